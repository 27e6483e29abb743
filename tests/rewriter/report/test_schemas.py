"""The committed schemas are what the dataclasses give."""

from __future__ import annotations

import json

import jsonschema
import pytest

pytest.importorskip("pydantic", reason="schemas are made with pydantic (extra dev)")
pytest.importorskip("docstring_parser", reason="schemas are made with docstring-parser (extra dev)")

from rewriter import certify
from tests.rewriter.report import make_schemas
from tests.rewriter.report.test_report import undocumented
from tests.textmodels import SILU, mlp

HEADS = "n = Neg(y) e = Exp(n) d = Add(e, $1.0) h = Div(y, d)"


def test_committed_schemas_are_those_of_the_dataclasses() -> None:
    assert make_schemas.main(["--check"]) == 0, "run: python -m tests.rewriter.report.make_schemas"


def test_every_exception_is_about_a_field_that_is_written() -> None:
    """A table that names a field which went away says nothing any more."""
    made = {name: make_schemas.schema(cls) for name, cls in make_schemas.FILES.items()}
    known = {
        f"{name}.{key}"
        for schema in made.values()
        for name, entry in {**schema.get("$defs", {}), schema["title"]: schema}.items()
        for key in (*entry["properties"], "")
    }
    named = [*make_schemas.TYPES, *make_schemas.ABOUT, *make_schemas.EXTRA]
    assert {name if "." in name else f"{name}." for name in named} <= known


def test_a_certificate_follows_its_schema() -> None:
    known = json.loads((make_schemas.FOLDER / "certificate.schema.json").read_text(encoding="utf-8"))
    data = json.loads(json.dumps(certify(mlp(SILU), mlp(HEADS)).to_json(), allow_nan=False))
    jsonschema.Draft202012Validator(known).validate(data)
    assert undocumented(data, known, known) == []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "version": 2}, known)
