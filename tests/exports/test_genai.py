"""Folders of onnxruntime-genai's own builder: rewritten without options, proved, and the same tokens come out."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import ExitStatus, FolderReport, Report, rewrite, validate

genai: Any = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is missing: pip install .[genai]")


def tokens(folder: Path, adapted: bool = False) -> list[int]:
    """Greedy tokens after a prompt on the CPU, long enough to leave a sliding window of 16."""
    settings = genai.Config(str(folder))
    settings.clear_providers()
    model = genai.Model(settings)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=40, do_sample=False)
    generator = genai.Generator(model, parameters)
    if adapted:
        adapters = genai.Adapters(model)
        adapters.load(str(folder / "own.onnx_adapter"), "own")
        generator.set_active_adapter(adapters, "own")
    generator.append_tokens([5, 17, 99, 3, 42, 8, 77, 21, 60])
    while not generator.is_done():
        generator.generate_next_token()
    return [int(each) for each in generator.get_sequence(0)]


def rewritten(old: Path, new: Path) -> Report:
    """The report on the folder's model, whose blocks are all converted and proved."""
    folder = rewrite(old, new)
    assert isinstance(folder, FolderReport)
    report = folder.models["model.onnx"]
    assert report.validation.passed, report.problems
    assert report.validation.certified
    assert len(report.converted) == 2
    return report


def proved(old: Path, new: Path) -> Any:
    """What the proof of the folder's model shows, of prefill and of decoding; an error in it is refused."""
    proof = rewritten(old, new).validation
    assert {"past 0" in each for each in proof.cases} == {True, False}
    wrong, own = onnx.load(new / "model.onnx"), onnx.load(old / "model.onnx", load_external_data=False)
    given = {each.name for each in own.graph.initializer}
    planted = next(each for each in wrong.graph.initializer if each.name not in given and each.data_type < 7)
    numbers = onnx.numpy_helper.to_array(planted)
    planted.CopyFrom(onnx.numpy_helper.from_array((numbers * 1.01).astype(numbers.dtype), planted.name))
    refused = validate(old / "model.onnx", wrong)
    assert refused.exit_status is ExitStatus.VALIDATION_FAILED
    return proof


BUILT = [
    (name, precision)
    for name in ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
    for precision in ("fp32", "int4")
]
BUILT += [(name, "fp16") for name in ("llama", "phi3", "qwen3", "gemma3")]


@pytest.mark.parametrize(("name", "precision"), BUILT)
def test_a_folder_of_the_builder(name: str, precision: Any, tmp_path: Path) -> None:
    from models.genai import build_genai

    old, new = tmp_path / "old", tmp_path / "new"
    build_genai(name, old, precision, provider="cuda" if precision == "fp16" else "cpu")
    proof = proved(old, new)
    assert not proof.skipped
    normed = precision == "fp16" and name in ("qwen3", "gemma3")  # onnxruntime-genai runs these on a GPU alone
    assert any("q_norm_weight" in each for each in proof.notes) == normed
    assert any("present.0.value are unwritten" in each for each in proof.notes) == name.startswith("gemma")
    assert any("rounded to 8 bits" in each for each in proof.notes) == (precision == "int4")
    if not normed and precision != "int4":
        assert len(tokens(old)) > 20
        assert tokens(new) == tokens(old)


def test_float16_for_the_cpu_is_proved_where_it_runs(tmp_path: Path) -> None:
    from models.genai import build_genai

    build_genai("llama", tmp_path / "old", "fp16")
    proof = rewritten(tmp_path / "old", tmp_path / "new").validation
    assert all("past 0" in each for each in proof.cases)
    assert len(proof.cases) + len(proof.skipped) == 6


@pytest.mark.parametrize("beside", [False, True])
def test_adapters(beside: bool, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is missing: pip install .[genai]")
    from models.genai import build_genai

    old, new = tmp_path / "old", tmp_path / "new"
    build_genai("llama", old, adapted=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
    own = tokens(old)
    if beside:
        _put_beside(old)
        assert tokens(old) != own
    proved(old, new)
    assert tokens(new, beside) == own


def _put_beside(folder: Path) -> None:
    """Take LoRA weights out of a model: they become inputs of rank 0 by default, and an adapter is put beside it."""
    model, weights = onnx.load(folder / "model.onnx"), {}
    (folder / "model.onnx.data").unlink()
    del model.graph.value_info[:]
    for held in [each for each in model.graph.initializer if "lora_" in each.name]:
        weights[held.name] = onnx.numpy_helper.to_array(held)
        sizes = [0 if size == 4 else size for size in held.dims]
        free = onnx.helper.make_tensor_value_info(held.name, held.data_type, [size or "rank" for size in sizes])
        model.graph.input.append(free)
        held.CopyFrom(onnx.numpy_helper.from_array(np.zeros(sizes, np.float32), held.name))
    onnx.save(model, folder / "model.onnx")
    adapter = onnxruntime.AdapterFormat()
    adapter.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(each) for name, each in weights.items()})
    adapter.export_adapter(str(folder / "own.onnx_adapter"))
