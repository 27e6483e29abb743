"""What other tools make of the committed files: the rewriter finds the same blocks in it; without PyTorch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from models.registry import COMMITTED, ENTRIES, Committed, get
from models.tools.optimisers import MODEL_TYPES
from models.variants import VARIANTS, Hints, Refused, Variant, get_variant, make_variant
from rewriter import rewrite
from tests.committed import FOLDER
from tests.conftest import slow

FREE = ("onnxruntime", "storage", "scopes")
OTHERWISE = ("ort-transformers", "external-all")
"""The transformers optimizer takes some architectures only; onnxruntime does not load shapes from a data file."""

PLAIN = [variant for variant in VARIANTS if variant.group in FREE and not variant.name.startswith(OTHERWISE)]
QUICK = ("silu-decoder.onnx", "gelu-encoder.onnx", "gated-decoder.onnx")
"""One from TorchScript, one of several nodes for its activation, one with gates; the others are slow tests."""

NO_PROGRAM = "no head program"


def each_file(committed: Committed) -> str:
    return Path(committed.file).stem


def each_variant(variant: Variant) -> str:
    return variant.name


def test_names_are_unique_and_known() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    assert get_variant("onnxsim").requires == ("onnxsim",)
    assert set(MODEL_TYPES) <= {entry.name for entry in ENTRIES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", PLAIN, ids=each_variant)
@pytest.mark.parametrize(
    "committed",
    [pytest.param(each, id=each_file(each), marks=() if each.file in QUICK else slow) for each in COMMITTED],
)
def test_the_same_blocks_are_found(committed: Committed, variant: Variant, tmp_path: Path) -> None:
    entry = get(committed.entry)
    target = make_variant(variant, FOLDER / committed.file, tmp_path / "model.onnx", Hints(entry.name, 4, 32))
    report = rewrite(target, dry_run=True)
    recognised = [row for row in report.left if NO_PROGRAM in (row.reason or "")]
    blocks = entry.mlp_blocks("tiny") * variant.copies
    assert len(report.converted) + len(recognised) == blocks
    assert entry.gated or not recognised
    names = [row.name for row in report.blocks]
    assert len(set(names)) == len(names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "ort-extended",
        pytest.param("inputs", marks=slow),
        pytest.param("constants", marks=slow),
        pytest.param("no-names", marks=slow),
        "if-captured",
        pytest.param("loop", marks=slow),
        "function-shared",
    ],
)
def test_a_variant_is_converted_and_proved(name: str, tmp_path: Path) -> None:
    target = make_variant(get_variant(name), FOLDER / "silu-decoder.onnx", tmp_path / "model.onnx")
    report = rewrite(target, tmp_path / "rewritten.onnx", providers=("cpu",))
    assert report.validation is not None
    assert report.validation.passed
    assert len(report.converted) == 2 * get_variant(name).copies


def test_what_the_variants_are(tmp_path: Path) -> None:
    source = FOLDER / "silu-decoder.onnx"
    weights = len(onnx.load(source).graph.initializer)

    def made(name: str) -> onnx.ModelProto:
        return onnx.load(make_variant(get_variant(name), source, tmp_path / f"{name}.onnx"))

    assert [node.op_type for node in made("if-captured").graph.node] == ["If"]
    assert len(made("if-captured").graph.initializer) == weights
    assert not made("if-own").graph.initializer
    assert [node.op_type for node in made("loop").graph.node] == ["Loop", "Squeeze"]
    shared, own = made("function-shared"), made("function-own")
    assert len(shared.functions) == 1
    assert [node.op_type for node in shared.graph.node].count(shared.functions[0].name) == 2
    assert len(own.functions) == 2
    assert not made("constants").graph.initializer
    assert len(made("inputs").graph.input) == 2 + weights
    assert not any(node.name for node in made("no-names").graph.node)
    make_variant(get_variant("external-data"), source, tmp_path / "external.onnx")
    assert (tmp_path / "external.onnx.data").stat().st_size > 100_000


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ort-transformers", "no model type for this architecture"),
        ("opset-18", "the model has this opset already"),
        ("int4-qdq", "4-bit DequantizeLinear needs opset 21"),
        ("opset-9", "onnx's version converter: "),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_refusal_has_a_reason(name: str, reason: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    with pytest.raises(Refused, match=reason):
        make_variant(get_variant(name), FOLDER / "gated-decoder.onnx", tmp_path / "model.onnx", Hints("llama", 4, 32))


def test_a_missing_package_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Refused, match="needs onnxslim"):
        make_variant(get_variant("onnxslim"), FOLDER / "silu-decoder.onnx", tmp_path / "model.onnx")


def test_a_tool_that_fails_is_a_refusal(tmp_path: Path) -> None:
    def fail(_source: Path, _target: Path, _hints: Hints) -> None:
        raise KeyError("x")

    with pytest.raises(Refused, match="KeyError: 'x'"):
        make_variant(Variant("broken", "storage", fail), FOLDER / "silu-decoder.onnx", tmp_path / "model.onnx")
