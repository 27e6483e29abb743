"""Heads that this tool made, recognised by their operators alone, without names, metadata and functions.

What a form writes out is a run of consecutive nodes with fixed operators that read each other in a fixed way, or a Loop
with such a body. The sequences are those of the emitters themselves. No exporter writes these:
its SiLU is Sigmoid and Mul, ours the product with an explicit key, Neg, Exp, Add and a division by the sum of weights.
Someone who wrote a SiLU by hand in exactly our operators would be recognised as well, and rightly so: that is a softmax
over two keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import onnx

from passes.forms.attention import ATTENTION_OPSET, Pattern, function_of, whole_of
from passes.forms.compact.attention import Neighbourhood, chunked, nodes_of
from passes.forms.spelling import Heads, LineOf, PowersOf, ProgressionOf, Spelling
from passes.match.marks import DOMAIN, made_for
from passes.whole.read import read_whole
from rewriter.graph.surgeon import Fragment
from rewriter.graph.view import GraphView, subgraphs

_MOST_KEYS, _MOST_SHARED, _MOST_PAIRS, _MOST_LEVELS = 12, 6, 12, 7
"""The largest spellings that are looked for; those of the table have fewer."""

_OPSET = 17
"""The operators are the same in all opsets, but for constants."""

_LINEAR = frozenset(
    ("MatMul", "Gemm", "Conv", "Einsum", "MatMulInteger", "FusedMatMul", "MatMulNBits", "ConvInteger", "QLinearMatMul")
)

ALREADY = "it is attention heads already: "
"""How the reason for leaving such a block starts."""

Step = tuple[str, frozenset[int]]
"""A node of a run: its operator, and the nodes of the run that it reads, by their places."""

Sequences = dict[tuple[Step, ...], str]
"""Consecutive nodes to what they compute."""


@dataclass(frozen=True)
class Made:
    """Heads of one block.

    Attributes:
        nodes: indices of the nodes between the block's linear operators.
        what: what they compute, such as `softmax over {self, bias token}`.
    """

    nodes: tuple[int, ...]
    what: str

    @property
    def reason(self) -> str:
        """Why the block is left."""
        return f"{ALREADY}{self.what}"


def made_before(view: GraphView) -> tuple[Made, ...]:
    """The blocks of one graph that are heads already and whose nodes have lost their marks, in graph order."""
    if view.path and _steps(_outline(view.nodes)) in _bodies():
        return ()  # a chunk of heads whose Loop is recognised
    known = [bool(made_for(node)) for node in view.nodes]
    found: dict[int | None, tuple[set[int], dict[str, None]]] = {}
    for run, what in (*_runs(view), *_loops(view), *_calls(view), *_whole(view)):
        if any(known[index] for index in run):
            continue
        inside, end = _between(view, run)
        nodes, texts = found.setdefault(end, (set(), {}))
        nodes |= inside
        texts[what] = None
    return tuple(Made(tuple(sorted(nodes)), " and ".join(texts)) for nodes, texts in found.values())


def _keys(count: int) -> str:
    return "{self, bias token}" if count == 1 else f"{{self, {count} bias tokens}}"


def _steps(nodes: Iterable[tuple[str, Sequence[str], Sequence[str]]]) -> tuple[Step, ...]:
    """The steps of nodes (operator, inputs, outputs); constants do not count, since they may be initializers."""
    made: dict[str, int] = {}
    steps: list[Step] = []
    for operator, inputs, outputs in nodes:
        if operator != "Constant":
            made.update(dict.fromkeys(outputs, len(steps)))
            steps.append((operator, frozenset(made[name] for name in inputs if name in made)))
    return tuple(steps)


def _outline(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    return ((node.op_type, node.input, node.output) for node in nodes)


def _emitted(spelling: Spelling) -> tuple[Step, ...]:
    """The nodes of a spelling of form `local`."""
    body = Fragment("")
    spelling.emit(body, {name: body.tensor(name) for name in spelling.inputs}, "output", _OPSET)
    return _steps(body.outline())


@cache
def _exponentials() -> Sequences:
    """The nodes of the spellings of form `local`; made only for graphs with an exponential."""
    spellings: list[tuple[Spelling, str]] = [
        (Heads(2, zero_bias=True, steep=steep), f"fused softmax over {_keys(1)}") for steep in (False, True)
    ]
    for keys, steep in product(range(2, _MOST_KEYS + 1), (False, True)):
        what = f"sum of exponentials over {_keys(keys - 1)}"
        for silent, centred in product(Heads.silences(keys - 1), (False, True) if steep else (False,)):
            spellings.append((Heads(keys, steep=steep, centred=centred, silent=silent), what))
        own = range(1, keys + 1) if keys <= _MOST_SHARED else ()
        spellings += [(Heads(keys, number, steep=steep), f"sum of exponentials over {keys} keys") for number in own]
    for keys, *options in product(range(2, _MOST_SHARED + 1), (False, True), (False, True), (False, True)):
        spellings.append((ProgressionOf(keys, *options), f"softmax over {keys} keys from one exponential"))
    for pairs, middle in product(range(1, _MOST_PAIRS + 1), (False, True)):
        spellings.append((LineOf(pairs, middle), f"a line as softmax over {2 * pairs + 2 + middle} keys"))
    for pairs, singles, *options in product(range(4), range(_MOST_LEVELS + 1), (False, True), (False, True)):
        if 0 < singles + 2 * pairs <= _MOST_LEVELS:
            of = PowersOf(singles, pairs, *options)
            spellings.append((of, f"softmax over {of.keys} keys from one exponential"))
    return {_emitted(each): what for each, what in spellings}


@cache
def _softmaxes() -> Sequences:
    """The nodes of patterns that are tensors of the graph; they do not depend on the number of bias tokens."""
    flags = (False, True)
    kinds = [Neighbourhood(1, *each) for each in product(flags, flags, flags)]
    found = {_steps(_outline(nodes_of(kind, _OPSET, "").node)): "softmax over {self, bias tokens}" for kind in kinds}
    return {**found, _steps(_outline(whole_of(_OPSET, "").node)): "softmax under a mask over {self, bias tokens}"}


@cache
def _bodies() -> Sequences:
    """The nodes of the bodies of Loops."""
    patterns = (Pattern(), Pattern(mask=False), Pattern(operator=True))
    texts = ("softmax under a mask over {self, bias tokens}", "softmax with positions over {self, bias tokens}")
    functions = [
        (function_of(pattern, ATTENTION_OPSET if pattern.operator else _OPSET), texts[not pattern.mask])
        for pattern in patterns
    ]
    flags = (False, True)
    for count, values, own, wide in product((0, 1), flags, flags, flags):
        kind = Neighbourhood(count, values and count > 0, own, wide)
        functions.append((chunked(kind, _OPSET), "softmax over {self, bias tokens}"))
    return {_body(node): what for function, what in functions for node in function.node if node.op_type == "Loop"}


def _body(loop: onnx.NodeProto) -> tuple[Step, ...]:
    return _steps(each for _, graph in subgraphs(loop) for each in _outline(graph.node))


def _runs(view: GraphView) -> Iterator[tuple[list[int], str]]:
    """Runs of nodes with the operators of heads; of several at one place the longest."""
    places = [index for index, node in enumerate(view.nodes) if node.op_type != "Constant"]
    text, starts = " ", dict[int, int]()
    for number, index in enumerate(places):
        starts[len(text) - 1] = number
        text += f"{view.nodes[index].op_type} "
    sequences = {**(_softmaxes() if " Softmax " in text else {}), **(_exponentials() if " Exp " in text else {})}
    taken: set[int] = set()
    for sequence, what in sorted(sequences.items(), key=lambda each: -len(each[0])):
        wanted = f" {' '.join(operator for operator, _ in sequence)} "
        at = text.find(wanted)
        while at >= 0:
            run = places[starts[at] : starts[at] + len(sequence)]
            if not taken.intersection(run) and _steps(_outline(view.nodes[index] for index in run)) == sequence:
                taken.update(run)
                yield run, what
            at = text.find(wanted, at + 1)


def _loops(view: GraphView) -> Iterator[tuple[list[int], str]]:
    for index, node in enumerate(view.nodes):
        if node.op_type == "Loop" and (what := _bodies().get(_body(node))) is not None:
            yield [index], what


def _calls(view: GraphView) -> Iterator[tuple[list[int], str]]:
    """Calls of functions of the domain `attnonly`, whose nodes have lost their metadata."""
    for index, node in enumerate(view.nodes):
        if node.domain == DOMAIN:
            yield [index], f"a call of {node.op_type}"


def _whole(view: GraphView) -> Iterator[tuple[list[int], str]]:
    """Heads of neurons on the one stream of form `whole`, known by their W_QK between positions."""
    found = read_whole(view)
    for run in () if found is None else found.neurons(view):
        yield run, "softmax over {self, bias tokens}, whose mask is W_QK between positions"


def _between(view: GraphView, run: Sequence[int]) -> tuple[set[int], int | None]:
    """The nodes from the linear operators before a run to the one behind it, and that operator."""
    inside, pending = set(run), list(run)
    while pending:
        for name in view.nodes[pending.pop()].input:
            index = view.producer.get(name)
            if index is not None and index not in inside and view.nodes[index].op_type not in _LINEAR:
                inside.add(index)
                pending.append(index)
    behind = [run[-1]]
    while behind:
        outputs = view.nodes[behind.pop(0)].output
        for reader in sorted(reader for name in outputs for reader in view.consumers.get(name, ())):
            if view.nodes[reader].op_type in _LINEAR and reader not in run:
                return inside, reader
            if reader not in inside:
                inside.add(reader)
                behind.append(reader)
    return inside, None
