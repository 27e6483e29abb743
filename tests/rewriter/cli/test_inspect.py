"""`rewrite inspect` describes a model and writes nothing."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from passes.forms import FORMS
from rewriter import inspect, rewrite
from rewriter.ort import open_session
from tests.changes import rename
from tests.committed import FOLDER as MODELS
from tests.committed import feeds
from tests.conftest import Ran
from tests.textmodels import mlp


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def test_table(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = ran(0, ["inspect", str(MODELS / "silu-decoder.onnx")]).out
    assert "model.transformer.h.0.mlp" in text
    assert "16 + 128 + 20" in text  # d_ff / d_head, d_ff, (d_model + d_ff) / d_head with d_head 8
    assert "purity once converted, nonlinearities that remain: none" in text
    assert not list(tmp_path.iterdir())


def test_json_counts_weights_and_heads(ran: Ran) -> None:
    found = json.loads(ran(0, ["inspect", str(MODELS / "conformer-encoder.onnx"), "--json"]).out)
    blocks = found["accounting"]["blocks"]
    assert [block["parameters"] for block in blocks] == [2 * 32 * 128] * 4
    assert sum(block["share"] for block in blocks) == pytest.approx(found["accounting"]["share"])
    assert (found["accounting"]["remaining"], found["purity"]) == ({"Sigmoid": 4}, "4 Sigmoid")
    assert found["accounting"]["operators"] == {
        "linear": 62, "data movement": 34, "normalisation": 11, "heads of neurons": 8, "attention": 6, "other": 4,
        "elementwise products": 4,
    }  # fmt: skip


def test_costs_of_the_forms_are_stated_for_a_length(ran: Ran) -> None:
    model = str(MODELS / "silu-decoder.onnx")
    text = ran(0, ["inspect", model, "--tokens", "1000"]).out
    assert "Forms: one block at 1,000 tokens" in text
    assert "1.0 MB" in text  # two keys for each of 1000 x 128 queries
    accounting = json.loads(ran(0, ["inspect", model, "--tokens", "1000", "--json"]).out)["accounting"]
    assert accounting["tokens"] == 1000
    for block in accounting["blocks"]:
        first = block["forms"][0]
        assert [form["form"] for form in block["forms"]] == list(FORMS)
        assert (first["heads"], first["pattern_bytes"]) == ([128], 2 * 1000 * 128 * 4)


def test_forms_that_need_too_much_say_so_with_the_figures(ran: Ran) -> None:
    text = " ".join(ran(0, ["inspect", str(MODELS / "silu-decoder.onnx"), "--tokens", "8000"]).out.split())
    assert "form maskless cannot take 2 of the blocks: W_QK of 8001 positions takes 244 MB" in text
    assert "more than 64 MB; lower --max-tokens" in text


def test_recognised_blocks_are_weighed_too(tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "unnamed.onnx"
    onnx.save(mlp("h = Sin(y)"), path)
    assert "the table has no program for it" in " ".join(ran(3, ["inspect", str(path)]).out.split())
    accounting = inspect(path).accounting
    assert [block.heads for block in accounting.blocks] == [None]
    assert all(block.parameters > 0 for block in accounting.blocks)


@pytest.mark.parametrize(
    ("gate", "purity"),
    [("heads", "none: attention, linear maps and normalisation only"), ("product", "2 elementwise products of gates")],
)
def test_purity_of_gates(gate: str, purity: str) -> None:
    assert str(inspect(MODELS / "gated-decoder.onnx", gate=gate).accounting.purity) == purity


@pytest.mark.parametrize("options", [{"inline": True}, {"form": "compact"}])
def test_heads_are_pure(options: dict[str, Any]) -> None:
    made = rewrite(MODELS / "gelu-vision.onnx", validate=False, **options).rewritten
    accounting = inspect(made).accounting
    assert accounting.remaining == {}
    assert accounting.operators.keys() == {"linear", "data movement", "normalisation", "heads of neurons", "attention"}
    # An exponential that belongs to no head does.
    name = made.graph.output[0].name
    rename(made.graph.node, {name: "before_exp"})
    made.graph.node.append(onnx.helper.make_node("Exp", ["before_exp"], [name], "exp"))
    assert inspect(made).accounting.purity == "1 Exp"


def test_inspect_and_form_staged_agree_on_heads() -> None:
    """W1 and W2 over heads of the model's own dimension, 8; counted in the graph that is made."""
    path = MODELS / "silu-decoder.onnx"
    stated = next(form for form in inspect(path).accounting.blocks[0].forms if form.form == "staged")
    made = rewrite(path, form="staged", validate=False, max_tokens=64).rewritten
    prefix = "model.transformer.h.0.mlp/heads/"
    names = [f"{prefix}linear_1_v", f"{prefix}q", f"{prefix}linear_2_v"]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = open_session(made, optimise=False).run(feeds(onnx.load(path)))
    assert tuple(values[name].shape[1] for name in names) == stated.heads
    assert stated.heads == (-(-128 // 8), 128, -(-(32 + 128) // 8))
