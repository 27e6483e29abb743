"""The committed example models: what every form makes of them, against the oracle; and the whole way."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import onnx
import pytest

from models.registry import COMMITTED, Committed, get
from passes.forms import FORMS
from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, Report, rewrite
from tests.committed import ACTIVATIONS, FOLDER, emitted, feeds, in_place
from tests.errors import apart, error_ratio
from tests.passes.test_apply import DOMAIN, all_nodes, assert_unique_names, metadata, new_nodes

pytestmark = pytest.mark.sample(1)

EACH_FILE = pytest.mark.parametrize("committed", COMMITTED, ids=lambda committed: committed.file)
CONVERTED = [committed for committed in COMMITTED if not get(committed.entry).gated]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("converted")


@cache
def report_of(file: str, folder: Path) -> Report:
    """One conversion of each file, for all tests of this module."""
    return rewrite(FOLDER / file, folder / file)


def test_there_are_models() -> None:
    assert set(ACTIVATIONS) == set(MEASURED) == {committed.file for committed in COMMITTED}
    assert {"silu", "relu", "gelu"} <= {get(committed.entry).activation for committed in COMMITTED}
    assert len(CONVERTED) > 3


MEASURED: Mapping[str, Mapping[str, float]] = {
    "silu-decoder.onnx": {"local": 0.9, "compact": 1.0, "masked": 1.0, "maskless": 1.0, "staged": 1.1},
    "relu-decoder.onnx": {"local": 1.0, "compact": 1.0, "masked": 1.0, "maskless": 1.0, "staged": 1.0},
    "gelu-encoder.onnx": {"local": 1.2, "compact": 1.2, "masked": 0.7, "maskless": 0.7, "staged": 0.7},
    "conformer-encoder.onnx": {"local": 1.0, "compact": 1.1, "masked": 1.2, "maskless": 1.2, "staged": 1.0},
    "gelu-vision.onnx": {"local": 1.2, "compact": 1.1, "masked": 0.9, "maskless": 0.9, "staged": 0.9},
    "gated-decoder.onnx": {"local": 1.0, "compact": 1.0, "masked": 0.9, "maskless": 0.9, "staged": 0.9},
}
"""e(rewritten) over e(original), the worse of onnxruntime with and without optimisation. Tests allow twice that."""

EACH_MODEL = pytest.mark.parametrize("file", ACTIVATIONS)
EACH_FORM = pytest.mark.parametrize("form", [form for form in FORMS if form != "whole"])


@cache
def rewritten(file: str, form: str) -> tuple[onnx.ModelProto, Plan, onnx.ModelProto]:
    model = onnx.load(FOLDER / file)
    # 64 positions: one of the models folds batch and tokens into one axis.
    plan = make_plan(model, Options(form=form, max_tokens=64))
    return model, plan, apply(plan)


@EACH_FORM
@EACH_MODEL
def test_every_form_is_the_same_function(file: str, form: str) -> None:
    """In float64: three sequences, one of them padded, each entry of the output by itself."""
    model, plan, result = rewritten(file, form)
    found = apart(model, result, in_place(file, plan), [feeds(model)])
    bound = emitted(file)
    assert found.emitted <= bound
    assert found.program <= max(conversion.max_error for conversion in plan.conversions) + 4.5e-16  # measured: 2.3e-16
    assert found.exact <= found.carried + bound


@pytest.mark.sample(0)
@EACH_FORM
@EACH_MODEL
def test_every_form_is_as_accurate(file: str, form: str) -> None:
    model, _, result = rewritten(file, form)
    cases = [feeds(model, seed) for seed in range(4)]
    optimised = (False, True) if form == "local" else (True,)
    assert error_ratio(model, result, cases, optimised) <= 2.0 * MEASURED[file][form]


@pytest.mark.sample(0)
@EACH_FILE
def test_all_blocks_are_converted_and_proved(committed: Committed, folder: Path) -> None:
    report = report_of(committed.file, folder)
    blocks = get(committed.entry).mlp_blocks("tiny")
    assert (report.problems, report.exit_status, len(report.converted)) == ((), ExitStatus.CONVERTED, blocks)


@pytest.mark.sample(0)
@EACH_FILE
def test_numbers_of_the_configuration(committed: Committed, folder: Path) -> None:
    entry = get(committed.entry)
    config = entry.config("tiny")
    d_ff = config.get("intermediate_size") or config.get("ffn_dim") or 4 * config.get("n_embd", 0)
    for row in report_of(committed.file, folder).converted:
        # GELU's keys are equally spaced, and each but the last two is a head's own.
        keys = {"gelu": 11, "gelu_tanh": 13}
        assert row.heads == d_ff * (2 if entry.gated else keys.get(entry.activation, 3) - 2)
        assert row.activation == ("silu(gate) * value" if entry.gated else entry.activation)
        assert row.name != "mlp"  # named after its module


@pytest.mark.sample(0)
@pytest.mark.parametrize("committed", CONVERTED, ids=lambda committed: committed.file)
def test_only_softmax_attention_is_left_of_the_blocks(committed: Committed, folder: Path) -> None:
    report = report_of(committed.file, folder)
    before, after = onnx.load(FOLDER / committed.file), onnx.load(folder / committed.file)
    onnx.checker.check_model(after, full_check=True)
    assert_unique_names(after)
    nonlinear = {"Sigmoid", "Relu", "Erf", "Tanh", "Gelu"}
    count_before = sum(node.op_type in nonlinear for node in before.graph.node)
    count_after = sum(node.op_type in nonlinear for node in all_nodes(after))
    assert count_after == count_before - len(report.converted)
    assert {metadata(node)[f"{DOMAIN}.block"] for node in new_nodes(after)} == {row.name for row in report.converted}
    untouched = {node.name for node in before.graph.node} & {node.name for node in after.graph.node}
    assert len(untouched) >= len(before.graph.node) - 12 * len(report.converted)
    again = rewrite(after)
    assert again.exit_status is ExitStatus.NOTHING_TO_CONVERT
    assert [row.reason for row in again.left].count("it is attention heads already") == len(report.converted)


@pytest.mark.slow
def test_what_is_no_mlp_block_is_left_with_a_reason(folder: Path) -> None:
    """BERT's pooler ends in an output; the Conformer's convolution modules mix positions."""
    pooler = [row for row in report_of("gelu-encoder.onnx", folder).left if "pooler" in row.name]
    assert [row.reason for row in pooler] == ["its output is an output of the graph, and no linear operator reads it"]
    modules = report_of("conformer-encoder.onnx", folder).left
    assert modules
    assert all((row.reason or "").endswith("which mixes positions") for row in modules)
