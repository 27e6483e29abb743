"""The claims of the standard programs: `python -m tests.rewriter.proof.certificate.standard` writes `bounds.json`.

Each activation of README's table is converted in each element type of `ELEMENTS`, and the committed models as they
are; in the forms of `ATTENTION` the activations in float32 and the committed models. What their certificates then ask
of `rewriter.proof.certificate.bounds`, with the limits that their plans claim, is what the table answers that comes
with the package.
Run it after a program, a claim or the search has changed. The slow tests prove every entry anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import onnx
from flint import fmpq

import rewriter
from rewriter.errors import RewriteError
from rewriter.proof.certificate import bounds, certify
from rewriter.proof.certificate.expressions import Expression
from tests.committed import FILES
from tests.textmodels import ERF_GELU, SILU, mlp

TABLE = Path(bounds.__file__).with_name("bounds.json")

TANH_GELU = (
    "c = Pow(y, $3.0) a = Mul(c, $0.044715) z = Add(y, a) i = Mul(z, $0.7978845608028654) t = Tanh(i) "
    "p = Add(t, $1.0) q = Mul($0.5, y) h = Mul(q, p)"
)
ACTIVATIONS = {
    "silu": SILU,
    "quick gelu": "b = Mul(y, $1.702) s = Sigmoid(b) h = Mul(y, s)",
    "sigmoid": "h = Sigmoid(y)",
    "tanh": "h = Tanh(y)",
    "mish": "p = Softplus(y) t = Tanh(p) h = Mul(y, t)",
    "relu": "h = Relu(y)",
    "leaky relu": "h = LeakyRelu(y)",
    "relu6": "h = Clip(y, $0.0, $6.0)",
    "hard sigmoid": "h = HardSigmoid(y)",
    "elu": "h = Elu(y)",
    "selu": "h = Selu(y)",
    "silu of a clip": "c = Clip(y, $-4.0, $4.0) s = Sigmoid(c) h = Mul(c, s)",
    "hard swish": "h = HardSwish(y)",
    "square": "h = Mul(y, y)",
    "squared relu": "r = Relu(y) h = Mul(r, r)",
    "gelu": ERF_GELU,
    "gelu by tanh": TANH_GELU,
    "softplus": "h = Softplus(y)",
}
GATES = ("silu", "sigmoid", "tanh", "relu", "gelu", "gelu by tanh")
ELEMENTS = ("float", "float16", "bfloat16")
"""Not double: its bounds are proved for each process anew, in some seconds."""
ATTENTION = ("compact", "masked")
"""The forms in which blocks are attention; `maskless` asks what `masked` does."""


@dataclass(frozen=True)
class Claim:
    """What a certificate asks: whether two functions are that close."""

    original: Expression
    rewritten: Expression
    limit: float
    top: fmpq
    domain: float | None

    @property
    def key(self) -> str:
        """Its name in the table."""
        return bounds.key_of(self.original, self.rewritten, self.limit, self.top, self.domain)

    def bound(self) -> bounds.Bound:
        """The answer, without the table."""
        with patch.object(bounds, "_table", dict):
            return bounds.bound(self.original, self.rewritten, limit=self.limit, top=self.top, domain=self.domain)


def models() -> Iterator[tuple[Callable[[], onnx.ModelProto], str]]:
    """Makers of the models whose claims the table has, and the form in which they are converted."""
    gate = "u = MatMul(x, V1)"
    texts = [*ACTIVATIONS.values(), f"{gate} h = Mul(y, u)"]
    texts += [f"{gate} {ACTIVATIONS[name].replace('h =', 'f =')} h = Mul(f, u)" for name in GATES]
    for file in FILES:
        yield from ((partial(onnx.load, file), form) for form in ("local", *ATTENTION))
    for text in texts:
        yield from ((partial(mlp, text, elem=elem), "local") for elem in ELEMENTS)
        yield from ((partial(mlp, text), form) for form in ATTENTION)


def claims(model: onnx.ModelProto, form: str = "local") -> list[Claim]:
    """What the certificate of a converted model asks and finds proved; nothing for a model that is not converted."""
    asked: list[Claim] = []

    def noted(a: Expression, b: Expression, *, limit: float, top: fmpq, domain: float | None = None) -> bounds.Bound:
        found = bounds.bound(a, b, limit=limit, top=top, domain=domain)
        if found.holds and a is not b:
            asked.append(Claim(a, b, limit, top, domain))
        return found

    try:
        rewritten = rewriter.rewrite(model, form=form, validate=False).rewritten
    except RewriteError:
        return []
    if rewritten is not None:
        with patch.object(certify, "bound", noted):
            rewriter.certify(model, rewritten)
    return asked


def standard() -> dict[str, Claim]:
    """Every claim of the standard programs by its key, each proved in this process and none looked up."""
    with patch.object(bounds, "_table", dict):
        return {claim.key: claim for make, form in models() for claim in claims(make(), form)}


def main() -> None:
    """Write the table."""
    entries = {}
    for key, claim in sorted(standard().items()):
        entry = asdict(claim.bound())
        del entry["key"]
        entries[key] = entry
    lines = (f"  {json.dumps(key)}: {json.dumps(entry, allow_nan=False)}" for key, entry in entries.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
