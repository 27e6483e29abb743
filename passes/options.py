"""The user's choices about the rewriting, each declared once (`rewriter.options`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rewriter.options import option

DEFAULT_MAX_TOKENS = 512  # positions in the forms with one-hot position columns
LOCAL = "local"  # without offsets in exponentials, with the fewest operations
WHOLE = "whole"  # the network on one stream, which its own heads read too
COMPACT = "compact"  # over the keys that a mask allows
STAGED = "staged"  # three sublayers: linear, activation, linear
FORM_NAMES = (LOCAL, COMPACT, "masked", "maskless", STAGED, WHOLE)  # as in FORMS, which imports this
ALREADY = "it is attention heads already"  # why blocks of an earlier run are left
EXPOSED = ("q", "scores", "pattern", "z")  # tensors of a sublayer that can be outputs of the model


@dataclass(frozen=True)
class FormOptions:
    """Options of forms; each form ignores the ones that do not apply to it."""

    max_tokens: int | None = option(
        None,
        "Longest sequence of the forms with one-hot positions (maskless, staged, whole). Default: the length that the "
        "model fixes, or 512, in form whole as much of it as fits.",
        metavar="N",
        least=1,
    )
    expose: tuple[str, ...] = option(
        (),
        "Make tensors of the heads outputs: q, scores, pattern or z, as pattern,z or pattern:GLOB for some blocks "
        "(forms compact and masked; repeatable).",
        metavar="NAMES[:GLOB]",
        see="forms.md#tensors-as-outputs",
    )
    neurons: str = option(
        "square",
        "Heads of neurons in form whole: square, over all tokens and bias tokens; compact, over the keys that W_QK "
        "allows; or staged, in three sublayers.",
        choices=("square", COMPACT, STAGED),
        rare=True,
        see="forms.md#the-whole-network",
    )
    d_head: int = 64  # of the linear sublayers of form `staged`: that of the model's own attention

    @property
    def positions(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS

    def exposed(self, block: str) -> tuple[str, ...]:
        asked = [each.partition(":") for each in self.expose]
        names = {name for names, _, glob in asked if fnmatchcase(block, glob or "*") for name in names.split(",")}
        return tuple(name for name in EXPOSED if name in names)


DEFAULT_OPTIONS = FormOptions()


@dataclass(frozen=True)
class Options(FormOptions):
    """The user's choices about the rewriting."""

    form: str = option(LOCAL, "How heads become nodes.", choices=FORM_NAMES, see="forms.md")
    scope: str = option(
        "mlp",
        "Convert MLP blocks, or every elementwise activation of a linear operator's output.",
        choices=("mlp", "all"),
    )
    inline: bool = option(False, "Write the heads out instead of calling a model-local function.", rare=True)
    only: tuple[str, ...] = option((), "Convert only blocks whose names match (repeatable).", metavar="GLOB")
    skip: tuple[str, ...] = option((), "Do not convert blocks whose names match (repeatable).", metavar="GLOB")
    gate: str = option(
        "heads",
        "Gated blocks h(g) u: heads with value u, or heads for h(g) alone, whose product with u stays in the graph.",
        choices=("heads", "product"),
        see="decisions/0009-gates-in-the-models-precision.md",
    )
    fit: bool = option(True, "Fit heads to activations that the table does not name; false leaves these.", rare=True)
    lower_experts: bool = option(
        False,
        "Take com.microsoft::MoE and QMoE apart into plain operators, which apply every expert to every token, so that "
        "their experts are blocks.",
        see="limits.md",
    )
    accuracy: float | None = option(
        None,
        "Largest error of a head program, over max(1, |f|). Default: dtype, the rounding of the block's type.",
        metavar="EPS|dtype",
        above=0.0,
        below=1.0,
    )
    domain: float | None = option(
        None,
        "Fit unnamed activations on |y| <= R. Default: at least 1.5 times what the model reaches on the inputs.",
        metavar="R",
        above=0.0,
        rare=True,
    )
    reached: Mapping[str, float] = field(default_factory=dict)  # largest |y| by pre-activation, for `domain` None
