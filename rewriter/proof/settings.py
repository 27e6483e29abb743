"""The options of the proof, and of a comparison of given models.

The module imports little at the top, because the command line always loads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.inputs import Given
from rewriter.options import option

LARGE = 5 * 10**8  # bytes of model and weights above which `auto` means `blocks`


@dataclass(frozen=True)
class Settings:
    """The options of the proof, by field; by default all working providers are used."""

    providers: tuple[str, ...] = option(
        (),
        "Execution provider to prove on: cpu, cuda, cuda:device_id=1 (repeatable). Default: cpu, and cuda where it "
        "works.",
        metavar="NAME[:KEY=VALUE,...]",
        flag="--provider",
    )
    inputs: Given | None = option(
        None,
        "Prove on the inputs in this file; keys are input names, or case/input for several cases. Default: generated "
        "inputs.",
        metavar="FILE.npz",
    )
    dims: Mapping[str, int] = option(
        {}, "Size of a symbolic dimension in generated inputs (repeatable).", metavar="NAME=VALUE", flag="--dim"
    )
    seed: int = option(0, "Seed of the generated inputs.", least=0, below=2**32, rare=True)
    proof: str = option(
        "auto",
        "Load whole models, or one block or segment of a model at a time (blocks). auto: blocks above "
        f"{LARGE // 10**6} MB.",
        choices=("auto", "whole", "blocks"),
        see="decisions/0019-proof-in-segments.md",
        rare=True,
    )

    def by_blocks(self, size: int) -> bool:
        """Whether a model of `size` bytes, weights included, is proved without ever loading it as a whole."""
        return self.proof == "blocks" or (self.proof == "auto" and size > LARGE)


@dataclass(frozen=True)
class CompareOptions:
    """What a comparison does otherwise."""

    names: Mapping[str, str] = option(
        {}, "An input or output that the second model calls otherwise (repeatable).", metavar="OLD=NEW", flag="--map"
    )
    atol: float | None = option(
        None, "Judge outputs by this absolute tolerance instead of the rule.", metavar="NUMBER", least=0.0
    )
    rtol: float | None = option(
        None, "The same, relative to the first model's values; added to --atol.", metavar="NUMBER", least=0.0
    )
    accuracy: float | None = option(
        None,
        "Let the plan in the second model claim errors up to this, over max(1, |f|). Default: the usual limits.",
        metavar="EPS",
        above=0.0,
        below=1.0,
    )

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """atol and rtol, if either was given."""
        return None if self.atol is self.rtol is None else (self.atol or 0.0, self.rtol or 0.0)
