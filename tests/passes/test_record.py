"""The plan in a model's metadata: written as described, read back exactly, and refused where it is anything else."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import onnx
import pytest

from passes.forms import FORMS
from passes.options import Options
from passes.plan import KEY, MAX_BYTES, PlanError, Record, make_plan, read_record
from rewriter import rewrite
from tests.changes import copied, run
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp


def made(model: Any, **options: Any) -> onnx.ModelProto:
    return rewrite(model, validate=False, **options).rewritten


@cache
def masked() -> onnx.ModelProto:
    """Not to be changed: the tests share it."""
    return made(FOLDER / "silu-decoder.onnx", form="masked")


def text_of(model: onnx.ModelProto) -> str:
    return next(str(entry.value) for entry in model.metadata_props if entry.key == KEY)


def with_text(model: onnx.ModelProto, *texts: str) -> onnx.ModelProto:
    result = copied(model)
    del result.metadata_props[:]
    for text in texts:
        result.metadata_props.add(key=KEY, value=text)
    return result


def claiming(model: onnx.ModelProto, statement: str) -> onnx.ModelProto:
    """The model with another plan: that after a statement on the `plan` and its first `block`."""
    plan = json.loads(text_of(model))
    return with_text(model, json.dumps(run(statement, plan=plan, block=plan["blocks"][0])["plan"]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["silu-decoder", "gelu-encoder", "gated-decoder"])
def test_it_says_what_was_planned(file: str, form: str) -> None:
    original = onnx.load(FOLDER / f"{file}.onnx")
    record = read_record(made(original, form=form))
    plan = make_plan(original, Options(form=form))
    assert record.options == ({} if form == "local" else {"form": form})
    assert len(record.blocks) == len(plan.conversions) == 2
    for block, conversion in zip(record.blocks, plan.conversions, strict=True):
        planned = conversion.block
        region, found = replace(planned.region, nodes=()), block.block
        assert found == replace(planned, where="", region=region, first=(), second=())
        assert (block.program, block.form) == (conversion.program, form)
        # The network's stream is only known when it is emitted.
        assert form == "whole" or block == replace(conversion, block=found, by_reference="")


def test_fitted_heads_are_in_it() -> None:
    model = mlp("t = Tanh(y) s = Sigmoid(t) h = Mul(y, s)")
    (block,) = read_record(made(model, domain=4.0, accuracy=1e-3)).blocks
    named = block.block.identified
    assert (named.activation.name, named.parameters, block.program.domain) == ("f", (), 4.0)
    assert block.program.heads


def test_other_metadata_stays() -> None:
    model = mlp(SILU)
    model.metadata_props.add(key="licence", value="none")
    assert [entry.key for entry in made(model).metadata_props] == ["licence", KEY]
    assert read_record(model) == Record({}, ())


DAMAGE = (
    ("plan = [plan]", "the plan is not an object"),
    ("plan['version'] = 1", "its version is not 2"),
    ("plan['version'] = True", "its version is not 2"),
    ("del plan['options']", "the plan has no 'options'"),
    ("plan['options'] = []", "options is not an object"),
    ("plan['blocks'] = {}", "blocks is not a list"),
    ("plan['blocks'][0] = None", r"blocks\[0\] is not an object"),
    ("plan['blocks'][1] = block", "two blocks have the same output"),
    ("block['block']['name'] = 'n' * 20_000", "not a text of at most"),
    ("block['block']['path'] = [['If']]", "has 1 entries, not 2"),
    ("block['block']['identified']['parameters'] = [1.5]", "not a hexadecimal number"),
    ("block['block']['identified']['parameters'] = ['nan']", "not a hexadecimal number"),
    ("block['block']['identified']['parameters'] = ['0x1p+99999']", "not a hexadecimal number"),
    ("block['program']['max_error'] = '-0x1p-9'", "a bound below 0"),
    ("block['program']['domain'] = '0x0p+0'", "an empty domain"),
    ("block['form'] = 'best'", "form of a block is not one of"),
    ("block['projections'] = 7", "is not an object"),
    ("block['block']['gate'] = None", "is not a text"),
    ("block['projections']['value'] = {}", "has no 'data'"),
    ("block['block']['value'] = 'v'", "a value and no gate"),
    ("block['projections']['query']['start'] = 3", "a gate and no value"),
    ("block['projections']['query']['in_features'] = -1", "is not a size"),
    ("block['projections']['query']['transposed'] = 1", "not true or false"),
    ("block['projections']['query']['biases'] = 'b'", "is not a list"),
    ("block['program']['heads'] = [{}]", "has no 'beta'"),
    ("block['carried'] = 1", "shares bias tokens"),
    ("block['carried'] = 2.5", "is not a size"),
    ("block['carried'] = 2**39", "too many positions"),
    ("block['options'] = {'max_tokens': 2**39}", "too many positions"),
)


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_plan_is_refused(damage: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        read_record(claiming(masked(), damage))


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("",), "it is not JSON"),
        (("[" * 100_000,), "it is not JSON"),
        (("{}", "{}"), "there are several"),
        (("9" * 10_000,), "it is not JSON"),
        ((" " * (MAX_BYTES + 1),), "characters, more than"),
    ],
    ids=["empty", "deep", "twice", "digits", "long"],
)
def test_hostile_text_is_refused(texts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        read_record(with_text(mlp(SILU), *texts))
