"""What a block costs in each form, before anything is built: heads, widths, parameters, peak memory.

Comes in: a conversion and a `Setting` (how many tokens, which limits). Goes out: `FormCost`, printed by `rewrite
inspect` and read by the forms that refuse what would need too much memory. Pure arithmetic on sizes: no weight is
read. Peak memory is that of the block's new tensors alive at one time, beside the model's weights and without what an
allocator adds; the factors are checked against measured runs by `python -m benchmarks.forms --memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from passes.conversion import Conversion
from passes.heads import spelling_of, takes_linear
from passes.programs import Head, Program

TOKENS = 128
"""Tokens that costs are stated for unless told otherwise."""

PATTERN_MB = 256.0
"""Largest pattern tensor of the forms with square patterns, in MB (10^6 bytes), unless told otherwise."""


@dataclass(frozen=True)
class Setting:
    """What a cost is stated for.

    Attributes:
        tokens: N, the length of the sequence.
        batch: sequences at a time.
        max_tokens: one-hot positions of the forms that have them; None: as many as tokens.
        max_pattern_mb: bound of the largest pattern tensor, in MB (10^6 bytes).
        head_dimension: d_head by which form `staged` splits its linear maps; None: unknown.
    """

    tokens: int = TOKENS
    batch: int = 1
    max_tokens: int | None = None
    max_pattern_mb: float = PATTERN_MB
    head_dimension: int | None = None

    @property
    def positions(self) -> int:
        """N_max: one-hot positions."""
        return max(self.tokens, self.max_tokens or 0)


@dataclass(frozen=True)
class FormCost:
    """One block in one form.

    Attributes:
        form: a key of `passes.forms.FORMS`.
        heads: attention heads of each sublayer.
        head_dimension: the larger of the query-key and the value dimension of the neurons' heads.
        rows: keys that the sublayer's stream holds: N, or N + m with the bias tokens.
        keys: keys that each query is scored against.
        width: columns of the residual stream inside the sublayer.
        parameters_reused: elements of the block's weights that stay as they are, shared with the original.
        parameters_added: elements of new weights.
        pattern_bytes: the largest pattern tensor as built.
        whole_pattern_bytes: the pattern of all heads at once, which the chunks avoid.
        peak_bytes: new tensors alive at one time.
    """

    form: str
    heads: tuple[int, ...]
    head_dimension: int
    rows: int
    keys: int
    width: int
    parameters_reused: int
    parameters_added: int
    pattern_bytes: int
    whole_pattern_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class _Sizes:
    """The numbers that every form's cost is made of. `bytes`: of one element of the heads' arithmetic."""

    program: Program
    width: int
    neurons: int
    weights: int
    bytes: int
    setting: Setting

    @property
    def bias_tokens(self) -> int:
        return self.program.bias_tokens

    @property
    def heads(self) -> int:
        return self.neurons * len(self.program.heads)

    @property
    def per_tensor(self) -> int:
        """Bytes of one tensor [batch, N, d_ff]."""
        return self.setting.batch * self.setting.tokens * self.neurons * self.bytes


def cost(conversion: Conversion, form: str, setting: Setting) -> FormCost | None:
    """The cost of the block in `form`; None where the weights' shapes do not say enough.

    Raises:
        KeyError: `form` is no key of `COSTS`.
    """
    block = conversion.block
    width = next((op.in_features for op in block.first if op.in_features), None)
    if width is None or block.neurons is None:
        return None
    sizes = _Sizes(
        program=conversion.program,
        width=width,
        neurons=block.neurons,
        weights=sum((op.in_features or 0) * (op.out_features or 0) for op in (*block.first, *block.second)),
        bytes=8 if conversion.compute_type == onnx.TensorProto.DOUBLE else 4,
        setting=setting,
    )
    return COSTS[form](sizes)


def _local(sizes: _Sizes) -> FormCost:
    """Each query meets its own key and m bias keys: nothing grows with the square of N."""
    program = sizes.program
    alone = len(program.heads) == 1
    taken = alone and program.linear != 0.0 and takes_linear(program.heads[0])
    live = max(_live_tensors(head, program.linear if taken else 0.0) for head in program.heads)
    live += len(program.heads) - 1
    keys = sizes.bias_tokens + 1
    return FormCost(
        form="local",
        heads=(sizes.heads,),
        head_dimension=_head_dimension(program),
        rows=sizes.setting.tokens,
        keys=keys,
        width=sizes.width,
        parameters_reused=sizes.weights,
        parameters_added=sum(_local_constants(head, program.linear if taken else 0.0) for head in program.heads)
        + (program.constant != 0.0)
        + (program.linear not in (0.0, 1.0) and not taken),
        pattern_bytes=sizes.per_tensor,
        whole_pattern_bytes=keys * len(program.heads) * sizes.per_tensor,
        peak_bytes=live * sizes.per_tensor,
    )


def _live_tensors(head: Head, linear: float) -> int:
    """Tensors [batch, N, d_ff] alive at one time in form `local`, pre-activation included.

    With the short spelling: query, logit and weight. Else m + 1 weights, and as many weighted values where these are
    not plain numbers times the weights, which replace them; and what is made of the pre-activation meanwhile.
    """
    spelling, m = spelling_of(head, linear, double=False), len(head.bias_tokens)
    if spelling.zero_bias:
        return 3
    return m + 5 if spelling.proportional else 2 * m + 5


def _local_constants(head: Head, linear: float) -> int:
    """Elements of the constants that form `local` adds for one head."""
    spelling = spelling_of(head, linear, double=False)
    count = 1 if head.alpha == 0.0 else (head.alpha != 1.0) + (head.beta != 0.0)
    if head.c not in (0.0, 1.0) and linear == 0.0:
        count += 1
    if not spelling.proportional and (head.d != 0.0 or head.c == 0.0):
        count += 1
    if not spelling.zero_bias:
        count += 1 + 3 * len(head.bias_tokens) + spelling.proportional
    return count


def _head_dimension(program: Program) -> int:
    """1, or 2 where the logits of some head differ by a constant, so that query and key need one more dimension."""
    return 2 if any(token.offset != head.gamma for head in program.heads for token in head.bias_tokens) else 1


Cost = Callable[[_Sizes], FormCost]

COSTS: dict[str, Cost] = {"local": _local}
"""Form name to its cost; the keys are those of `passes.forms.FORMS`."""
