"""Mixtures of experts in one operator: the definition against onnxruntime's kernel and numpy, and taken apart."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, certify, rewrite
from rewriter.graph import fused
from rewriter.ort import open_session
from tests.cases import proved
from tests.changes import Change, change_values, maker, nodes_of, weight
from tests.textmodels import Array, text_model

EXPERTS, WIDTH, NEURONS = 4, 64, 32
SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1}
GPT_OSS = {**SWIGLU, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 1.5}
FORM: dict[str, Any] = {
    "domains": {"com.microsoft": 1},
    "inputs": f"float[batch, tokens, {WIDTH}] x",
    "outputs": f"float[batch, tokens, {WIDTH}] out",
}


def quantised(rng: Any, size: tuple[int, ...], bits: int, block: int, zeros: bool) -> tuple[list[Array | None], Array]:
    """Numbers, scales and zero points as QMoE stores them, and the matrices that they represent."""
    blocks = size[-1] // block if block else 1
    numbers, middle = (rng.integers(0, 2**bits, each).astype(np.uint8) for each in (size, (*size[:-1], blocks)))
    middle = middle if zeros else np.full_like(middle, 2 ** (bits - 1))
    scales = rng.uniform(0.5, 1.5, middle.shape).astype(np.float32) / 2**bits
    wide = [np.repeat(each.astype(float), size[-1] // blocks, -1) for each in (middle, scales)]

    def packed(values: Array) -> Array:
        even = np.concatenate([values, np.zeros_like(values[..., : values.shape[-1] % 2])], -1)
        return values if bits == 8 else np.asarray(even[..., ::2] | even[..., 1::2] << 4, np.uint8)

    flat = [each if block else each[..., 0] for each in (scales, middle)]
    return [packed(numbers), flat[0], packed(flat[1]) if zeros else None], (numbers - wide[0]) * wide[1]


def mixture(
    *, bias: bool = True, bits: int = 0, block: int = 0, zeros: bool = False, **given: Any
) -> tuple[onnx.ModelProto, Callable[[Array], Array]]:
    """A model of a router and a mixture, and what it computes, in numpy."""
    rng = np.random.default_rng(5)
    chosen = {"k": 2, "normalize_routing_weights": 1, "activation_type": "silu", **given}
    rows = NEURONS * (2 if chosen["activation_type"] == "swiglu" else 1)
    sizes = (EXPERTS, rows, WIDTH), (EXPERTS, WIDTH, NEURONS)
    w1, w2, b1, b2 = (rng.normal(size=each) / each[-1] ** 0.5 for each in (*sizes, sizes[0][:2], sizes[1][:2]))
    held: dict[str, Any] = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "R": rng.normal(size=(WIDTH, EXPERTS))}
    order: tuple[str, ...] = ("w1", "b1", "w2", "b2")
    if bits:
        (held["w1"], held["s1"], held["z1"]), w1 = quantised(rng, sizes[0], bits, block, zeros)
        (held["w2"], held["s2"], held["z2"]), w2 = quantised(rng, sizes[1], bits, block, zeros)
        chosen = {"expert_weight_bits": bits, **({"block_size": block} if block else {}), **chosen}
        order = ("w1", "s1", "b1", "w2", "s2", "b2", "", "", "", "z1", "z2")
    names = [name if (bias or "b" not in name) and held.get(name) is not None else "" for name in order]
    model = text_model("f = Reshape(x, flat) r = MatMul(f, R) out = Add(x, m)", **FORM)
    operator, name = "QMoE" if bits else "MoE", "/layers.0/moe/MoE"
    node = onnx.helper.make_node(operator, ["x", "r", *names], ["m"], name, domain="com.microsoft", **chosen)
    model.graph.node.insert(2, node)
    for name, value in {**held, "flat": np.array([-1, WIDTH])}.items():
        if name in (*names, "R", "flat"):
            array = value.astype(np.float32 if value.dtype == float else value.dtype)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

    def expert(e: int, x: Array) -> Array:
        y = w1[e] @ x + b1[e] * bias
        if rows > NEURONS:
            limit = chosen.get("swiglu_limit", math.inf)
            gate, value = np.minimum(y[::2], limit), np.clip(y[1::2], -limit, limit) + chosen.get("activation_beta", 0)
            h = gate / (1 + np.exp(-chosen.get("activation_alpha", 1.0) * gate)) * value
        elif chosen["activation_type"] == "gelu":
            h = y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        else:
            h = np.maximum(y, 0) if chosen["activation_type"] == "relu" else y / (1 + np.exp(-y))
        return np.asarray(w2[e] @ h + b2[e] * bias)

    def computed(x: Array) -> Array:
        out = x.astype(float)
        for place in np.ndindex(x.shape[:-1]):
            shares = np.exp(out[place] @ held["R"])
            best = np.argsort(-shares)[: chosen["k"]]
            total = (shares[best] if chosen["normalize_routing_weights"] else shares).sum()
            out[place] += sum(shares[e] / total * expert(e, x[place]) for e in best)
        return out

    return model, computed


def named(chosen: Any) -> str:
    return "-".join(f"{key}={each}" for key, each in chosen.items()) if isinstance(chosen, dict) else ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("chosen", [
    *({"activation_type": name, "k": k, "normalize_routing_weights": n, "bias": bool(n)}
      for name in ("relu", "gelu", "silu") for k, n in ((1, 0), (2, 1))),
    {"normalize_routing_weights": 0}, SWIGLU, GPT_OSS,
    {"bits": 4}, {"bits": 4, "zeros": True, "bias": False}, {"bits": 4, "block": 32, "zeros": True},
    {"bits": 4, "block": 16, **GPT_OSS}, {"bits": 8, "zeros": True}, {"bits": 8, "k": 1},
], ids=named)  # fmt: skip
def test_experts_are_blocks_and_proved_and_compute_what_numpy_does(chosen: dict[str, Any]) -> None:
    model, computed = mixture(**chosen)
    report = proved(model, lower_experts=True, providers="cpu")
    assert report.validation.certified
    assert report.validation.error_ratio < 4
    neurons = NEURONS * (1 + ("swiglu_fusion" in chosen))
    assert report.converted[-1].first == f"MatMul {WIDTH}x{neurons} of {EXPERTS} experts"
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
    wanted = computed(x)
    for each in (model, fused.with_plain_experts(model), report.rewritten):
        assert each is model or {node.op_type for node in each.graph.node}.isdisjoint({"MoE", "QMoE"})
        assert np.linalg.norm(open_session(each).run({"x": x})["out"] - wanted) < 1e-6 * np.linalg.norm(wanted)


PERMUTED = "v = v[[1, 0, 2, 3]]"


def another_k(model: onnx.ModelProto) -> None:
    (top,) = nodes_of(model, "TopK")
    maker(model, top.input[1]).attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([3])))


def swapped(model: onnx.ModelProto) -> None:
    gate, value = nodes_of(model, "Slice")
    gate.output[0], value.output[0] = value.output[0], gate.output[0]


def no_bias(model: onnx.ModelProto) -> None:
    total = next(node for node in reversed(model.graph.node) if node.op_type == "Add" and node.output[0] != "out")
    total.op_type, total.input[:] = "Identity", total.input[:1]


@pytest.mark.sample(0)
@pytest.mark.parametrize(("chosen", "spoil"), [
    ({}, lambda model: change_values(weight(model, "w1"), PERMUTED)),
    ({"bits": 8}, lambda model: change_values(weight(model, "s2"), PERMUTED)),
    ({}, lambda model: change_values(weight(model, "w2"), "v[2] *= 1.001")),
    ({}, another_k), (SWIGLU, swapped), ({}, no_bias),
], ids=["permuted", "scales", "weight", "k", "swapped", "bias"])  # fmt: skip
def test_planted_errors_are_refused(chosen: dict[str, Any], spoil: Change) -> None:
    model, _ = mixture(**chosen)
    broken = rewrite(model, lower_experts=True, validate=False).rewritten
    assert certify(model, broken).certificate.certified
    spoil(broken)
    assert not certify(model, broken).certificate.certified


CONSTANT = fused._Mixture.constant


def three(self: Any, values: Any, *kind: int) -> str:
    return CONSTANT(self, [3] if values == [2] else values, *kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "wrong"), [("activation", b"relu"), ("constant", three)])
def test_an_error_in_the_definition_is_found_by_the_run(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and certificate share the definition; onnxruntime's kernel does not."""
    monkeypatch.setattr(fused._Mixture, name, wrong)
    report = rewrite(mixture()[0], lower_experts=True, providers="cpu")
    assert (report.validation.certified, report.exit_status) == (True, ExitStatus.VALIDATION_FAILED)


KERNEL = "onnxruntime's CPU kernel"
SHAPES = "its weights are not initializers of the shapes that it asks for"
PAIRS = f"{KERNEL} has gates in pairs of rows only (swiglu_fusion 1)"
EIGHT = f"{KERNEL} rounds its activations to 8 bits (blocks of 8-bit weights, or accuracy_level 4)"


@pytest.mark.parametrize(("chosen", "reason"), [
    ({}, ""),
    ({"activation_type": "identity"}, "its experts have no activation"),
    ({"activation_type": "relu2"}, f"{KERNEL} has no activation 'relu2'"),
    ({"use_sparse_mixer": 1}, "it routes with use_sparse_mixer"),
    ({"activation_type": "swiglu"}, PAIRS),
    ({**SWIGLU, "swiglu_fusion": 2}, PAIRS),
    ({**SWIGLU, "swiglu_limit_after_activation": 1}, f"{KERNEL} does not clip behind the activation"),
    ({"bits": 8, "block": 16}, EIGHT),
    ({"bits": 4, "block": 32, "accuracy_level": 4}, EIGHT),
    ({"bits": 4, "normalize_routing_weights": 0},
     f"{KERNEL} normalises its routing weights, though normalize_routing_weights is not 1"),
    ({"bits": 4, "quant_type": "fp8"}, f"{KERNEL} has integers as weights only"),
    ({"bits": 4, "fc2_expert_weight_bits": 8}, "its weights are not of 4 bits or 8 bits throughout"),
    ({"bits": 4, "block": 32, "weights_prepacked": 1}, "its weights are packed for one kernel"),
    ({"bits": 4, "expert_weight_bits": 8}, SHAPES),
    ({"bits": 4, "block_size": 48}, SHAPES),
], ids=named)  # fmt: skip
def test_what_is_left_has_its_reason_in_folders_too(chosen: dict[str, Any], reason: str, tmp_path: Path) -> None:
    onnx.save(mixture(**chosen)[0], tmp_path / "model.onnx")
    what = f"com.microsoft::{'QMoE' if 'bits' in chosen else 'MoE'} '/layers.0/moe/MoE'"
    why = f", and {reason}" if reason else "; --lower-experts takes them apart"
    for asked in (False, True):
        folder: Any = rewrite(tmp_path, tmp_path.with_name("out"), dry_run=True, lower_experts=asked)
        report = folder.models["model.onnx"]
        left = [f"{what}: its experts are inside one operator{why}"] * (not asked or bool(reason))
        assert ([each.reason for each in report.left], len(report.converted)) == (left, 1 - len(left))


@pytest.mark.slow
def test_rounding_of_the_original_is_measured_at_its_mixtures() -> None:
    """Else twelve layers would be off by more than one operator may be."""
    layer = """n{0} = SimplifiedLayerNormalization({1}, ones) f{0} = Reshape(n{0}, flat) r{0} = MatMul(f{0}, R{0})
        m{0} = com.microsoft.MoE<k = 2, activation_type = "swiglu", swiglu_fusion = 1>(n{0}, r{0}, w{0}, , v{0})
        {2} = Add({1}, m{0}) """
    names, rng = ["x", *(f"x{place}" for place in range(11)), "out"], np.random.default_rng(0)
    body = "".join(layer.format(place, *names[place : place + 2]) for place in range(12))
    sizes = {"R": (WIDTH, 8), "w": (8, 2 * NEURONS, WIDTH), "v": (8, WIDTH, NEURONS)}
    held: dict[str, Any] = {f"{key}{place}": rng.normal(size=sizes[key]) for key in sizes for place in range(12)}
    held |= {"ones": np.ones(WIDTH), "flat": onnx.numpy_helper.from_array(np.array([-1, WIDTH]), "flat")}
    report = rewrite(text_model(body, constants=held, **FORM), lower_experts=True, providers="cpu")
    assert (report.exit_status, len(report.converted)) == (ExitStatus.CONVERTED, 12), report.problems
