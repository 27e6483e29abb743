"""The table of variants: model files as other tools change them.

A variant needs only the packages that it names.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.tools import optimisers, precision, scopes, storage
from models.tools.common import Hints, Refused, quiet

__all__ = ["VARIANTS", "Hints", "Refused", "Variant", "get_variant", "make_variant"]

Make = Callable[[Path, Path, Hints], None]


@dataclass(frozen=True)
class Variant:
    """A change that another tool makes to a file.

    Attributes:
        name: its name in `python -m models coverage`.
        group: the table of docs/tables/coverage.txt that lists it.
        make: writes the variant of one path to another path.
        requires: packages beyond onnx and onnxruntime.
        copies: how often each block occurs in the result.
        labels: activation labels that the tool changes, old to new.
        exact: whether the outputs stay the same up to rounding.
    """

    name: str
    group: str
    make: Make
    requires: tuple[str, ...] = ()
    copies: int = 1
    labels: tuple[tuple[str, str], ...] = ()
    exact: bool = True


NEWEST_OPSET = 26
"""The newest opset of onnx 1.21, the oldest supported onnx; onnxruntime may not run it yet."""

_COMMON = ("onnxconverter_common",)

_PRODUCTS = ("gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared", "silu_clipped")
"""Activations whose last step is a product: with rounding inside they are converted piece by piece."""

VARIANTS: tuple[Variant, ...] = (
    Variant("ort-basic", "onnxruntime", optimisers.runtime_level("basic")),
    Variant("ort-extended", "onnxruntime", optimisers.runtime_level("extended")),
    Variant("ort-all", "onnxruntime", optimisers.runtime_level("all")),
    Variant("ort-transformers", "onnxruntime", optimisers.transformers_optimizer()),
    Variant("ort-transformers-only", "onnxruntime", optimisers.transformers_optimizer(level=0)),
    Variant(
        "ort-transformers-fastgelu",
        "onnxruntime",
        optimisers.transformers_optimizer(approximate=True),
        labels=(("gelu", "gelu_tanh"),),
        exact=False,
    ),
    Variant("ort-transformers-fp16", "onnxruntime", optimisers.transformers_optimizer(half=True), exact=False),
    Variant("onnxslim", "simplifiers", optimisers.slim, ("onnxslim",)),
    Variant("onnxsim", "simplifiers", optimisers.simplify, ("onnxsim",)),
    Variant("fp16-keep-io", "precision", precision.float16(keep_io=True), _COMMON, exact=False),
    Variant("fp16-all", "precision", precision.float16(keep_io=False), _COMMON, exact=False),
    Variant("fp16-ort", "precision", precision.runtime_float16(), exact=False),
    Variant("mixed", "precision", precision.runtime_float16(block=precision.ACTIVATIONS), exact=False),
    Variant("mixed-products", "precision", precision.runtime_float16(block=precision.PRODUCTS), exact=False),
    Variant("int8-dynamic", "quantised", precision.dynamic_int8(per_channel=False), exact=False),
    Variant("int8-dynamic-channel", "quantised", precision.dynamic_int8(per_channel=True), exact=False),
    Variant("int4-nbits", "quantised", precision.four_bits("QOperator"), exact=False),
    Variant("int4-qdq", "quantised", precision.four_bits("QDQ"), exact=False),
    Variant("int8-qdq", "quantised", precision.static_qdq("QDQ"), exact=False),
    Variant("int8-qoperator", "quantised", precision.static_qdq("QOperator"), exact=False),
    *(
        Variant(
            f"int8-default-{kind.lower()}",
            "quantised",
            precision.static_qdq(kind, linear_only=False),
            labels=(*((label, "linear") for label in _PRODUCTS), ("relu_squared", "square")),
            exact=False,
        )
        for kind in ("QDQ", "QOperator")
    ),
    Variant("int8-weights", "quantised", precision.weight_only, exact=False),
    *(
        Variant(f"opset-{version}", "opsets", storage.converted_opset(version))
        for version in (7, 9, 11, 13, 15, 18, 20, 21, 22, 23, 24, 25, NEWEST_OPSET)
    ),
    Variant("external-data", "storage", storage.external_data(threshold=1024)),
    Variant("external-all", "storage", storage.external_data(threshold=0)),
    Variant("inputs", "storage", storage.initializers_as_inputs),
    Variant("constants", "storage", storage.constant_nodes),
    Variant("transposes", "storage", storage.live_transposes),
    Variant("no-names", "storage", storage.no_names),
    Variant("if-captured", "scopes", scopes.if_bodies(weights_outside=True), copies=2),
    Variant("if-own", "scopes", scopes.if_bodies(weights_outside=False), copies=2),
    Variant("loop", "scopes", scopes.loop_body),
    Variant("function-shared", "scopes", scopes.functions(shared=True)),
    Variant("function-own", "scopes", scopes.functions(shared=False)),
)


def get_variant(name: str) -> Variant:
    """The variant with this name.

    Raises:
        KeyError: no variant has this name.
    """
    return {variant.name: variant for variant in VARIANTS}[name]


def make_variant(variant: Variant, source: Path, target: Path, hints: Hints | None = None) -> Path:
    """Write the variant of `source` to `target`.

    Raises:
        Refused: a package is missing, or the tool cannot handle the model.
    """
    missing = [package for package in variant.requires if importlib.util.find_spec(package) is None]
    if missing:
        raise Refused(f"needs {' and '.join(missing)}")
    with quiet():
        try:
            variant.make(source, target, hints or Hints())
        except Refused:
            raise
        except Exception as error:  # any exception of a foreign tool counts as its refusal
            lines = str(error).strip().splitlines() or [repr(error)]
            raise Refused(f"{type(error).__name__}: {lines[0].replace(str(source.parent), '')[:160]}") from error
    return target
