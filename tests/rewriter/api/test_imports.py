"""Imports: only what a call needs, and our own `passes` even if another module has that name."""

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import rewriter
from tests.committed import FOLDER

_SLOW = {"rewriter.api.comparing", "rich.progress", "onnx.reference", "jinja2", "torch", "joblib"}


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("imported", ["rewriter.api.rewriting", "rewriter.report.terminal", "rewriter.cli"])
def test_what_a_rewriting_does_not_need(imported: str, tmp_path: Path) -> None:
    found = python("-c", f"import sys, {imported}; print(*sys.modules, sep=chr(10))", cwd=tmp_path)
    assert "rewriter" in found.stdout.split()
    assert _SLOW.isdisjoint(found.stdout.split())


def test_every_public_name_is_found_and_introduced() -> None:
    for name in {*dir(rewriter)} - {"__version__"}:
        assert getattr(rewriter, name).__name__ == name
        assert name in str(rewriter.__doc__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rewriter.nothing  # type: ignore[attr-defined]  # noqa: B018 - reading it must fail


def test_help_is_short_and_says_what_can_be_passed() -> None:
    assert len(pydoc.render_doc(rewriter).splitlines()) < 100
    text = pydoc.plain(pydoc.render_doc(rewriter.rewrite))
    assert "ForwardRef" not in text
    assert "<function" not in text
    for part in (
        "form: str = 'local'",
        "providers: str | collections.abc.Sequence[str]",
        "accuracy: float | None = None",
    ):
        assert part in text


@pytest.mark.parametrize("path", ["passes/__init__.py", "passes.py"])
def test_another_module_named_passes_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("", encoding="utf-8")
    wanted = f"Python finds {tmp_path / 'passes'}"
    done = python("-m", "rewriter", str(FOLDER / "silu-decoder.onnx"), "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"rewrite: {wanted}")
    done = python("-c", "import rewriter; rewriter.inspect", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {wanted}")


SCRIPT = """
import numpy as np
import onnx
import rewriter

result = rewriter.rewrite("model.onnx", "heads.onnx")
if result:
    ratio: float = result.validation.error_ratio
    nodes: int = len(result.rewritten.graph.node) - result.after.nodes
    model: onnx.ModelProto = onnx.load(result.output)
    print(ratio < 2, nodes, sum(block.heads or 0 for block in result.converted))
again = rewriter.validate("model.onnx", "heads.onnx", inputs={"x": np.ones((1, 2, 4), np.float32)})
print(again.same, again.error_ratio < 2, again.validation.certified, again.validation.cases[0])
found = rewriter.diff("model.onnx", "heads.onnx", providers="cpu")
print(found.graph.same, found.validation.cases[0])
"""
"""What people write without looking up which attribute may be missing."""


@pytest.mark.slow
def test_a_natural_script_runs_and_is_typed(tmp_path: Path) -> None:
    import onnx

    from tests.textmodels import SILU, mlp

    onnx.save(mlp(SILU), tmp_path / "model.onnx")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = python("script.py", cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", "True 0 8\nTrue True True the given inputs\nFalse batch 3, sequence 17\n")
    checked = python("-m", "mypy", "--strict", "script.py", cwd=tmp_path)
    assert checked.stdout == "Success: no issues found in 1 source file\n"
    (tmp_path / "script.py").write_text(SCRIPT.replace("ratio: float", "ratio: str"), encoding="utf-8")
    assert "Incompatible types" in python("-m", "mypy", "--strict", "script.py", cwd=tmp_path).stdout
