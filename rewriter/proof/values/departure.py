"""Where two models depart: their tensors matched by value, the first node without a partner, and regions that differ.

Names and operators do not matter: a tensor of B has a partner where a tensor of A has the same fingerprint.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import onnx

from rewriter.arrays import grouped
from rewriter.evaluate.arithmetic import Value, content
from rewriter.graph.view import label, operator_of
from rewriter.graph.walk import reached, reads, subgraphs
from rewriter.proof.values.folds import contents
from rewriter.proof.values.prints import Fingerprints
from rewriter.proof.values.walk import Kept
from rewriter.text import counted, one_line, quoted

_SHOWN = 6  # names and nodes listed in one place
_FOLLOWED = 3  # nodes of A that are named behind the operands of the first difference, if it has more of them
_REGIONS = 10
_EVALUATIONS, _PROPOSED = 60, 8  # evaluations of A in which it gets values of B, in all and for one difference


@dataclass(frozen=True)
class Region:
    """Connected nodes of B whose results A lacks, with the nodes that lead from there to tensors that it has."""

    nodes: int  # how many
    operators: str  # "2 Mul, Add, Tanh"
    begins: tuple[str, ...]  # tensors that it reads, all of which A has; the first few
    ends: tuple[str, ...]  # tensors that it computes and A has, and outputs of the model that it reaches; the first few
    same: bool  # whether A has every output of it: another spelling of the same function
    counterpart: int  # the number of nodes of A between the same tensors
    counterpart_operators: str  # those of A

    def text(self) -> str:
        what = "computes the same as" if self.same else "differs from"
        ours = f"{counted(self.counterpart, 'node')} of A ({self.counterpart_operators})"
        return (
            f"{counted(self.nodes, 'node')} ({self.operators}) from {_listed(self.begins) or 'constants'}"
            f" to {_listed(self.ends) or 'nothing'}: {what} {ours if self.counterpart else 'no node of A'}"
        )


@dataclass(frozen=True)
class Departure:
    """How two models differ by value."""

    matched: int  # tensors of B that depend on data and have a partner in A
    of: int  # all its tensors that depend on data
    # the first node of B whose operands all have partners and whose output has none, outside regions that are only
    # another spelling
    node: str | None = None
    output: str | None = None  # that output
    reads: tuple[str, ...] = ()  # what it reads, except constants
    operands: tuple[tuple[str, str], ...] = ()  # its operands that depend on data, each with its partner in A
    rearranged: tuple[str, ...] = ()  # operands whose partner has the same entries in another order or shape
    candidates: tuple[str, ...] = ()  # what A computes from the same operands, as "operator -> tensor"
    constants: tuple[str, ...] = ()  # its constants that A does not have
    missing: str | None = None  # the first node of A whose output B does not have, though it has all its operands
    outputs: tuple[str, ...] = ()  # outputs of B that equal other tensors of A than they should
    regions: tuple[Region, ...] = ()  # first the ones that compute something else, the largest first
    regions_in_all: int = 0  # how many there are

    @property
    def first(self) -> str | None:
        """The first difference, in one line; None where there is none."""
        if self.node is None:
            return self.outputs[0] if self.outputs else None
        names = _listed(self.reads) or "constants alone"
        ours = f"; A: {', '.join(self.candidates)}" if self.candidates else ""
        return f"{self.node} computes from {names} something that A does not compute{ours}"

    def lines(self) -> list[str]:
        told = {
            "first difference": self.first,
            "its operands": ", ".join(f"{quoted(b)} is {quoted(a)} in A" for b, a in self.operands if a != b),
            "the same entries in another order or shape": _listed(self.rearranged),
            "constants that A does not have": _listed(self.constants),
            "first node of A without a partner": self.missing,
        }
        found = [f"{what}: {text}" for what, text in told.items() if text]
        found += self.outputs if self.node is not None else self.outputs[1:]
        found.append(f"{self.matched:,} of {counted(self.of, 'tensor')} of B have the values of a tensor of A")
        found += [each.text() for each in self.regions]
        if self.regions_in_all > len(self.regions):
            found.append(f"and {counted(self.regions_in_all - len(self.regions), 'smaller region')}")
        return found


def isolated(evaluate: Callable[[Mapping[str, Any]], Fingerprints], b: Kept) -> Departure:
    """As `departure`, but downstream of a difference further ones are distinguished.

    Where B departs, A is evaluated again with B's value in place of one of its own tensors: the one that lets the most
    tensors behind it agree. What then departs is another difference. `b` has the values of all its tensors.
    """
    replaced: dict[str, Any] = {}
    a = evaluate(replaced)
    first, left = departure(a, b), _EVALUATIONS
    while left > 0:
        pairs = partners(a, b)
        agreeing, best = len(pairs) + 1, None
        for theirs, ours in _proposals(_Graph(a, partners(b, a)), _Graph(b, pairs)):
            value = b.field.lift(b.values[theirs])
            tried = replaced | {ours: Value(value.entries.reshape(a.prints[ours].exact[0]), whole=value.whole)}
            again, left = evaluate(tried), left - 1
            if len(partners(again, b)) > agreeing:
                agreeing, best = len(partners(again, b)), (again, tried)
            if left <= 0 or (best is not None and ours == theirs):
                break
        if best is None:
            break
        a, replaced = best
    last = departure(a, b, planted=replaced)
    return replace(first, regions=last.regions, regions_in_all=last.regions_in_all)


def _proposals(a: "_Graph", b: "_Graph") -> list[tuple[str, str]]:
    """Pairs of a tensor of B where it departs and one of A that may be what it should have been."""
    node = b.departing()
    if node is None:
        return []
    theirs = b.lost(node)[0]
    size = b.prints.prints[theirs].loose[0]
    apart = (a.nodes[place] for region in a.regions if not a.converges(region) for place in region)
    ours = {name for node in apart for name in a.lost(node) if a.prints.prints[name].loose[0] == size}
    return [(theirs, name) for name in sorted(ours, key=lambda name: (name != theirs, a.makers[name]))[:_PROPOSED]]


def departure(a: Fingerprints, b: Fingerprints, *, planted: Collection[str] = ()) -> Departure:
    """Compare two finished evaluations in the same field at the same inputs.

    `planted` are tensors of A whose values were taken from B, so that a region that ends there is not the same.
    """
    pairs = partners(a, b)
    graph_a, graph_b = _Graph(a, partners(b, a)), _Graph(b, pairs)
    graph_b.planted = graph_a.planted = graph_a.keys(planted)
    ahead, regions = graph_a.departing(), _regions(graph_a, graph_b)
    own = {value.name for value in a.program.graph.output}
    crossed = [
        f"output {quoted(name)} has the values of {quoted(pairs[name][0])} of A"
        for name in (value.name for value in b.program.graph.output)
        if name in own and name in pairs and pairs[name][0] != name
    ]
    return Departure(
        matched=sum(name in pairs for name in graph_b.data),
        of=len(graph_b.data),
        missing=None if ahead is None else _named(ahead),
        outputs=tuple(crossed[:_SHOWN]),
        regions=tuple(regions[:_REGIONS]),
        regions_in_all=len(regions),
        **_first(graph_a, graph_b, pairs),
    )


def partners(a: Fingerprints, b: Fingerprints) -> dict[str, tuple[str, bool]]:
    """Tensor of B to its partner in A, and whether it is exact, not the same entries in another order or shape.

    The one of the same name is preferred, and the first one otherwise.
    """
    holders: dict[object, dict[str, None]] = {}
    for name, each in a.prints.items():
        for key in (each.exact, each.loose):
            holders.setdefault(key, {})[name] = None
    found = {}
    for name, each in b.prints.items():
        for key, exact in ((each.loose, False), (each.exact, True)):  # the exact one counts
            if key in holders:
                found[name] = name if name in holders[key] else next(iter(holders[key])), exact
    return found


class _Graph:
    """The nodes of an evaluated model, bodies included, and which tensors have a partner in the other model."""

    def __init__(self, prints: Fingerprints, pairs: Mapping[str, object]) -> None:
        self.prints, self.pairs, makers = prints, pairs, prints.program.makers
        entered = {value.name for value in prints.program.graph.input}
        self.data = {name: None for name in prints.data if name in makers or name in entered}
        # In the order in which they were computed, those of bodies before the node that holds them.
        self.nodes = [*{id(makers[name]): makers[name] for name in self.data if name in makers}.values()]
        self.makers = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.planted: set[object] = set()

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        return grouped((name, place) for place, node in enumerate(self.nodes) for name in dict.fromkeys(_inputs(node)))

    def operands(self, node: onnx.NodeProto) -> list[str]:
        return [name for name in dict.fromkeys(_inputs(node)) if name in self.data]

    def lost(self, node: onnx.NodeProto) -> list[str]:
        """Its outputs that depend on data and have no partner."""
        return [name for name in node.output if name in self.data and name not in self.pairs]

    def departing(self) -> onnx.NodeProto | None:
        """The first node with an output without a partner, but all operands; not of a region that converges.

        Nor of one of which nothing is read but sizes, if there are others.
        """
        apart = [region for region in self.regions if not self.converges(region)]
        leading = [region for region in apart if any(self.boundary(region)[1:])] or apart
        places = sorted(place for region in leading for place in region)
        return next((self.nodes[place] for place in places if self.lost(self.nodes[place])), None)

    def converges(self, region: Sequence[int]) -> bool:
        """Whether every output of a region has a partner."""
        _, ends, lost = self.boundary(region)
        return bool(ends) and not lost and not self.keys(ends) & self.planted

    @cached_property
    def regions(self) -> list[list[int]]:
        """Nodes connected by tensors without partners."""
        links = defaultdict[int, set[int]](set)
        for name in self.data:
            maker = self.makers.get(name)
            if maker is None:
                continue
            if self.keys([name]) & self.planted:
                if not self.keys([name]) & self.keys(self.operands(self.nodes[maker])):  # it does not only move entries
                    links[maker].add(maker)
            elif name not in self.pairs:
                for place in (maker, *self.readers.get(name, ())):
                    links[maker].add(place)
                    links[place].add(maker)
        groups, seen = list[list[int]](), set[int]()
        for place in sorted(links):
            if place not in seen:
                groups.append(sorted(reached([place], links.__getitem__)))
                seen.update(groups[-1])
        return groups

    def boundary(self, region: Sequence[int]) -> tuple[list[str], list[str], list[str]]:
        """Tensors with partners that a region reads and computes, and the model's outputs that it reaches without."""
        nodes = [self.nodes[place] for place in region]
        made = {name: None for node in nodes for name in node.output if name in self.data}
        outputs = {value.name for value in self.prints.program.graph.output}
        read = {name: None for node in nodes for name in self.operands(node) if name in self.pairs and name not in made}
        ends = [name for name in made if name in self.pairs]
        return list(read), ends, [name for name in made if name not in self.pairs and name in outputs]

    def keys(self, names: Iterable[str]) -> set[object]:
        return {self.prints.prints[name].loose for name in names if name in self.prints.prints}


def _inputs(node: onnx.NodeProto) -> list[str]:
    """What a node reads, with what its bodies read and return."""
    return [*reads(node), *(value.name for _, body in subgraphs(node) for value in body.output)]


def _first(a: _Graph, b: _Graph, pairs: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    """The first node of B that departs, as fields of `Departure`."""
    node = b.departing()
    if node is None:
        return {}
    operands = [each for each in b.operands(node) if each in pairs]
    return {
        "node": one_line(label(node)),
        "output": b.lost(node)[0],
        "reads": tuple(name for name in dict.fromkeys(_inputs(node)) if name in b.data or name not in b.prints.fixed),
        "operands": tuple((name, pairs[name][0]) for name in operands),
        "rearranged": tuple(name for name in operands if not pairs[name][1]),
        "candidates": tuple(_named(each) for each in _readers_of(a, b.keys(operands))[:_SHOWN]),
        "constants": tuple(_new_constants(a.prints, b.prints, node)[:_SHOWN]),
    }


def _new_constants(a: Fingerprints, b: Fingerprints, node: onnx.NodeProto) -> list[str]:
    """The constants that a node reads and A does not have, in any shape and transposed."""
    stated, known = b.program.constants(), contents(a.program.constants().values())
    computed = {each.loose for each in a.prints.values()}

    def lacking(name: str) -> bool:
        if name in stated:
            return content(stated[name].reshape(-1)) not in known
        return name in b.prints and name not in b.data and b.prints[name].loose not in computed

    return [*filter(lacking, dict.fromkeys(node.input))]


def _readers_of(a: _Graph, keys: set[object]) -> list[onnx.NodeProto]:
    """Nodes of A that read the same values: first the ones that lead to tensors B lacks, with their successors."""
    same = [name for name in a.data if a.prints.prints[name].loose in keys]
    ranks: dict[int, tuple[bool, int, int]] = {}
    for place in {place for name in same for place in a.readers.get(name, ())}:
        node = a.nodes[place]
        made = [name for name in node.output if name in a.data]
        shared = a.keys(a.operands(node)) & keys
        if made and not a.keys(made) <= keys:  # a mere reshape of an operand is the operand
            ranks[place] = not a.lost(node), -len(shared), place
    found = sorted(ranks, key=lambda place: ranks[place])
    ahead = [place for place in found if a.lost(a.nodes[place])]
    for place in ahead:
        if len(ahead) < _FOLLOWED:
            behind = (reader for name in a.lost(a.nodes[place]) for reader in a.readers.get(name, ()))
            ahead += [each for each in dict.fromkeys(behind) if each not in ahead and a.operands(a.nodes[each])]
    return [a.nodes[place] for place in dict.fromkeys([*ahead[: max(_FOLLOWED, len(found))], *found])]


def _regions(a: _Graph, b: _Graph) -> list[Region]:
    """The regions of B; first the ones that lead to something that A does not have, then by size."""
    ours = [(region, a.boundary(region)) for region in a.regions]
    found = []
    for region in b.regions:
        begins, ends, lost = b.boundary(region)
        keys = b.keys(ends)
        # Without an end that A has, the counterpart is what begins at the same tensors and is lost in A, too.
        starts = b.keys(begins) if not ends else set()
        counterpart = {a.makers[name] for name in a.data if name in a.makers and a.keys([name]) & keys}
        for nodes, (reads_from, leads_to, without) in ours:
            if a.keys(leads_to) & keys or (without and a.keys(reads_from) & starts):
                counterpart.update(nodes)
        found.append(
            Region(
                nodes=len(region),
                operators=_counts(b.nodes[place] for place in region),
                begins=tuple(begins[:_SHOWN]),
                ends=tuple((lost + ends)[:_SHOWN]),
                same=b.converges(region),
                counterpart=len(counterpart),
                counterpart_operators=_counts(a.nodes[place] for place in sorted(counterpart)),
            )
        )
    return sorted(found, key=lambda each: (each.same, -each.nodes))


def _named(node: onnx.NodeProto) -> str:
    return f"{one_line(operator_of(node), 60)} -> {quoted(next(filter(None, node.output), ''))}"


def _counts(nodes: Iterable[onnx.NodeProto]) -> str:
    """`2 Mul, Add`: the most frequent operators."""
    found = Counter(one_line(operator_of(node), 60) for node in nodes).most_common(_SHOWN)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in found)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(quoted(name) for name in names[:_SHOWN])
