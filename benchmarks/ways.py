"""`python -m benchmarks.ways`: what each way of writing the heads costs in form `local`.

The activation stands between linear operators of GPT-2's widths, as in `rewrite --tune`, which makes the same
measurement on the user's model and machine. The default way must be the fastest; a test compares it with the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, print_table, write_json
from passes.options import Options
from passes.plan import make_plan
from passes.tuning import ORIGINAL, samples
from rewriter.api.timing.tuning import TOKENS, timed

ACTIVATIONS = {
    "gelu": "h = Gelu(y)",
    "gelu_tanh": 'h = Gelu<approximate = "tanh">(y)',
    "silu": "s = Sigmoid(y) h = Mul(s, y)",
    "relu": "h = Relu(y)",
    "mish": "h = Mish(y)",
    "elu": "h = Elu(y)",
    "tanh": "h = Tanh(y)",
    "hard_swish": "h = HardSwish(y)",
    "relu_squared": "r = Relu(y) h = Mul(r, r)",
    "swiglu": "s = Sigmoid(y) g = Mul(s, y) h = Mul(g, u)",
    "geglu": "g = Gelu(y) h = Mul(g, u)",
}
TYPES = {"float": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}
WIDTH, NEURONS = 768, 3072


@dataclass(frozen=True)
class Row:
    """One activation in one type, on one provider.

    Attributes:
        activation: its name.
        elem_type: the type of the block.
        provider: the execution provider.
        tokens: the lengths of the sequences.
        milliseconds: way, or `original`, to the median time of the block at each length; the default way comes first
            after the original.
    """

    activation: str
    elem_type: str
    provider: str
    tokens: tuple[int, ...]
    milliseconds: dict[str, list[float]]


def block(activation: str, elem: str) -> onnx.ModelProto:
    """A block with weights of zeros: samples have random ones of their own."""
    gated = "u)" in ACTIVATIONS[activation]
    value = "u = MatMul(x, V1)" if gated else ""
    weights = f"{elem}[{WIDTH}, {NEURONS}] W1, {elem}[{WIDTH}, {NEURONS}] V1, {elem}[{NEURONS}, {WIDTH}] W2"
    text = (
        f'<ir_version: 9, opset_import: ["" : 20]> block ({elem}[b, t, {WIDTH}] x, {weights}) => '
        f"({elem}[b, t, {WIDTH}] out) {{ y = MatMul(x, W1) {value} {ACTIVATIONS[activation]} out = MatMul(h, W2) }}"
    )
    model = onnx.parser.parse_model(text)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(TYPES[elem])
    kept = [each for each in model.graph.input if each.name == "x" or (each.name != "V1" or gated)]
    for value_info in kept[1:]:
        sizes = [dim.dim_value for dim in value_info.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(sizes, dtype), value_info.name))
    del model.graph.input[1:]
    return model


def measured(activation: str, elem: str, provider: str) -> Iterator[Row]:
    """The row of an activation; none where it has one way only."""
    plan = make_plan(block(activation, elem), Options())
    for sample in samples(plan, Options(), lambda tensor: tensor):
        times = timed(sample, provider)
        usual = [ORIGINAL, *(name for name in times if name != ORIGINAL)]
        yield Row(activation, elem, provider, TOKENS, {name: [1e3 * each for each in times[name]] for name in usual})


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--provider", default="cpu", help="Execution provider.")
@click.option("--activation", "activations", multiple=True, type=click.Choice(list(ACTIVATIONS)))
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), default=None)
def main(provider: str, activations: tuple[str, ...], path: Path | None) -> None:
    """Time each way of writing the heads."""
    rows = [row for name in activations or ACTIVATIONS for elem in TYPES for row in measured(name, elem, provider)]
    path = path or RESULTS / f"ways-{provider}.json"
    write_json(path, "ways", {"width": WIDTH, "neurons": NEURONS}, [asdict(row) for row in rows])
    cells = [
        (row.activation, row.elem_type, way, *(f"{each:.2f}" for each in times))
        for row in rows
        for way, times in row.milliseconds.items()
    ]
    columns = ("activation", "type", "way", *(f"{tokens} tokens, ms" for tokens in TOKENS))
    print_table(f"Ways of writing the heads, {provider}", columns, cells)


if __name__ == "__main__":
    main()
