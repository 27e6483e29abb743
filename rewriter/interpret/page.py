"""`head_pictures`: patterns, activations, tokens and attributions of heads on one sequence, as data for a page.

A page has a bounded size: the neurons with the largest attributions to the logit, or without one the largest
activations, original heads by the same measure as far as their patterns fit, and a window of tokens. Whatever is left
out is counted. `rewriter.report.html.heads` makes the page.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.activity import activations_of
from rewriter.interpret.attribute import Attribution, attribute
from rewriter.interpret.graph import attribution_graph, vocabulary_of
from rewriter.interpret.index import HeadIndex, count_of, heads
from rewriter.interpret.rank import TokenScores, Told, head_tokens, tokens_as_text
from rewriter.interpret.run import Recording, hooks_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.inputs.given import InputsOrText

# -- drawing ----------------------------------------


MOST_NODES, MOST_EDGES = 100, 300


def drawn(graph: Mapping[str, Any], window: range) -> dict[str, Any]:
    """Nodes with `row`, `column` (a token of the window) and `lane` (their place among those of one row and column).

    Args:
        graph: in the published schema.
        window: the tokens that are shown; nodes at others are left out.
    """
    inside = [node for node in graph["nodes"] if node["ctx_idx"] in window]
    ranked = sorted(inside, key=lambda node: (_weight(node), node["node_id"]))[:MOST_NODES]
    kept = {node["node_id"]: node for node in ranked}
    links = [link for link in graph["links"] if link["source"] in kept and link["target"] in kept]
    links = sorted(links, key=lambda link: (-abs(link["weight"]), link["source"], link["target"]))[:MOST_EDGES]
    joined = {link[end] for link in links for end in ("source", "target")}
    kept = {name: node for name, node in kept.items() if name in joined or node["is_target_logit"]}
    layers = sorted({_layer(node) for node in kept.values()})
    lanes: dict[tuple[int, int], int] = {}
    nodes = []
    for node in sorted(kept.values(), key=lambda each: (_layer(each), each["ctx_idx"], each["node_id"])):
        place = (layers.index(_layer(node)), node["ctx_idx"] - window.start)
        lane = lanes.get(place, 0)
        lanes[place] = lane + 1
        nodes.append(
            {
                "id": node["node_id"],
                "row": place[0],
                "column": place[1],
                "lane": lane,
                "kind": node["feature_type"],
                "label": node["clerp"] or "embedding",
                "head": _head_of(node),
                "activation": node["activation"],
            }
        )
    return {
        "nodes": nodes,
        "links": [[link["source"], link["target"], float(f"{link['weight']:.4g}")] for link in links],
        "rows": [_row(layer, layers[-1], kept.values()) for layer in layers],
        "left_out": [len(graph["nodes"]) - len(nodes), len(graph["links"]) - len(links)],
    }


def _weight(node: Mapping[str, Any]) -> float:
    """Small for what must be drawn: influence is the share of all that nodes of at least this size have."""
    if node["is_target_logit"] or node["feature_type"] == "embedding":
        return -1.0
    return float(node["influence"])


def _layer(node: Mapping[str, Any]) -> int:
    return -1 if node["layer"] == "E" else int(node["layer"])


def _row(layer: int, last: int, nodes: Iterable[Mapping[str, Any]]) -> str:
    if layer in (-1, last):
        return "tokens" if layer == -1 else "logit"
    # Biases after the last layer have one of their own in the published schema.
    own = {node["feature_type"] for node in nodes if _layer(node) == layer}
    return "biases" if own == {"bias"} else f"layer {layer}"


def _head_of(node: Mapping[str, Any]) -> str | None:
    """`blocks.0.attn.3`, where the node is one head or neuron."""
    if node["feature_type"] not in ("neuron", "attention head"):
        return None
    sublayer, _, number = node["clerp"].rpartition("[")
    return f"{sublayer}.{number.rstrip(']')}"


# -- contents ----------------------------------------


MOST_TOKENS = 64
"""Tokens of the sequence that are shown."""

_PATTERN_ENTRIES = 2**19
"""Entries of the patterns of all original heads that are shown."""

_READ = 8
"""Tokens at either end of what a head reads or writes."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """What a page of heads shows.

    Attributes:
        title: the model's name.
        data: JSON-ready data: `tokens`, `sublayers`, `heads`, `logit`, `missing`, `graph` and `notes`.
    """

    title: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """Which logit is attributed; arguments as for `attribute`."""

    logit: int
    minus: int | None = None
    position: int = -1
    output: str | None = None


def head_pictures(
    model: Source,
    inputs: InputsOrText,
    *,
    logit: int | None = None,
    minus: int | None = None,
    position: int = -1,
    output: str | None = None,
    sequence: int = 0,
    program: str = "fewest",
    tokenizer: str | os.PathLike[str] | None = None,
    most: int = 200,
) -> Pictures:
    """Data for a page of heads on one sequence.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory.
        inputs: maps inputs to arrays; or an npz file with one case.
        logit: which entry of the output's last axis is attributed; default: none.
        minus: the difference from this entry instead.
        position: the token of the logit.
        output: the output; default: the first one.
        sequence: the sequence in the batch.
        program: as for `heads`.
        tokenizer: a `tokenizer.json` that gives tokens as text.
        most: how many neurons are shown.

    Raises:
        UsageError: an argument is out of range, or the output cannot be attributed.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: the model cannot be run on these inputs.
    """
    if most < 0:
        raise UsageError(f"there cannot be {most} neurons")
    told = tokens_as_text(tokenizer)
    index = heads(model, program=program)
    if not index.sublayers:
        raise UsageError("no heads were found: there is nothing to show")
    run = _Run.of(index, inputs, sequence)
    target = None if logit is None else Target(logit, minus, position, output)
    found = None
    if target is not None:
        found = attribute(model, inputs, target.logit, sequence=sequence, program=program, **_options(target))
    window = run.window(position if target is not None else None)
    chosen = _chosen(run, found, most)
    scores = _scores(index, chosen, told, tokenizer)
    graph = None
    if target is not None:
        made = attribution_graph(
            model, inputs, target.logit, sequence=sequence, program=program, max_nodes=400, **_options(target)
        )
        graph = drawn(made.to_json(), window)
    data = {
        "model": _title(model),
        "tokens": [{"place": place, "text": run.text(place, told)} for place in window],
        "logit": None if found is None or target is None else {**vars(target), "value": found.logit},
        "sublayers": [_sublayer(each, chosen[each.name]) for each in index.sublayers],
        "heads": [
            _head(run, each, number, window, found, scores) for each in index.sublayers for number in chosen[each.name]
        ],
        "missing": scores["missing"],
        "graph": graph,
        "notes": run.notes(window, chosen, found is not None),
    }
    return Pictures(_title(model), data)


def _options(target: Target) -> dict[str, Any]:
    return {"minus": target.minus, "position": target.position, "output": target.output}


def _title(model: Source) -> str:
    return Path(model).name if isinstance(model, str | os.PathLike) else "model in memory"


@dataclass(frozen=True, eq=False)
class _Run:
    """One sequence of a run.

    Attributes:
        index: the heads of the model.
        patterns: sublayer to [heads, dest, src] or, of neurons, [tokens, heads, 1 + m].
        activations: sublayer to [tokens, members].
        ids: the token ids; None where the model reads none.
        tokens: how many tokens the sequence has.
    """

    index: HeadIndex
    patterns: Mapping[str, Array]
    activations: Mapping[str, Array]
    ids: tuple[int, ...] | None
    tokens: int

    @classmethod
    def of(cls, index: HeadIndex, inputs: InputsOrText, sequence: int) -> _Run:
        """Run the model. Raises UsageError."""
        known = hooks_of(index)
        wanted = [f"{each.name}.{hook}" for each in index.sublayers for hook in ("hook_pattern", "hook_z")]
        recording = Recording.of(index, inputs, [name for name in wanted if name in known], "cpu")
        if len(recording.cases) != 1:
            raise UsageError(f"the page shows one case, and the file has {len(recording.cases)}")
        patterns, activations = dict[str, Array](), dict[str, Array]()
        sublayers = {each.name: each for each in index.sublayers}
        for name, array in recording.arrays():
            if not -len(array) <= sequence < len(array):
                raise UsageError(f"there is no sequence {sequence}: {name} has shape {list(array.shape)}")
            sublayer, _, hook = name.rpartition(".")
            if hook == "hook_pattern":
                patterns[sublayer] = array[sequence]
                continue
            named = sublayers[sublayer]
            rows = index[f"{sublayer}.W_O"]
            activations[sublayer] = activations_of(named, array[sequence][None], rows)[0]
        tokens = max(len(each) for each in activations.values())
        ids = vocabulary_of(index, recording.cases[0].feeds, sequence, tokens)
        return cls(index, patterns, activations, ids if _has_ids(index, recording, tokens) else None, tokens)

    def window(self, position: int | None) -> range:
        """The tokens that are shown: the first ones, or those up to the logit's."""
        if self.tokens <= MOST_TOKENS:
            return range(self.tokens)
        last = MOST_TOKENS if position is None else max(position % self.tokens + 1, MOST_TOKENS)
        return range(last - MOST_TOKENS, last)

    def text(self, place: int, told: Told) -> str:
        """A token in words; its place where the model reads no ids."""
        return f"#{place}" if self.ids is None else told(self.ids[place])

    def notes(self, window: range, chosen: Mapping[str, Sequence[int]], attributed: bool) -> list[str]:
        """What is left out, in sentences."""
        found = []
        if len(window) < self.tokens:
            found.append(f"Shown are tokens {window.start} to {window.stop - 1} of {self.tokens}.")
        for neurons, kind in ((True, "neurons"), (False, "original heads")):
            own = [each for each in self.index.sublayers if isinstance(each.sublayer, NeuronHeads) is neurons]
            shown, every = sum(len(chosen[each.name]) for each in own), sum(count_of(each) for each in own)
            if shown < every:
                measure = "attribution to the logit" if attributed else "activation on these tokens"
                found.append(f"Shown are {shown:,} of {every:,} {kind}, those with the largest {measure}.")
        return found


def _has_ids(index: HeadIndex, recording: Recording, tokens: int) -> bool:
    from rewriter.proof.inputs.roles import Role, input_specs

    feeds = recording.cases[0].feeds
    names = [spec.name for spec in input_specs(index.proto, index.view) if spec.role is Role.IDS]
    return any(name in feeds and feeds[name].ndim > 1 and feeds[name].shape[-1] == tokens for name in names)


def _chosen(run: _Run, found: Attribution | None, most: int) -> dict[str, list[int]]:
    """Sublayer to the heads or neurons that are shown, as numbers."""
    sizes: dict[str, Array] = {}
    for each in run.index.sublayers:
        if found is not None and each.name in found.effects:
            sizes[each.name] = np.abs(_effects(found, each)).max(axis=0)
        else:
            activations = run.activations[each.name]
            sizes[each.name] = np.abs(activations).max(axis=0, initial=0.0)
    entries = min(run.tokens, MOST_TOKENS) ** 2
    limits = {True: most, False: max(1, _PATTERN_ENTRIES // max(entries, 1))}
    result: dict[str, list[int]] = {each.name: [] for each in run.index.sublayers}
    for neurons, limit in limits.items():
        own = [each for each in run.index.sublayers if isinstance(each.sublayer, NeuronHeads) is neurons]
        pairs = [(-size, each.name, number) for each in own for number, size in enumerate(sizes[each.name].tolist())]
        for _, name, number in sorted(pairs)[:limit]:
            result[name].append(number)
    return {name: sorted(numbers) for name, numbers in result.items()}


def _effects(found: Attribution, named: Named) -> Array:
    """[tokens, members]: contributions along all paths, those of a neuron's heads added up."""
    effects = np.asarray(found.effects[named.name])
    if isinstance(named.sublayer, NeuronHeads):
        effects = effects.reshape(len(effects), -1, named.sublayer.neurons).sum(axis=1)
    return effects


def _scores(
    index: HeadIndex, chosen: Mapping[str, Sequence[int]], told: Told, tokenizer: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """`rows`: head to what it reads and writes; `missing`: what there is not, and why."""
    names = [glob.escape(f"{name}.{number}") for name, numbers in chosen.items() for number in numbers]
    if not names:
        return {"rows": {}, "missing": {}}
    made = head_tokens(index, names=names, top=_READ, tokenizer=tokenizer)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in made.rows:
        rows.setdefault(row.head, []).append(_read(row, told))
    return {"rows": rows, "missing": dict(made.missing)}


def _read(row: TokenScores, told: Told) -> dict[str, Any]:
    ends = {
        name: [[told(token), _short(score)] for token, score in end]
        for name, end in (("top", row.top), ("bottom", row.bottom))
    }
    return {"side": row.side, "share": round(row.share, 4), **ends}


def _sublayer(named: Named, shown: Sequence[int]) -> dict[str, Any]:
    kind = "neurons" if isinstance(named.sublayer, NeuronHeads) else "heads"
    return {"name": named.name, "kind": kind, "count": count_of(named), "shown": len(shown)}


def _head(
    run: _Run, named: Named, number: int, window: range, found: Attribution | None, scores: Mapping[str, Any]
) -> dict[str, Any]:
    """One head or neuron; its tokens are those of the window as far as its sublayer sees them."""
    name, own = f"{named.name}.{number}", named.sublayer
    pattern = run.patterns.get(named.name)
    shown: list[Any] | None = None
    if pattern is not None and isinstance(own, NeuronHeads):
        groups = [pattern[window.start : window.stop, group * own.neurons + number] for group in range(len(own.groups))]
        shown = [_rounded(each) for each in groups]
    elif pattern is not None:
        sources = (
            slice(0, MOST_TOKENS)
            if not isinstance(own, NeuronHeads) and own.cross
            else slice(window.start, window.stop)
        )
        shown = [_rounded(pattern[number, window.start : window.stop, sources])]
    effects = None
    if found is not None and named.name in found.effects:
        effects = _effects(found, named)[:, number]
    return {
        "name": name,
        "sublayer": named.name,
        "number": number,
        "kind": "neuron" if isinstance(own, NeuronHeads) else "head",
        "cross": not isinstance(own, NeuronHeads) and own.cross,
        "activation": [_short(value) for value in run.activations[named.name][window.start : window.stop, number]],
        "pattern": shown,
        "tokens": scores["rows"].get(name, []),
        "effects": None if effects is None else [_short(value) for value in effects[window.start : window.stop]],
        "effect": None if effects is None else _short(effects.sum()),
    }


def _rounded(array: Array) -> list[list[float]]:
    return [[round(float(value), 4) if np.isfinite(value) else 0.0 for value in row] for row in array]


def _short(value: float) -> float:
    """Four digits; 0 for what is not finite, which JSON does not have."""
    return float(f"{float(value):.4g}") if np.isfinite(value) else 0.0
