"""Heads of earlier runs: recognised where the plan in the file is true, and nodes like any other where it is not."""

import re
from typing import Any

import numpy as np
import onnx
import pytest

from passes.forms import FORMS
from passes.options import ALREADY, FormOptions, Options
from passes.plan import KEY, make_plan, read_record
from rewriter import heads, inspect
from rewriter.interpret.index import HeadIndex
from tests.changes import copied, run
from tests.committed import FOLDER
from tests.passes.test_record import claiming, made, masked
from tests.textmodels import ERF_GELU, FIRST, SILU, mlp

BETA = "k = Mul(y, $1.2345678) s = Sigmoid(k) h = Mul(y, s)"


def already(model: onnx.ModelProto) -> list[str]:
    """The activations of the blocks that are heads."""
    plan = make_plan(model, Options(), onnx.numpy_helper.to_array)
    return [left.activation for left in plan.left if left.miss.reason == ALREADY]


SPELLINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (SILU, {}, "silu"),
    (BETA, {}, "silu(beta=1.23457, factor=1)"),
    ("h = Relu(y)", {}, "relu"),
    (ERF_GELU, {}, "gelu"),
    (ERF_GELU, {"accuracy": 0.03}, "gelu"),
    ("p = Softplus(y) t = Tanh(p) h = Mul(y, t)", {}, "mish"),
    ("h = LeakyRelu<alpha = 0.1>(y)", {}, "leaky_relu(right=1, left=0.1)"),
    ("h = Clip(y, $-1.0, $6.0)", {}, ""),
    ("h = HardSwish(y)", {}, "hard_swish"),
    ("r = Relu(y) h = Mul(r, r)", {}, ""),
    ("h = Elu(y)", {}, ""),
    ("t = Tanh(y) s = Sigmoid(t) h = Mul(y, s)", {"domain": 8.0, "accuracy": 1e-3}, "f"),
    ("h = Tanh(y)", {"form": "compact"}, ""),
    (SILU, {"form": "masked"}, "silu"),
    (SILU, {"form": "masked", "expose": "pattern"}, "silu"),
    (SILU, {"form": "maskless"}, "silu"),
    (SILU, {"form": "maskless", "max_tokens": 1}, "silu"),
    (ERF_GELU, {"form": "staged"}, "gelu"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "calls"])
@pytest.mark.parametrize(("text", "options", "activation"), SPELLINGS)
def test_heads_are_recognised(text: str, options: dict[str, Any], activation: str, inline: bool) -> None:
    result = made(mlp(text), inline=inline, **options)
    plan = make_plan(result, Options(), onnx.numpy_helper.to_array)
    assert (plan.conversions, plan.recognised.notes) == ((), ())
    (found,) = already(result)
    assert found == activation or not activation


GATED = "a = MatMul(x, W1) y = Add(a, b1) u = MatMul(x, V1)"


@pytest.mark.parametrize(
    ("text", "elem", "options"),
    [
        *(
            (SILU, elem, {"form": form})
            for elem in ("float16", "bfloat16", "double")
            for form in ("local", "compact", "masked")
        ),
        ("h = Exp(y)", "float16", {}),  # beyond the type's largest number
        ("h = Exp(y)", "double", {}),
        ("w = Clip(y, $0.0, $6.0) h = Mul(w, u)", "double", {"form": "compact"}),  # a difference of large numbers
        ("w = Clip(y, $0.0, $6.0) h = Mul(w, u)", "float", {}),
        ("w = Relu(y) h = Mul(w, u)", "float16", {"form": "masked"}),
    ],
)
def test_in_other_types(text: str, elem: str, options: dict[str, Any]) -> None:
    result = made(mlp(text, elem=elem, first=GATED if "u)" in text else FIRST), **options)
    assert len(already(result)) == 1, make_plan(result, Options()).notes
    assert already(result) == ["silu"] or text != SILU


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["silu-decoder", "gelu-vision", "gated-decoder"])
def test_committed_models_are_recognised(file: str, form: str) -> None:
    found = inspect(made(FOLDER / f"{file}.onnx", form=form)).report
    assert (found.converted, [row.reason for row in found.left]) == ((), [ALREADY] * 2)


def test_what_a_second_run_leaves_stays_in_the_plan() -> None:
    first = made(FOLDER / "silu-decoder.onnx", only=("*h.0*",))
    second = made(first, form="masked")
    record: Any = read_record(second)
    assert [(each.block.name, each.form) for each in record.blocks] == [
        ("model.transformer.h.0.mlp", "local"),
        ("model.transformer.h.1.mlp", "masked"),
    ]
    assert already(second) == ["silu", "silu"]


def test_a_file_without_its_metadata_is_a_model_like_any_other() -> None:
    bare = made(FOLDER / "silu-decoder.onnx")
    del bare.metadata_props[:]
    assert already(bare) == []
    assert len(make_plan(bare, Options()).conversions) == 2


def test_metadata_of_nodes_say_nothing() -> None:
    model = mlp("h = Relu(y)")
    for node in model.graph.node:
        node.metadata_props.add(key="attnonly.block", value="mlp")
    assert inspect(model).accounting.purity != ""
    assert len(make_plan(model, Options()).conversions) == 1


def same(found: HeadIndex, expected: HeadIndex) -> None:
    """The same names, beside positions in form `whole`, and the same numbers."""
    assert [name for name in found if not name.endswith(".P")] == list(expected) != []
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, *({"form": form} for form in FORMS if form != "local")], ids=str)
@pytest.mark.parametrize("program", ["fewest", "fast"])
def test_parameters_are_exact(options: dict[str, Any], program: str) -> None:
    """A label that rounds to six digits would give b_K 1.2345700 for 1.2345677."""
    original = mlp(BETA)
    same(heads(made(original, **options), program=program), heads(original, program=program))


def test_the_models_own_attention_in_form_whole() -> None:
    accounting = inspect(made(FOLDER / "gelu-vision.onnx", form="whole", max_tokens=24)).accounting
    assert (accounting.attention_heads, accounting.head_dimension) == (4, 8)


W1 = "for each in (block['projections']['query'], block['projections']['value']): each"
"""Of a block without a gate."""
EXCHANGED = """
one, other = ([each["projections"][name] for name in ("query", "value")] for each in plan["blocks"])
for a, b in zip(one, other): a["weight"], b["weight"] = b["weight"], a["weight"]
"""
ONE_HEAD_MORE = "block['program']['heads'].append({'beta': (0.0).hex(), 'c': (2.0**-40).hex(), 'bias_tokens': [{}]})"
"""It is nearly 0: the program is still SiLU."""
OTHER = "is not what the heads of the plan would be"
FALSE = (
    ("block['block']['identified']['activation'] = 'gelu'", "silu is off by 0.* from gelu, more than the plan says"),
    ("block['block']['identified']['activation'] = 'silly'", "the table has no activation 'silly'"),
    ("block['block']['identified']['parameters'] = [(1.0).hex()]", "with so many parameters"),
    ("block['block']['identified']['parameters'] = [(1.001).hex(), (1.0).hex()]", "silu is off by"),
    ("block['block']['path'] = [['If', 'then_branch']]", "the graph that should contain it does not exist"),
    ("block['form'] = 'maskless'", OTHER),
    ("block['double'] = True", OTHER),
    (f"{W1}['data'] = 'nothing'", OTHER),
    ("block['projections']['result'] = 'logits'", OTHER),
    (f"{W1}['transposed'] = True", "another shape than in the plan"),
    (f"{W1}['stop'] = 64", "another shape than in the plan"),
    ("block['projections']['output']['weight'] = 'nothing'", "or is not constant"),
    (EXCHANGED, OTHER),
    (f"{W1}['biases'] = []", OTHER),
    (ONE_HEAD_MORE, OTHER),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("change", "reason"), FALSE)
def test_a_false_plan_is_ignored_with_a_note(change: str, reason: str) -> None:
    model = claiming(masked(), change)
    plan = make_plan(model, Options())
    assert len(plan.recognised.notes) >= 1
    assert re.search(reason, plan.recognised.notes[0]), plan.recognised.notes
    assert "model.transformer.h.0.mlp" not in [left.name for left in plan.left if left.miss.reason == ALREADY]
    if reason == OTHER:  # the same note as of other changes
        return
    assert any("is ignored" in note for note in inspect(model).report.notes)
    index = heads(model)
    assert not any(name.startswith("blocks.0.mlp_heads") for name in list(index))
    assert any("is ignored" in miss.reason for miss in index.missed)


SWAPPED = "p = block['projections']; p['query'], p['value'] = p['value'], p['query']"
CONSTANT = "change_values(weight(model, 'mlp/heads/*'), 'v += 1')", "has other values than the heads of the plan"


@pytest.mark.parametrize(
    ("original", "form", "change", "noted"),
    [
        (FOLDER / "gated-decoder.onnx", "compact", f'model = claiming(model, "{SWAPPED}")', OTHER),
        (mlp("h = LeakyRelu<alpha = 0.1>(y)"), "local", *CONSTANT),
        (mlp(ERF_GELU), "compact", *CONSTANT),
        (mlp(ERF_GELU), "masked", *CONSTANT),
        (mlp(SILU), "local", "(function,) = model.functions; function.node[0].op_type = 'Neg'", "is another one"),
    ],
    ids=["gate-and-value", "self-value", "bias-of-keys", "forbidden", "function"],
)
def test_a_change_of_heads_or_plan_is_noted(original: Any, form: str, change: str, noted: str) -> None:
    model = made(original, form=form)
    assert len(already(model)) == (1 if isinstance(original, onnx.ModelProto) else 2)
    (note,) = make_plan(run(change, model=model, claiming=claiming)["model"], Options()).recognised.notes
    assert noted in note


def test_an_unreadable_plan_is_no_plan() -> None:
    model = made(mlp(SILU))
    del model.metadata_props[:]
    model.metadata_props.add(key=KEY, value="[" * 100_000)
    plan = make_plan(model, Options())
    assert (plan.notes[0], len(plan.conversions)) == ("the plan in the file's metadata is ignored: it is not JSON", 1)


@pytest.mark.parametrize(
    "text",
    ["h = Relu(y)", SILU, "n = Neg(y) e = Exp(n) a = Add(e, $1.0) h = Div(y, a)", "m = Max(y, $0.0) h = Identity(m)"],
)
def test_an_activation_is_no_head_because_the_file_says_so(text: str) -> None:
    """Else `inspect` would say that nothing but attention is left."""
    model = mlp(text)
    model.metadata_props.extend(made(mlp(SILU)).metadata_props)
    (note,) = make_plan(model, Options()).recognised.notes
    assert OTHER in note
    assert already(model) == []


def test_weights_in_another_file_are_read(tmp_path: Any) -> None:
    path = tmp_path / "made.onnx"
    onnx.save(copied(masked()), path, save_as_external_data=True, size_threshold=0)
    assert [row.reason for row in inspect(path).report.left] == [ALREADY] * 2
    bare = onnx.load(path, load_external_data=False)
    assert "cannot be read" in make_plan(bare, Options()).recognised.notes[0]


def test_options_of_the_file_are_those_of_the_run() -> None:
    record: Any = read_record(made(mlp(SILU), form="maskless", max_tokens=64))
    assert record.options == {"form": "maskless", "max_tokens": 64}
    assert record.blocks[0].options.max_tokens == 64 != FormOptions().max_tokens
