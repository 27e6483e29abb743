"""`python -m benchmarks.plan_scaling`: time of planning per node, for graphs of growing size.

The models are decoders of tiny width and many layers, so that the time is that of the graph and not of weights. Steps:
`view` (type inference and index), of it `types`; `find` (all blocks); `plan` (view, find and the decision about every
block); `apply` (the rewritten proto). Linear time shows as a constant cost per node.

Then models of today, whole, from a file to a file without a proof: 32 layers of 128 SwiGLU experts, as nodes of their
own or stacked in one weight, and a Llama of 1B parameters in 4 bits. Their weights are holes in a data file;
how many bytes were read is stated. Writes tables and a JSON file.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights
from passes.match.blocks import Block, Finder, Namer
from passes.options import Options
from passes.plan import apply, make_plan
from rewriter import rewrite
from rewriter.graph.types import inferred_graph
from rewriter.graph.view import GraphView, all_views

T = TypeVar("T")

STEPS = ("types", "view", "find", "plan", "apply")


@dataclass(frozen=True)
class Row:
    """One graph: its size, and the seconds of each step, median over the repeats."""

    nodes: int
    blocks: int
    seconds: dict[str, float]
    all_seconds: dict[str, list[float]]

    def microseconds(self, step: str) -> float:
        """Microseconds per node of one step."""
        return 1e6 * self.seconds[step] / self.nodes


def chain(nodes: int, activation: str) -> onnx.ModelProto:
    """A decoder of about `nodes` nodes."""
    short, long = (len(_decoder(layers, activation).graph.node) for layers in (1, 2))
    per_layer = long - short
    return _decoder(max(1, round((nodes - short + per_layer) / per_layer)), activation)


def _decoder(layers: int, activation: str) -> onnx.ModelProto:
    shape = Shape(layers, width=8, hidden=32, heads=2, vocabulary=16, positions=16, activation=activation)
    return decoder(shape, random_weights())


def measure(model: onnx.ModelProto, repeats: int) -> Row:
    """Time every step on one model."""
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    blocks = 0
    for _ in range(repeats):
        _timed(seconds["types"], inferred_graph, model)
        (view,) = _timed(seconds["view"], all_views, model)
        blocks = len(_timed(seconds["find"], _found, view))
        plan = _timed(seconds["plan"], make_plan, model, Options())
        _timed(seconds["apply"], apply, plan)
    medians = {step: float(np.median(times)) for step, times in seconds.items()}
    return Row(len(model.graph.node), blocks, medians, seconds)


def _found(view: GraphView) -> tuple[Block, ...]:
    return Finder(view, Namer(), Options()).run()[0]


def _timed(into: list[float], step: Callable[..., T], *arguments: Any) -> T:
    gc.collect()
    start = time.perf_counter()
    result = step(*arguments)
    into.append(time.perf_counter() - start)
    return result


class _Network:
    """Nodes, and weights at one data file that holds zeros."""

    def __init__(self, width: int) -> None:
        self.width, self.size = width, 0
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, kind: int, *dims: int) -> str:
        """The name of a new weight."""
        tensor = onnx.TensorProto(name=f"w{len(self.weights)}", data_type=kind, dims=dims)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = int(np.prod(dims)) * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
        for key, value in {"location": "weights.data", "offset": str(self.size), "length": str(length)}.items():
            tensor.external_data.add(key=key, value=value)
        self.size += -(-length // 4096) * 4096
        self.weights.append(tensor)
        return tensor.name

    def op(self, operator: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        """The first output of a new node."""
        names = [f"t{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(onnx.helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names[0]

    def linear(self, data: str, features: int, made: int, *, bits: int) -> str:
        """A product with float32 weights, or with weights of 4 bits in blocks of 32."""
        if bits != 4:
            return self.op("MatMul", data, self.weight(onnx.TensorProto.FLOAT, features, made))
        packed = self.weight(onnx.TensorProto.UINT8, made, features // 32, 16)
        scales = self.weight(onnx.TensorProto.FLOAT, made * features // 32)
        sizes = {"K": features, "N": made, "bits": 4, "block_size": 32}
        return self.op("MatMulNBits", data, packed, scales, domain="com.microsoft", **sizes)

    def swiglu(self, data: str, hidden: int, *, bits: int = 32) -> str:
        """A gated MLP."""
        gate, up = (self.linear(data, self.width, hidden, bits=bits) for _ in range(2))
        gated = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        return self.linear(gated, hidden, self.width, bits=bits)

    def write(self, path: Path, result: str) -> Path:
        """The model beside its data file."""
        value = onnx.helper.make_tensor_value_info
        kind = onnx.TensorProto.FLOAT
        inputs, outputs = value("x", kind, ["tokens", self.width]), value(result, kind, ["tokens", self.width])
        graph = onnx.helper.make_graph(self.nodes, "network", [inputs], [outputs], self.weights)
        opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        with path.with_name("weights.data").open("wb") as file:
            file.truncate(self.size)
        return path


def experts(folder: Path, *, stacked: bool, layers: int = 32, count: int = 128) -> Path:
    """Routed experts: each as separate nodes, or one picked from a stacked weight for every token."""
    net, hidden, data = _Network(64), 32, "x"
    for _ in range(layers):
        router = net.op("Softmax", net.linear(data, net.width, count, bits=32), axis=-1)
        if stacked:
            chosen = net.op("ArgMax", router, axis=-1, keepdims=0)
            kind, rows = onnx.TensorProto.FLOAT, net.op("Unsqueeze", data, _axis(net))
            both = net.op("MatMul", rows, net.op("Gather", net.weight(kind, count, net.width, 2 * hidden), chosen))
            gate = net.op("Split", both, outputs=2, axis=-1, num_outputs=2)
            up = gate.replace("_0", "_1")
            gated = net.op("Mul", net.op("Mul", gate, net.op("Sigmoid", gate)), up)
            made = net.op("MatMul", gated, net.op("Gather", net.weight(kind, count, hidden, net.width), chosen))
            data = net.op("Add", data, net.op("Squeeze", made, _axis(net)))
            continue
        first = net.op("Split", router, outputs=count, axis=-1, num_outputs=count)
        for number in range(count):
            share = first.replace("_0", f"_{number}")
            data = net.op("Add", data, net.op("Mul", share, net.swiglu(data, hidden)))
    return net.write(folder / "experts.onnx", data)


def _axis(net: _Network) -> str:
    return net.op("Constant", value_ints=[1])


def llama(folder: Path) -> Path:
    """The linear operators of Llama 3.2 1B (16 layers, width 2048, 8192 neurons) in 4 bits."""
    net, data = _Network(2048), "x"
    for _ in range(16):
        query, key = net.linear(data, 2048, 2048, bits=4), net.linear(data, 2048, 512, bits=4)
        value = net.linear(data, 2048, 512, bits=4)
        mixed = net.op("Concat", value, value, value, value, axis=-1)
        mixed = net.op("Mul", net.op("Softmax", net.op("Mul", query, net.op("Concat", *[key] * 4, axis=-1))), mixed)
        data = net.op("Add", data, net.linear(mixed, 2048, 2048, bits=4))
        data = net.op("Add", data, net.swiglu(data, 8192, bits=4))
    return net.write(folder / "llama.onnx", data)


MODELS: dict[str, Callable[[Path], Path]] = {
    "32 layers of 128 experts, each by itself": partial(experts, stacked=False),
    "32 layers of 128 experts, stacked": partial(experts, stacked=True),
    "Llama 1B in 4 bits": llama,
}


def rewritten(make: Callable[[Path], Path], repeats: int) -> dict[str, Any]:
    """A model from a file to a file beside it: nodes, bytes of weights, blocks, seconds of planning and in all."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder))
        before = _bytes_read()
        reports = [rewrite(path, Path(folder, f"out{n}.onnx"), validate=False) for n in range(repeats)]
        return {
            "read_bytes": (_bytes_read() - before) // repeats,
            "nodes": len(onnx.load(path, load_external_data=False).graph.node),
            "weight_bytes": path.with_name("weights.data").stat().st_size,
            "blocks": len(reports[0].converted),
            "plan": float(np.median([each.seconds["plan"] for each in reports])),
            "total": float(np.median([each.seconds["total"] for each in reports])),
        }


def _bytes_read() -> int:
    """Bytes that this process has read so far, of any file."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--nodes", type=click.IntRange(min=10), multiple=True, default=(1_000, 10_000, 100_000))
@click.option("--activation", type=click.Choice(tuple(ACTIVATIONS)), default="silu")
@click.option("--repeats", type=click.IntRange(min=1), default=3)
@click.option("--today/--no-today", default=True, help="The models of today, too.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    default=RESULTS / "plan-scaling.json",
    show_default=False,
)
def main(nodes: tuple[int, ...], activation: str, repeats: int, today: bool, json_path: Path) -> None:
    """Measure the time of planning per node."""
    rows = []
    for count in nodes:
        click.echo(f"{count} nodes", err=True)
        rows.append(measure(chain(count, activation), repeats))
    models = {}
    for name, make in MODELS.items() if today else ():
        click.echo(name, err=True)
        models[name] = rewritten(make, repeats)
    settings = {"activation": activation, "repeats": repeats}
    whole = [{"model": name, **row} for name, row in models.items()]
    write_json(json_path, "plan_scaling", settings, [*map(asdict, rows), *whole])
    header = ("nodes", "blocks", "plan s", *(f"{step} us/node" for step in STEPS))
    cells = [
        (
            str(row.nodes),
            str(row.blocks),
            f"{row.seconds['plan']:.3f}",
            *(f"{row.microseconds(step):.1f}" for step in STEPS),
        )
        for row in rows
    ]
    print_table(f"Planning, median of {repeats}", header, cells)
    header = ("model", "nodes", "blocks", "GB of weights", "MB read", "plan s", "in all s")
    cells = [
        (
            *(name, str(row["nodes"]), str(row["blocks"]), f"{row['weight_bytes'] / 1e9:.2f}"),
            *(f"{row['read_bytes'] / 1e6:.1f}", f"{row['plan']:.2f}", f"{row['total']:.2f}"),
        )
        for name, row in models.items()
    ]
    print_table(f"From a file to a file, without a proof, median of {repeats}", header, cells)


if __name__ == "__main__":
    main()
