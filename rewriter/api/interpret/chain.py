"""The residual stream that a logit reads: from the embeddings, past every sublayer, to the unembedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.heads.layers import Named
from passes.heads.norms import Norm, norm_before
from passes.heads.original import Attention
from passes.heads.residual import Write, writes
from passes.match.linear import LinearOperator, Miss, linear_operator
from passes.match.projections import Projection, matrix_of
from rewriter.api.interpret.index import HeadIndex
from rewriter.errors import UsageError
from rewriter.graph.constants import Constants
from rewriter.graph.layout import SAME_NUMBERS
from rewriter.graph.view import label


@dataclass(frozen=True, eq=False)
class Stage:
    """Sublayers that read one value of the stream, more than one if they are in parallel.

    Attributes:
        before: the stream that they read.
        after: the stream with what they write.
        sublayers: the sublayers, with what they write.
        norm: the normalisation through which `before` comes from the stage before it, as where normalisation follows
            the sublayers; None where it is that stage's result itself.
    """

    before: str
    after: str
    sublayers: tuple[tuple[Named, Write], ...]
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Chain:
    """The way to an output.

    Attributes:
        stages: the stages, first to last; each reads what the one before it wrote.
        norm: the normalisation after the last one.
        unembedding: what reads that; None where the output is the normalised stream itself.
        bias: a constant that is added to the output; empty for none.
        token: the token that the output is about, such as 0 for a class token; None where it has all tokens.
        factor: a number that the normalised stream is multiplied with before the unembedding.
    """

    stages: tuple[Stage, ...]
    norm: Norm
    unembedding: Projection | None
    bias: str
    token: int | None = None
    factor: float = 1.0

    @property
    def stream(self) -> str:
        """The stream at the end."""
        return self.stages[-1].after


def known_output(index: HeadIndex, output: str | None) -> str:
    """The output of this name; the first one for None. Raises UsageError."""
    known = index.view.outputs
    if output is not None and output not in known:
        raise UsageError(f"the model has no output '{output}'; its outputs are {', '.join(known)}")
    return known[0] if output is None else output


def chain_to(index: HeadIndex, output: str) -> Chain:
    """The way to an output [batch, tokens, vocabulary].

    Raises:
        UsageError: the output is not a linear map of the normalised residual stream, or the stream is interrupted.
    """
    view, constants = index.view, Constants(index.view)
    tensor, bias, token, factor = output, "", None, 1.0
    unembedding: Projection | None = None
    while unembedding is None:
        operator = _operator(index, constants, tensor)
        if operator is not None:
            read = matrix_of(view, constants, operator)
            if isinstance(read, Miss):
                raise UsageError(f"output {output} cannot be attributed: {read.reason}")
            unembedding = read
            tensor, factor = _factor(index, constants, operator.data)
            tensor, token = _token(index, constants, tensor)
            break
        node = view.made_by(tensor)
        data = [] if node is None else [name for name in node.input if name not in constants]
        if node is None or not data or node.op_type not in (*SAME_NUMBERS, "Add"):
            break
        if node.op_type == "Add":
            held = [name for name in node.input if name in constants]
            if bias or len(held) != 1:
                break
            bias = held[0]
        tensor = data[0]
    norm = norm_before(view, constants, tensor)
    if norm is None or (unembedding is None and tensor != output):
        node = view.made_by(tensor)
        where = label(node) if node is not None else tensor
        raise UsageError(f"output {output} cannot be attributed: {where} is not a normalisation of the residual stream")
    return Chain(_stages(index, constants, norm.output, output), norm, unembedding, bias, token, factor)


def _factor(index: HeadIndex, constants: Constants, tensor: str) -> tuple[str, float]:
    """A product with a number as (the other factor, the number); the tensor itself times 1 for anything else."""
    node = index.view.made_by(tensor)
    numbers = [constants.scalar(name) for name in node.input] if node is not None and node.op_type == "Mul" else []
    for place, number in enumerate(numbers):
        if node is not None and number is not None:
            return node.input[1 - place], number
    return tensor, 1.0


def _token(index: HeadIndex, constants: Constants, tensor: str) -> tuple[str, int | None]:
    """(all tokens, which one of them is read) where an operator reads one of them; else the tensor itself."""
    node = index.view.made_by(tensor)
    if (
        node is None
        or node.op_type != "Gather"
        or not any(each.name == "axis" and each.i == 1 for each in node.attribute)
    ):
        return tensor, None
    place = constants.value(node.input[1])
    return (tensor, None) if place is None or place.size != 1 else (node.input[0], int(place.reshape(())))


def _operator(index: HeadIndex, constants: Constants, tensor: str) -> LinearOperator | None:
    place = index.view.producer.get(tensor)
    found = None if place is None else linear_operator(index.view, constants, place)
    return found if isinstance(found, LinearOperator) and found.axis == -1 else None


def _stages(index: HeadIndex, constants: Constants, end: str, output: str) -> tuple[Stage, ...]:
    """The stages whose results the tensor `end` depends on, which must follow on one another."""
    added = writes(index.view, constants, index.sublayers)
    stages: list[Stage] = []
    for named in index.sublayers:
        write = added.get(named.name)
        if write is None:
            raise UsageError(f"output {output} cannot be attributed: {named.name} does not add to the residual stream")
        if stages and stages[-1].after == write.after:
            stages[-1] = Stage(write.before, write.after, (*stages[-1].sublayers, (named, write)))
        else:
            stages.append(Stage(write.before, write.after, ((named, write),)))
    last = next((place for place in range(len(stages) - 1, -1, -1) if _reads(index, end, stages[place].after)), None)
    if last is None:
        raise UsageError(f"output {output} cannot be attributed: no sublayer writes to the stream that it reads")
    chain = [stages[last]]
    for stage in reversed(stages[:last]):
        if unflattened(index, stage.after) == unflattened(index, chain[0].before):
            chain.insert(0, stage)
            continue
        norm = norm_before(index.view, constants, chain[0].before)
        if norm is not None and _reads(index, norm.output, stage.after):
            chain = [stage, replace(chain[0], norm=norm), *chain[1:]]
    linked = {stage.after for stage in chain}
    apart = [named.name for stage in stages if stage.after not in linked for named, _ in stage.sublayers]
    # The sublayers of an encoder write to a stream of their own; in one stack none may be missing.
    same = {each.layer.split(".")[0] for each, _ in chain[0].sublayers}
    lost = [name for name in apart if name.split(".")[0] in same]
    if lost:
        raise UsageError(f"output {output} cannot be attributed: {lost[0]} is not on the stream that it reads")
    return tuple(chain)


def _reads(index: HeadIndex, tensor: str, stream: str) -> bool:
    """Whether the normalisation that makes `tensor` reads `stream`: a few nodes back, before any sublayer."""
    pending: Sequence[str] = [tensor]
    for _ in range(16):
        nodes = [node for name in pending if (node := index.view.made_by(name)) is not None]
        pending = list(dict.fromkeys(name for node in nodes for name in node.input if name))
        if stream in pending:
            return True
    return False


def norm_of(index: HeadIndex, named: Named, stage: Stage) -> Norm | None:
    """The normalisation before a sublayer's values; None where there is none, or they are of another sequence.

    Raises:
        UsageError: the sublayer reads something else than the stream or its normalisation.
    """
    sublayer = named.sublayer
    if isinstance(sublayer, Attention) and sublayer.cross:
        return None
    data = sublayer.value.operator.data if isinstance(sublayer, Attention) else sublayer.data
    if unflattened(index, data) == unflattened(index, stage.before):
        return None
    norm = norm_before(index.view, Constants(index.view), data)
    if norm is None:
        raise UsageError(f"{named.name} does not read a normalised residual stream; it cannot be attributed")
    return norm


def unflattened(index: HeadIndex, tensor: str) -> str:
    """The tensor before operators that keep its entries."""
    node = index.view.made_by(tensor)
    while node is not None and node.op_type in SAME_NUMBERS:
        tensor = node.input[0]
        node = index.view.made_by(tensor)
    return tensor
