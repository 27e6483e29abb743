"""Reports to make pages of: real ones from small models, and extreme ones that are put together by hand."""

from dataclasses import replace
from typing import Any

import pytest

from rewriter import ExitStatus, Report, rewrite
from rewriter.proof.certificate.bounds import Bound
from rewriter.proof.records import Certificate, CertifiedRegion, Refusal
from rewriter.proof.rule import Judgement
from rewriter.proof.validate import ProviderRun, Validation
from rewriter.report.report import BlockRow, Shape
from tests.cases import plant
from tests.changes import change_values, weight
from tests.textmodels import ERF_GELU, SILU, mlp

HOSTILE = (
    "<script>alert(1)</script>",
    "\N{RIGHT-TO-LEFT OVERRIDE}drow\N{LEFT-TO-RIGHT ISOLATE}",
    '"><img src=https://example.org/x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "</style></title><b>\x00\x1b[31m",
    "a" * 5000,
    "שלום",
    "javascript:alert(1)' onload='x",
)


EVIL = "</script><script>document.title='run'</script><!--<img src=x onerror=alert(1)>\u2028\u202e\x1b[31m&amp;'\"\\"


def failed() -> Report:
    """A proof that fails: one coefficient of a block's heads is off."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, lambda model: change_values(weight(model, "*/parts"), "v[2] *= 1.01"))
        report = rewrite(mlp(ERF_GELU))
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    return report


def large(blocks: int, left: int, names: tuple[str, ...] = ()) -> Report:
    """A report of many blocks, made by hand; `names` are used in turn, wherever a name may stand."""

    def named(number: int, kind: str) -> str:
        return f"{names[number % len(names)]}{number}" if names else f"model.decoder.layers.{number}.{kind}"

    rows = [
        BlockRow(
            named(number, "mlp"),
            "converted",
            activation="gelu",
            first="MatMul 4096x16384",
            second="MatMul 16384x4096",
            program="gelu_erf_m8",
            exact=False,
            heads=16384,
            bias_tokens=8,
            max_error=4.6e-8,
        )
        for number in range(blocks)
    ]
    rows += [
        BlockRow(
            named(number, "conv"),
            "left",
            first="Conv 512x512 5",
            reason=f"the second operator is a {named(number % 5, 'Conv')}, which mixes positions",
            node=f"Conv '{named(number, 'node_conv')}'",
        )
        for number in range(left)
    ]
    bound = Bound(True, 1e-7, 2.4e-8, 2.1e-8, 0.5, exact=False, domain=None, cells=7)
    facts = (), ("y",), None, 1, 9, bound, (("t0",), ("t0",))
    regions = tuple(CertifiedRegion(row.name, row.name, *facts) for row in rows[:blocks])
    certificate = Certificate(False, regions, (Refusal("t", "t", named(0, "node"), "stands elsewhere"),), 0.1)
    outputs = {named(number, "output"): _stats(named(number, "output")) for number in range(60 if not names else 8)}
    provider = ProviderRun(outputs, 1.3, tuple(names))
    cases = (*(names or ("batch 1",)),)
    return Report(
        model=names[0] if names else "model.onnx",
        output=names[1] if names else "out.onnx",
        form="local",
        blocks=tuple(rows),
        before=Shape({names[0] if names else "Erf": 100, "MatMul": 400}, 500, 40_000_000_000),
        made=Shape({"MatMul": 400, names[2] if names else "attnonly::NeuronAttention_8": 100}, 500, 40_000_000_123),
        proof=Validation(certificate, {"cpu": provider, "cuda": provider}, cases, cases),
        seconds={"load": 1.0, "plan": 2.0, "total": 3.0},
        notes=names,
        exit_status=ExitStatus.CONVERTED,
        environment={"onnx": "1.22.0"},
    )


def extreme() -> Report:
    """Errors that are 0, infinite, missing; no float64 evaluation; failures without end."""
    report = large(4, 0)
    stats = replace(_stats("out"), max_abs=float("inf"), error=float("inf"))
    provider = ProviderRun({"out": stats, "integers": stats}, None, ())
    failures = tuple(f"failure {number}" for number in range(1000))
    return replace(
        report,
        output="",
        exit_status=ExitStatus.VALIDATION_FAILED,
        proof=replace(report.validation, failures=failures, providers={"cpu": provider}),
    )


def _stats(name: str) -> Judgement:
    return Judgement(name, 1e-7, 1e-7, 1.6e-6, max_abs=1e-6)


def _head(sublayer: str, number: int, kind: str, text: str) -> dict[str, Any]:
    pattern = (
        [[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]]
        if kind == "neuron"
        else [[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]]
    )
    scores = [[text, 1.5], ["b", 0.5]]
    return {
        "name": f"{sublayer}.{number}",
        "sublayer": sublayer,
        "number": number,
        "kind": kind,
        "cross": False,
        "scores": [[2, 2, 1.5, -0.5, [[0, 1, 3.0], [1, 1, -1.25]]]] if kind == "head" else None,
        "activation": [0.5, -1.0, 2.0],
        "pattern": pattern,
        "tokens": [
            {"side": side, "share": 1.0, "top": scores, "bottom": [["c", -0.5], [text, -2.0]]} for side in ("QV", "O")
        ],
        "effects": [0.1, -0.2, 0.3 + number],
        "effect": 0.2 + number,
    }


def heads_data(text: str = "a") -> dict[str, Any]:
    """A small page; `text` stands wherever a model or a tokenizer could put something."""
    attention, neurons = f"{text}.0.attn", f"{text}.0.mlp_heads"
    return {
        "model": text,
        "tokens": [{"place": place, "text": each} for place, each in enumerate((text, " x", "y"))],
        "logit": {"entry": text, "position": -1, "value": 3.0},
        "embed": [0.25, -0.5, 2.0],
        "sublayers": [
            {"name": attention, "kind": "heads", "count": 2, "shown": 2},
            {"name": neurons, "kind": "neurons", "count": 9, "shown": 2},
        ],
        "heads": [
            _head(name, number, kind, text)
            for name, kind in ((attention, "head"), (neurons, "neuron"))
            for number in (0, 1)
        ],
        "sources": [f"{attention}[0]", text],
        "missing": {"writes": text},
        "notes": [text],
    }


REPORTS: dict[str, Any] = {
    "gelu": lambda: rewrite(mlp(ERF_GELU)),
    "relu": lambda: rewrite(mlp("h = Relu(y)")),
    "float16": lambda: rewrite(mlp(SILU, elem="float16")),
    "not-proved": lambda: rewrite(mlp(SILU), validate=False),
    "dry-run": lambda: rewrite(mlp(SILU), dry_run=True),
    "left": lambda: rewrite(mlp("r = Relu(y) h = Sin(r)"), fit=False),
    "nothing-at-all": lambda: rewrite(mlp("h = Softmax(y)")),
    "hostile": lambda: large(8, 8, names=HOSTILE),
    "large": lambda: large(100, 2000),
    "extreme": extreme,
    "failed": failed,
}
