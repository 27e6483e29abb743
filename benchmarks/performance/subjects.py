"""The models whose speed is measured: whole decoders of the widths of known ones, with random weights."""

from dataclasses import dataclass, replace

from benchmarks.decoder import Shape


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        name: how tables call it.
        about: what it is.
        shape: its sizes; layers are fewer than published where `about` says so.
        tokens: the lengths that it is measured at.
        halves: the element types: whether float16.
        group: the table in which it stands.
    """

    name: str
    about: str
    shape: Shape
    tokens: tuple[int, ...] = (16, 128, 512)
    halves: tuple[bool, ...] = (False, True)
    group: str = "known"

    def quick(self) -> "Subject":
        """Two layers and the middle length only."""
        return replace(
            self, shape=replace(self.shape, layers=min(self.shape.layers, 2), vocabulary=2048), tokens=(128,)
        )


_GPT2 = Shape()
_LLAMA = Shape(layers=4, width=2048, hidden=8192, heads=32, vocabulary=32000)
_GEMMA = Shape(layers=2, width=2048, hidden=16384, heads=8, vocabulary=32000)
_BOTH, _HALF = (False, True), (True,)
_SHORT = replace(_GPT2, layers=4, vocabulary=2048)

SUBJECTS: tuple[Subject, ...] = (
    Subject("gpt2-gelu", "GPT-2 small, 12 layers, GELU by erf", replace(_GPT2, activation="gelu")),
    Subject("gpt2-silu", "the same with SiLU", replace(_GPT2, activation="silu")),
    Subject("llama-swiglu", "widths of Llama 3.2 1B, 4 of its 16 layers, SwiGLU", replace(_LLAMA, activation="swiglu")),
    Subject("gemma-geglu", "widths of Gemma 2B, 2 of its 18 layers, GEGLU", replace(_GEMMA, activation="geglu")),
    *(
        Subject(
            name,
            f"4 layers as in GPT-2 small, {about}",
            replace(_SHORT, activation=name),
            halves=halves,
            group="unfused",
        )
        for name, about, halves in (
            ("mish", "Mish spelled out", _BOTH),
            ("relu6", "ReLU6 as Relu and Min", _BOTH),
            ("hard_swish", "hard swish as Add, Clip, Mul, Div", _BOTH),
            ("swiglu", "SwiGLU with separate gate and up projections", _BOTH),
            ("gelu_between_casts", "float16 with GELU in float32 between casts", _HALF),
            ("gelu_new", "float16 with GPT-2's GELU, tanh spelled out with Pow", _HALF),
            ("gelu_bloom", "float16 with Bloom's GELU, tanh spelled out with products", _HALF),
        )
    ),
)
