"""Head programs as numbers, in plain numpy as the sources write them; independent of the passes."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


HeadNumbers: TypeAlias = Any
"""Self logit `beta y + gamma`, self value `c z + d`; of each bias token, logit `slope y + offset` and value `value`."""


class ProgramNumbers(Protocol):
    """A sum of heads, plus `linear z + constant`."""

    @property
    def heads(self) -> Sequence[HeadNumbers]: ...
    @property
    def linear(self) -> float: ...
    @property
    def constant(self) -> float: ...


def neurons(program: ProgramNumbers, y: Array, z: Array) -> Array:
    """The output of a program for every pre-activation y and value z: theorem 3 without the stream."""
    total = program.linear * z + program.constant
    for head in program.heads:
        logits = [head.beta * y + head.gamma]
        logits += [token.slope * y + token.offset for token in head.bias_tokens]
        values = [head.c * z + head.d] + [np.full_like(z, token.value) for token in head.bias_tokens]
        weights = np.exp(np.stack(logits) - np.max(logits, axis=0))
        total = total + np.sum(weights * np.stack(values), axis=0) / weights.sum(axis=0)
    return np.asarray(total)
