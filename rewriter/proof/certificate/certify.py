"""Certify that a rewritten model computes what the original does, at every input of every size, over the reals.

Tensors of both models are compared from the outputs backwards. Equal numbers are equal computations
(`rewriter.proof.certificate.graphs`). Where two tensors differ, either both are elementwise functions of the same one
or two tensors, whose distance is bounded for all reals (`regions`, `bounds`), or both are the same linear layer of the
same rows (`rows`), or the same operator makes them from the same operands, body by body. Anything else is refused.
Names only suggest where a region may begin; nothing is believed that was not compared, and no input is run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import onnx
from flint import fmpq

from rewriter.files.load import LoadedModel
from rewriter.graph.edit import LOOSE_INITIALIZERS
from rewriter.graph.extract import cut
from rewriter.graph.types import FLOATS, elem_name
from rewriter.graph.view import GraphView, Path, Place, attributes, key_of, label, operator_of
from rewriter.graph.walk import iter_nodes, reads, subgraphs
from rewriter.proof.certificate.attention import UNLIKE, unfold
from rewriter.proof.certificate.bounds import Bound, bound, proportional
from rewriter.proof.certificate.constants import TOPS, WIDTHS, Axes, before_casts, holds, rank, sizes, whole_shape
from rewriter.proof.certificate.expressions import (
    ONE,
    VARIABLE,
    ZERO,
    Expression,
    NotAFunction,
    constant,
    degree_in,
    div,
    listing,
    substitute,
)
from rewriter.proof.certificate.graphs import (
    FUNCTION,
    HEADS,
    SOURCE,
    Model,
    NotCertifiable,
    Scope,
    Tensor,
    shared_ranges,
)
from rewriter.proof.certificate.regions import Reader, Region
from rewriter.proof.certificate.rows import Layer, alike, extent, in_order, read_layer
from rewriter.proof.claims import Claim
from rewriter.proof.values.departure import Departure

CEILINGS: Mapping[int, float] = {
    onnx.TensorProto.FLOAT: 1e-5,
    onnx.TensorProto.DOUBLE: 1e-5,
    onnx.TensorProto.FLOAT16: 2.0**-10,
    onnx.TensorProto.BFLOAT16: 2.0**-7,
}
"""The largest error over max(1, |f|) that a pass may claim for an activation unless the user asked for more, by element
type: what a program may be off by that is fitted while planning (those of the table are off by 1e-7 at most), and for
half precision the spacing of its numbers, to which constants round. What is claimed is then proved."""

UNCLAIMED = 1e-7
"""The limit of a region about which nothing is claimed, in every type: it holds the program over the reals to what the
table of programs states, and is not loosened for types whose rounding would hide a wrong coefficient."""
_DOMAINS = (512.0, 508.0)
"""What is tried for a gate about which nothing is claimed, that does not hold everywhere, and that heads stand for: how
far the programs of this tool reach. The certificate states which was proved."""
_ROOM = 1.02
"""A claim is held to this many times its limit: it is itself a bound, rounded to a float."""
_FOLDED: Mapping[int, float] = {
    onnx.TensorProto.FLOAT: 2.0**-21,
    onnx.TensorProto.FLOAT16: 2.0**-8,
    onnx.TensorProto.BFLOAT16: 2.0**-5,
}
"""Four units in the last place, over max(1, |f|): what folding constants in the model's type does to a function. One
that is no further off is not refuted."""
_EXACT = 1e-15
"""What a claim of 0 allows."""
_DEEPEST = 10**7
"""Calls inside each other, some five per node: models are deeper than Python's default, and its frames are on the heap.
Whatever calls itself here is plain Python, without `*` in the call, so that C's stack does not grow."""

_NARROWER = "computes in a narrower type than the original"
_INVISIBLE = {
    SOURCE: "may draw other numbers than the original",
    FUNCTION: "calls a local function of another content",
    HEADS: "has heads that compute another function, or take sequences of another length",
}

ASSUMED = (
    "operators compute what the specifications of ONNX and onnxruntime say",
    "arithmetic is that of the reals; operators that are the same in both models get the same operands",
    "where a model lists all of its initializers as inputs, as in IR version 3, they keep their values",
    "tensors of the original have the shapes that it declares for them",
)
NOT_CLAIMED = (
    "rounding and overflow in the types of the model",
    "NaN and infinities",
    "what a runtime makes of the file",
    "how the bounds of the activations propagate to the outputs",
)


@dataclass(frozen=True)
class Claimed:
    """What is claimed about one activation.

    Attributes:
        limit: largest |F_B - F_A| / max(1, |F_A|).
        domain: largest |y| for which that is claimed; None for all.
        leaves: names of the pre-activation and, of a gate, the value; without them, a part of the activation that
            differs by little may hide that the whole does not.
        accuracy: the error that was asked for. A limit above it and above the ceiling of the type is lowered to the
            larger of these, so that no file sets its own limit.
    """

    limit: float
    domain: float | None = None
    leaves: tuple[str, ...] = ()
    accuracy: float = math.inf


@dataclass(frozen=True)
class CertifiedRegion:
    """One activation of the original and what stands in its place.

    Attributes:
        original: the tensor of the original that it computes.
        rewritten: the tensor of the rewritten model.
        path: the graph of the original that it is in; () for the main one.
        leaves: the tensors of the original that it is a function of: the pre-activation, or gate and value.
        linear_in: the value of a gate, in which both sides are linear; None for an activation.
        elem_type: narrowest element type in which the original computes it (TensorProto.DataType).
        nodes: nodes of the region in the rewritten model.
        bound: what was proved.
        functions: both functions of y, part by part.
        added: what the rows of other tokens may add to it, beside the bound; 0 where they are masked.
        tokens: the longest sequence that the rewritten model takes there; None where it takes any.
    """

    original: str
    rewritten: str
    path: Path
    leaves: tuple[str, ...]
    linear_in: str | None
    elem_type: int
    nodes: int
    bound: Bound
    functions: tuple[tuple[str, ...], ...]
    added: float = 0.0
    tokens: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Why two tensors were not shown to be the same.

    Attributes:
        tensor: of the rewritten model.
        original: the tensor of the original that it was compared with.
        node: what makes it, in words.
        reason: in a sentence.
        refuted: whether the reason is a counterexample: a number at which a function is further off than is claimed,
            or, where nothing is, than folded constants explain.
        settled: whether further reasons follow from it: another function, weights or operands.
        path: the graph of the original.
        unmet: whether a block that is said to be replaced is not.
    """

    tensor: str
    original: str
    node: str
    reason: str
    refuted: bool = False
    settled: bool = field(default=False, metadata={"json": ""})
    path: Path = ()
    unmet: bool = field(default=False, metadata={"json": ""})

    @property
    def text(self) -> str:
        """The refusal in one line."""
        what = self.node or self.tensor
        return f"{what}: {self.reason}" if what else self.reason


@dataclass(frozen=True)
class Certificate:
    """What was proved about two models.

    Attributes:
        certified: whether the rewritten model computes what the original does, up to the bounds of the regions.
        regions: the activations that were replaced, with their bounds.
        refusals: why not, the most telling first; empty if certified.
        sizes: the sizes of inputs for which it is proved, such as `batch 2, sequence 5`; empty for every size.
        bits: of a proof at some sizes: other models pass with a probability of less than 2^-bits.
        rounded: constants that were read as the number that they are rounded from, such as sqrt(8).
        folded: constants that a tool multiplied in float32, which were read as the exact product.
        departure: where the values of both models part; None where they do not, or were not compared.
        undecided: why values decide nothing; empty where they are the same, and where they part.
        assumed: what the proof rests on.
        not_claimed: what it says nothing about.
        seconds: how long it took.
    """

    certified: bool
    regions: tuple[CertifiedRegion, ...]
    refusals: tuple[Refusal, ...]
    seconds: float
    sizes: tuple[str, ...] = ()
    bits: int | None = None
    rounded: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    departure: Departure | None = None
    undecided: str = ""
    assumed: tuple[str, ...] = ASSUMED
    not_claimed: tuple[str, ...] = NOT_CLAIMED
    also: ClassVar[tuple[str, ...]] = ("domain",)

    @property
    def domain(self) -> float | None:
        """The largest |pre-activation| for which all regions are proved; None where they are for every number."""
        return min((each.bound.domain for each in self.regions if each.bound.domain is not None), default=None)

    @property
    def refuted(self) -> bool:
        """Whether a region has a counterexample."""
        return any(each.refuted for each in self.refusals)

    @property
    def worst(self) -> float:
        """The largest bound of a region, over max(1, |F|); 0 if all are exact."""
        return max((region.bound.bound for region in self.regions), default=0.0)


def certify(
    original: LoadedModel,
    rewritten: LoadedModel,
    *,
    claims: Mapping[Place, Claimed] | None = None,
    blocks: Sequence[Claim] = (),
    limit: float = UNCLAIMED,
) -> Certificate:
    """Prove that `rewritten` computes the outputs of `original`, or say where it does not.

    Args:
        original: the model that is the specification.
        rewritten: the model to be judged; it may have further outputs.
        claims: by graph and tensor of the original, what its replacement is held to.
        blocks: what was replaced. Each must have been, by heads.
        limit: the limit of all others.
    """
    start = time.perf_counter()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST))
    matching = _Matching(claims or {}, limit)
    try:
        a = Model(original, shared=shared_ranges(original, rewritten))
        b = Model(rewritten, a)
        unfold(a)
        unfold(b)
        refusals = tuple(_interface(a, b)) or tuple(matching.compare(a, b)) or tuple(_kept(a, b, blocks))
        if any(each.refuted and (each.path, each.original) not in matching.claims for each in refusals):
            # Other weights may make up for another function: it is a counterexample only where all else is the same.
            rest = tuple(_Matching(claims or {}, limit, excused=True).compare(a, b))
            refusals = tuple(
                replace(each, refuted=each.refuted and (not rest or (each.path, each.original) in matching.claims))
                for each in refusals
            )
    except (NotAFunction, NotCertifiable) as error:
        refusals = (Refusal("", "", "", str(error)),)
    finally:
        sys.setrecursionlimit(before)
    return Certificate(not refusals, tuple(matching.regions.values()), refusals, time.perf_counter() - start)


def _kept(a: Model, b: Model, blocks: Sequence[Claim]) -> Iterator[Refusal]:
    """Blocks that are said to be replaced, and are as they were, or hold no softmax over what they read."""
    for block in blocks:
        old, new = a.scopes.get(block.path), b.scopes.get(block.path)
        if old is None or new is None:
            text = "the graph that holds it is not in both models"
        else:
            ends = [name for name in block.makes if name in old.made and name in new.made]
            if all(old.number(name) == new.number(name) for name in ends):
                text = "reported as converted, but the original's activation is still there"
            elif not _attends(b.views[block.path], block.reads, ends):
                text = "reported as converted, but there is no softmax between its ends"
            else:
                continue
        yield Refusal(block.makes[0], block.makes[0], block.name, text, settled=True, path=block.path, unmet=True)


def _attends(view: GraphView, starts: Sequence[str], ends: Sequence[str]) -> bool:
    """Whether a softmax is taken, between tensors, of what the first of them reach."""
    reached, powers = set(starts), set[str]()
    for node in (view.nodes[index] for index in cut(view, starts, ends).nodes):
        read = set(reads(node))
        if not read & reached:
            continue
        inner = {node.op_type, *(each.op_type for _, body in subgraphs(node) for each in iter_nodes(body.node))}
        if inner & {"Softmax", "Attention"} or (node.op_type == "Div" and node.input[1] in powers):
            return True
        reached.update(node.output)
        if node.op_type == "Exp" or read & powers:
            powers.update(node.output)
    return False


def _interface(a: Model, b: Model) -> Iterator[Refusal]:
    """Differences of opsets, inputs and outputs; further outputs of `b` are none."""
    for domain in sorted(a.domains & b.domains):
        old, new = (side.opsets.get(domain, "not imported") for side in (a, b))
        if old != new:
            yield Refusal("", "", "", f"opset {domain or 'ai.onnx'} is {new} instead of {old}")
    for key in sorted(b.functions.keys() - a.functions.keys()):
        yield Refusal("", "", "", f"function {key[1]} is none of the original's, and may be an operator to a runtime")
    if b.ir_version < LOOSE_INITIALIZERS <= a.ir_version:
        yield Refusal("", "", "", f"IR version is {b.ir_version} instead of {a.ir_version}, without defaults of inputs")
    for what, ours, theirs in zip(("input", "output"), a.signature, b.signature, strict=True):
        if ours != (theirs if what == "input" else theirs[: len(ours)]):
            names = [each[0] for each, _ in zip(theirs, ours, strict=False) if each not in ours]
            which = f" {names[0]}" if names else "s"
            yield Refusal(names[0] if names else "", "", "", f"{what}{which} differs in name, type or shape")


class _Matching:
    """Compares tensors of two models.

    Attributes:
        regions: the regions that were proved, by the tensors of both sides.
        claims: graph and tensor of the original to what its replacement is held to.
    """

    def __init__(self, claims: Mapping[Place, Claimed], limit: float, *, excused: bool = False) -> None:
        """`excused`: regions that are refuted count as the same, so that only other differences are found."""
        self.regions: dict[tuple[Tensor, Tensor], CertifiedRegion] = {}
        self.claims = claims
        self._excused = excused
        self._limit = limit
        self._known: dict[tuple[Tensor, Tensor, bool], bool] = {}
        self._bodies: dict[int, Scope] = {}
        self._readers = Reader(), Reader()
        self._why: list[tuple[int, Refusal]] = []
        self._broken: set[tuple[Tensor, Tensor]] = set()

    def compare(self, a: Model, b: Model) -> Iterator[Refusal]:
        """The reasons why an output differs; none if all are the same."""
        for name in a.outputs:
            if not self._same(a.main, name, b.main, name):
                found = sorted(self._why, key=lambda each: each[0])
                yield from dict.fromkeys(refusal for _, refusal in found)  # several ways fail for one reason
                if not found:
                    yield Refusal(name, name, "", "is not computed as in the original")
                return

    def _refused(
        self,
        a: Tensor,
        b: Tensor,
        rank: int,
        reason: str,
        *,
        refuted: bool = False,
        settled: bool = False,
    ) -> bool:
        node = label(b.node) if b.node is not None else ""
        self._why.append((rank, Refusal(b.name, a.name, node, reason, refuted, settled, a.scope.path)))
        return False

    def _same(self, scope: Scope, name: str, other: Scope, others: str) -> bool:
        if not name or not others:
            return name == others
        return self._same_tensors(scope.find(name), other.find(others))

    def _same_tensors(self, a: Tensor, b: Tensor, *, rows: bool = False) -> bool:
        """Whether two tensors are the same; with `rows`, whether they have the same entries in the same order."""
        key = a, b, rows
        if key not in self._known:
            self._known[key] = False  # what depends on itself is nowhere proved
            count = len(self._why)
            self._known[key] = self._decided_rows(a, b) if rows else self._decided(a, b)
            if self._known[key]:
                del self._why[count:]  # of other ways that were tried
        return self._known[key]

    def _decided(self, a: Tensor, b: Tensor) -> bool:
        paired = a.scope.depth == b.scope.depth == 0 or self._bodies.get(id(a.scope)) is b.scope
        if paired and a.number == b.number:
            return True
        if "constant" in (a.kind, b.kind):
            if a.kind == b.kind:
                return a.equals(b) or self._refused(a, b, 1, f"constant differs from {a.name}")
            return self._refused(a, b, 3, f"is a {b.kind} where the original has a {a.kind}")
        if "input" in (a.kind, b.kind):
            return self._refused(a, b, 3, f"is not {a.name}")
        count = len(self._why)
        found = self._computed(a, b)
        return found or (
            self._excused and any(each.refuted and each.original == a.name for _, each in self._why[count:])
        )

    def _computed(self, a: Tensor, b: Tensor) -> bool:
        """Whether both are the same function, operator or layer of the same tensors."""
        unread = in_order(b, a.elem_type)
        if unread.name in unread.scope.unread:
            self._refused(a, b, 0, unread.scope.unread[unread.name])
        regions = self._pairs(a, b)
        first = next(regions, None)
        if first is not None and self._equal_functions(a, b, first[0], first[1]):
            return True
        if (a, b) in self._broken:  # parts of it would be held to another limit than what is claimed about the whole
            return False
        if self._same_node(a, b):
            return True
        for pair in regions:
            if self._equal_functions(a, b, pair[0], pair[1]):
                return True
        return self._same_layer(a, b) or self._same_sizes(a, b)

    def _decided_rows(self, a: Tensor, b: Tensor) -> bool:
        first = in_order(b, a.elem_type)  # a layout that both have is followed in the original alone
        if any(self._same_tensors(*each) for each in ((a, b), (a, first), (in_order(a), first))):
            return True
        ours, theirs = (self._region_in_order(*each, a.elem_type) for each in zip(self._readers, (a, b), strict=True))
        if ours and theirs and self._equal_functions(ours[0], theirs[0], ours[1], theirs[1], rows=True):
            return True
        return self._same_layer(a, b, rows=True)

    def _region_in_order(self, reader: Reader, tensor: Tensor, kind: int) -> tuple[Tensor, Region] | None:
        """The region that has the entries of a tensor in order, and its own tensor."""
        for each in (tensor, in_order(tensor, kind)):
            region = reader.region(each)
            if region is not None:
                return each, region
        return None

    # -- linear layers -----------------------------------------------------------------------------------------------

    def _same_layer(self, a: Tensor, b: Tensor, *, rows: bool = False) -> bool:
        """Whether both are x W + b with the same weights, of the same rows, and have the same shape."""
        made = [in_order(each, a.elem_type, shaped=not rows) for each in (a, b)]
        ours, theirs = map(read_layer, made)
        if ours is None or theirs is None or (a.elem_type != b.elem_type and not rows):
            return False
        if not self._same_tensors(ours.source, theirs.source, rows=True):
            return False
        kinds = [each.elem_type for each in made]
        if all(kinds) and not holds(kinds[1], kinds[0]):
            return self._refused(a, b, 0, _NARROWER)
        if not ours.equals(theirs):
            return self._refused(a, b, 0, f"has other weights or another bias than {a.name}", settled=True)
        # The same entries are laid out alike as rows of a matrix, or both as one tensor is.
        alike = rows or (_is_matrix(a, ours) and _is_matrix(b, theirs)) or self._same_front(a, b)
        return alike or self._refused(a, b, 1, f"may have other axes than {a.name}")

    def _same_front(self, a: Tensor, b: Tensor) -> bool:
        """Whether the axes in front of the last are the same."""
        found = []
        for tensor in (a, b):
            axes: Axes | None = extent(tensor).front
            if axes is not None and axes.stop != -1:
                axes = self._all_but_last(a.scope, axes)
            if axes is None or axes.stop != -1:
                return False
            found.append(axes.tensor)
        fixed = _fixed_front(found[0])
        if fixed is not None and fixed == _fixed_front(self._of_original(a.scope, found[1])):
            return True
        return self._same_tensors(found[0], found[1])

    def _all_but_last(self, original: Scope, axes: Axes) -> Axes | None:
        """Axes by their numbers as those of another tensor, if the tensor has one more."""
        tensor = before_casts(axes.tensor)
        known = self._of_original(original, tensor)
        return extent(tensor).front if known is not None and known.type.rank == (axes.stop or 0) + 1 else None

    def _of_original(self, original: Scope, tensor: Tensor) -> Tensor | None:
        """The tensor, or the same one of the original: what the rewritten model says of its shapes is not believed."""
        if tensor.scope.model.original:
            return tensor
        scope = original.model.scopes.get(tensor.scope.path, original)
        known = scope.find(tensor.name) if scope.own(tensor.name) is not None else None
        return known if known is not None and self._same_tensors(known, tensor) else None

    def _same_sizes(self, a: Tensor, b: Tensor) -> bool:
        """Whether both are the shape of the same rows, one of them without a tensor that has it."""
        measured, written = whole_shape(sizes(a)), sizes(b)
        last = extent(measured).width if measured is not None else None
        if measured is None or written is None or last is None or len(written) != 2 or written[1] != last:
            return False
        if not isinstance(written[0], Axes) or written[0][1:] != (0, -1):
            return False
        return self._same_front(measured, written[0].tensor)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _same_node(self, a: Tensor, b: Tensor) -> bool:
        """Whether the same operator makes both from the same operands."""
        one, two = a.node, b.node
        if one is None or two is None:
            return False
        outputs = [[bool(name) for name in node.output] for node in (one, two)]
        if key_of(one) != key_of(two) or a.place != b.place or outputs[0] != outputs[1]:
            return self._refused(a, b, 2, f"stands where the original has {operator_of(one)}")
        ours, theirs = a.scope.attributes(one), b.scope.attributes(two)
        if ours != theirs:
            mine, other = dict(ours), dict(theirs)
            changed = sorted(name for name in mine | other if mine.get(name) != other.get(name))
            reason = next((text for name, text in _INVISIBLE.items() if name in changed), "")
            return self._refused(a, b, 1, reason or f"attribute {', '.join(changed)} differs from the original's")
        if len(one.input) != len(two.input):
            return self._refused(a, b, 2, "has another number of operands than in the original")
        for name, other in zip(one.input, two.input, strict=True):
            if not self._same(a.scope, name, b.scope, other):
                return False
        return self._same_bodies(a, b, one, two)

    def _same_bodies(self, a: Tensor, b: Tensor, one: onnx.NodeProto, two: onnx.NodeProto) -> bool:
        names = sorted(name for name, _ in subgraphs(one))
        if names != sorted(name for name, _ in subgraphs(two)):
            return self._refused(a, b, 2, "has other bodies than in the original")
        for name in names:
            body, other = a.scope.bodies[id(one), name], b.scope.bodies[id(two), name]
            if len(body.inputs) != len(other.inputs) or len(body.outputs) != len(other.outputs):
                return self._refused(a, b, 2, f"body {name} has other inputs or outputs than in the original")
            self._bodies[id(body)] = other
            for output, others in zip(body.outputs, other.outputs, strict=True):
                if not self._same(body, output, other, others):
                    return False
        return True

    # -- regions -----------------------------------------------------------------------------------------------------

    def _pairs(self, a: Tensor, b: Tensor) -> Iterator[tuple[Region, Region]]:
        """What may be the same region: between tensors that keep their names, the largest, and cut at a waist."""
        ours, theirs = (reader.names_above(each) for reader, each in zip(self._readers, (a, b), strict=True))
        common = (ours & theirs) - {a.name, b.name}
        claim, seen = self.claims.get((a.scope.path, a.name)), set()
        stops = [claim.leaves] if claim is not None and claim.leaves else []
        for pair in (*((Reader(names), Reader(names)) for names in (*stops, common)), self._readers):
            found = [reader.region(each) for reader, each in zip(pair, (a, b), strict=True)]
            if found[0] is not None and found[1] is not None:
                key = tuple(frozenset(each for each in region.leaves.values()) for region in found if region)
                if key not in seen:
                    seen.add(key)
                    yield found[0], found[1]

    def _equal_functions(self, a: Tensor, b: Tensor, ours: Region, theirs: Region, *, rows: bool = False) -> bool:
        """Whether both regions are the same function of the same leaves, up to what is claimed."""
        count = len(self._why)
        matched = self._matched(ours, theirs, rows=rows)
        if matched is None:
            return False
        reason = _not_real(a, b, ours, theirs, rows=rows)
        if reason:
            return self._refused(a, b, 0, reason)
        mine, other = ours.expression, substitute(theirs.expression, matched)
        del self._why[count:]  # leaves that were tried in another order
        if mine is other and (ours.added, ours.tokens) == (theirs.added, theirs.tokens):
            return True
        value = None
        if len(ours.leaves) == 2:
            value = next((each for each in ours.leaves if degree_in(mine, each) == 1 == degree_in(other, each)), None)
            if value is None:
                return self._refused(a, b, 0, "combines two tensors in a way that is not linear in one of them")
        values = {each: ONE if each is value else VARIABLE for each in ours.leaves}
        one, two = substitute(mine, values), substitute(other, values)
        heads = _attention(ours), _attention(theirs)
        (y, *_) = (each for leaf, each in ours.leaves.items() if leaf is not value)
        proved = self._proved(a, y, one, two, program=value is not None and heads == (False, True))
        claimed = (a.scope.path, a.name) in self.claims
        if proved.holds and proved.bound > _EXACT and not any(heads) and not claimed:
            proved = self._to_scale(proved, one, two, TOPS[y.elem_type])
        if not proved.holds:
            settled = refuted = proved.at_least > proved.limit
            if refuted and claimed:
                self._broken.add((a, b))
            elif refuted:
                limit = max(self._limit, _FOLDED.get(y.elem_type, 0.0))
                refuted = bound(one, two, limit=limit, top=TOPS[y.elem_type]).at_least > limit
            text = f"{proved.reason} (the activation {a.name})"
            return self._refused(a, b, 0, text, refuted=refuted, settled=settled)
        self.regions[a, b] = CertifiedRegion(
            original=a.name,
            rewritten=b.name,
            path=a.scope.path,
            leaves=(y.name,),
            linear_in=None if value is None else ours.leaves[value].name,
            elem_type=min(_types(ours), key=lambda kind: WIDTHS.get(kind, len(WIDTHS) + 1)),
            nodes=len(theirs.inside),
            bound=proved,
            functions=(tuple(listing(one)), tuple(listing(two))),
            added=theirs.added,
            tokens=theirs.tokens,
        )
        return True

    def _matched(self, ours: Region, theirs: Region, *, rows: bool = False) -> dict[Expression, Expression] | None:
        """Each leaf of `theirs` to the leaf of `ours` that is the same tensor; None where there is none."""
        if len(ours.leaves) != len(theirs.leaves):
            return None
        matched: dict[Expression, Expression] = {}
        for leaf, tensor in theirs.leaves.items():
            # Tensors that kept their names first: most questions are then answered once.
            for other, mine in sorted(ours.leaves.items(), key=lambda each: each[1].name != tensor.name):
                if other not in matched.values() and self._same_tensors(mine, tensor, rows=rows):
                    matched[leaf] = other
                    break
            else:
                return None
        return matched

    def _proved(self, a: Tensor, y: Tensor, mine: Expression, other: Expression, *, program: bool) -> Bound:
        top = TOPS[y.elem_type]
        claim = self.claims.get((a.scope.path, a.name))
        if claim is not None:
            ceilings = (CEILINGS.get(each.elem_type, 0.0) for each in (a, y))
            limit = min(claim.limit, max(claim.accuracy, *ceilings))
            found = bound(mine, other, limit=limit * _ROOM + _EXACT, top=top, domain=claim.domain)
            if found.holds or claim.limit <= limit:
                return found
            return replace(found, reason=f"{found.reason}; accuracy {claim.limit:.2g} allows what its plan claims")
        everywhere = bound(mine, other, limit=self._limit, top=top)
        near = everywhere.at is not None and everywhere.at_least > self._limit and abs(everywhere.at) <= min(_DOMAINS)
        if everywhere.holds or near or not program:
            return everywhere
        parts = (bound(mine, other, limit=self._limit, top=top, domain=domain) for domain in _DOMAINS)
        return next((each for each in parts if each.holds), everywhere)

    def _to_scale(self, found: Bound, mine: Expression, other: Expression, top: fmpq) -> Bound:
        """What is left of a bound over max(1, |F|) where neither claim nor heads say that it is an activation.

        The tensor may be a variance of 1e-9: its functions must meet at 0, and be as near where F is scaled to reach 1.
        """
        if not proportional(mine, other, top):
            reason = f"differs by up to {found.bound:.3g}, and not in proportion to y"
            return replace(found, holds=False, reason=reason)
        size = bound(ZERO, mine, limit=1.0, top=top, domain=1.0)
        if not size.holds or size.bound == 0.0:
            return found
        one, two = (div(each, constant(size.bound)) for each in (mine, other))
        return bound(one, two, limit=self._limit, top=top)


def _is_matrix(tensor: Tensor, layer: Layer) -> bool:
    """Whether a tensor has two axes, the last one of the layer's width."""
    tensor = before_casts(tensor)
    node = tensor.node
    if tensor.scope.model.original and tensor.type.rank == 2:
        return extent(tensor).width == len(layer.bias)
    if node is None or node.domain or node.op_type != "Reshape":
        return node is not None and not node.domain and node.op_type == "Gemm"
    shape = sizes(tensor.scope.find(node.input[1]))
    return rank(shape) == 2 and shape is not None and shape[-1] == len(layer.bias)


def _attention(region: Region) -> bool:
    """Whether a region is attention: a softmax over keys, or its weights written out."""
    operators = {each.node.op_type for each in region.inside if each.node is not None}
    return "Heads" in operators or {"Exp", "Div"} <= operators


def _fixed_front(tensor: Tensor | None) -> tuple[int, ...] | None:
    """The sizes of all axes but the last, if the original fixes them."""
    shape = tensor.type.shape if tensor is not None else None
    fixed = tuple(size for size in (shape or ())[:-1] if isinstance(size, int))
    return fixed if shape is not None and len(fixed) == len(shape) - 1 else None


def _not_real(a: Tensor, b: Tensor, ours: Region, theirs: Region, *, rows: bool) -> str:
    """Why the arithmetic of a region is not that of the reals; empty where it is."""
    for tensor in ours.leaves.values():
        if tensor.elem_type not in FLOATS:
            kind = elem_name(tensor.elem_type) if tensor.elem_type else "of unknown type"
            return f"{tensor.name} is {kind}, and only floating-point arithmetic is that of the reals"
    axes, ranks = max(ours.axes, theirs.axes), [each.type.rank for each in ours.leaves.values()]
    if axes and (None in ranks or max(each or 0 for each in ranks) < axes):
        return f"{a.name} may have fewer axes than a constant, which then changes its shape"
    if theirs.together and not alike(tuple(ours.leaves.values())):
        return UNLIKE
    if rows and len(ours.leaves) > 1 and not all(alike(tuple(side.leaves.values())) for side in (ours, theirs)):
        return UNLIKE
    if not rows and a.elem_type and b.elem_type and a.elem_type != b.elem_type:
        return f"has type {elem_name(b.elem_type)} instead of {elem_name(a.elem_type)}"
    types = _types(ours)
    return "" if all(any(holds(kind, other) for other in types) for kind in _types(theirs)) else _NARROWER


def _types(region: Region) -> set[int]:
    """The floating-point types that a region computes in."""
    casts = {attributes(each.node)["to"] for each in region.inside if each.node and each.node.op_type == "Cast"}
    return casts | {tensor.elem_type for tensor in region.leaves.values()}
