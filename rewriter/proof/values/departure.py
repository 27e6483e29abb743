"""Where two models depart: their tensors matched by value, the first node without a partner, and regions that differ.

Names and operators do not matter: a tensor of B has a partner where a tensor of A has the same fingerprint.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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
        agreeing, best = len(partners(a, b)) + 1, None
        for theirs, ours in _proposals(_Graph(a, b), _Graph(b, a))[:left]:
            value = b.field.lift(b.values[theirs])
            tried = replaced | {ours: Value(value.entries.reshape(a.prints[ours].exact[0]), whole=value.whole)}
            again, left = evaluate(tried), left - 1
            if len(partners(again, b)) > agreeing:
                agreeing, best = len(partners(again, b)), (again, tried)
            if best is not None and ours == theirs:
                break
        if best is None:
            break
        a, replaced = best
    last = departure(a, b, planted=replaced)
    return replace(first, regions=last.regions, regions_in_all=last.regions_in_all)


def _proposals(a: "_Graph", b: "_Graph") -> list[tuple[str, str]]:
    """Pairs of a tensor of B where it departs and one of A that may be what it should have been."""
    if (node := b.departing()) is None:
        return []
    theirs = b.lost(node)[0]
    apart = (a.nodes[place] for region in a.regions if not region.same for place in region.places)
    ours = {name for node in apart for name in a.lost(node) if a.loose[name][0] == b.loose[theirs][0]}
    return [(theirs, name) for name in sorted(ours, key=lambda name: (name != theirs, a.makers[name]))[:_PROPOSED]]


def departure(a: Fingerprints, b: Fingerprints, *, planted: Collection[str] = ()) -> Departure:
    """Compare finished evaluations in one field at the same inputs; `planted` tensors of A were given B's values."""
    values = {a.prints[name].loose for name in planted if name in a.prints}
    ours, theirs = _Graph(a, b, values), _Graph(b, a, values)
    ahead, node, regions = ours.departing(), theirs.departing(), _regions(ours, theirs)
    crossed = [
        f"output {quoted(name)} has the values of {quoted(theirs.pairs[name][0])} of A"
        for name in theirs.outputs
        if name in ours.outputs and name in theirs.pairs and theirs.pairs[name][0] != name
    ]
    found = Departure(
        matched=sum(name in theirs.pairs for name in theirs.data),
        of=len(theirs.data),
        missing=None if ahead is None else _named(ahead),
        outputs=tuple(crossed[:_SHOWN]),
        regions=tuple(regions[:_REGIONS]),
        regions_in_all=len(regions),
    )
    if node is None:
        return found
    operands = [name for name in theirs.operands(node) if name in theirs.pairs]
    return replace(
        found,
        node=one_line(label(node)),
        output=theirs.lost(node)[0],
        reads=tuple(name for name in dict.fromkeys(inputs_of(node)) if name in theirs.data or name not in b.fixed),
        operands=tuple((name, theirs.pairs[name][0]) for name in operands),
        rearranged=tuple(name for name in operands if not theirs.pairs[name][1]),
        candidates=tuple(_named(each) for each in _readers_of(ours, theirs.keys(operands))[:_SHOWN]),
        constants=tuple(_new_constants(ours, theirs, node)[:_SHOWN]),
    )


def partners(a: Fingerprints, b: Fingerprints) -> dict[str, tuple[str, bool]]:
    """Tensor of B to its partner in A, if possible of the same name, and whether it has the same order and shape."""
    holders = grouped((key, name) for name, each in a.prints.items() for key in (each.exact, each.loose))
    found = {}
    for name, each in b.prints.items():
        for key, exact in ((each.loose, False), (each.exact, True)):  # the exact one counts
            if key in holders:
                found[name] = name if name in holders[key] else holders[key][0], exact
    return found


class _Connected(NamedTuple):
    """Nodes connected by tensors without partners."""

    places: list[int]
    begins: list[str]  # tensors with partners that they read
    ends: list[str]  # and compute
    lost: list[str]  # outputs of the model that they compute, without partners
    same: bool  # whether every output of them has a partner


class _Graph:
    """The nodes of an evaluated model, bodies included, and which tensors have a partner in the other model."""

    def __init__(self, prints: Fingerprints, other: Fingerprints, planted: Container[object] = ()) -> None:
        """`planted`: values of the other model that were put into this one, or the reverse."""
        self.prints, self.pairs, self._planted = prints, partners(other, prints), planted
        self.data, makers = prints.data, prints.program.makers
        self.loose = {name: prints.prints[name].loose for name in self.data}
        self.outputs = [value.name for value in prints.program.graph.output]
        # In the order in which they were computed, those of bodies before the node that holds them.
        self.nodes = [*{id(makers[name]): makers[name] for name in self.data if name in makers}.values()]
        self.makers = {name: place for place, node in enumerate(self.nodes) for name in self.made(node)}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        return grouped(
            (name, place) for place, node in enumerate(self.nodes) for name in dict.fromkeys(inputs_of(node))
        )

    def operands(self, node: onnx.NodeProto) -> list[str]:
        return [name for name in dict.fromkeys(inputs_of(node)) if name in self.data]

    def made(self, node: onnx.NodeProto) -> list[str]:
        return [name for name in node.output if name in self.data]

    def lost(self, node: onnx.NodeProto) -> list[str]:
        """Its outputs that depend on data and have no partner."""
        return [name for name in self.made(node) if name not in self.pairs]

    def departing(self) -> onnx.NodeProto | None:
        """The first node with lost outputs of a region that does not converge, if possible read for more than sizes."""
        apart = [each for each in self.regions if not each.same]
        leading = [each for each in apart if each.ends or each.lost] or apart
        places = sorted(place for each in leading for place in each.places)
        return next((self.nodes[place] for place in places if self.lost(self.nodes[place])), None)

    @cached_property
    def regions(self) -> list[_Connected]:
        """By tensors without partners; a node that computes a value that was put there is one, unless it moves it."""
        found, seen = list[_Connected](), set[int]()
        for name, place in self.makers.items():
            value, read = self.loose[name], self.operands(self.nodes[place])
            departs = name not in self.pairs or (value in self._planted and value not in self.keys(read))
            if departs and place not in seen:
                found.append(self._connected(sorted(reached([place], self._beside))))
                seen.update(found[-1].places)
        return found

    def _beside(self, place: int) -> Iterator[int]:
        """The nodes that share a tensor without a partner with a node."""
        for name in self.lost(self.nodes[place]):
            yield from self.readers.get(name, ())
        for name in self.operands(self.nodes[place]):
            if name not in self.pairs and name in self.makers:
                yield self.makers[name]

    def _connected(self, places: list[int]) -> _Connected:
        nodes = [self.nodes[place] for place in places]
        made = {name: None for node in nodes for name in self.made(node)}
        read = {name: None for node in nodes for name in self.operands(node) if name in self.pairs and name not in made}
        ends = [name for name in made if name in self.pairs]
        lost = [name for name in made if name not in self.pairs and name in self.outputs]
        same = bool(ends) and not lost and not any(self.loose[name] in self._planted for name in ends)
        return _Connected(places, [*read], ends, lost, same)

    def keys(self, names: Iterable[str]) -> set[object]:
        return {self.loose[name] for name in names}


def inputs_of(node: onnx.NodeProto) -> list[str]:
    """What a node reads, with what its bodies read and return."""
    return [*reads(node), *(value.name for _, body in subgraphs(node) for value in body.output)]


def _new_constants(a: _Graph, b: _Graph, node: onnx.NodeProto) -> list[str]:
    """The constants that a node reads and A does not have, in any shape and transposed."""
    stated, known = b.prints.program.constants(), contents(a.prints.program.constants().values())
    new = {name for name in node.input if name in stated and content(stated[name].reshape(-1)) not in known}
    new |= b.prints.prints.keys() - stated.keys() - b.data.keys() - b.pairs.keys()
    return [name for name in dict.fromkeys(node.input) if name in new]


def _readers_of(a: _Graph, keys: set[object]) -> list[onnx.NodeProto]:
    """Nodes of A that read the same values: first the ones that lead to tensors B lacks, with their successors."""
    ranks: dict[int, tuple[bool, int, int]] = {}
    for place in {place for name in a.data if a.loose[name] in keys for place in a.readers.get(name, ())}:
        node = a.nodes[place]
        if not a.keys(a.made(node)) <= keys:  # a mere reshape of an operand is the operand
            ranks[place] = not a.lost(node), -len(a.keys(a.operands(node)) & keys), place
    found = sorted(ranks, key=lambda place: ranks[place])
    ahead = [place for place in found if a.lost(a.nodes[place])]
    for place in ahead:
        if len(ahead) < _FOLLOWED:
            behind = (reader for name in a.lost(a.nodes[place]) for reader in a.readers.get(name, ()))
            ahead += [each for each in dict.fromkeys(behind) if each not in ahead and a.operands(a.nodes[each])]
    return [a.nodes[place] for place in dict.fromkeys([*ahead[: max(_FOLLOWED, len(found))], *found])]


def _regions(a: _Graph, b: _Graph) -> list[Region]:
    """The regions of B; first the ones that lead to something that A does not have, then by size."""
    found = []
    for region in b.regions:
        keys = b.keys(region.ends)
        # Without an end that A has, the counterpart is what begins at the same tensors and is lost in A, too.
        starts = b.keys(region.begins) if not region.ends else set()
        counterpart = {place for name, place in a.makers.items() if a.loose[name] in keys}
        for each in a.regions:
            if a.keys(each.ends) & keys or (each.lost and a.keys(each.begins) & starts):
                counterpart.update(each.places)
        found.append(
            Region(
                nodes=len(region.places),
                operators=_counts(b.nodes[place] for place in region.places),
                begins=tuple(region.begins[:_SHOWN]),
                ends=tuple((region.lost + region.ends)[:_SHOWN]),
                same=region.same,
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
