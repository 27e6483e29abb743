"""Options are declared once: fields, keywords, the command line and the report agree."""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import click
import pytest

from passes.forms import FORMS
from passes.options import FORM_NAMES, Options
from rewriter import UsageError, rewrite
from rewriter.api.run import RewriteKeywords
from rewriter.cli.models import convert
from rewriter.options import build, option, options_of, values_of
from rewriter.proof.settings import Settings
from tests.conftest import Ran
from tests.textmodels import SILU, mlp

DECLARED = {each.name: each for kind in (Options, Settings) for each in options_of(kind)}


@dataclass(frozen=True)
class Base:
    share: float = option(0.5, "A share.", above=0.0, below=1.0)
    hidden: int = 3


@dataclass(frozen=True)
class Derived(Base):
    kind: str = option("a", "A kind.", choices=("a", "b"))
    names: tuple[str, ...] = option((), "Names.")
    count: int | None = option(None, "How many.", least=1)


def test_inherited_options_come_last() -> None:
    assert [each.name for each in options_of(Derived)] == ["kind", "names", "count", "share"]
    assert [each.kind for each in options_of(Derived)] == [str, str, int, float]
    assert values_of(build(Derived, {"share": 0.25})) == {"kind": "a", "names": (), "count": None, "share": 0.25}


def test_a_string_is_one_entry_of_a_repeatable_option() -> None:
    assert build(Derived, {"names": "abc"}).names == ("abc",)
    assert build(Derived, {"names": ["abc", "d"]}).names == ("abc", "d")
    assert build(Derived, {"names": None}).names == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "c"}, "unknown kind 'c'; known are: a, b"),
        ({"count": 0}, "count is 0; it must be an integer of at least 1"),
        ({"count": True}, "count is True"),
        ({"count": 1.5}, "count is 1.5"),
        ({"share": 0.0}, "share is 0.0; it must be a number above 0 and below 1"),
        ({"share": 1.0}, "share is 1.0"),
        ({"share": math.nan}, "share is nan"),
        ({"share": "0.5"}, "share is 0.5"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(Derived, given)


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown option 'inlin'; did you mean 'inline'"):
        rewrite(mlp(SILU), inlin=True)  # type: ignore[call-arg]


def test_the_keywords_of_rewrite_are_the_declared_options() -> None:
    assert set(RewriteKeywords.__annotations__) == set(DECLARED)
    parameters = inspect.signature(rewrite).parameters
    assert {name: parameters[name].default for name in DECLARED} == {n: each.default for n, each in DECLARED.items()}
    assert all(f"{name} (" in (rewrite.__doc__ or "") for name in DECLARED)


def test_the_command_line_has_every_declared_option() -> None:
    params = {name: each for each in convert.params if isinstance(each, click.Option) for name in each.opts}
    for each in DECLARED.values():
        if each.rare:
            assert each.name in (params["--option"].help or "")
            continue
        param = params[each.command_line]
        assert param.help == each.help
        if each.choices:
            assert isinstance(param.type, click.Choice)
            assert tuple(param.type.choices) == each.choices


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("inline", "inline", True), ("inline=true", "inline", True), ("fit=false", "fit", False), ("seed=7", "seed", 7)],
)
def test_rare_options_by_name(text: str, name: str, value: Any) -> None:
    context = convert.make_context("rewrite", ["m.onnx", "--option", text])
    assert context.params[name] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sead=8", "unknown option 'sead'; did you mean 'seed'?"),
        ("=3", "unknown option ''; known are: inline, "),
        ("form=local", "'form' has its own flag: --form"),
        ("proof=bold", "unknown proof 'bold'; known are: auto, whole, blocks"),
        ("proof", "proof has no value; write --option proof=VALUE"),
        ("domain=", "domain has no value; write --option domain=R"),
        ("domain=wide", "domain is 'wide'; it must be a number above 0"),
        ("domain=nan", "domain is nan; it must be a number above 0"),
        ("seed=1.5", "seed is '1.5'; it must be an integer of at least 0"),
        ("inline=maybe", "inline is 'maybe'; it must be true or false"),
    ],
)
def test_rare_options_that_are_refused(text: str, message: str, ran: Ran) -> None:
    assert ran(2, ["m.onnx", "--dry-run", "--option", text]).refusal.startswith(f"rewrite: {message}")


def test_the_report_repeats_the_options() -> None:
    report = rewrite(mlp(SILU), form="masked", only="*", dry_run=True)
    assert report.options == values_of(build(Options, {"form": "masked", "only": "*"}))
    assert report.to_json()["options"]["only"] == ["*"]


def test_choices_are_the_keys_of_the_forms() -> None:
    assert tuple(FORMS) == FORM_NAMES
