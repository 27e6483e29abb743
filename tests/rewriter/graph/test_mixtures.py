"""Mixtures of experts in one operator: the definition against onnxruntime's kernel and numpy, and taken apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, Report, certify, rewrite
from rewriter.graph import mixtures
from rewriter.graph.mixtures import with_plain_experts
from rewriter.ort.sessions import open_session
from tests.textmodels import Array, text_model

EXPERTS, WIDTH, NEURONS = 4, 64, 32
GPT_OSS = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 1.5}


def quantised(
    rng: Any, rows: int, columns: int, bits: int, block: int, zeros: bool
) -> tuple[list[Array | None], Array]:
    """Numbers, scales and zero points as QMoE stores them, and the matrices that they stand for."""
    blocks = columns // block if block else 1
    numbers, middle = (rng.integers(0, 2**bits, (EXPERTS, rows, size)).astype(np.uint8) for size in (columns, blocks))
    middle = middle if zeros else np.full_like(middle, 2 ** (bits - 1))
    scales = rng.uniform(0.5, 1.5, middle.shape).astype(np.float32) / 2**bits
    wide = [np.repeat(each.astype(float), columns // blocks, -1) for each in (middle, scales)]

    def packed(values: Array) -> Array:
        if bits == 8:
            return values
        even = np.concatenate([values, np.zeros_like(values[..., : values.shape[-1] % 2])], -1)
        return np.asarray(even[..., ::2] | even[..., 1::2] << 4, np.uint8)

    flat = [each if block else each[..., 0] for each in (scales, middle)]
    return [packed(numbers), flat[0], packed(flat[1]) if zeros else None], (numbers - wide[0]) * wide[1]


def mixture(
    activation: str = "silu", *, bias: bool = True, bits: int = 0, block: int = 0, zeros: bool = False, **chosen: Any
) -> tuple[onnx.ModelProto, Callable[[Array], Array]]:
    """A model of a router and a mixture, and what it computes, in numpy."""
    rng = np.random.default_rng(5)
    rows = NEURONS * (2 if activation == "swiglu" else 1)
    first, second = rng.normal(size=(EXPERTS, rows, WIDTH)) / 8, rng.normal(size=(EXPERTS, WIDTH, NEURONS)) / 5
    given: dict[str, Any] = {
        "w1": first,
        "w2": second,
        "R": rng.normal(size=(WIDTH, EXPERTS)),
        "flat": np.array([-1, WIDTH]),
    }
    if bits:
        (given["w1"], given["s1"], given["z1"]), first = quantised(rng, rows, WIDTH, bits, block, zeros)
        (given["w2"], given["s2"], given["z2"]), second = quantised(rng, WIDTH, NEURONS, bits, block, zeros)
        chosen = {"expert_weight_bits": bits, **({"block_size": block} if block else {}), **chosen}
    b1, b2 = rng.normal(size=(EXPERTS, rows)), rng.normal(size=(EXPERTS, WIDTH))
    given |= {"b1": b1, "b2": b2} if bias else {}
    chosen = {"k": 2, "normalize_routing_weights": 1, "activation_type": activation, **chosen}
    order = ("w1", "s1", "b1", "w2", "s2", "b2", "", "", "", "z1", "z2") if bits else ("w1", "b1", "w2", "b2")
    node = onnx.helper.make_node(
        "QMoE" if bits else "MoE", ["x", "r", *(name if given.get(name) is not None else "" for name in order)],
        ["m"], "/layers.0/moe/MoE", domain="com.microsoft", **chosen,
    )  # fmt: skip
    x, out = (f"float[batch, tokens, {WIDTH}] {name}" for name in ("x", "out"))
    body = "f = Reshape(x, flat) r = MatMul(f, R) out = Add(x, m)"
    model = text_model(body, domains={"com.microsoft": 1}, inputs=x, outputs=out)
    model.graph.node.insert(2, node)
    for name, value in given.items():
        if value is not None:
            kind = np.float32 if value.dtype == float else value.dtype
            model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(kind), name))

    def expert(e: int, x: Array) -> Array:
        y = first[e] @ x + b1[e] * bias
        gate, value = y[::2], y[1::2]
        if activation == "swiglu":
            limit = chosen.get("swiglu_limit", math.inf)
            gate, value = np.minimum(gate, limit), np.clip(value, -limit, limit) + chosen.get("activation_beta", 0)
            h = gate / (1 + np.exp(-chosen.get("activation_alpha", 1.0) * gate)) * value
        elif activation == "gelu":
            h = y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        else:
            h = np.maximum(y, 0) if activation == "relu" else y / (1 + np.exp(-y))
        return np.asarray(second[e] @ h + b2[e] * bias)

    def computed(x: Array) -> Array:
        out = x.astype(float)
        for place in np.ndindex(x.shape[:-1]):
            logits = out[place] @ given["R"]
            shares = np.exp(logits) / np.exp(logits).sum()
            best = np.argsort(-logits)[: chosen["k"]]
            total = shares[best].sum() if chosen["normalize_routing_weights"] else 1.0
            out[place] += sum(shares[e] / total * expert(e, x[place]) for e in best)
        return out

    return model, computed


MIXTURES: tuple[dict[str, Any], ...] = (
    *({"activation": name, "k": k, "normalize_routing_weights": n, "bias": bool(n)}
      for name in ("relu", "gelu", "silu") for k, n in ((1, 0), (2, 1))),
    {"activation": "silu", "k": 2, "normalize_routing_weights": 0},
    {"activation": "swiglu", "swiglu_fusion": 1},
    {"activation": "swiglu", **GPT_OSS},
    {"bits": 4}, {"bits": 4, "zeros": True, "bias": False}, {"bits": 4, "block": 32, "zeros": True},
    {"bits": 4, "block": 16, "activation": "swiglu", **GPT_OSS}, {"bits": 8, "zeros": True}, {"bits": 8, "k": 1},
)  # fmt: skip


def named(chosen: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in chosen.items() if key not in GPT_OSS or key == "swiglu_limit")


@pytest.mark.parametrize("chosen", MIXTURES, ids=named)
def test_the_definition_is_what_the_kernel_and_numpy_compute(chosen: dict[str, Any]) -> None:
    model, computed = mixture(**chosen)
    plain = with_plain_experts(model)
    assert not {node.op_type for node in plain.graph.node} & {"MoE", "QMoE"}
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
    ran = [
        open_session(each, optimise=level).run({"x": x})["out"] for each in (model, plain) for level in (False, True)
    ]
    wanted = computed(x)
    for each in ran:
        assert np.linalg.norm(each - wanted) < 1e-6 * np.linalg.norm(wanted)


def converted(model: onnx.ModelProto) -> Report:
    return rewrite(model, lower_experts=True, providers="cpu")


@pytest.mark.parametrize("chosen", [MIXTURES[0], MIXTURES[6], *MIXTURES[7:12], MIXTURES[13]], ids=named)
def test_experts_are_blocks_and_proved(chosen: dict[str, Any]) -> None:
    model, computed = mixture(**chosen)
    report = converted(model)
    assert report.exit_status is ExitStatus.CONVERTED, (report.left, report.problems)
    assert report.rewritten is not None
    assert report.validation is not None
    assert report.validation.certified
    assert report.validation.error_ratio < 4
    shown = report.converted[-1].first
    assert shown == f"MatMul {WIDTH}x{NEURONS * (1 + (chosen.get('activation') == 'swiglu'))} of {EXPERTS} experts"
    assert {node.op_type for node in report.rewritten.graph.node}.isdisjoint({"MoE", "QMoE"})
    x = np.random.default_rng(0).normal(size=(1, 7, WIDTH)).astype(np.float32)
    wanted = computed(x)
    assert np.linalg.norm(open_session(report.rewritten).run({"x": x})["out"] - wanted) < 1e-6 * np.linalg.norm(wanted)


def changed(name: str, change: Callable[[Array], Array]) -> Callable[[onnx.ModelProto], None]:
    def spoil(model: onnx.ModelProto) -> None:
        (tensor,) = (each for each in model.graph.initializer if each.name == name)
        tensor.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(tensor)), name))

    return spoil


def one_expert(value: Array) -> Array:
    return np.where(np.arange(len(value))[:, None, None] == 2, value * np.float32(1.001), value)


def another_k(model: onnx.ModelProto) -> None:
    (top,) = (node for node in model.graph.node if node.op_type == "TopK")
    (count,) = (node for node in model.graph.node if node.output[0] == top.input[1])
    count.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([3])))


def swapped(model: onnx.ModelProto) -> None:
    gate, value = (node for node in model.graph.node if node.op_type == "Slice")
    gate.output[0], value.output[0] = value.output[0], gate.output[0]


def no_bias(model: onnx.ModelProto) -> None:
    (bias,) = (node for node in model.graph.node if node.op_type == "Cast" and node.input[0] == "b2")
    (wide,) = (node for node in model.graph.node if bias.output[0] in node.input)
    (total,) = (node for node in model.graph.node if wide.output[0] in node.input)
    total.op_type, total.input[:] = "Identity", [name for name in total.input if name != wide.output[0]]


SPOILED = {
    "permuted": changed("w1", lambda value: value[[1, 0, 2, 3]]),
    "permuted-scales": changed("s2", lambda value: value[[1, 0, 2, 3]]),
    "weight": changed("w2", one_expert),
    "k": another_k,
    "swapped": swapped,
    "bias": no_bias,
}


@pytest.mark.parametrize("name", SPOILED)
def test_planted_errors_are_refused(name: str) -> None:
    gated: dict[str, Any] = {"activation": "swiglu", "swiglu_fusion": 1} if name == "swapped" else {}
    model, _ = mixture(bits=8 if "scales" in name else 0, **gated)
    broken = converted(model).rewritten
    assert broken is not None
    assert certify(model, broken).certificate.certified
    SPOILED[name](broken)
    assert not certify(model, broken).certificate.certified


CONSTANT = mixtures._Mixture.constant


def three(self: Any, values: Any, *kind: int) -> str:
    return CONSTANT(self, [3] if values == [2] else values, *kind)


@pytest.mark.parametrize("wrong", [{"activation": b"relu"}, {"constant": three}], ids=["activation", "k"])
def test_an_error_in_the_definition_is_found_by_the_run(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and certificate share the definition; onnxruntime's kernel does not."""
    for name, value in wrong.items():
        monkeypatch.setattr(mixtures._Mixture, name, value)
    report = converted(mixture()[0])
    assert report.validation is not None
    assert report.validation.certified
    assert report.exit_status is ExitStatus.VALIDATION_FAILED


KERNEL = "onnxruntime's CPU kernel"
PAIRS = f"{KERNEL} has gates in pairs of rows only (swiglu_fusion 1)"
EIGHT = f"{KERNEL} rounds its activations to 8 bits (blocks of 8-bit weights, or accuracy_level 4)"


@pytest.mark.parametrize(("chosen", "reason"), [
    ({"activation": "identity"}, "its experts have no activation"),
    ({"activation": "relu2"}, f"{KERNEL} has no activation 'relu2'"),
    ({"use_sparse_mixer": 1}, "it routes with use_sparse_mixer"),
    ({"activation": "swiglu"}, PAIRS),
    ({"activation": "swiglu", "swiglu_fusion": 2}, PAIRS),
    ({"activation": "swiglu", "swiglu_fusion": 1, "swiglu_limit_after_activation": 1},
     f"{KERNEL} does not clip behind the activation"),
    ({"bits": 8, "block": 16}, EIGHT),
    ({"bits": 4, "block": 32, "accuracy_level": 4}, EIGHT),
    ({"bits": 4, "normalize_routing_weights": 0},
     f"{KERNEL} normalises its routing weights, though normalize_routing_weights is not 1"),
    ({"bits": 4, "quant_type": "fp8"}, f"{KERNEL} has integers as weights only"),
    ({"bits": 4, "fc2_expert_weight_bits": 8}, "its weights are not of 4 bits or 8 bits throughout"),
    ({"bits": 4, "block": 32, "weights_prepacked": 1}, "its weights are packed for one kernel"),
    ({"bits": 4, "expert_weight_bits": 8}, "its weights are not initializers of the shapes that it asks for"),
    ({"bits": 4, "block_size": 48}, "its weights are not initializers of the shapes that it asks for"),
], ids=lambda each: named(each) if isinstance(each, dict) else "")  # fmt: skip
@pytest.mark.parametrize("wanted", [False, True])
def test_what_is_not_written_out_has_a_reason(chosen: dict[str, Any], reason: str, wanted: bool) -> None:
    (left,) = rewrite(mixture(**chosen)[0], lower_experts=wanted, dry_run=True).left
    name = "QMoE" if "bits" in chosen else "MoE"
    assert (
        left.reason == f"com.microsoft::{name} '/layers.0/moe/MoE': its experts are inside one operator, and {reason}"
    )


def test_without_the_option_the_reason_names_it_in_folders_too(tmp_path: Path) -> None:
    model, _ = mixture()
    (tmp_path / "in").mkdir()
    onnx.save(model, tmp_path / "in" / "model.onnx")
    options: dict[str, Any] = {"providers": "cpu", "validate": False}
    reports: list[Any] = [
        rewrite(tmp_path / "in", tmp_path / "out", lower_experts=each, **options) for each in (False, True)
    ]
    left, done = (each.models["model.onnx"] for each in reports)
    reason = "its experts are inside one operator; --lower-experts takes them apart"
    assert [each.reason for each in left.left] == [f"com.microsoft::MoE '/layers.0/moe/MoE': {reason}"]
    assert [each.first for each in done.converted] == ["MatMul 64x32 of 4 experts"]


def test_rounding_of_the_original_is_measured_at_its_mixtures() -> None:
    """Else twelve layers would be off by more than one operator may be."""
    layer = """n{0} = SimplifiedLayerNormalization({1}, ones) f{0} = Reshape(n{0}, flat) r{0} = MatMul(f{0}, R{0})
        m{0} = com.microsoft.MoE<k = 2, activation_type = "swiglu", swiglu_fusion = 1>(n{0}, r{0}, w{0}, , v{0})
        {2} = Add({1}, m{0}) """
    names, rng = ["x", *(f"x{place}" for place in range(11)), "out"], np.random.default_rng(0)
    body = "".join(layer.format(place, *names[place : place + 2]) for place in range(12))
    sizes = {"R": (WIDTH, 8), "w": (8, 2 * NEURONS, WIDTH), "v": (8, WIDTH, NEURONS)}
    given: dict[str, Any] = {
        f"{name}{place}": rng.normal(size=size) for name, size in sizes.items() for place in range(12)
    }
    given |= {"ones": np.ones(WIDTH), "flat": onnx.numpy_helper.from_array(np.array([-1, WIDTH]), "flat")}
    x, out = (f"float[batch, tokens, {WIDTH}] {name}" for name in ("x", "out"))
    report = converted(text_model(body, constants=given, domains={"com.microsoft": 1}, inputs=x, outputs=out))
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert len(report.converted) == 12
