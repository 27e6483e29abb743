"""JSON and its schemas, generated from the dataclasses: each describes the other."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest

from rewriter import ExitStatus, Report, certify, diff, rewrite, validate
from rewriter.proof.rule import Judgement
from rewriter.report.report import BlockRow
from tests.changes import change_values, weight
from tests.textmodels import ERF_GELU, SILU, mlp, text_model, values

FOLDER = Path(__file__).parents[3] / "rewriter" / "report"
SCHEMAS: dict[str, Any] = {
    path.name.split(".")[0]: json.loads(path.read_bytes()) for path in FOLDER.glob("*.schema.json")
}

HEADS = "n = Neg(y) e = Exp(n) d = Add(e, $1.0) h = Div(y, d)"
BLOCK_THAT_STAYS = "s2 = Sigmoid(out1) out2 = Mul(out1, s2) out = LayerNormalization(out2, b2)"


def mixed() -> onnx.ModelProto:
    """One block to convert and one that stays."""
    text = f"f = MatMul(x, W1) y = Add(f, b1) {SILU} g = MatMul(h, W2) out1 = Add(g, b2) {BLOCK_THAT_STAYS}"
    return text_model(text, constants={"W1": values("W1"), "W2": values("W2")})


def rewritten(delta: float = 0.0) -> onnx.ModelProto:
    model = rewrite(mlp(SILU), validate=False).rewritten
    change_values(weight(model, "mlp/heads/key"), f"v.flat[0] += {delta}")
    return model


def apart() -> Report:
    report = rewrite(mlp(SILU))
    far = {"out": Judgement("out", math.inf, 1e-7, 1e-6, "has another shape")}
    run = report.validation.providers["cpu"]
    spoiled = replace(run, compared=far)
    worse = replace(report.validation, failures=("output out has another shape",), providers={"cpu": spoiled})
    return replace(report, proof=worse, exit_status=ExitStatus.VALIDATION_FAILED)


RESULTS: dict[str, Any] = {
    "report converted": lambda: rewrite(mixed()),
    "report gelu": lambda: rewrite(mlp(ERF_GELU)),
    "report not-proved": lambda: rewrite(mlp(SILU), validate=False),
    "report dry-run": lambda: rewrite(mlp(SILU), dry_run=True),
    "report left": lambda: rewrite(mlp(SILU, second="out = LayerNormalization(h, b1)")),
    "report apart": apart,
    "report nothing-at-all": lambda: rewrite(text_model("out = Identity(x)")),
    "comparison passed": lambda: validate(mlp(SILU), rewritten()),
    "comparison failed": lambda: diff(mlp(SILU), rewritten(1e-2)),
    "comparison graph": lambda: diff(mlp(SILU), mlp("h = Relu(y)", opset=18), outputs=False),
    "comparison signature": lambda: diff(mlp(SILU), text_model("z = Relu(x)", outputs="float[a, b, 4] z")),
    "comparison nan": lambda: validate(mlp("h = Relu(y)"), mlp("n = Sqrt(y) m = Mul(n, n) h = Relu(m)")),
    "comparison tolerance": lambda: validate(mlp(SILU), rewritten(1e-2), atol=1e-9),
    "certificate certified": lambda: certify(mlp(SILU), mlp(HEADS)),
    "optimised certified": lambda: certify(mlp(SILU)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RESULTS)
def test_results_follow_their_schema(name: str) -> None:
    schema, result = SCHEMAS[name.split(maxsplit=1)[0]], RESULTS[name]()
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    jsonschema.Draft202012Validator(schema).validate(data)
    assert undocumented(data, schema, schema) == []
    failing = {"failed", "graph", "signature", "nan", "tolerance", "left", "apart", "nothing-at-all"}
    assert bool(result) is (name.split()[1] not in failing)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "version": 2}, schema)


def undocumented(data: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> list[str]:
    """Fields that the schema says nothing about, though additional ones are allowed."""
    found: list[str] = []
    schema = resolved(schema, root)
    if isinstance(data, dict):
        known = schema.get("properties", {})
        # An object without fields is a mapping, and documented as one.
        others = schema.get("additionalProperties") if known else schema.get("additionalProperties") or {}
        others = {} if others is True and not known else others
        for key, entry in data.items():
            inner = known.get(key, others if isinstance(others, dict) else None)
            where = f"{path}/{key}"
            found += [where] if inner is None else undocumented(entry, inner, root, where)
    elif isinstance(data, list):
        for entry in data:
            found += undocumented(entry, schema.get("items", {}), root, f"{path}[]")
    return found


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference leads to, of what may be null too."""
    schema, *_ = schema.get("anyOf", [schema])
    return root["$defs"][schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema


def parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that stands under `properties` or `$defs`, with its name."""
    for key, entry in (*schema.get("properties", {}).items(), *schema.get("$defs", {}).items()):
        yield key, entry
        yield from parts(entry)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_is_described_and_new_ones_may_come(name: str) -> None:
    described = list(parts(SCHEMAS[name]))
    assert len(described) > 30
    assert [key for key, entry in described if not entry.get("description")] == []
    assert [key for key, entry in described if entry.get("additionalProperties") is False] == []
    assert SCHEMAS[name]["additionalProperties"] is True


def test_numbers_of_a_conversion() -> None:
    data = rewrite(mixed()).to_json()
    converted, left = data["blocks"]
    assert (converted["heads"], converted["bias_tokens"], converted["exact"], converted["max_error"]) == (8, 1, True, 0)
    assert left["reason"] == "its output feeds LayerNormalization 'out', which is not a linear operator"
    assert [data[side]["operators"]["Sigmoid"] for side in ("before", "after")] == [2, 1]
    assert data["after"]["operators"]["attnonly::NeuronAttention"] == 1
    assert [data[side]["nodes"] for side in ("before", "after")] == [9, 8]
    assert set(data["seconds"]) == {"load", "plan", "apply", "validate", "total"}


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_json_cannot_say_is_null(number: float) -> None:
    row = BlockRow("a", "converted", program="p", exact=False, heads=1, bias_tokens=1, max_error=number)
    report = replace(rewrite(mlp(SILU), dry_run=True), blocks=(row,))
    assert report.to_json()["blocks"][0]["max_error"] is None


def test_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path, report = tmp_path / "report.json", rewrite(mlp(SILU), dry_run=True)
    path.write_text("old")
    report.write(path)
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(report.to_json()))
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_committed_schemas_are_those_of_the_dataclasses() -> None:
    pytest.importorskip("pydantic", reason="schemas are made with pydantic (extra dev)")
    pytest.importorskip("docstring_parser", reason="schemas are made with docstring-parser (extra dev)")
    from tools import schemas

    assert schemas.main(["--check"]) == 0, "run: python -m tools.schemas"
    # A table that names a field which went away says nothing any more.
    made = [schemas.schema(cls) for cls in schemas.FILES.values()]
    known = {
        f"{name}.{key}".rstrip(".")
        for schema in made
        for name, entry in {**schema.get("$defs", {}), schema["title"]: schema}.items()
        for key in (*entry["properties"], "")
    }
    assert {*schemas.TYPES, *schemas.ABOUT} <= known
