"""Bridges to other tools without those tools: one line that names the extra."""

import importlib
import sys

import pytest

from rewriter import UsageError


@pytest.mark.parametrize("package", ["torch", "transformer_lens"])
def test_transformer_lens(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.partition(".")[0] == "transformer_lens"]
    for name in ("torch", "rewriter.adapters.transformer_lens", *loaded):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "transformer_lens":
        monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
        for name in ("Tensor", "nn"):
            setattr(sys.modules["torch"], name, object)
    with pytest.raises(UsageError, match=r"pip install 'attnonly\[transformerlens\]'") as error:
        importlib.import_module("rewriter.adapters.transformer_lens")
    assert f"({package} is missing)" in str(error.value)
