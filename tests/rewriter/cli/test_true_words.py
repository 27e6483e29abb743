"""What every command says where nothing is refuted, where a domain holds, and that bounds are proved afresh."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import rewrite, validate
from rewriter.cli import run
from rewriter.proof.certificate import bounds
from tests import changes
from tests.cases import plant
from tests.conftest import Ran
from tests.textmodels import ERF_GELU, SILU, mlp, text_model, values

pytestmark = pytest.mark.usefixtures("folder")


def folded(epsilon: float = 1e-5) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A bias and a constant, added in the graph; and their sum folded in float32, which is rounded."""
    body = (
        f"first = MatMul(x, W1) y = Add(first, b1) {SILU} t = MatMul(h, W2) "
        f"n = LayerNormalization <epsilon = {epsilon}> (t, b2) second = Add(n, b2) "
    )
    one = text_model(f"bias = Add(b1, $0.1) {body.replace('b1', 'bias')} out = Abs(second)")
    total = values("b1").astype(np.float32) + np.float32(0.1)
    return one, text_model(f"{body} out = Abs(second)", constants={"b1": total})


def test_a_constant_that_was_folded_is_certified(ran: Ran) -> None:
    for name, model in zip("ab", folded(), strict=True):
        onnx.save(model, f"{name}.onnx")
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    outputs = [onnxruntime.InferenceSession(f"{name}.onnx").run(None, {"x": x})[0] for name in "ab"]
    assert np.array_equal(*outputs), "the premise: equal bit for bit"
    for command in ("validate", "certify"):
        assert ran(0, [command, "a.onnx", "b.onnx"]).out.splitlines()[-1].startswith("CERTIFIED  b.onnx ")


@pytest.mark.parametrize("what", ["weight", "epsilon"])
def test_what_is_wrong_differs_on_an_input_that_is_named(what: str) -> None:
    a, b = folded()[0], folded(0.1)[0] if what == "epsilon" else changes.copied(folded()[0])
    if what == "weight":
        changes.change_values(changes.weight(b, "W2"), "v[0, 0] += 1e-3")
    found = validate(a, b)
    assert found.verdict == "different"
    failure = found.failures[0]
    case = failure.partition(", input '")[2].rstrip("'")
    assert case in found.validation.cases
    index, _, numbers = failure.partition("; at ")[2].partition("]")
    assert len(json.loads(f"{index}]")) == 3
    theirs, ours = numbers.partition(" on ")[0].split(" instead of ")
    assert abs(float(theirs) - float(ours)) > 1e-5


@pytest.mark.slow
def test_rewriting_is_strict_all_the_same(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    """A bias of the rewritten model that is one unit in the last place off: no run sees it, and nothing refutes it."""
    onnx.save(mlp(SILU), "a.onnx")
    heads = rewrite("a.onnx", validate=False).rewritten
    plant(monkeypatch, lambda model: changes.nudge(changes.weight(model, "b1")))
    out = ran(1, ["a.onnx", "-o", "out.onnx"]).out
    assert "not proved: output 'out' has other values" in out
    assert "first difference: Add 'y' computes from 'first' something that A does not compute; A: Add -> 'y'" in out
    assert out.splitlines()[-1] == "FAILED  1 block, read as 8 attention heads: not proved, nothing was written"
    assert not Path("out.onnx").exists()
    changes.nudge(changes.weight(heads, "b1"))
    found = validate("a.onnx", heads)
    assert (found.verdict, found.failures, int(found.exit_status)) == ("agrees", (), 0), "it is only compared"


GATE = "u = MatMul(x, V1) s = Sigmoid(y) f = Mul(y, s) h = Mul(f, u)"


SOFTSIGN = "a = Abs(y) p = Add(a, $1.0) h = Div(y, p)"


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("body", "domain", "options"),
    [(GATE, 508.0, []), (SOFTSIGN, 32.0, ["--option", "domain=32"])],
    ids=["swiglu", "softsign"],
)
def test_where_a_domain_holds_every_verdict_says_so(body: str, domain: float, options: list[str], ran: Ran) -> None:
    onnx.save(mlp(body), "a.onnx")
    out = ran(0, ["a.onnx", "-o", "b.onnx", "--html", "p.html", "--report", "r.json", "-v", *options]).out
    where = f"for |pre-activation| <= {domain:g}"
    assert f"certified {where}, run on cpu" in out.splitlines()[-1]
    assert f"proved    {where} and every size" in out
    assert f"Certified {where}" in out
    assert f"|y| <= {domain:g}" in out
    page = Path("p.html").read_text(encoding="utf-8").replace("&lt;", "<")
    assert f"certified {where}, run on cpu" in page
    assert f"Proved {where}</h2>" in page
    certificates = [json.loads(Path("r.json").read_text(encoding="utf-8"))["validation"]["certificate"]]
    for command, said in (
        ("certify", f"CERTIFIED  b.onnx against a.onnx, {where}: "),
        ("validate", f"CERTIFIED  b.onnx computes what a.onnx does {where}, and on cpu"),
        ("diff", f"CERTIFIED  b.onnx computes what a.onnx does {where}, and on cpu"),
    ):
        text = ran(0, [command, "a.onnx", "b.onnx", "--report", "r.json"]).out
        assert text.splitlines()[-1].startswith(said), command
        out += text
        data = json.loads(Path("r.json").read_text(encoding="utf-8"))
        certificates.append(data.get("validation", data)["certificate"])
    assert [each["domain"] for each in certificates] == [domain] * 4
    assert "for every input" not in out + page
    assert where in " ".join(ran(0, ["a.onnx", "--dry-run", *options]).out.split())


@pytest.mark.slow
def test_bounds_are_proved_where_they_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `rewrite`, and again by a later process of `certify --check`, for which the cache is emptied."""
    onnx.save(mlp(ERF_GELU), "a.onnx")
    searched, search = list[float](), bounds._Search.run

    def counted(self: bounds._Search, limit: float) -> float:
        searched.append(limit)
        return search(self, limit)

    monkeypatch.setattr(bounds._Search, "run", counted)
    for command in (
        ["a.onnx", "-o", "b.onnx", "--certificate", "c.json", "-q"],
        ["certify", "a.onnx", "b.onnx", "--check", "c.json"],
    ):
        bounds.bound.cache_clear()
        assert run(command) == 0
        assert len(searched) == 1, command
        searched.clear()
