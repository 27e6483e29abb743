"""What `rewrite FOLDER`, `rewrite doctor` and `rewrite inspect` write as JSON follows its schema, and hides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest

from rewriter import certify, inspect, rewrite_folder
from rewriter.api import diagnosing as room
from rewriter.api.diagnosing import doctor
from tests.committed import FOLDER
from tests.rewriter.report.test_report import parts, undocumented
from tests.textmodels import SILU, mlp

HEADS = "n = Neg(y) e = Exp(n) d = Add(e, $1.0) h = Div(y, d)"


def _diagnosis(folder: Path) -> dict[str, Any]:
    onnx.save(mlp(SILU), folder / "model.onnx")
    found = doctor(folder / "model.onnx")
    assert found.problems
    return found.to_json()


def _folder(folder: Path) -> dict[str, Any]:
    (folder / "in").mkdir()
    onnx.save(mlp(SILU), folder / "in" / "model.onnx")
    (folder / "in" / "config.json").write_text("{}", encoding="utf-8")
    rewrite_folder(folder / "in", folder / "out", providers="cpu", quick=True)
    written: dict[str, Any] = json.loads((folder / "out" / "attnonly-report.json").read_text(encoding="utf-8"))
    return written


MADE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "certificate": lambda _: certify(mlp(SILU), mlp(HEADS)).to_json(),
    "diagnosis": _diagnosis,
    "folder": _folder,
    "inspection": lambda _: inspect(FOLDER / "gelu-encoder.onnx").to_json(),
}


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        files("rewriter.report").joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
    )
    return found


@pytest.mark.parametrize("name", MADE)
def test_what_is_written_follows_the_schema(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_state", lambda name: (name in ("cpu", "cuda"), "no device" * (name == "cuda")))
    data = json.loads(json.dumps(MADE[name](tmp_path), allow_nan=False))
    known = schema(name)
    jsonschema.Draft202012Validator.check_schema(known)
    jsonschema.Draft202012Validator(known).validate(data)
    assert undocumented(data, known, known) == []
    spoils: list[dict[str, Any]] = [{"version": 2}, {"exit_status": 70, "certificate": {}}]
    for spoiled in spoils:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **spoiled}, known)


@pytest.mark.parametrize("name", MADE)
def test_every_field_is_described(name: str) -> None:
    described = dict(parts(schema(name)))
    assert [path for path, entry in described.items() if not entry.get("description")] == []
