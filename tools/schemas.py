"""The schemas of the JSON reports, made from the dataclasses that are written.

    python -m tools.schemas [--check]

Types, docstrings and comments of the dataclasses say almost everything. The tables below hold what they do not, such
as the limits of numbers. Needs pydantic and docstring-parser (extra `dev`).
"""

import functools
import inspect
import json
import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from rewriter.report.report import Certification, Comparison, Report, Result, RuntimeCertification

FOLDER = Path(inspect.getfile(Report)).parent
_LINE = 120
FILES = {
    "report.schema.json": Report,
    "comparison.schema.json": Comparison,
    "certificate.schema.json": Certification,
    "optimised.schema.json": RuntimeCertification,
}

Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(ge=0)]
"""A number that is never infinite; of every other, infinity is written as null."""

TYPES: dict[str, Any] = {
    "Report.version": Literal[1],
    "Report.exit_status": Literal[0, 1, 3],
    "Report.seconds": Mapping[str, Finite],
    "Certification.version": Literal[1],
    "RuntimeCertification.version": Literal[1],
    "Comparison.version": Literal[1],
    "Comparison.exit_status": Literal[0, 1],
    "Comparison.seconds": Mapping[str, Finite],
    "Bound.at": float | None,
}
"""Types that differ from the field's, or that it does not state: numbers are not negative unless they stand here."""


def _model(name: str, about: str, entries: Mapping[str, Any]) -> type[BaseModel]:
    config = ConfigDict(extra="allow")
    made: type[BaseModel] = create_model(name, __config__=config, __doc__=about, **dict(entries))
    return made


ABOUT: dict[str, str] = {
    "Report": "What `rewrite --report FILE.json` writes.",
    "Report.version": "Version of this schema.",
    "Report.exit_status": "What the command line exits with: 0 converted, 1 the proof failed, 3 nothing to convert. "
    "Other statuses leave no report.",
    "Certification": "What `rewrite certify -o FILE.json` writes.",
    "Certification.version": "Version of this schema.",
    "RuntimeCertification": "What `rewrite certify MODEL -o FILE.json` writes for one model.",
    "RuntimeCertification.version": "Version of this schema.",
    "Comparison": "What `rewrite validate --report FILE.json` and `rewrite diff --report FILE.json` write.",
    "Comparison.version": "Version of this schema.",
    "Comparison.error_ratio": "Root mean square error of B over that of A, against float64; null if not evaluated.",
    "Comparison.exit_status": "What the command line exits with: 0 certified or agreeing, 1 not proved or different.",
}
"""Descriptions that the dataclasses lack."""

CONTRACT = (
    " `version` is raised when a field changes its meaning or goes away; new fields may come at any time, so readers "
    "must ignore unknown ones: additionalProperties is true throughout. Numbers that are infinite are "
    "null."
)


class _Schema(GenerateJsonSchema):
    """Without titles, and with `type: [X, null]` for what may be null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {**inner, "type": [inner["type"], "null"]} if "type" in inner else super().nullable_schema(schema)


def schema(cls: type) -> dict[str, Any]:
    """The JSON schema of what `cls.to_json` gives."""
    found = TypeAdapter(model(cls)).json_schema(mode="serialization", schema_generator=_Schema)
    for part in found.get("$defs", {}).values():
        del part["title"]
    found["description"] += CONTRACT
    first, last = ("title", "description"), ("$defs",)
    head = {"$schema": GenerateJsonSchema.schema_dialect, **{key: found.pop(key) for key in first}}
    return head | {key: found[key] for key in sorted(found, key=last.__contains__)}


@functools.cache
def model(cls: type) -> type[BaseModel]:
    """What is written of a dataclass, as a pydantic model; every entry is always there."""
    about = ABOUT.get(cls.__name__) or _sentence(docstring_parser.parse(cls.__doc__ or "").short_description)
    return _model(cls.__name__, about, _entries(cls))


def _entries(cls: type) -> dict[str, Any]:
    hints, about, found = get_type_hints(cls), _attributes(cls), dict[str, Any]()
    names = {each.metadata.get("json", each.name): each.name for each in fields(cls)}
    also: tuple[str, ...] = getattr(cls, "also", ())
    for name in (*(["version"] if issubclass(cls, Result) else []), *filter(None, names), *also):
        if name in also:
            getter = inspect.getattr_static(cls, name).fget
            hint, text = get_type_hints(getter)["return"], getter.__doc__
        else:
            hint, text = hints.get(names.get(name, name)), about.get(names.get(name, name))
        key = f"{cls.__name__}.{name}"
        described = Field(description=ABOUT.get(key) or _sentence(text))
        found[name] = (TYPES.get(key) or _type(hint), described)
    return found


def _type(hint: Any) -> Any:
    """The type in writing: dataclasses as models, numbers not negative, null for what is infinite."""
    if is_dataclass(hint):
        return model(hint)  # type: ignore[arg-type]
    if hint in (int, float):
        return Count if hint is int else Finite | None
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (None, Literal):
        return hint
    made = tuple(map(_type, inner))
    return functools.reduce(operator.or_, made) if origin in (UnionType, Union) else origin[made]


_FIELD = re.compile(r"((?:^    # .*\n)*)^    (\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)


def _attributes(cls: type) -> dict[str, str | None]:
    """What the docstring says of the fields, or the comments above and behind them."""
    found: dict[str, str | None] = {}
    for above, name, behind in _FIELD.findall(inspect.getsource(cls)):
        about = " ".join([*above.replace("#", " ").split(), *behind.split()])
        found[name] = f"{about}." if about else None
    return found | {each.arg_name: each.description for each in docstring_parser.parse(cls.__doc__ or "").params}


def _sentence(text: str | None) -> str:
    """Prose of a docstring as a description."""
    joined = re.sub(r"\bNone\b|\binfinite(?= wh)", "null", " ".join((text or "").split()))
    return joined[:1].upper() + joined[1:]


def text(name: str) -> str:
    """The file."""
    return _laid_out(schema(FILES[name]), "") + "\n"


def _laid_out(value: Any, indent: str) -> str:
    """JSON in which everything that fits is on one line."""
    line, inner = json.dumps(value, ensure_ascii=False), indent + "  "
    if not isinstance(value, (dict, list)) or len(indent + line) <= _LINE:
        return line
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_laid_out(entry, inner)}" for key, entry in value.items()]
    else:
        entries = [_laid_out(entry, inner) for entry in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(inner + entry for entry in entries), indent + closing])


def _committed(path: Path) -> Any:
    """The schema that is there; None for a new one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main(arguments: list[str]) -> int:
    """Write the schemas; with --check only compare."""
    changed = [name for name in FILES if _committed(FOLDER / name) != schema(FILES[name])]
    for name in changed:
        sys.stdout.write(f"{name}\n")
        if "--check" not in arguments:
            (FOLDER / name).write_text(text(name), encoding="utf-8")
    return int(bool(changed) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
