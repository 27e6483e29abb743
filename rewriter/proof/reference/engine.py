"""Plan a scope as a sequence of steps, and run it; each operator is computed by the first way that can.

Consecutive operators with a kernel in onnxruntime form one step (a `Part`). Operators in numpy, operators that onnx's
evaluator computes and nodes with bodies are a step each; bodies are planned in the same way. A value is dropped after
its last reader. The same engine also runs a model in its own precision (`rewriter.proof.reference.audit`).
"""

from __future__ import annotations

import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.graph.view import attributes
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.control import Body, control_of
from rewriter.proof.reference.evaluator import EVALUATED, Evaluated
from rewriter.proof.reference.kernels import double_kernel
from rewriter.proof.reference.operators.table import NUMPY_OPERATORS, Operator
from rewriter.proof.reference.parts import NoKernelError, Part
from rewriter.proof.reference.scope import CALL, Key, Node, Scope, Value
from rewriter.proof.reference.widen import NoReference, widened
from rewriter.text import one_line

Values = Mapping[str, Value]
Watch = Callable[[Node, Values], None]
"""Called with an operator after it ran, and with the values that are known then."""


def _nothing(_: Node) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Ways:
    """How operators are computed, in order of preference.

    Attributes:
        kernel: returns the node as onnxruntime can run it, or None.
        forms: operators in numpy.
        evaluated: operators that onnx's evaluator may compute.
        wide: whether every float must be float64.
        longest: maximum number of operators in a part.
        keep: whether a watcher wants to see an operator's outputs.
    """

    kernel: Callable[[Node], Node | None]
    forms: Mapping[Key, Operator]
    evaluated: frozenset[Key]
    wide: bool
    longest: int = sys.maxsize
    keep: Callable[[Node], bool] = _nothing


def float64_ways(own: Mapping[Key, Operator], keep: Callable[[Node], bool] = _nothing) -> Ways:
    """The ways of the float64 evaluation; the caller's own operators take precedence."""
    return Ways(
        kernel=lambda node: None if node.key in own else double_kernel(node),
        forms={**NUMPY_OPERATORS, **own},
        evaluated=frozenset(("", name) for name in EVALUATED),
        wide=True,
        keep=keep,
    )


def plain_ways(
    own: Mapping[Key, Operator], keep: Callable[[Node], bool] = _nothing, longest: int = sys.maxsize
) -> Ways:
    """The ways of a model in its own precision: onnxruntime, and the caller's operators, rounded to that precision."""
    forms = {key: _rounding(form) for key, form in own.items()}
    return Ways(lambda node: None if node.key in own else node, forms, frozenset(), False, longest, keep)


def _rounding(form: Operator) -> Operator:
    """The operator, computed in float64 and rounded to the type of its first float operand."""

    def rounded(attributes: Mapping[str, Any], *operands: Array | None) -> tuple[Array | None, ...]:
        made = form(attributes, *(None if each is None else widened(each) for each in operands))
        kinds = [each.dtype for each in operands if each is not None and is_float(each.dtype)]
        outputs = made if isinstance(made, tuple) else (made,)
        return tuple(np.asarray(each, kinds[0]) if kinds and _is_float(each) else each for each in outputs)

    return rounded


def _is_float(value: Value) -> bool:
    return isinstance(value, np.ndarray) and is_float(value.dtype)


class Step(Protocol):
    """Operators that are computed together."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The operators."""

    def run(self, values: Values, watch: Watch | None) -> dict[str, Value]:
        """Compute the operators and return their outputs."""

    def by(self) -> Iterator[tuple[str, str]]:
        """Pairs of a way and the operator that it computes."""


@dataclass(frozen=True, eq=False)
class Program:
    """A planned scope; `dead` lists the names that no step after each one reads."""

    scope: Scope
    steps: tuple[Step, ...]
    dead: tuple[tuple[str, ...], ...]
    wide: bool

    def run(self, given: Values, around: Values, watch: Watch | None = None) -> dict[str, Value]:
        """Run the scope.

        Args:
            given: values of its inputs.
            around: values of the names that it captures.
            watch: sees every operator after it ran.

        Returns:
            The values of its outputs.

        Raises:
            NoReference: an operator cannot be computed in float64.
            ValidationError: onnxruntime cannot run an operator as it is.
        """
        # Given values come last: an input may override the initializer of its name. A chain of maps lets a body capture
        # what surrounds it without copying, and keeps its own names out of the scopes around it.
        local: dict[str, Value] = dict(given)
        outer = around.maps if isinstance(around, ChainMap) else [dict(around)]
        values = ChainMap(local, self.scope.constants, *outer)  # type: ignore[arg-type] # only `local` is written
        for step, dead in zip(self.steps, self.dead, strict=True):
            made = step.run(values, watch)
            if self.wide:
                _check_wide(made)
            local.update(made)
            for name in dead:
                local.pop(name, None)
        return {name: values[name] for name in self.scope.outputs}

    def by(self) -> Iterator[tuple[str, str]]:
        """Pairs of a way and an operator that it computes."""
        for step in self.steps:
            yield from step.by()


def plan(scope: Scope, ways: Ways) -> Program:
    """Plan how a scope is computed. Raises NoReference if no way computes an operator."""
    nodes = needed(scope)
    readers: dict[str, int] = {name: index for index, node in enumerate(nodes) for name in node.reads}
    readers.update(dict.fromkeys(scope.outputs, len(nodes)))
    steps: list[Step] = []
    group: list[tuple[Node, Node]] = []
    for index, node in enumerate(nodes):
        worded = None if node.bodies else ways.kernel(node)
        if group and not _joins(group, worded, ways):
            steps.append(_kernels(group, index, readers, scope.constants, ways))
            group = []
        if worded is None:
            steps.append(_step(node, ways))
        else:
            group.append((node, worded))
    if group:
        steps.append(_kernels(group, len(nodes), readers, scope.constants, ways))
    return Program(scope, tuple(steps), tuple(_dead(steps, scope)), ways.wide)


def needed(scope: Scope) -> list[Node]:
    """The operators that the outputs of a scope depend on. A dead operator without a float64 form does not matter."""
    wanted, kept = set(scope.outputs), []
    for node in reversed(scope.nodes):
        if wanted.intersection(node.gives):
            kept.append(node)
            wanted.update(node.reads)
    return kept[::-1]


def _joins(group: Sequence[tuple[Node, Node]], worded: Node | None, ways: Ways) -> bool:
    if worded is None or len(group) >= ways.longest:
        return False
    # A model imports each domain in one version, but local functions may import others than the main graph does.
    domain, _ = worded.key
    return all(other.opset == worded.opset for _, other in group if other.key[0] == domain)


def _dead(steps: Sequence[Step], scope: Scope) -> Iterator[tuple[str, ...]]:
    """For each step, the names that no later step reads."""
    # Names that are written and never read end with the step that writes them.
    last = {
        name: index for index, step in enumerate(steps) for node in step.nodes for name in (*node.gives, *node.reads)
    }
    for name in scope.outputs:
        last.pop(name, None)
    ending: list[list[str]] = [[] for _ in steps]
    for name, index in last.items():
        ending[index].append(name)
    return (tuple(names) for names in ending)


def _kernels(
    group: Sequence[tuple[Node, Node]],
    end: int,
    readers: Mapping[str, int],
    constants: Mapping[str, Array],
    ways: Ways,
) -> _Kernels:
    """A step of operators with kernels. It outputs what later operators read; `end` is the index after its last one."""
    nodes = tuple(node for node, _ in group)
    gives = [name for node in nodes for name in node.gives if readers.get(name, -1) >= end or ways.keep(node)]
    return _Kernels(nodes, Part(tuple(worded for _, worded in group), tuple(gives), constants), ways)


def _step(node: Node, ways: Ways) -> Step:
    if node.bodies:
        return _Control(node, control_of(node), {name: plan(body, ways) for name, body in node.bodies.items()})
    form = ways.forms.get(node.key)
    if form is not None:
        return _Single(node, "numpy", partial(_in_numpy, node, form))
    if node.key in ways.evaluated:
        return _Single(node, "onnx's reference evaluator", Evaluated(node).run)
    raise NoReference(f"{one_line(node, 120)} has no known float64 form")


@dataclass(eq=False)
class _Kernels:
    """Operators that should have a kernel. If onnxruntime lacks one after all, the step is split.

    Whether a kernel exists depends on the types that flow in, which are known only at run time. Halving finds the
    operator without one in a logarithmic number of attempts; it is then computed in another way.
    """

    nodes: tuple[Node, ...]
    part: Part
    ways: Ways
    finer: Program | None = None

    def run(self, values: Values, watch: Watch | None) -> dict[str, Value]:
        if self.finer is None:
            try:
                made = self.part.run(values)
            except NoKernelError as error:
                self.finer = self._finer(error)
            except ValidationError as error:
                if not self.ways.wide:
                    raise
                raise NoReference(f"onnxruntime cannot run it in float64: {one_line(error, 160)}") from error
            else:
                if watch is not None:
                    _show(self.nodes, values, made, watch)
                return made
        return self.finer.run({}, values, watch)

    def _finer(self, error: NoKernelError) -> Program:
        scope = Scope((), self.part.gives, {}, self.nodes)
        if len(self.nodes) > 1:
            return plan(scope, replace(self.ways, longest=(len(self.nodes) + 1) // 2))
        if not self.ways.wide:
            raise ValidationError(str(error)) from error
        return plan(scope, replace(self.ways, kernel=lambda _: None))

    def by(self) -> Iterator[tuple[str, str]]:
        return iter([("onnxruntime double kernels", "")]) if self.finer is None else self.finer.by()


@dataclass(frozen=True, eq=False)
class _Single:
    """A single operator."""

    node: Node
    way: str
    compute: Callable[[Values], dict[str, Value]]

    @property
    def nodes(self) -> Sequence[Node]:
        return (self.node,)

    def run(self, values: Values, watch: Watch | None) -> dict[str, Value]:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = self.compute(values)
        except MemoryError:
            raise  # not the operator's fault: reporting that it has no float64 form would be wrong
        except Exception as error:
            raise NoReference(f"{self.way} cannot run {one_line(self.node, 120)}: {one_line(error, 160)}") from error
        if watch is not None:
            _show(self.nodes, values, made, watch)
        return made

    def by(self) -> Iterator[tuple[str, str]]:
        domain, name = self.node.key
        yield self.way, f"{domain}::{name}" if domain else name


@dataclass(frozen=True, eq=False)
class _Control:
    """A node with bodies."""

    node: Node
    form: Callable[[Mapping[str, Body], Sequence[Value]], list[Value]]
    programs: Mapping[str, Program]

    @property
    def nodes(self) -> Sequence[Node]:
        return (self.node,)

    def run(self, values: Values, watch: Watch | None) -> dict[str, Value]:
        def body(name: str, program: Program) -> Body:
            inputs = program.scope.inputs
            # The body of a control-flow node captures names; that of a local function sees its arguments alone.
            around = {} if name == CALL else values

            def run(operands: Sequence[Value]) -> list[Value]:
                given = dict(zip(inputs, [*operands, *[None] * (len(inputs) - len(operands))], strict=True))
                made = program.run(given, around, watch)
                return [made[output] for output in program.scope.outputs]

            return run

        bodies = {name: body(name, program) for name, program in self.programs.items()}
        results = self.form(bodies, _operands(self.node, values))
        return {name: value for name, value in zip(self.node.proto.output, results, strict=False) if name}

    def by(self) -> Iterator[tuple[str, str]]:
        for program in self.programs.values():
            yield from program.by()


def _show(nodes: Sequence[Node], values: Values, made: Values, watch: Watch) -> None:
    known = ChainMap(dict(made), values)  # type: ignore[arg-type]
    for node in nodes:
        watch(node, known)


def _operands(node: Node, values: Values) -> list[Value]:
    return [values[name] if name else None for name in node.proto.input]


def _in_numpy(node: Node, form: Operator, values: Values) -> dict[str, Value]:
    made = form(attributes(node.proto), *_operands(node, values))
    outputs = made if isinstance(made, tuple) else (made,)
    found = {name: value for name, value in zip(node.proto.output, outputs, strict=False) if name}
    if len(found) < len(node.gives) or any(value is None for value in found.values()):
        raise NotImplementedError("not all of its outputs")
    return {name: np.asarray(value) for name, value in found.items()}


def _check_wide(made: Values) -> None:
    # A kernel or evaluator that silently computes in float32 would make the truth as inexact as the model.
    for name, value in made.items():
        if _is_float(value) and value.dtype != np.float64:
            raise NoReference(f"the evaluator computes '{one_line(name, 80)}' in {value.dtype} only")
