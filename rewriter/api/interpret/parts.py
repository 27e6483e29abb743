"""What `attribute` returns: a logit in parts, and what happens to it when something changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from passes.heads.original import Attention
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array


@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit, or a difference of two, in parts.

    Attributes:
        logit: the model's value.
        direct: part to its contributions: a number, or one per head of a sublayer.
        paths: part to its contributions: `embed` [tokens], a sublayer's `bias_tokens` and `b_V` [heads], biases.
        effects: sublayer to [tokens, heads]: what a head's output at a token contributes along all paths.
        written: sublayer to [tokens]: the same for all that it writes, its bias included.
        predicted: MLP to [tokens]: what `patched` is on the frozen network, where a write counts what it contributes.
        patched: MLP to [tokens]: how much lower the logit is if it writes nothing there, or what it writes on
            `against`; empty without `patching`.
        index: the heads of the model.
        tokens: the tokens of the text; empty where inputs are arrays.
        entries: how the tokenizer spells the entries that were attributed: the logit, and `minus`.
    """

    logit: float
    direct: Mapping[str, Array]
    paths: Mapping[str, Array]
    effects: Mapping[str, Array]
    written: Mapping[str, Array]
    predicted: Mapping[str, Array]
    patched: Mapping[str, Array]
    index: HeadIndex
    tokens: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    @property
    def correlation(self) -> float | None:
        """Of `predicted` and `patched` over all MLPs and tokens; None without `patching`, or if nothing varies."""
        if not self.patched:
            return None
        made, changed = (
            np.concatenate([each[name] for name in self.patched]) for each in (self.predicted, self.patched)
        )
        return None if np.ptp(made) == 0.0 or np.ptp(changed) == 0.0 else float(np.corrcoef(made, changed)[0, 1])

    def by_neuron(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        """`direct` or `paths` with the heads of each neuron added up.

        In gates they are large and nearly cancel (docs/decisions/0008), so that single heads say little.
        """
        found = dict(parts)
        for each in self.index.sublayers:
            if isinstance(each.sublayer, Attention):
                continue
            for name in (each.name, f"{each.name}.bias_tokens", f"{each.name}.b_V"):
                if name in found:
                    found[name] = found[name].reshape(-1, each.sublayer.neurons).sum(axis=0)
        return found

    @property
    def residuals(self) -> dict[str, float]:
        """The logit minus each of the two sums."""
        return {name: self.logit - total(parts) for name, parts in (("direct", self.direct), ("paths", self.paths))}


def total(parts: Mapping[str, Array]) -> float:
    """The sum of all contributions."""
    return float(sum(float(np.sum(part)) for part in parts.values()))
