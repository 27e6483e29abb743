"""A small model with one block, and around it an example of everything that a model may hold."""

from __future__ import annotations

from functools import cache
from math import isfinite
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.options import Options
from passes.plan import Plan, make_plan
from rewriter.api.rows import claim_of
from rewriter.files.load import LoadedModel
from rewriter.proof.certificate.certify import Claimed, certify
from rewriter.proof.validate import replaced
from tests.textmodels import text_model

SHAPE = "float[batch, tokens, 4]"
BLOCK = (
    "first = MatMul(x, W1) y = Add(first, b1) s = Sigmoid(y) h = Mul(y, s) second = MatMul(h, W2) m = Add(second, b2)"
)
AROUND = f"""
  gone = Identity(z) nobody = Add(z, spare) unread = Abs(nobody)
  n = d.scale<factor = 2.0>(m) t, u = Split<axis = 2>(n) joined = Concat<axis = 2>(u, t) top = Mul(gain, joined)
  p, q = If (flag) <
    then_branch = g1 () => ({SHAPE} b, {SHAPE} c) {{ b = Sub(top, z) c = Div(top, w) }},
    else_branch = g2 () => ({SHAPE} b, {SHAPE} c) {{ b = Sub(z, top) c = Mul(w, v) }}>
  r = Loop (trips, , p) <body = g3 (int64 step, bool going, {SHAPE} one) => (bool on, {SHAPE} two) {{
    on = Identity(going) two = Sub(one, w) }}>
  shifted = Add(r, sparse) out = Sub(shifted, q) other = Sub(q, gone)
"""
FUNCTIONS = """
<opset_import: ["": 17, "d": 1], domain: "d"> scale <factor: float = 1.0> (a) => (b) {
  k = Constant<value_float: float = @factor>() e = d.inner(a) b = Mul(e, k)
}
<opset_import: ["": 17], domain: "d"> inner (a) => (b) { b = Sin(a) }
<opset_import: ["": 17], domain: "d"> uncalled (a) => (b) { b = Cos(a) }
"""
GIVEN = {"spare": np.ones(4), "w": np.asarray([1, 2, 3, 4.0]), "v": np.asarray([4, 3, 2, 1.0]), "gain": np.asarray(0.5)}


@cache
def house() -> onnx.ModelProto:
    """One block, and around it an example of everything that a model may hold."""
    model = text_model(
        BLOCK + AROUND,
        inputs=f"{SHAPE} x, {SHAPE} z, bool flag, int64 trips, float idle, float gain",
        outputs=f"{SHAPE} out, {SHAPE} other, {SHAPE} m",
        constants=GIVEN,
        domains={"d": 1},
        functions=FUNCTIONS,
    )
    values = numpy_helper.from_array(np.asarray([1.5], np.float32), "sparse")
    indices = numpy_helper.from_array(np.asarray([2]), "sparse_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    entry = model.graph.quantization_annotation.add(tensor_name="top")
    entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    for node in model.graph.node:
        node.name = f"n_{node.output[0]}"
    return model


@cache
def planned(form: str) -> Plan:
    """What becomes of the house."""
    plan = make_plan(house(), Options(form=form))
    assert len(plan.conversions) == 1
    return plan


def loaded(model: onnx.ModelProto, base: Path | None = None) -> LoadedModel:
    """A model in memory; its external data lies in `base`."""
    return LoadedModel(model, None, base, (), 0)


def refusals(plan: Plan, rewritten: onnx.ModelProto) -> list[str]:
    """What a rewritten model has that the plan does not explain."""
    claims = [claim_of(conversion) for conversion in plan.conversions]
    held = {each.output: Claimed(1e-6, each.domain if isfinite(each.domain) else None) for each in claims}
    found = certify(loaded(plan.model), loaded(rewritten), claims=held, blocks=replaced(claims))
    return [each.text for each in found.refusals]
