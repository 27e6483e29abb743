"""The network of attention heads that docs/heads.md writes in torch computes what the original does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import heads, rewrite
from tests.cases import run
from tests.committed import FOLDER

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

PAGE = Path(__file__).parents[2] / "docs" / "heads.md"
OUTPUTS = {
    "silu-decoder": ("logits", 1e-5),
    "relu-decoder": ("logits", 1e-5),
    "gated-decoder": ("logits", 1e-6),
    "gelu-encoder": ("last_hidden_state", 1e-12),
}
"""By model the output, and the number in its normalisations."""


def network(epsilon: float) -> Any:
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"EPSILON": epsilon, "THETA": 10000.0}
    exec(code, names)  # noqa: S102 - our own page
    return names


@pytest.mark.parametrize("stem", OUTPUTS)
def test_the_network_of_the_page(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output, epsilon = OUTPUTS[stem]
    model = onnx.load(FOLDER / f"{stem}.onnx")
    heads(rewrite(model, form="whole", max_tokens=16, validate=False).rewritten).write("heads.safetensors")
    made, ids = network(epsilon), np.arange(7) * 3 % 128
    expected = run(model, input_ids=ids[None], attention_mask=np.ones((1, 7), np.int64))[output][0]
    np.testing.assert_allclose(made["network"](torch.tensor(ids)).numpy(), expected, atol=2e-5)
    made["w"]["blocks.1.attn.P"][:, made["rows"] + 6, made["rows"] + 5] -= 1.0  # planted, at a score of the last token
    assert np.abs(made["network"](torch.tensor(ids)).numpy() - expected).max() > 1e-3
