"""Which tensors are elementwise functions of linear operators' outputs: one forward pass over a graph.

Abstract interpretation over a small lattice, in time linear in the size of the graph. A tensor is one of

    opaque    anything
    leaf      the output of a linear operator, after any per-channel affine and shape-only operators
    function  an elementwise function, with scalar constants, of one or two leaves
    beyond    a nonlinear function followed by per-channel affine or shape-only operators, on its way to W2

`passes.match.blocks` turns these facts into MLP blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import onnx

from passes.match.linear import LINEAR_OPERATORS, MICROSOFT, LinearOperator, Miss, linear_operator
from rewriter.graph import elementwise
from rewriter.graph.constants import Constants
from rewriter.graph.types import FLOATS
from rewriter.graph.view import ONNX_DOMAINS, PARTS, GraphView, integer_of, integers_of, key_of, label, operator_of


@dataclass(frozen=True)
class Source:
    """The producers of a leaf.

    Attributes:
        operators: the linear operators whose outputs it sums.
        trailing: the affine and shape-only nodes after them.
        miss: why the leaf is not a linear map of the data after all; activations that read it are left for this reason.
    """

    operators: tuple[LinearOperator, ...]
    trailing: tuple[int, ...] = ()
    miss: Miss | None = None


@dataclass(frozen=True)
class Fact:
    """What is known about one tensor.

    Attributes:
        leaves: the tensors of which this one is an elementwise function; the tensor itself where it is a leaf or beyond
            an activation.
        source: the producers of a leaf; None for functions and for tensors beyond an activation.
        nonlinear: whether the function is (syntactically) not affine.
        ends: for a tensor beyond an activation, the activation's output.
        axis: the channel axis counted from the end; None where a shape-only operator lost track of it.
    """

    leaves: tuple[str, ...]
    source: Source | None = None
    nonlinear: bool = False
    ends: str | None = None
    axis: int | None = -1


@dataclass
class Dataflow:
    """The facts of one graph; filled by `analyse`, read-only afterwards.

    Attributes:
        facts: tensor name to fact; a tensor without an entry is opaque or constant.
        operators: node index to linear operator.
        sinks: activation output to the linear operators that consume it.
        blocked: activation output to the reasons why other consumers are not linear operators.
        extended: activation outputs that are part of a larger activation.
        scales: scalars of dynamic quantisation, computed at run time, that turn an integer product back into floats.
        values: activation output to its fact as the value of a gate.
        reached: such an operator to the linear operator, as reports print it, that reads what becomes of its output.
        strays: tensor to the activation operator, by index, that was applied to no projection.
        near_misses: leaf to why the nonlinear node that reads it is not elementwise with scalar constants.
    """

    facts: dict[str, Fact] = field(default_factory=dict)
    operators: dict[int, LinearOperator] = field(default_factory=dict)
    sinks: dict[str, list[LinearOperator]] = field(default_factory=lambda: defaultdict(list))
    blocked: dict[str, list[Miss]] = field(default_factory=lambda: defaultdict(list))
    extended: set[str] = field(default_factory=set)
    scales: set[str] = field(default_factory=set)
    values: dict[str, Fact] = field(default_factory=dict)
    reached: dict[int, str] = field(default_factory=dict)
    strays: dict[str, int] = field(default_factory=dict)
    near_misses: dict[str, Miss] = field(default_factory=dict)

    def source_of(self, tensor: str) -> Source | None:
        """The producers of a leaf, None for other tensors."""
        fact = self.values.get(tensor) or self.facts.get(tensor)
        return None if fact is None else fact.source

    def activation_behind(self, tensor: str) -> str | None:
        """The activation output that `tensor` is, or lies beyond; None if there is none."""
        fact = self.facts.get(tensor)
        if fact is None:
            return None
        return tensor if fact.nonlinear else fact.ends

    def between(self, view: GraphView, leaves: Sequence[str], output: str) -> tuple[int, ...]:
        """The nodes that compute `output` from `leaves`, in topological order."""
        inside: set[int] = set()
        pending = [output]
        while pending:
            index = view.producer[pending.pop()]
            if index in inside:
                continue
            inside.add(index)
            pending.extend(name for name in view.nodes[index].input if name in self.facts and name not in leaves)
        return tuple(sorted(inside))


_SHAPE_ONLY = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}
_QUANTISING = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
"""They round, but they stay in the graph: only what lies between them is replaced."""
FIRST_INPUT_ONLY = {"Dropout", "CastLike"}
"""The other inputs are not operands: a ratio and a training flag, and the tensor whose type is taken."""
_TRANSPARENT = {"Identity", "Cast", "CastLike", "Dropout", "Neg"}
_NO_ACTIVATION = ("Attention", "Embedding", "Norm", "Quantize", "BiasAdd")
"""Parts of the names of onnxruntime's operators that are known not to be activations."""
_SUMS = {"Add", "Sub", "Sum"}


def analyse(view: GraphView, constants: Constants) -> Dataflow:
    """Run the pass over `view`."""
    return _Analysis(view, constants).run()


class _Analysis:
    def __init__(self, view: GraphView, constants: Constants) -> None:
        self._view = view
        self._constants = constants
        self._flow = Dataflow()

    def run(self) -> Dataflow:
        # Nodes are in topological order, so that every operand has its fact before its consumers are visited.
        for index, node in enumerate(self._view.nodes):
            # Weights that are transposed, cast or dequantised by nodes count as constants, not as data.
            if all(name in self._constants for name in node.output if name):
                continue
            if not self._linear(index, node):
                self._other(index, node)
        return self._flow

    def _linear(self, index: int, node: onnx.NodeProto) -> bool:
        found = linear_operator(self._view, self._constants, index)
        if found is None:
            return False
        if isinstance(found, Miss):
            if any(name in self._constants for name in node.input[:2]):
                self._sink(node.input, operator_of(node))
            self._block(node, found)
            return True
        self._flow.operators[index] = found
        miss = None
        if found.added:
            # A residual fused into a Gemm is harmless in a second operator, which stays as it is. In a first operator
            # the pre-activation would depend on more than W1 and b1.
            miss = Miss(f"it adds '{found.added}', which is not constant, to its product", label(node))
        self._flow.facts[found.output] = Fact((found.output,), source=Source((found,), miss=miss), axis=found.axis)
        self._sink([found.data], found.shown)
        activation = self._flow.activation_behind(found.data)
        if activation is not None:
            axis = self._flow.facts[found.data].axis
            # W2 must contract the axis of the neurons; along another axis it would mix tokens.
            if axis is not None and axis != found.axis:
                reason = f"{label(node)} contracts another axis than the one that the first operator produces"
                self._block(node, Miss(reason, label(node)))
            else:
                self._flow.sinks[activation].append(found)
        return True

    def _sink(self, data: Iterable[str], shown: str) -> None:
        """Note that a linear operator reads what became of an activation operator's output."""
        for stray in (self._flow.strays[name] for name in data if name in self._flow.strays):
            self._flow.reached.setdefault(stray, shown)

    def _other(self, index: int, node: onnx.NodeProto) -> None:
        if elementwise.lookup(node) is not None:
            self._elementwise(index, node)
        elif self._view.is_onnx(node) and node.op_type in _SHAPE_ONLY | PARTS | _QUANTISING:
            self._shape_only(index, node)
        elif self._view.is_onnx(node) and node.op_type == "BatchNormalization" and self._is_per_channel(node):
            self._follow(node.output[0], node.input[0], self._flow.facts[node.input[0]], index, 1 - self._rank_of(node))
        else:
            self._block(node, Miss(f"its output feeds {label(node)}, which is not a linear operator", label(node)))

    def _block(self, node: onnx.NodeProto, miss: Miss) -> None:
        """Leave the node's outputs opaque, and record the reason with the activations that it reads."""
        # An operator of an unknown domain right after a projection may well be an activation, so users must be told.
        foreign = node.domain not in ONNX_DOMAINS and key_of(node) not in LINEAR_OPERATORS
        if node.domain == MICROSOFT and any(part in node.op_type for part in _NO_ACTIVATION):
            foreign = False
        for name in dict.fromkeys(node.input):
            fact = self._flow.facts.get(name)
            if foreign and fact is not None and fact.source is not None:
                self._flow.near_misses.setdefault(name, Miss(f"{label(node)} is an unknown operator", label(node)))
            activation = self._flow.activation_behind(name)
            if activation is not None:
                self._flow.blocked[activation].append(miss)

    # -- shape-only operators ------------------------------------------------------------------------------

    def _shape_only(self, index: int, node: onnx.NodeProto) -> None:
        data = node.input[0]
        fact = self._flow.facts.get(data)
        outputs = list(node.output)
        if node.op_type == "DynamicQuantizeLinear":
            # Outputs: the quantised data, their scale and their zero point. The scale comes back as a factor of the
            # integer product (`_rescaled`).
            self._flow.scales.update(outputs[1:])
            outputs = outputs[:1]
        # Scales and zero points must be constant. Bounds of Split and Slice may be computed: each part is a leaf of its
        # own, whatever its bounds.
        tied = node.op_type in _QUANTISING
        self._stray(index, node, [data])
        if fact is None or (tied and any(name and name not in self._constants for name in node.input[1:])):
            self._block(node, Miss(f"its output feeds {label(node)}, whose other inputs are not constant", label(node)))
            return
        axis = self._axis_after(node, fact.axis)
        for output in outputs:
            self._follow(output, data, fact, index, axis)

    def _axis_after(self, node: onnx.NodeProto, axis: int | None) -> int | None:
        """The channel axis in the output of a shape-only operator; None where it is lost."""
        if axis is None or node.op_type in {"Split", "Slice", "GatherElements"} | _QUANTISING:
            return axis
        if node.op_type in PARTS:
            return None  # an axis may go, and others come
        if node.op_type == "Transpose":
            order = integers_of(node, "perm")
            if order is None or axis + len(order) not in order:
                return None
            return order.index(axis + len(order)) - len(order)
        # A Reshape that keeps the size of the last axis rearranges tokens only; one that changes it splits or merges
        # channels. Where a size is unknown, the axis is assumed to survive.
        before, after = (self._view.type_of(name).shape for name in (node.input[0], node.output[0]))
        if axis != -1 or (
            before and after and isinstance(before[-1], int) and isinstance(after[-1], int) and before[-1] != after[-1]
        ):
            return None
        return -1

    def _follow(self, output: str, data: str, fact: Fact, index: int, axis: int | None) -> None:
        """Record that `output` is an affine or shape-only image of `data`.

        It becomes a leaf of its own (or a tensor beyond the activation), since its entries no longer correspond one to
        one to those of `data`: the halves of a Split are a gate and a value.
        """
        if fact.nonlinear or fact.ends is not None:
            self._flow.facts[output] = Fact((output,), ends=fact.ends or data, axis=axis)
        elif (source := self._affine_source(fact)) is not None:
            trailing = (*source.trailing, index)
            self._flow.facts[output] = Fact((output,), source=replace(source, trailing=trailing), axis=axis)

    def _affine_source(self, fact: Fact) -> Source | None:
        """The source of a leaf, or of an affine function of one leaf."""
        if fact.source is not None:
            return fact.source
        return self._flow.source_of(fact.leaves[0]) if len(fact.leaves) == 1 and not fact.nonlinear else None

    def _is_per_channel(self, node: onnx.NodeProto) -> bool:
        """Whether a BatchNormalization is one factor and one summand for each channel of a leaf, as in inference."""
        fact = self._flow.facts.get(node.input[0])
        return (
            fact is not None
            and fact.axis == 1 - self._rank_of(node)
            and integer_of(node, "training_mode", 0) == 0
            and not any(node.output[1:])
            and all(name in self._constants for name in node.input[1:])
        )

    def _rank_of(self, node: onnx.NodeProto) -> int:
        """The rank of a node's data; 0 where it is not known."""
        return self._view.type_of(node.input[0]).rank or 0

    # -- elementwise operators -----------------------------------------------------------------------------

    def _elementwise(self, index: int, node: onnx.NodeProto) -> None:
        names = list(node.input[:1] if node.op_type in FIRST_INPUT_ONLY else node.input)
        data = [name for name in dict.fromkeys(names) if name and name not in self._constants]
        self._stray(index, node, data)
        if node.op_type == "Mul" and self._flow.scales.intersection(data):
            self._rescaled(index, node, [name for name in data if name not in self._flow.scales])
            return
        if not self._plain(node) or not data:
            self._block(node, Miss(f"its output feeds {label(node)}, which is not elementwise", label(node)))
            return
        chosen = [name for name in data if name in self._view.picked and name not in self._flow.facts]
        if chosen and self._expert_bias(index, node, [name for name in data if name not in chosen]):
            return
        constant = [name for name in names if name in self._constants]
        wide = [name for name in constant if not self._is_scalar(name, data[0]) or self._is_bias(node, name, data)]
        if wide and not self._is_biased_sum(node, data, wide):
            self._per_channel(index, node, data, wide)
            return
        facts = [self._flow.facts.get(name) for name in data]
        if any(fact is None for fact in facts):
            self._mixed(node, data)
            return
        self._combine(index, node, data, [fact for fact in facts if fact is not None])

    def _stray(self, index: int, node: onnx.NodeProto, data: list[str]) -> None:
        """Follow an activation operator that reads no projection, so that it is reported if a linear one reads it."""
        known = next((self._flow.strays[name] for name in data if name in self._flow.strays), None)
        if (
            known is None
            and node.op_type in elementwise.NONLINEAR
            and not any(name in self._flow.facts for name in data)
        ):
            known = index
        if known is not None:
            self._flow.strays.update(dict.fromkeys(node.output, known))

    def _expert_bias(self, index: int, node: onnx.NodeProto, data: list[str]) -> bool:
        """Follow a projection by an expert that the router chose, whose bias is chosen like its weight."""
        fact = self._flow.facts.get(data[0]) if len(data) == 1 and node.op_type in ("Add", "Sum") else None
        source = self._affine_source(fact) if fact is not None else None
        if fact is None or source is None or not all(each.weight in self._view.picked for each in source.operators):
            return False
        self._follow(node.output[0], data[0], fact, index, fact.axis)
        return True

    def _rescaled(self, index: int, node: onnx.NodeProto, data: list[str]) -> None:
        """Multiply by a scale of dynamic quantisation: the result is another scale, or the product as floats."""
        if not data:
            self._flow.scales.update(node.output)
        elif len(data) == 1 and (fact := self._flow.facts.get(data[0])) is not None:
            self._follow(node.output[0], data[0], fact, index, fact.axis)

    def _plain(self, node: onnx.NodeProto) -> bool:
        """Whether the node computes what the elementwise table says: no training mode, no cast to integers."""
        if node.op_type == "Cast":
            return any(attribute.name == "to" and attribute.i in FLOATS for attribute in node.attribute)
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            return self._constants.scalar(node.input[2]) == 0
        return True

    def _is_scalar(self, name: str, data: str) -> bool:
        """Whether a constant has one element and broadcasts without adding axes to the data."""
        if self._constants.scalar(name) is None:
            return False
        rank = len(self._constants.shape(name) or ())
        data_rank = self._view.type_of(data).rank
        # Exporters write scalars with shape [] or [1], which are safe for data of unknown rank.
        return rank <= (1 if data_rank is None else max(data_rank, 0))

    def _is_bias(self, node: onnx.NodeProto, name: str, data: list[str]) -> bool:
        """Whether a constant of shape [1] is the bias of a linear operator with one output, not part of a function."""
        fact = self._flow.facts.get(data[0])
        if node.op_type != "Add" or len(data) != 1 or fact is None or fact.source is None:
            return False
        single = [operator.out_features for operator in fact.source.operators] == [1]
        return single and self._constants.shape(name) == (1,) and len(self._view.consumers.get(data[0], ())) == 1

    def _per_channel(self, index: int, node: onnx.NodeProto, data: list[str], wide: list[str]) -> None:
        affine = node.op_type in ("Add", "Sub", "Mul", "Sum") or (node.op_type == "Div" and node.input[0] == data[0])
        shape = self._constants.shape(wide[0])
        fact = self._flow.facts.get(data[0])
        if fact is None:
            return
        if not affine or len(data) > 1:
            where = data[0] if fact.source is not None else fact.leaves[0]
            reason = f"{label(node)} has a constant of shape {list(shape or ())} where a scalar is needed"
            self._flow.near_misses.setdefault(where, Miss(reason, label(node)))
            self._block(node, Miss(reason, label(node)))
        elif shape is None or self._one_per_channel(shape, fact):
            self._follow(node.output[0], data[0], fact, index, fact.axis)
        else:
            miss = Miss(f"{label(node)} has a constant of shape {list(shape)}, not one value per channel", label(node))
            self._block(node, miss)
            # A bias per token, say. The tensor stays a leaf, with the reason, so that its activation is reported.
            source = self._affine_source(fact)
            if source is not None and source.miss is None:
                output = node.output[0]
                self._flow.facts[output] = Fact((output,), source=replace(source, miss=miss), axis=fact.axis)

    def _is_biased_sum(self, node: onnx.NodeProto, data: list[str], wide: list[str]) -> bool:
        """Whether the node is a Sum of several projections and per-channel constants."""
        facts = [self._flow.facts.get(name) for name in data]
        shapes = [self._constants.shape(name) for name in wide]
        return (
            node.op_type == "Sum"
            and len(data) > 1
            and all(fact is not None and not fact.nonlinear and fact.ends is None for fact in facts)
            and all(shape is not None and facts[0] and self._one_per_channel(shape, facts[0]) for shape in shapes)
        )

    def _one_per_channel(self, shape: tuple[int, ...], fact: Fact) -> bool:
        """Whether a constant varies along the channel axis alone, and along that of experts where there are some."""
        wide = [axis - len(shape) for axis, dim in enumerate(shape) if dim != 1]
        source = self._affine_source(fact)
        experts = {operator.experts for operator in source.operators} if source is not None else set()
        if len(wide) == 2 and {shape[axis] for axis in wide if axis != fact.axis} & experts:
            return True
        return len(wide) <= 1 and (fact.axis is None or all(axis == fact.axis for axis in wide))

    def _mixed(self, node: onnx.NodeProto, data: list[str]) -> None:
        outsider = next(name for name in data if name not in self._flow.facts)
        self._block(node, Miss(f"it meets '{outsider}', not from a linear operator, in {label(node)}", label(node)))

    def _combine(self, index: int, node: onnx.NodeProto, data: list[str], facts: list[Fact]) -> None:
        output = node.output[0]
        if any(fact.ends is not None for fact in facts):
            # After a per-channel or shape-only operator a scalar factor may still follow. A nonlinear operator there is
            # a second activation; directly after the first, the two would be one function.
            affine = len(facts) == 1 and self._is_affine(node, data)
            if affine:
                self._follow(output, data[0], facts[0], index, facts[0].axis)
            else:
                self._block(node, Miss(f"a second activation follows in {label(node)}", label(node)))
            return
        facts = self._values(node, data, facts)
        leaves = tuple(dict.fromkeys(leaf for fact in facts for leaf in fact.leaves))
        nonlinear = any(fact.nonlinear for fact in facts) or not self._is_affine(node, data)
        if not nonlinear and len(leaves) > 1:
            # A sum of projections is a projection: x W + (x A) B, for example, is a LoRA adapter beside its weight.
            sources = [source for leaf in leaves if (source := self._flow.source_of(leaf)) is not None]
            operators = tuple(operator for source in sources for operator in source.operators)
            trailing = tuple(dict.fromkeys(step for source in sources for step in source.trailing))
            miss = next((source.miss for source in sources if source.miss), None)
            self._flow.facts[output] = Fact(
                (output,), source=Source(operators, (*trailing, index), miss), axis=facts[0].axis
            )
            return
        if len(leaves) > 2:
            # A head reads one number for its logits and one for its value.
            self._block(node, Miss(f"{label(node)} joins more than two projections", label(node)))
            return
        self._flow.facts[output] = Fact(leaves, nonlinear=nonlinear, axis=facts[0].axis)
        # Only the largest function is a candidate: in y * sigmoid(y), the sigmoid is only a part.
        self._flow.extended.update(name for name, fact in zip(data, facts, strict=True) if fact.nonlinear)

    def _values(self, node: onnx.NodeProto, data: list[str], facts: list[Fact]) -> list[Fact]:
        """Facts of the operands of a node, where the value beside a function of another projection is a leaf.

        h(a) (b + 1) is then a gate whose value has another bias; 2 b stays a function of b, so that the gate is 2 h.
        h(a) k(b) is a gate whose value is an activation itself; of the two, the value is what takes fewer nodes.
        """
        if len(facts) != 2 or not any(fact.nonlinear for fact in facts):
            return facts
        found = list(facts)
        alone = [fact.source is None and len(fact.leaves) == 1 for fact in facts]
        steps = [
            self._flow.between(self._view, fact.leaves, name) if single else ()
            for name, fact, single in zip(data, facts, alone, strict=True)
        ]
        factors = node.op_type == "Mul" and all(alone) and all(fact.nonlinear for fact in facts)
        for place, (name, fact, other) in enumerate(zip(data, facts, reversed(facts), strict=True)):
            source = self._flow.source_of(fact.leaves[0]) if alone[place] else None
            if source is None or fact.leaves[0] in other.leaves:
                continue
            leaf = Fact((name,), source=replace(source, trailing=(*source.trailing, *steps[place])), axis=fact.axis)
            if not fact.nonlinear and any(self._view.nodes[step].op_type in _SUMS for step in steps[place]):
                found[place] = self._flow.facts[name] = leaf
            elif factors and (len(steps[place]), -place) < (len(steps[1 - place]), place - 1):
                found[place] = self._flow.values[name] = leaf
        return found

    def _is_affine(self, node: onnx.NodeProto, data: list[str]) -> bool:
        if node.op_type in _SUMS or node.op_type in _TRANSPARENT:
            return True
        # Not deduplicated: y * y has two data operands.
        operands = [name for name in node.input if name and name not in self._constants]
        if len(operands) != 1:
            return False
        return node.op_type == "Mul" or (node.op_type == "Div" and node.input[0] == data[0])
