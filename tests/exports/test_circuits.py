"""The networks that docs/notebooks builds again in torch, and the scores of their nodes."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from models.export import export_model
from models.genai import FAMILIES, genai_entry
from models.registry import get
from models.training.questions import indirect_object
from rewriter import run_with_cache
from rewriter.errors import UsageError
from rewriter.files.tokenizer import open_tokenizer
from tests.committed import FOLDER

torch = pytest.importorskip("torch")
circuits = pytest.importorskip("docs.notebooks.circuits", reason="needs the extra text")
TOKENIZER = FOLDER / "trained" / "questions-tokenizer.json"
SHAPES = ("llama", "qwen3", "gemma3", "olmo2", "pythia", "bloom")
"""Rotary and grouped; queries and keys normalised by head, or all heads at once; rotated in part; not rotated."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives a random model, and three prompts."""

    @cache
    def made(name: str) -> Any:
        entry, path = genai_entry(name) if name in FAMILIES else get(name), tmp_path_factory.mktemp(name) / "m.onnx"
        export_model(replace(entry, sizes={"tiny": {**entry.sizes["tiny"], "vocab_size": 256}}), path, size="tiny")
        subject = circuits.Subject(path, open_tokenizer(TOKENIZER))
        return subject, subject.prompts(indirect_object, 3, np.random.default_rng(1))

    return made


@pytest.mark.parametrize("name", SHAPES)
def test_a_network_is_the_file(name: str, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, batch = asked(name)
    monkeypatch.setattr(circuits, "_ROWS", 2 * len(batch.last))
    assert subject.off(batch) < 1e-5
    assert circuits.scores(subject, batch, 0)[1] < 1e-4, "its scores are not those of attribute"
    away = torch.rand(12, subject.nodes, generator=torch.Generator().manual_seed(0)) < 0.4
    away[6:] &= torch.arange(subject.nodes) > torch.arange(6)[:, None] * subject.nodes // 6
    other = subject.replica.run(batch.changed)[1]
    for row, short in zip(away, subject.patched(batch, away), strict=True):  # what does not change is not run again
        change = lambda each, own, row=row: torch.where(row[subject.owner[each]], other[each], own)  # noqa: E731
        plain = subject.metric(batch, subject.replica.run(batch.start, change=change)[0]).mean()
        assert float(short) == pytest.approx(float(plain), abs=1e-5)


@pytest.mark.parametrize("what", ["a wrong sign", "a shifted head", "the pattern of another text"])
@pytest.mark.parametrize("name", ["qwen3", "bloom"])
def test_what_is_wrong_is_noticed(what: str, name: str, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, batch = asked(name)
    (own, *beside), *rest = subject.replica.stages
    w, width, positions = own.weights, own.width, own.positions
    text = subject.network.feeds(np.arange(positions.shape[1])[None] * 5 % 256)
    pattern = run_with_cache(subject.path, text).cache[f"{own.name}.hook_pattern"][0]
    changes = {
        "a wrong sign": {"W_O": torch.cat([-w["W_O"][:width], w["W_O"][width:]])},
        "a shifted head": {"W_O": w["W_O"].roll(width, 0)},
        "the pattern of another text": {each: 0 * w[each] for each in ("W_K", "b_K")},  # scores are positions alone
    }
    positions = torch.from_numpy(pattern).log().clamp(min=-1e30) if "text" in what else positions
    wrong = replace(own, weights={**w, **changes[what]}, positions=positions)
    monkeypatch.setattr(subject.replica, "stages", [(wrong, *beside), *rest])
    with pytest.raises(UsageError, match="computes something else"):
        subject.off(batch)
    assert circuits.scores(subject, batch, 0)[1] > 1e-3


def test_gates_share_their_product(asked: Any) -> None:
    (own,) = asked("llama")[0].replica.stages[1]
    stream = torch.randn(1, 4, len(own.weights["W_in"]), generator=torch.Generator().manual_seed(0)).requires_grad_()
    made = {rule: own.channels(stream, (rule,)) for rule in (*circuits.GATES, "gates free")}
    half, values, gates, free = (torch.autograd.grad(each.sum(), stream)[0] for each in made.values())
    torch.testing.assert_close(half, (values + gates) / 2)
    assert (values - gates).norm() > 0.1 * half.norm() < (free - half).norm() * 2
    for each in made.values():
        torch.testing.assert_close(each, made["gates"])


@pytest.mark.slow
def test_the_command_scores_what_a_model_is_rewritten_to(asked: Any, tmp_path: Path) -> None:
    arguments = [str(asked("llama")[0].path), "--tokenizer", str(TOKENIZER), "--json", str(tmp_path / "rows.json")]
    few = "--prompts=2 --neurons=4 --seeds=2 --question=induction --form=local --form=compact --form=whole"
    done = CliRunner().invoke(circuits.main, [*arguments, *few.split()])
    assert done.exit_code == 0, done.output
    assert "RelP, gates free" in done.output
    for seed, row in enumerate(json.loads((tmp_path / "rows.json").read_text())["rows"]):
        assert (row["seed"], [*row["rewritten"]]) == (seed, ["local", "compact", "whole"])
        assert max(max(each.values()) for each in row["rewritten"].values()) < 1e-6
