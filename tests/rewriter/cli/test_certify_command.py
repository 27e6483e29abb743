"""`rewrite certify`: exit statuses, what is printed, certificates that are written and checked."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import rewriter
from rewriter.cli import run
from rewriter.errors import UsageError
from tests import changes
from tests.conftest import Ran
from tests.textmodels import ERF_GELU, SILU, mlp

HEADS = "n = Neg(y) e = Exp(n) d = Add(e, $1.0) h = Div(y, d)"
CLOSE = "n = Mul(y, $-1.000001) e = Exp(n) d = Add(e, $1.0) h = Div(y, d)"
WRONG = CLOSE.replace("-1.000001", "-1.001")


@pytest.fixture
def folder(folder: Path) -> Path:
    """A folder with an original, the same in another spelling, one that is off by 4e-7, and one by 4e-4."""
    for name, body in (("a", SILU), ("b", HEADS), ("c", CLOSE), ("d", WRONG)):
        onnx.save(mlp(body), folder / f"{name}.onnx")
    return folder


def certificate(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_certified(folder: Path, ran: Ran) -> None:
    out = " ".join(ran(0, ["certify", "a.onnx", "b.onnx", "-o", "cert.json"]).out.split())
    assert "not claimed: rounding and overflow" in out
    assert "CERTIFIED b.onnx against a.onnx, for every input: all values are the same, in" in out
    data = certificate(folder / "cert.json")
    assert (data["certificate"]["certified"], len(data["original"]["sha256"])) == (True, 64)


def test_a_counterexample_is_printed(folder: Path, ran: Ran) -> None:
    out = ran(1, ["certify", "a.onnx", "d.onnx", "-o", "cert.json"]).out
    assert "differs by 4.52e-06 at y = -10, more than 1e-07 (the activation h)" in out
    assert out.splitlines()[-1].startswith("DIFFERENT  d.onnx against a.onnx, in ")
    data = certificate(folder / "cert.json")
    assert (data["verdict"], data["certificate"]["refusals"][0]["refuted"]) == ("different", True)


def test_what_nobody_refuted_is_not_proved(folder: Path, ran: Ran) -> None:
    onnx.save(mlp("h = Relu(y)"), "one.onnx")
    onnx.save(mlp("r = Relu(y) h = Min(r, $1e4)"), "two.onnx")
    lines = ran(1, ["certify", "one.onnx", "two.onnx", "-o", "cert.json"]).out.splitlines()
    assert lines[0].startswith("first difference: Min 'h' computes from 'r' something that A does not compute")
    assert lines[-1].startswith("NOT PROVED  two.onnx against one.onnx, in ")
    data = certificate(folder / "cert.json")
    assert (data["verdict"], data["certificate"]["refusals"][0]["refuted"]) == ("not proved", False)
    assert data["certificate"]["departure"]["node"] == "Min 'h'"
    assert rewriter.validate("one.onnx", "two.onnx").verdict == "agrees"


@pytest.mark.parametrize(("accuracy", "found"), [(None, False), (1e-3, False), (0.05, True)])
def test_no_file_sets_its_own_limit(accuracy: float | None, found: bool) -> None:
    (entry,) = rewriter.rewrite(mlp(SILU), validate=False).rewritten.metadata_props
    plan = json.loads(entry.value)
    plan["blocks"][0]["program"]["max_error"] = (0.9).hex()
    plan["options"] = {"accuracy": 0.05}
    far = mlp(CLOSE.replace("-1.000001", "-1.003"))
    far.metadata_props.add(key=entry.key, value=json.dumps(plan))
    certified = rewriter.certify(mlp(SILU), far, accuracy=accuracy)
    assert bool(certified) == found
    assert [0.0013 < each.bound.bound < 0.0014 for each in certified.certificate.regions] == [True] * found
    with pytest.raises(UsageError, match="the accuracy is nan"):
        rewriter.certify(mlp(SILU), far, accuracy=float("nan"))


def test_the_limit_is_what_an_activation_without_a_claim_is_held_to(folder: Path) -> None:
    pair = (folder / "a.onnx", folder / "c.onnx")
    assert rewriter.certify(*pair, limit=6e-7)
    assert not rewriter.certify(*pair, limit=4e-7)
    with pytest.raises(UsageError, match="the limit is -1"):
        rewriter.certify(*pair, limit=-1.0)


def test_a_certificate_is_checked_against_the_files(folder: Path, ran: Ran) -> None:
    assert run(["certify", "a.onnx", "b.onnx", "-o", "cert.json"]) == 0
    assert "HOLDS" in ran(0, ["certify", "a.onnx", "b.onnx", "--check", "cert.json"]).out
    out = ran(1, ["certify", "a.onnx", "c.onnx", "--check", "cert.json"]).out
    assert 'rewritten.sha256: it states "' in out
    assert "DOES NOT HOLD" in out


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        (
            "it['regions'][0]['bound']['domain'] = 5.0",
            "regions[0].bound.domain: it states 5.0, and the files give null",
        ),
        ("it['regions'] = []", "regions: it states [], and the files give [{"),
        ("it['not_claimed'] = []", "not_claimed: it states []"),
    ],
)
def test_a_forged_certificate_does_not_hold(statement: str, reason: str, folder: Path, ran: Ran) -> None:
    onnx.save(mlp(ERF_GELU), "e.onnx")
    rewriter.rewrite("e.onnx", "heads.onnx", validate=False)
    assert run(["certify", "e.onnx", "heads.onnx", "-o", "cert.json"]) == 0
    data = certificate(folder / "cert.json")
    changes.run(statement, it=data["certificate"])
    (folder / "cert.json").write_text(json.dumps(data), encoding="utf-8")
    assert f"certificate.{reason}" in ran(1, ["certify", "e.onnx", "heads.onnx", "--check", "cert.json"]).out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ("[]", "is not a certificate of version 1"),
        ('{"version": 2}', "is not a certificate of version 1"),
        ('{"version": 1}', "is not a certificate of version 1"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_certificate(content: str, reason: str, folder: Path, ran: Ran) -> None:
    (folder / "cert.json").write_text(content, encoding="utf-8")
    assert reason in ran(2, ["certify", "a.onnx", "b.onnx", "--check", "cert.json"]).err


def test_files_that_cannot_be_read(folder: Path) -> None:
    assert run(["certify", "a.onnx", "missing.onnx"]) == 4
    assert run(["certify", "a.onnx", "b.onnx", "--check", "missing.json"]) == 2
    assert run(["certify", "a.onnx", "b.onnx", "-o", "a.onnx"]) == 2


@pytest.mark.slow
def test_the_plan_in_the_file_is_what_is_proved(folder: Path) -> None:
    onnx.save(mlp("h = Gelu(y)", opset=20), folder / "g.onnx")
    assert run(["g.onnx", "-o", "coarse.onnx", "--accuracy", "0.05", "--no-validate", "-q"]) == 0
    assert run(["certify", "g.onnx", "coarse.onnx"]) == 1
    assert run(["certify", "g.onnx", "coarse.onnx", "--accuracy", "0.05"]) == 0
    assert run(["validate", "g.onnx", "coarse.onnx"]) == 1
    assert run(["validate", "g.onnx", "coarse.onnx", "--accuracy", "0.05"]) == 0
    model = onnx.load(folder / "coarse.onnx")
    plan = next(each for each in model.metadata_props if each.key == "attnonly.plan")
    model.metadata_props.remove(plan)
    assert not rewriter.certify(folder / "g.onnx", model, accuracy=0.05)
    plan.value = plan.value.replace("version", "version_of")
    model.metadata_props.append(plan)
    assert not rewriter.certify(folder / "g.onnx", model, accuracy=0.05)


def test_python(folder: Path) -> None:
    found = rewriter.certify(folder / "a.onnx", mlp(CLOSE), claims={"h": (6e-7, None)})
    assert found
    assert found.rewritten.path == "<memory>"
    assert "each within 4.2e-07 max(1, |f|)" in found.summary
    assert rewriter.certify(mlp(SILU), mlp(SILU)).summary.endswith("all values are the same")
    for claim in ((-1.0, None), (1e-7, 0.0)):
        with pytest.raises(UsageError, match="claim about 'h'"):
            rewriter.certify(mlp(SILU), mlp(HEADS), claims={"h": claim})


def test_rewrite_writes_a_certificate_that_holds(folder: Path, ran: Ran) -> None:
    assert run(["a.onnx", "-o", "out.onnx", "--certificate", "cert.json", "-q"]) == 0
    assert "HOLDS" in ran(0, ["certify", "--check", "cert.json", "a.onnx", "out.onnx"]).out
    assert run(["certify", "--check", "cert.json", "a.onnx", "b.onnx"]) == 1
    assert run(["a.onnx", "--dry-run", "--certificate", "new.json"]) == 2


@pytest.mark.slow
def test_an_activation_within_a_fused_operator() -> None:
    """Its pre-activation is not a tensor of the original, so that the operator has to be written out."""
    fused = mlp("h = com.microsoft.BiasGelu(first, b1)", first="first = MatMul(x, W1)", domains={"com.microsoft": 1})
    heads = rewriter.rewrite(fused, validate=False).rewritten
    found = rewriter.certify(fused, heads)
    assert (found.verdict, len(found.certificate.regions)) == ("certified", 1)
    assert rewriter.validate(fused, heads).verdict == "certified"
    changes.change_values(changes.weight(heads, "b1"), "v[0] += 1e-3")
    assert rewriter.certify(fused, heads).verdict != "certified"
