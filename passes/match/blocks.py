"""Finding the MLP blocks of one graph: linear operator, activation, linear operator.

The ends of a block are structural, found in one pass over the nodes (`Dataflow`). A tensor is one of

    opaque    anything
    leaf      the output of a linear operator, after any affine and shape-only operators
    function  an elementwise function, with scalar constants, of one or two leaves
    beyond    a nonlinear function followed by affine or shape-only operators, on the path to W2

The middle of a block is semantic (`passes.match.identify`). Other activations before a linear operator are reported
with the reason.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import onnx

from passes.match.identify import FIRST_INPUT_ONLY, ActivationRegion, Identified, Identifier, in_table
from passes.match.linear import LINEAR_OPERATORS, LinearOperator, Operators, linear_operator
from passes.options import Options
from rewriter.evaluate.moves import PARTS, REARRANGED
from rewriter.evaluate.scalar import NONLINEAR
from rewriter.evaluate.table import ELEMENTWISE, MICROSOFT
from rewriter.graph.constants import Constants
from rewriter.graph.edit import ancestors
from rewriter.graph.fused import FUSED, plain_experts
from rewriter.graph.types import FLOATS
from rewriter.graph.view import ONNX_DOMAINS, GraphView, Miss, Path, attributes, integer_of, key_of, label, operator_of
from rewriter.graph.walk import own_names, reads, subgraphs

QUANTISING = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}  # only nodes between them are replaced
_LINEAR_MAPS = {"Identity", "Cast", "CastLike", "Dropout", "Neg"}
_SUMS = {"Add", "Sub", "Sum"}
_ON_QUANTISED = ((MICROSOFT, "QLinearAdd"), (MICROSOFT, "QLinearMul"))  # of constants
# Parts of the names of onnxruntime's operators that are known not to be activations.
_NO_ACTIVATION = (
    "Attention Embedding Norm Quantize BiasAdd CausalConv QLinearAdd QLinearMul QLinearConcat QLinearSoftmax"
)

_FUSED = "its activation is inside one operator; write the model without this fusion to have it converted"
_EXPERTS = "its experts are inside one operator"
_UNEXPANDABLE = {  # operators with MLPs or activations inside, which this pass cannot expand
    **dict.fromkeys(("MoE", "QMoE", "MoEPacked"), f"{_EXPERTS}; export them as plain operators to have them converted"),
    **dict.fromkeys(("MatMulNBitsMlp", "FusedMatMulActivation", "BiasSplitGelu", "GatedRMSNorm"), _FUSED),
    **dict.fromkeys(("RouterGateUpProj", "LinearAttentionGate", "GatedDeltaNet", "HyperConnectionLowRankMix"), _FUSED),
}


def _why_not_expanded(view: GraphView, node: onnx.NodeProto) -> str:
    """Why the activation inside an operator is not converted; empty without a known one."""
    if (apart := plain_experts(node, view.initializers, view.opsets.get("", 1))) is not None:
        why = f", and {apart}" if isinstance(apart, str) else "; --lower-experts takes them apart"
        return f"{_EXPERTS}{why}"
    named = attributes(node).get("activation") not in (None, 0, b"", b"none") and key_of(node) not in LINEAR_OPERATORS
    return _FUSED if named else _UNEXPANDABLE.get(node.op_type, "")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One MLP block."""

    name: str  # unique in the model; the module path where the exporter recorded one
    where: str = ""  # the scope, empty for the main graph
    path: Path = ()
    region: ActivationRegion
    gate: str  # the pre-activation y (of the gate, in a gated block)
    value: str  # the factor of the activation in a gated block; the gate itself otherwise
    first: Operators = ()
    second: Operators = ()
    identified: Identified
    # of the activation's output, 0 when unknown; that of gate and value differ if the region contains casts
    elem_type: int
    gate_type: int
    value_type: int
    channels: int | None = None  # of the output, where no later operator reads all of them
    product: bool = False  # whether only h(gate) of a gated block is replaced and its product with the value stays
    part_of: str = ""  # the block that contains this one, such as the clip of the value of its gate; otherwise empty

    @property
    def output(self) -> str:
        return self.region.output

    @property
    def types(self) -> set[int]:
        return {self.elem_type, self.gate_type, self.value_type}

    @property
    def coarsest(self) -> int:
        """The least precise of its types, for which the block must be accurate."""
        return next((elem_type for elem_type in FLOATS if elem_type in self.types), self.elem_type)

    @property
    def neurons(self) -> int | None:
        """d_ff; None where the weights' shapes do not show it."""
        if known := [size for size in (self.channels, *(op.in_features for op in self.second)) if size]:
            return max(known)
        # W1 last: one that holds gate and value side by side has 2 d_ff columns.
        return next((op.out_features for op in self.first if op.out_features), None)


@dataclass(frozen=True)
class Left:
    """A rejected candidate, or a block that is not converted, and why."""

    name: str
    where: str
    activation: str
    first: str
    second: str
    miss: Miss
    block: Block | None = None

    @classmethod
    def of(cls, block: Block, miss: Miss) -> "Left":
        first, second = kinds(block.first), kinds(block.second)
        return cls(block.name, block.where, block.identified.label, first, second, miss, block)


def kinds(operators: Sequence[LinearOperator]) -> str:
    """As reports print them."""
    return " + ".join(dict.fromkeys(operator.shown for operator in operators))


# -- one pass over the nodes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """The analysis of one tensor."""

    leaves: tuple[str, ...]  # of which this tensor is a function; itself where it is one, or beyond an activation
    operators: Operators = ()  # whose outputs a leaf sums; empty for other tensors
    nonlinear: bool = False
    ends: str = ""  # for a tensor beyond an activation, the activation's output
    rounded: bool = False  # whether it was quantised and dequantised there, so that a separate function follows
    part: bool = False  # whether it is only a part of what the operators or the activation compute, as behind a Split


class Dataflow:
    """The facts of one graph, in linear time; read-only."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self.constants = Constants(view)
        self.facts: dict[str, Fact] = {}  # of tensors that are neither opaque nor constant
        self.operators: dict[int, LinearOperator] = {}
        # by the output of an activation: the linear operators that read it, and why another reader is none
        self.sinks: dict[str, list[LinearOperator]] = defaultdict(list)
        self.blocked: dict[str, Miss] = {}
        self.extended: set[str] = set()  # activation outputs that are part of a larger activation
        self.parts: set[str] = set()  # activation outputs that are quantised and then part of another activation
        self.values: dict[str, Fact] = {}  # of gate operands, and of quantised leaves beyond another activation
        self.strays: dict[str, int] = {}  # by tensor: the activation before it that reads no projection
        self.reached: dict[int, str] = {}  # by that activation: the linear operator behind it
        self.near_misses: dict[str, Miss] = {}  # by leaf: why a nonlinear node that reads it is not elementwise
        self._scales: set[str] = set()  # of dynamic quantisation, which turn an integer product back into floats
        # Nodes are in topological order, so that every operand has its fact before its consumers are visited.
        for index, node in enumerate(view.nodes):
            # Weights that are transposed, cast or dequantised by nodes count as constants, not as data.
            if not all(name in self.constants for name in node.output if name):
                self._visit(index, node)

    def leaf(self, tensor: str) -> Fact:
        """The fact of a leaf; one without operators for any other tensor."""
        return self.values.get(tensor) or self.facts.get(tensor) or Fact((tensor,))

    def operators_of(self, leaves: Iterable[str]) -> Operators:
        """The linear operators whose outputs the leaves sum, each once."""
        return tuple(dict.fromkeys(operator for leaf in leaves for operator in self.leaf(leaf).operators))

    def region(self, output: str, leaves: tuple[str, ...]) -> ActivationRegion:
        """The nodes that compute `output` from `leaves`, in topological order; it ends before a Dropout that stays."""
        while (last := self._view.made_by(output)) is not None and self._view.has_further_readers(last):
            output = last.input[0]
        inside = ancestors(self._view, frozenset(leaves), [output])
        nodes = (index for index in inside if not self.facts.keys().isdisjoint(self._view.nodes[index].output))
        return ActivationRegion(output, leaves, tuple(sorted(nodes)))

    def behind_affine(self, region: ActivationRegion) -> ActivationRegion | None:
        """The region without a first node that shifts or scales a leaf by a scalar; None without such a node."""
        nodes = [self._view.nodes[index] for index in region.nodes]
        for leaf in region.leaves:
            made = [node.output[0] for node in nodes if leaf in node.input]
            fact = self.facts[made[0]]
            if len(made) == 1 and made != [region.output] and not fact.nonlinear and len(fact.leaves) == 1:
                self.values[made[0]] = replace(self.leaf(leaf), leaves=(made[0],))
                return self.region(region.output, tuple(made[0] if each == leaf else each for each in region.leaves))
        return None

    def _visit(self, index: int, node: onnx.NodeProto) -> None:
        for name in reads(node) if subgraphs(node) else ():
            if self.leaf(name).operators and _outputs_activation_of(node, {name}):
                where = label(node)
                why = f"its activation is inside {where}, apart from its linear operators; move it out of the body"
                self.near_misses.setdefault(name, Miss(why, where))
        found = linear_operator(self._view, self.constants, index)
        miss: Miss | None = None
        if isinstance(found, Miss):
            miss = found
            if any(name in self.constants for name in node.input[:2]):
                self._sink(node.input, operator_of(node))
        elif found is not None:
            self.operators[index] = found
            self.facts[found.output] = Fact((found.output,), (found,))
            self._sink([found.data], found.shown)
            if activation := self._activation_behind(found.data):
                self.sinks[activation].append(found)
        elif key_of(node) in ELEMENTWISE:
            miss = self._elementwise(index, node)
        elif self._view.is_onnx(node) and node.op_type in PARTS | REARRANGED | QUANTISING:
            miss = self._shape_only(index, node)
        elif data := self._affine_image_of(node):
            self._follow(node, node.output[0], data)
        else:
            miss = Miss(f"its output feeds {label(node)}, which is not a linear operator", label(node))
        if miss is not None:
            self._block(node, miss)

    def _sink(self, data: Iterable[str], shown: str) -> None:
        for stray in (self.strays[name] for name in data if name in self.strays):
            self.reached.setdefault(stray, shown)

    def _stray(self, index: int, node: onnx.NodeProto, data: Sequence[str]) -> None:
        """Follow an activation operator that reads no projection, to report it if a linear one reads it."""
        starts = node.op_type in NONLINEAR and not any(name in self.facts for name in data)
        known = next((self.strays[name] for name in data if name in self.strays), index if starts else None)
        if known is not None:
            self.strays.update(dict.fromkeys(node.output, known))

    def _activation_behind(self, tensor: str) -> str:
        """The activation output that `tensor` is or depends on; otherwise empty."""
        fact = self.facts.get(tensor)
        return "" if fact is None else tensor if fact.nonlinear else fact.ends

    def _block(self, node: onnx.NodeProto, miss: Miss) -> None:
        # An operator of an unknown domain right after a projection may be an activation, so it is reported.
        named = (*_NO_ACTIVATION.split(), *_UNEXPANDABLE)
        known = node.domain == MICROSOFT and any(part in node.op_type for part in named)
        foreign = node.domain not in ONNX_DOMAINS and key_of(node) not in LINEAR_OPERATORS and not known
        for name in node.input:
            if foreign and self.leaf(name).operators:
                unknown = f"{label(node)} is {'part of no block' if key_of(node) in FUSED else 'an unknown operator'}"
                self.near_misses.setdefault(name, Miss(unknown, label(node)))
            if activation := self._activation_behind(name):
                self.blocked.setdefault(activation, miss)

    def _affine_image_of(self, node: onnx.NodeProto) -> str:
        """The operand of which a BatchNormalization, or an operator on quantised numbers, is an affine image."""
        if key_of(node) == ("", "BatchNormalization"):  # which scales and shifts the channels, by constants
            constant = all(name in self.constants for name in node.input[1:]) and not any(node.output[1:])
            return node.input[0] if constant and integer_of(node, "training_mode", 0) == 0 else ""
        if key_of(node) not in _ON_QUANTISED:
            return ""
        data = [name for name in node.input[:4:3] if name not in self.constants]
        if len(data) == 2 and node.op_type == "QLinearAdd":
            known = all(name in self.facts for name in data)
            data = [name for name in data if self.facts[name].ends] if known else self._without_chosen(data)
        return data[0] if len(data) == 1 else ""

    def _without_chosen(self, data: list[str]) -> list[str]:
        """Summands, excluding a routed expert's bias, which is gathered like its weight."""
        others = [name for name in data if name not in self._view.picked or name in self.facts]
        if len(others) != 1 or len(data) != 2:
            return data
        source = self._affine_source(self.facts.get(others[0], Fact((others[0],))))
        weights = () if source is None else [each.weight for each in source.operators]
        return others if weights and all(weight in self._view.picked for weight in weights) else data

    def _shape_only(self, index: int, node: onnx.NodeProto) -> Miss | None:
        data, outputs = node.input[0], list(node.output)
        if node.op_type == "DynamicQuantizeLinear":
            # The scale comes back as a factor of the integer product.
            self._scales.update(outputs[1:])
            outputs = outputs[:1]
        self._stray(index, node, [data])
        # Scales and zero points must be constant; bounds of Split and Slice need not, as each part is a separate leaf.
        tied = node.op_type in QUANTISING
        if data not in self.facts or (tied and any(name and name not in self.constants for name in node.input[1:])):
            return Miss(f"its output feeds {label(node)}, whose other inputs are not constant", label(node))
        for output in outputs:
            self._follow(node, output, data)
        return None

    def _follow(self, node: onnx.NodeProto, output: str, data: str) -> None:
        """Record that `output` is an affine or shape-only image of `data`, unless that is opaque.

        It becomes a separate leaf (or a tensor beyond the activation): the halves of a Split are a gate and a value.
        """
        if (fact := self.facts.get(data)) is None:
            return
        if fact.nonlinear or fact.ends:
            rounded, part = fact.rounded or node.op_type in QUANTISING, fact.part or node.op_type in PARTS
            self.facts[output] = Fact((output,), ends=fact.ends or data, rounded=rounded, part=part)
        elif (source := self._affine_source(fact)) is not None:
            self.facts[output] = replace(source, leaves=(output,), part=source.part or node.op_type in PARTS)

    def _affine_source(self, fact: Fact) -> Fact | None:
        source = self.leaf(fact.leaves[0])
        return source if len(fact.leaves) == 1 and not fact.nonlinear and source.operators else None

    def _elementwise(self, index: int, node: onnx.NodeProto) -> Miss | None:
        names = list(node.input[:1] if node.op_type in FIRST_INPUT_ONLY else node.input)
        data = [name for name in dict.fromkeys(names) if name and name not in self.constants]
        self._stray(index, node, data)
        if node.op_type == "Mul" and self._scales.intersection(data):
            others = [name for name in data if name not in self._scales]
            self._scales.update(() if others else node.output)
            if len(others) == 1:  # the integer product, as floats
                self._follow(node, node.output[0], others[0])
            return None
        if not self._plain(node) or not data:
            return Miss(f"its output feeds {label(node)}, which is not elementwise", label(node))
        if (norm := self._norm_of_square(node, names)) is not None:
            return Miss(f"its output feeds {label(norm)}, which is not a linear operator", label(norm))
        if node.op_type in ("Add", "Sum") and (terms := self._without_chosen(data)) != data:
            self._follow(node, node.output[0], terms[0])
            return None
        constant = (name for name in names if name in self.constants)
        wide = [name for name in constant if not self._is_scalar(name, data[0]) or self._is_bias(node, name, data)]
        known = [self.facts[name] for name in data if name in self.facts]
        affine = all(not fact.nonlinear and not fact.ends for fact in known)
        if wide and not (node.op_type == "Sum" and len(data) > 1 and affine):
            return self._with_wide_constant(node, data, wide[0])
        if len(known) < len(data):
            outsider = next(name for name in data if name not in self.facts)
            return Miss(f"it meets '{outsider}', not from a linear operator, in {label(node)}", label(node))
        return self._combine(node, data, known)

    def _norm_of_square(self, node: onnx.NodeProto, operands: Sequence[str]) -> onnx.NodeProto | None:
        """The mean of a square in a spelled-out normalisation; such a square is not an activation."""
        square = len({*operands}) == 1 if node.op_type == "Mul" else self.constants.scalar(operands[-1]) == 2
        readers = self._view.readers(node.output[0]) if square and node.op_type in ("Mul", "Pow") else []
        return readers[0] if {each.op_type for each in readers} in ({"ReduceMean"}, {"ReduceSum"}) else None

    def _plain(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Cast":
            return integer_of(node, "to", 0) in FLOATS
        training = node.input[2] if node.op_type == "Dropout" and len(node.input) > 2 else ""
        return not training or self.constants.scalar(training) == 0

    def _is_scalar(self, name: str, data: str) -> bool:
        """Whether a constant has one element and broadcasts without adding axes to the data."""
        rank, data_rank = len(self.constants.shape(name) or ()), self._view.type_of(data).rank
        # Exporters write scalars with shape [] or [1], which are safe for data of unknown rank.
        return self.constants.scalar(name) is not None and rank <= (1 if data_rank is None else data_rank)

    def _is_bias(self, node: onnx.NodeProto, name: str, data: list[str]) -> bool:
        """Whether a constant of shape [1] is the bias of a linear operator with one output, not part of a function."""
        single = [operator.out_features for operator in self.leaf(data[0]).operators] == [1]
        alone = node.op_type == "Add" and len(data) == 1 and len(self._view.consumers.get(data[0], ())) == 1
        return single and alone and self.constants.shape(name) == (1,)

    def _with_wide_constant(self, node: onnx.NodeProto, data: list[str], wide: str) -> Miss | None:
        """A constant per channel, token or expert: affine, or not a function of the entry alone."""
        if len(data) == 1 and (node.op_type in _SUMS or self._is_scaling(node, data)):
            self._follow(node, node.output[0], data[0])
        elif (fact := self.facts.get(data[0])) is not None:
            shape = list(self.constants.shape(wide) or ())
            miss = Miss(f"{label(node)} has a constant of shape {shape} where a scalar is needed", label(node))
            self.near_misses.setdefault(fact.leaves[0], miss)
            return miss
        return None

    def _is_scaling(self, node: onnx.NodeProto, data: list[str]) -> bool:
        # Not deduplicated: y * y has two data operands.
        operands = [name for name in node.input if name and name not in self.constants]
        return len(operands) == 1 and (node.op_type == "Mul" or (node.op_type == "Div" and node.input[0] == data[0]))

    def _combine(self, node: onnx.NodeProto, data: list[str], facts: list[Fact]) -> Miss | None:
        output = node.output[0]
        affine = node.op_type in _SUMS | _LINEAR_MAPS or self._is_scaling(node, data)
        beyond = [fact for fact in facts if fact.ends]
        if affine and (len(facts) == 1 if not all(fact.rounded for fact in beyond) else len(beyond) == 1):
            # After an affine or shape-only operator a scalar factor may still follow.
            self._follow(node, output, next(name for name, fact in zip(data, facts, strict=True) if fact.ends))
            return None
        if not all(fact.rounded for fact in beyond):
            # Directly after the first, the two would be one function.
            second = Miss(f"a second activation follows in {label(node)}", label(node))
            return self._rank_mismatch(node, data, facts) or second
        for place, (name, fact) in enumerate(zip(data, facts, strict=True)):
            if fact.ends:  # a quantised tensor is a leaf of the next activation: the rounding between the two stays
                self.parts.add(fact.ends)
                facts[place] = self.values[name] = Fact((name,), self.operators_of(self.facts[fact.ends].leaves))
        facts = self._values_of_gates(node, data, facts)
        leaves = tuple(dict.fromkeys(leaf for fact in facts for leaf in fact.leaves))
        nonlinear = any(fact.nonlinear for fact in facts) or not affine
        if not nonlinear and len(leaves) > 1:
            # A sum of projections is a projection: x W + (x A) B, for example, is a LoRA adapter beside its weight.
            self.facts[output] = Fact((output,), self.operators_of(leaves))
            return None
        if len(leaves) > 2:
            # A head reads one number for its logits and one for its value.
            return Miss(f"{label(node)} joins more than two projections", label(node))
        if (miss := self._rank_mismatch(node, data, facts)) is None:
            self.facts[output] = Fact(leaves, nonlinear=nonlinear)
            # Only the largest function is a candidate: in y * sigmoid(y), the sigmoid is only a part.
            self.extended.update(name for name, fact in zip(data, facts, strict=True) if fact.nonlinear)
        return miss

    def _rank_mismatch(self, node: onnx.NodeProto, data: list[str], facts: list[Fact]) -> Miss | None:
        """Operands that are functions of one projection and have different numbers of axes."""
        leaves = [leaf for fact in facts for leaf in (self.facts[fact.ends] if fact.ends else fact).leaves]
        ranks = sorted({rank for name in data if (rank := self._view.type_of(name).rank) is not None})
        if len(ranks) < 2 or len({self.leaf(leaf).operators for leaf in leaves}) > 1:
            return None
        what = f"joins tensors with {' and '.join(map(str, ranks))} axes"
        return Miss(f"{label(node)} {what}; give constants of one entry before it the shape []", label(node))

    def _values_of_gates(self, node: onnx.NodeProto, data: list[str], facts: list[Fact]) -> list[Fact]:
        """Facts of operands, where the value beside a function of another projection is a leaf.

        In h(a) (b + 1), the bias of the value changes; 2 b stays a function of b, so that the gate is 2 h. In
        h(a) k(b), the value is the activation with fewer nodes.
        """
        if len(facts) != 2 or not any(fact.nonlinear for fact in facts):
            return facts
        found = list(facts)
        alone = [not fact.operators and len(fact.leaves) == 1 for fact in facts]
        rows = zip(data, facts, alone, strict=True)
        steps = [self.region(name, fact.leaves).nodes if single else () for name, fact, single in rows]
        factors = node.op_type == "Mul" and all(alone) and all(fact.nonlinear for fact in facts)
        for place, (name, fact, other) in enumerate(zip(data, facts, reversed(facts), strict=True)):
            source = self.leaf(fact.leaves[0])
            if not alone[place] or not source.operators or fact.leaves[0] in other.leaves:
                continue
            leaf = replace(source, leaves=(name,))
            if not fact.nonlinear and any(self._view.nodes[step].op_type in _SUMS for step in steps[place]):
                found[place] = self.facts[name] = leaf
            elif factors and (len(steps[place]), -place) < (len(steps[1 - place]), place - 1):
                found[place] = self.values[name] = leaf
        return found


def _outputs_activation_of(node: onnx.NodeProto, tensors: set[str]) -> bool:
    """Whether a node, or a body of it, outputs an activation of one of the tensors."""
    bodies = [graph for _, graph in subgraphs(node)]
    if not bodies:
        return node.op_type in NONLINEAR and not tensors.isdisjoint(node.input)
    for graph in bodies:
        # What Loop and Scan read and their bodies' inputs are in the same order; an If has no inputs in its bodies.
        same = {value.name for name, value in zip(node.input, graph.input, strict=False) if name in tensors}
        data, found = (tensors - own_names(graph)) | same, set[str]()
        for each in graph.node:
            entrywise = key_of(each) in ELEMENTWISE or each.op_type in REARRANGED
            if _outputs_activation_of(each, data) or (entrywise and not found.isdisjoint(each.input)):
                found.update(each.output)
            elif entrywise and not data.isdisjoint(each.input):
                data.update(each.output)
        if any(value.name in found for value in graph.output):
            return True
    return False


# -- from facts to blocks --------------------------------------------------------------------------------------------


class Finder:
    """Find the MLP blocks and near misses of one graph, in time linear in the number of nodes."""

    def __init__(self, view: GraphView, namer: "Namer", options: Options) -> None:
        self._view = view
        self._namer = namer
        self._every, self._product = options.scope == "all", options.gate == "product"
        self._flow = Dataflow(view)
        self._identify = Identifier(view, self._flow.constants, fit=options.fit).identify

    def run(self, made: frozenset[int] = frozenset()) -> tuple[tuple[Block, ...], tuple[Left, ...]]:
        """Return blocks and rejected candidates in graph order; `made` are nodes of heads of an earlier run."""
        found: list[Block | Left] = []
        flow, view = self._flow, self._view
        for output, fact in flow.facts.items():
            sinks = tuple(flow.sinks.get(output, ()))
            # Part of a larger activation, unless a linear operator reads it too; with scope `all`, any other consumer.
            inner = output in flow.extended and not (self._every and output in flow.blocked)
            if fact.nonlinear and (sinks or not inner):
                region = flow.region(output, fact.leaves)
                # Heads of an earlier run look like an activation between linear operators.
                if not made.intersection(region.nodes):
                    found.append(self._candidate(output, region, sinks))
        # Near misses have no region: the data flow stopped at the node that is not elementwise.
        near = [each for each in flow.near_misses.items() if not made.intersection(view.consumers.get(each[0], ()))]
        found += [self._left(miss, first=flow.leaf(leaf).operators) for leaf, miss in near]
        found += [self._stray(index, sink) for index, sink in flow.reached.items() if index not in made]
        for index, node in enumerate(view.nodes):
            if reason := _why_not_expanded(view, node):
                found.append(self._left(Miss(f"{label(node)}: {reason}", label(node)), nodes=(index,)))
        # An activation that is only a part of another, such as the value of a gate, is dropped together with that one.
        needed: dict[str, Block] = {}
        parts = set() if self._product else flow.values.keys() | flow.parts
        for place, candidate in reversed(tuple(enumerate(found))):
            if not isinstance(candidate, Block):
                continue
            block, whole = candidate, None if candidate.second else needed.get(candidate.output)
            if whole is not None:
                block = replace(block, channels=block.channels or whole.neurons, part_of=whole.name)
            elif not block.second and block.output in parts:
                reason = "the activation that it is a part of is not converted"
                found[place] = Left.of(block, Miss(reason, block.output))
                continue
            found[place] = needed[block.value] = block
            needed.update(dict.fromkeys((flow.facts[leaf].ends for leaf in block.region.leaves), block))
        blocks = tuple(each for each in found if isinstance(each, Block))
        return blocks, tuple(each for each in found if isinstance(each, Left))

    def _candidate(self, output: str, region: ActivationRegion, sinks: Operators) -> Block | Left:
        shorter: ActivationRegion | None = region
        while shorter and not in_table(self._identify(shorter)):
            shorter = self._flow.behind_affine(shorter)
        region = shorter or region
        first, identified = self._flow.operators_of(region.leaves), self._identify(region)
        if (miss := self._obstacle(output, first, sinks, identified)) is not None or isinstance(identified, str):
            shown = "" if isinstance(identified, str) else identified.label
            return replace(self._left(miss or Miss("", ""), first, sinks, region.nodes), activation=shown)
        block = self._block(self._namer.name(self._view, first, sinks, region.nodes), region, sinks, identified)
        return self._without_product(block) if self._product and identified.gated else block

    def _block(self, name: str, region: ActivationRegion, sinks: Operators, identified: Identified) -> Block:
        leaves, slots = region.leaves, identified.gated or (0, 0)
        gate, value = (self._leaf_type(leaves[slot]) for slot in slots)
        known, first = self._view.type_of(region.output), self._flow.operators_of(leaves)
        leaf, sizes = self._flow.leaf(leaves[0]), dict(enumerate(reversed(known.shape or ()), start=1))
        stated = [op.out_features for op in leaf.operators if not leaf.part]
        stated += [size for op in first[:1] if isinstance(size := sizes.get(-op.axis), int)]
        unread = region.output in self._flow.values or any(self._flow.facts[sink.data].part for sink in sinks)
        return Block(
            name=name,
            where=self._view.where,
            path=self._view.path,
            region=region,
            gate=leaves[slots[0]],
            value=leaves[slots[1]],
            first=first,
            # A convolution that reads the same activation is not part of the MLP; it keeps its input.
            second=tuple(sink for sink in sinks if sink.rowwise or self._every),
            identified=identified,
            elem_type=known.elem_type or gate,
            gate_type=gate,
            value_type=value,
            channels=next(filter(None, stated), None) if unread else None,
        )

    def _without_product(self, block: Block) -> Block | Left:
        """The activation of a gated block alone: the part of its region that depends on the gate only."""
        facts, nodes = self._flow.facts, [self._view.nodes[index] for index in block.region.nodes]
        inner = {node.output[0] for node in nodes if facts[node.output[0]].leaves == (block.gate,)}
        # Only the activation crosses from that part into the product, and perhaps the gate: a factor in g (s(g) u).
        ends = {name for node in nodes if node.output[0] not in inner for name in node.input if name in inner}
        if len(ends) != 1:
            reason = "the graph does not compute its activation apart from the product; use --gate heads"
            return Left.of(block, Miss(reason, block.output))
        identified = self._identify(region := self._flow.region(ends.pop(), (block.gate,)))
        if isinstance(identified, str):
            return Left.of(block, Miss(identified, region.output))
        return replace(self._block(block.name, region, (), identified), channels=block.neurons, product=True)

    def _obstacle(self, output: str, first: Operators, sinks: Operators, identified: Identified | str) -> Miss | None:
        # A residual fused into a Gemm is harmless in a second operator, not in a first one.
        if (adding := next((operator for operator in first if operator.added), None)) is not None:
            why = f"it adds '{adding.added}', which is not constant, to its product"
            return Miss(why, label(self._view.nodes[adding.node]))
        node = label(self._view.nodes[self._view.producer[output]])
        if isinstance(identified, str):
            return Miss(identified, node)
        if self._every:
            return None  # Theorem 8 needs an activation, but no second operator
        if not sinks and output not in self._flow.values.keys() | self._flow.parts:
            why = "no linear operator reads its output"
            if output in self._view.outputs:
                what = "leaves this body, and a block must be in one graph" if self._view.path else ""
                why = f"its output {what or 'is an output of the graph, and no linear operator reads it'}"
            return self._flow.blocked.get(output, Miss(why, node))
        # A convolution with a larger kernel is linear too, but its neurons would read several positions: not an MLP.
        spatial, which = next((operator for operator in first if not operator.rowwise), None), "first"
        if spatial is None and sinks and not any(sink.rowwise for sink in sinks):
            spatial, which = sinks[0], "second"
        if spatial is None:
            return None
        where = label(self._view.nodes[spatial.node])
        return Miss(f"the {which} operator is a {spatial.kind}, which mixes positions", where)

    def _stray(self, index: int, second: str) -> Left:
        """An activation operator on the path to a linear one whose operand is not a projection."""
        node = self._view.nodes[index]
        maker = self._view.made_by(node.input[0])
        origin = f"'{node.input[0]}', which {'is an input' if maker is None else f'{label(maker)} makes'},"
        reason = f"{origin} is not the output of a linear operator with constant weights"
        if maker is None and node.input[0] not in self._view.inputs:
            reason = f"'{node.input[0]}' is computed outside of this body, and a block must be in one graph"
        return replace(self._left(Miss(reason, label(node)), nodes=(index,)), second=second)

    def _left(self, miss: Miss, first: Operators = (), sinks: Operators = (), nodes: tuple[int, ...] = ()) -> Left:
        name = self._namer.name(self._view, first, sinks, nodes)
        return Left(name, self._view.where, "", kinds(first), kinds(sinks), miss)

    def _leaf_type(self, leaf: str) -> int:
        """The element type of a leaf; where inference stops before it, of a floating-point operand of its operators."""
        nodes = (self._view.nodes[operator.node] for operator in self._flow.leaf(leaf).operators)
        types = (self._view.type_of(name).elem_type for node in nodes for name in node.input)
        return self._view.type_of(leaf).elem_type or next((each for each in types if each in FLOATS), 0)


# -- names -----------------------------------------------------------------------------------------------------------
#
# A block is named by the module path that the exporter left in the graph, such as `model.layers.0.mlp`. Sources, best
# first: the dynamo exporter's metadata, the TorchScript exporter's scoped node names, the names of the weights, the
# nodes of the activation. Where linear operators are quantised, the addition of the bias shows the module, so that a
# block has one name in every type. Without any path it is called `mlp` or `conv`.


_SCALING = ("Cast", "Mul", "DequantizeLinear", "Reshape")  # nodes between a product and its bias


class Namer:
    """Gives each block a unique name; a name that is taken, also by tensors `<name>/heads/...`, gets a number."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self._taken: dict[str, int] = dict.fromkeys(reserved, 1)

    def name(self, view: GraphView, first: Operators, second: Operators, region: tuple[int, ...]) -> str:
        """The common module path of the block's nodes. A lone operator is named by its own module."""
        operators = (*first, *second[:1])
        paths = [path for op in operators if (path := _module_path(view.nodes[op.node]) or _bias_path(view, op.output))]
        if len(paths) < len(operators) or not paths:
            # A partial list would name a block after one operator (`mlp.fc1`), so weights replace it altogether.
            paths = [path for op in operators if (path := _weight_path(op.weight))]
        common = _common(paths)
        if not common and region:
            common = _common([path for index in region if (path := _module_path(view.nodes[index]))])
        name = unique = common or ("conv" if any("Conv" in op.kind for op in operators) else "mlp")
        while unique in self._taken:
            self._taken[name] += 1
            unique = f"{name}_{self._taken[name]}"
        self._taken[unique] = 1
        return unique


def _module_path(node: onnx.NodeProto) -> list[str]:
    """Module path as parts; empty where the exporter left none."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            # A list from the root module down to the operator itself; the last but one is the operator's own module.
            own = ["", "", *re.findall(r"'([^']*)'", entry.value)][-2]
            return [part for part in own.split(".") if part]
    return [part for part in re.split(r"[/.]", node.name) if part][:-1] if node.name.startswith("/") else []


def _bias_path(view: GraphView, output: str) -> list[str]:
    """Module path of a linear operator by the addition of its bias, past nodes that scale its output."""
    while len(readers := view.consumers.get(output, ())) == 1:
        node = view.nodes[readers[0]]
        if node.op_type == "Add":
            bias = next((name for name in node.input if name in view.initializers), None)
            return [] if bias is None else _module_path(node) or _weight_path(bias)
        if node.op_type not in _SCALING or _module_path(node):
            break
        output = node.output[0]
    return []


def _weight_path(weight: str) -> list[str]:
    # TorchScript numbers folded weights, as in `onnx::MatMul_1234`; the numbers differ within a block.
    return [re.sub(r"_\d+$", "", part) if part.startswith("onnx::") else part for part in weight.split(".")[:-1]]


def _common(paths: list[list[str]]) -> str:
    """The longest common prefix, without characters that are special in a glob."""
    parts = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))]
    return ".".join(cleaned for part in parts if (cleaned := re.sub(r"[^A-Za-z0-9_.\-]+", "_", part)))[:200]
