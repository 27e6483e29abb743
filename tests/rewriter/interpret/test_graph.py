"""Edges against the frozen network run forwards in numpy, without what the source writes; sums; remaining heads."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from rewriter import UsageError, attribution_graph, why
from rewriter.arrays import Array
from rewriter.interpret.graph import AttributionGraph, GraphNode, influence, normalised, prune, scores
from tests.committed import FOLDER
from tests.rewriter.interpret.test_attribution import EXACT, FITTED, LOGIT, attributed, decoder, given, lost

pytestmark = pytest.mark.sample(1)

ALL = 10**6


@cache
def graph_of(stem: str, most: int = ALL, **options: Any) -> AttributionGraph:
    return attribution_graph(FOLDER / f"{stem}.onnx", given(stem), LOGIT, max_nodes=most, **options)


def effects_of(graph: AttributionGraph) -> Array:
    """[N]: what each node contributes to the logit along all paths, as its out-edges say."""
    return np.asarray(np.array([node.gradient for node in graph.nodes]) @ graph.adjacency)


def activation(stem: str, node: GraphNode, stream: Array, off: tuple[str, ...] = ()) -> float:
    """A node's activation in the held network if it reads this stream; a head's is what the logit loses without it."""
    network = decoder(stem)
    if node.kind == "logit":
        return float(network.unembedded(stream)[-1, LOGIT])
    made = network.made(node.name, stream, off=off)[node.token, node.index]
    if node.kind == "neuron":
        return float(made)

    def without(whole: Array) -> Array:
        whole[node.token, node.index] -= made
        return whole

    return lost(stem, changes={node.name: without})


def edge(stem: str, source: GraphNode, target: GraphNode) -> float:
    """What the target's activation loses if it does not see what the source writes, with everything else unchanged."""
    network = decoder(stem)
    stream = network.streams["end" if target.kind == "logit" else target.name]
    whole = activation(stem, target, stream)
    inner = next((part for part in ("ln.b", "b_V", "b_in") if source.name.endswith(f".{part}")), "")
    if inner:
        # Constants of all tokens are one here, and a node for each token there.
        own = source.name == f"{target.name}.{inner}"
        return whole - activation(stem, target, stream, (source.name,)) if own else 0.0
    name = source.name.removesuffix(".b_O")
    if name != "embed" and ORDER.index(name) >= ORDER.index(target.name):
        return 0.0
    row = f"{source.name}[{source.index}]" if source.kind in ("neuron", "head") else source.name
    written = network.written[row] + (network.written["pos_embed"] if row == "embed" else 0.0)
    changed = stream.copy()
    changed[source.token] -= written[source.token]
    return whole - activation(stem, target, changed)


ORDER = ["blocks.0.attn", "blocks.0.mlp_heads", "blocks.1.attn", "blocks.1.mlp_heads", "logit"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("stem", EXACT)
def test_edges_are_direct_effects(stem: str) -> None:
    graph = graph_of(stem)
    generator = np.random.default_rng(0)
    made = [place for place, node in enumerate(graph.nodes) if node.kind in ("neuron", "head", "logit")]
    made = [place for place in made if graph.adjacency[place].any()]  # heads without effect have no edges
    by_kind = {kind: [place for place in made if graph.nodes[place].kind == kind] for kind in ("neuron", "head")}
    targets = [place for each in by_kind.values() for place in generator.choice(each, 12, replace=False)]
    targets += [place for place in made if graph.nodes[place].kind == "logit"]
    kinds, checked, kind_of = set(), 0, np.array([node.kind * (node.name != "final.ln.b") for node in graph.nodes])
    for target in targets:
        row = graph.adjacency[target]
        largest = list(np.argsort(-np.abs(row))[:8])
        largest += [np.argmax(np.abs(row) * (kind_of == kind)) for kind in ("embedding", "bias", "neuron", "head")]
        linked = generator.choice(np.flatnonzero(row), 8)
        for source in {*largest, *linked, *generator.choice(len(row), 8)}:
            if graph.nodes[source].name == "final.ln.b" or graph.nodes[source].kind == "logit":
                continue
            wanted, name = edge(stem, graph.nodes[source], graph.nodes[target]), graph.nodes[source].name
            same = [each.name == name for each in graph.nodes] if name.endswith(("ln.b", "b_V", "b_in")) else [source]
            assert abs(row[same].sum() - wanted) <= 1e-6, (graph.nodes[source], graph.nodes[target])
            if row[source]:
                kinds.add((graph.nodes[source].kind, graph.nodes[target].kind))
                checked += 1
    assert checked > 200
    assert len(kinds) == 12, "embeddings, biases, neurons and heads on neurons, heads and the logit"


@pytest.mark.sample(0)
@pytest.mark.parametrize("stem", EXACT)
def test_activations_are_those_of_the_model(stem: str) -> None:
    nodes = [node for node in graph_of(stem).nodes if node.kind == "neuron"]
    made = {name: decoder(stem).made(name, stream) for name, stream in decoder(stem).streams.items() if "mlp" in name}
    assert len(nodes) == sum(array.size for array in made.values())
    for node in nodes:
        assert abs(node.activation - made[node.name][node.token, node.index]) <= 1e-6


@pytest.mark.parametrize("most", [ALL, 60, 0])
@pytest.mark.parametrize("stem", EXACT + FITTED)
def test_edges_add_up(stem: str, most: int) -> None:
    """In-edges to the activation, out-edges to the effect along all paths; nothing is lost by taking fewer nodes."""
    graph, whole = graph_of(stem, min(most, 1000) if stem == "gelu-vision" else most), attributed(stem)
    bound, along = 1e-10 if stem in EXACT else 1e-9, effects_of(graph)
    made = np.array([node.kind not in ("embedding", "bias") for node in graph.nodes])
    assert np.abs(graph.residuals[made]).max() <= bound
    assert not graph.adjacency[~made].any()
    inner = [place for place, node in enumerate(graph.nodes) if node.kind in ("neuron", "head", "rest")]
    products = [graph.nodes[place].activation * graph.nodes[place].gradient for place in inner]
    np.testing.assert_allclose(along[inner], products, atol=bound)
    # The same numbers as the attribution along all paths has.
    tokens = [place for place, node in enumerate(graph.nodes) if node.kind == "embedding"]
    np.testing.assert_allclose(along[tokens], whole.paths["embed"], atol=bound)
    biases = sum(along[place] for place, node in enumerate(graph.nodes) if node.kind == "bias")
    assert biases + whole.paths["embed"].sum() == pytest.approx(graph.logit, abs=bound)
    for name, effects in whole.effects.items():
        own = [place for place in inner if graph.nodes[place].name in (name, f"{name}.rest")]
        by_token = np.zeros(len(effects))
        for place in own:
            by_token[graph.nodes[place].token] += along[place]
        np.testing.assert_allclose(by_token, effects.sum(axis=1), atol=bound)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("stem", "most"),
    [("silu-decoder", ALL), *((stem, 60) for stem in ("silu-decoder", "gated-decoder", "gelu-encoder"))],
)
def test_scores_are_sums_over_pairs_of_nodes(stem: str, most: int) -> None:
    graph = graph_of(stem, most)
    nodes = dict(zip(graph.ids, (*graph.nodes, *graph.constants), strict=True))
    for place, found in [*graph.why.items()][-4:]:
        own, largest = graph.nodes[place], np.abs(found.table).max()
        assert abs(found.residual) <= 1e-12 * largest
        assert {nodes[name].token for name in found.sources} == {found.query} == {own.token}
        assert {nodes[name].token for name in found.keys} == {found.key}
        wanted = why(FOLDER / f"{stem}.onnx", given(stem), f"{own.name}[{own.index}]", query=own.token)
        assert (wanted.head, wanted.key) == (found.head, found.key)
        assert (found.total, found.added) == pytest.approx((wanted.total, wanted.added), abs=1e-12)
        for axis, (names, others) in enumerate(((found.sources, wanted.sources), (found.keys, wanted.keys))):
            known = [spelled(own.name, name) for name in others]
            made = summed([nodes[name].name.removesuffix(".rest") for name in names], found.table.sum(axis=1 - axis))
            assert made == pytest.approx(summed(known, wanted.table.sum(axis=1 - axis)), abs=1e-11 * largest)


def summed(names: list[str], values: Array) -> dict[str, float]:
    return {each: float(values[[name == each for name in names]].sum()) for each in names}


def spelled(head: str, name: str) -> str:
    """A source of `why` as the graph calls it."""
    plain = name.partition("[")[0].replace("pos_embed", "embed")
    return plain if plain.startswith(("blocks", "embed")) else f"{head}.{plain}"


def test_remaining_heads_are_the_sum_of_theirs() -> None:
    whole, small = graph_of("silu-decoder"), graph_of("silu-decoder", 60)
    own = {(node.name, node.index, node.token): place for place, node in enumerate(small.nodes)}
    places = [own.get((node.name, node.index, node.token)) for node in whole.nodes]
    rests = [own.get((f"{node.name}.rest", 0, node.token), -1) for node in whole.nodes]
    groups = np.array([rest if place is None else place for place, rest in zip(places, rests, strict=True)])
    # Constants that only neurons without effect read have no edges, so no node, once these are one node.
    assert not effects_of(whole)[groups < 0].any()
    assert {whole.nodes[place].kind for place in np.flatnonzero(groups < 0)} == {"bias"}
    lumped = np.array([place >= 0 and small.nodes[place].kind == "rest" for place in groups])
    scales = np.where(lumped, [node.gradient for node in whole.nodes], 1.0)
    summed = np.zeros(small.adjacency.shape)
    shared = groups >= 0
    np.add.at(
        summed, (groups[shared][:, None], groups[shared][None]), (whole.adjacency * scales[:, None])[shared][:, shared]
    )
    np.testing.assert_allclose(summed, small.adjacency, atol=1e-10)
    # Heads with their own nodes have the largest effects.
    left = [abs(node.activation * node.gradient) for node, rest in zip(whole.nodes, lumped, strict=True) if rest]
    kept = [abs(node.activation * node.gradient) for node in small.nodes if node.kind in ("neuron", "head")]
    assert len(kept) == 60
    assert max(left) <= min(kept)


@pytest.mark.slow
def test_of_a_difference_and_another_token() -> None:
    path = FOLDER / "silu-decoder.onnx"
    options: dict[str, Any] = {"position": 3}
    pair = attribution_graph(path, given("silu-decoder"), 5, minus=7, **options)
    parts = [attributed("silu-decoder", **options), attributed("silu-decoder", minus=7, **options)]
    assert pair.logit == parts[1].logit != parts[0].logit
    assert np.abs(pair.residuals).max() <= 1e-10
    later = [place for place, node in enumerate(pair.nodes) if node.token > 3 and node.kind != "rest"]
    assert not effects_of(pair)[later].any()


def test_too_many_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.interpret.graph._MAX_NODES", 100)
    with pytest.raises(UsageError, match="nodes, more than 100: take fewer of them, or tokens"):
        attribution_graph(FOLDER / "silu-decoder.onnx", given("silu-decoder"), LOGIT, max_nodes=60)


# -- influence, pruning and scores on graphs whose values are known, and against a matrix inverse -------------------

# Places: two tokens, a bias, three heads, the logit.
TOKEN, OTHER, BIAS, FIRST, SECOND, WEAK, END = range(7)
KINDS = np.array(["embedding", "embedding", "bias", "neuron", "head", "rest", "logit"])


def small() -> Array:
    edges = np.zeros((7, 7))
    edges[FIRST, TOKEN], edges[FIRST, OTHER] = 3.0, -1.0
    edges[SECOND, FIRST], edges[SECOND, BIAS] = -2.0, 2.0
    edges[WEAK, OTHER] = 1.0
    edges[END, FIRST], edges[END, SECOND], edges[END, WEAK] = 5.0, -4.0, 1.0
    return edges


def test_influence_by_hand() -> None:
    start = np.eye(7)[END]
    found = influence(normalised(small()), start)
    # FIRST: 5/10 directly and 4/10 of SECOND's input, of which it is half.
    np.testing.assert_allclose(found, [0.7 * 0.75, 0.7 * 0.25 + 0.1, 0.2, 0.7, 0.4, 0.1, 0.0])


def test_scores_without_and_with_errors() -> None:
    none = np.zeros(7)
    replacement, completeness = scores(small(), none, KINDS)
    assert replacement == 1.0
    assert completeness == pytest.approx(1.0)
    missing = none.copy()
    missing[END] = 10.0  # half of what the logit reads
    replacement, completeness = scores(small(), missing, KINDS)
    begun = (0.525 + 0.275) / 2
    assert replacement == pytest.approx(begun / (begun + 0.5))
    passing = 1.0 + (0.525 + 0.275 + 0.2 + 0.7 + 0.4 + 0.1) / 2
    assert completeness == pytest.approx((passing - 0.5) / passing)


def test_pruning() -> None:
    nodes, edges, cumulative = prune(small(), KINDS, 1.0, 1.0)
    assert nodes.all()
    assert (edges == (small() != 0.0)).all()
    # Influence falls: 0.7, 0.525, 0.4, 0.275, 0.2, 0.1 of 2.2 in all.
    np.testing.assert_allclose(cumulative[[FIRST, SECOND, WEAK]] * 2.2, [0.7, 1.625, 2.2])
    # 0.8 of it is reached with OTHER: the bias and the weak head go.
    nodes, edges, _ = prune(small(), KINDS, 0.8, 1.0)
    assert set(np.flatnonzero(nodes)) == {TOKEN, OTHER, FIRST, SECOND, END}
    assert not edges[:, WEAK].any()
    # Edges: only the largest. A head without in-edges or out-edges goes as well.
    nodes, edges, _ = prune(small(), KINDS, 1.0, 0.3)
    assert {(int(target), int(source)) for target, source in np.argwhere(edges)} == {(END, FIRST), (FIRST, TOKEN)}
    assert set(np.flatnonzero(nodes)) == {TOKEN, OTHER, FIRST, END}
