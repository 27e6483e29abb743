"""A folder that optimum wrote, converted as a whole, still generates the same tokens in optimum's own classes."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx, which needs a separate environment")
import torch

from rewriter import ExitStatus, FolderReport, rewrite


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers with random weights, made here, and a tokenizer of as many words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from models.genai import save_tokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    config.initializer_range = 0.3  # such that the next tokens differ
    GPT2LMHeadModel(config).eval().save_pretrained(folder)
    save_tokenizer(folder, 64)
    return folder


@pytest.mark.parametrize("task", ["text-generation-with-past", "text-generation"])
def test_generation_is_the_same(source: Path, tmp_path: Path, task: str) -> None:
    from optimum.exporters.onnx import main_export
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer, GPT2LMHeadModel

    main_export(str(source), output=str(tmp_path / "in"), task=task, do_validation=False, local_files_only=True)
    report = rewrite(tmp_path / "in", tmp_path / "out", providers="cpu")
    assert isinstance(report, FolderReport)
    assert report.exit_status is ExitStatus.CONVERTED
    assert all(len(each.converted) == 2 for each in report.models.values())
    assert {"config.json", "tokenizer.json"} <= set(report.copied)

    prompt = torch.tensor([[5, 17, 3, 42]])
    cached = task.endswith("past")
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = [
        ORTModelForCausalLM.from_pretrained(tmp_path / name, use_cache=cached, use_io_binding=False)
        .generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=cached, **options)
        .tolist()
        for name in ("in", "out")
    ]
    model = GPT2LMHeadModel.from_pretrained(source)
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).tolist()
    assert len(set(wanted[0])) > 4
    assert tokens == [wanted, wanted]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5, 17]) == "w5 w17"
