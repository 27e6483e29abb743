"""The JSON report and its schema: each describes the other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest

from rewriter import ExitStatus, Report, rewrite
from rewriter.proof.rule import Judgement
from rewriter.proof.statistics import compare
from rewriter.report.report import BlockRow
from tests.textmodels import ERF_GELU, SILU, mlp, text_model, values

SCHEMA: dict[str, Any] = json.loads(files("rewriter.report").joinpath("report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

BLOCK_THAT_STAYS = "s2 = Sigmoid(out1) out2 = Mul(out1, s2) out = LayerNormalization(out2, b2)"


def mixed() -> onnx.ModelProto:
    """One block to convert and one that stays."""
    text = f"f = MatMul(x, W1) y = Add(f, b1) {SILU} g = MatMul(h, W2) out1 = Add(g, b2) {BLOCK_THAT_STAYS}"
    return text_model(text, constants={"W1": values("W1"), "W2": values("W2")})


REPORTS: dict[str, Any] = {
    "converted": lambda: rewrite(mixed()),
    "gelu": lambda: rewrite(mlp(ERF_GELU)),
    "not-proved": lambda: rewrite(mlp(SILU), validate=False),
    "dry-run": lambda: rewrite(mlp(SILU), dry_run=True),
    "nothing": lambda: rewrite(mlp("h = Softmax(y)")),
    "left": lambda: rewrite(mlp(SILU, second="out = LayerNormalization(h, b1)")),
    "failed": lambda: replace(rewrite(mlp(SILU)), exit_status=ExitStatus.VALIDATION_FAILED),
    "old": lambda: rewrite(mlp(SILU, ir=7)),
    "nothing-at-all": lambda: rewrite(text_model("out = Identity(x)")),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_follow_the_schema(name: str) -> None:
    report: Report = REPORTS[name]()
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    VALIDATOR.validate(data)
    assert undocumented(data, SCHEMA, SCHEMA) == []


def undocumented(data: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> list[str]:
    """Fields that the schema says nothing about, though additional ones are allowed."""
    found: list[str] = []
    schema = resolved(schema, root)
    if isinstance(data, dict):
        known = schema.get("properties", {})
        # An object without fields of its own is a mapping, and documented as one.
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


def parts(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that stands under `properties` or `$defs`, with its path."""
    for key, entry in schema.get("properties", {}).items():
        yield f"{path}/{key}", entry
        yield from parts(entry, f"{path}/{key}")
    for key, entry in schema.get("$defs", {}).items():
        yield f"{path}/$defs/{key}", entry
        yield from parts(entry, f"{path}/$defs/{key}")


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_every_field_is_described_and_new_ones_may_come(name: str) -> None:
    schema = json.loads(files("rewriter.report").joinpath(f"{name}.schema.json").read_text(encoding="utf-8"))
    described = dict(parts(schema))
    assert len(described) > 50
    assert [path for path, entry in described.items() if not entry.get("description")] == []
    closed = [path for path, entry in described.items() if entry.get("additionalProperties") is False]
    assert closed == []
    assert schema["additionalProperties"] is True


@pytest.mark.parametrize(
    "spoil",
    [
        {"version": 2},
        {"form": None},
        {"blocks": None},
        {"exit_status": 4},
        {"blocks": [{"name": "a", "status": "gone"}]},
        {"seconds": {"total": -1.0}},
    ],
    ids=lambda spoil: next(iter(spoil)),
)
def test_schema_refuses(spoil: dict[str, Any]) -> None:
    data = rewrite(mlp(SILU), dry_run=True).to_json()
    VALIDATOR.validate(data)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate({**data, **spoil})


@pytest.mark.parametrize("field", SCHEMA["required"])
def test_schema_requires_every_field(field: str) -> None:
    data = rewrite(mlp(SILU), dry_run=True).to_json()
    del data[field]
    with pytest.raises(jsonschema.ValidationError, match=field):
        VALIDATOR.validate(data)


@pytest.mark.parametrize(("status", "spoil"), [("converted", {"program": None}), ("left", {"reason": None})])
def test_schema_ties_status_and_fields(status: str, spoil: dict[str, Any]) -> None:
    data = rewrite(mixed()).to_json()
    row = next(row for row in data["blocks"] if row["status"] == status)
    row.update(spoil)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(data)


def test_numbers_of_a_conversion() -> None:
    data = rewrite(mixed()).to_json()
    converted, left = data["blocks"]
    assert (converted["heads"], converted["bias_tokens"], converted["exact"], converted["max_error"]) == (8, 1, True, 0)
    assert left["reason"] == "its output feeds LayerNormalization 'out', which is not a linear operator"
    assert data["before"]["operators"]["Sigmoid"] == 2
    assert data["after"]["operators"]["Sigmoid"] == 1
    assert data["after"]["operators"]["attnonly::NeuronAttention"] == 1
    assert (data["before"]["nodes"], data["after"]["nodes"]) == (9, 8)
    assert set(data["seconds"]) == {"load", "plan", "apply", "validate", "total"}


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_json_cannot_say_is_null(number: float) -> None:
    row = BlockRow("a", "converted", program="p", exact=False, heads=1, bias_tokens=1, max_error=number)
    report = replace(rewrite(mlp(SILU), dry_run=True), blocks=(row,))
    assert report.to_json()["blocks"][0]["max_error"] is None


def test_differing_shapes_are_null_and_follow_the_schema() -> None:
    import numpy as np

    report = rewrite(mlp(SILU))
    proof = report.validation.providers["cpu"]
    apart = compare("out", [np.zeros(2)], [np.zeros(3)])
    far = {"out": Judgement("out", math.inf, 1e-7, 1e-6, "has another shape")}
    spoiled = replace(proof, outputs={"out": apart}, compared=far)
    worse = replace(report.validation, passed=False, providers={"cpu": spoiled})
    data = replace(report, proof=worse, exit_status=ExitStatus.VALIDATION_FAILED).to_json()
    assert data["validation"]["providers"]["cpu"]["outputs"]["out"]["max_abs"] is None
    VALIDATOR.validate(json.loads(json.dumps(data, allow_nan=False)))


def test_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    rewrite(mlp(SILU), dry_run=True).write(path)
    VALIDATOR.validate(json.loads(path.read_text(encoding="utf-8")))
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
