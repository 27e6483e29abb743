"""Tokens that heads read and write, against products with the model's own tables in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import UsageError, head_tokens, heads
from rewriter.interpret import rank as tokens
from rewriter.interpret.index import HeadIndex
from tests.committed import FOLDER, VOCABULARY

Array = NDArray[Any]


TABLES = {
    "silu-decoder": ("model.transformer.wte.weight", "onnx::MatMul_569"),
    "relu-decoder": ("model.lm_head.weight", "val_210"),
}
"""Embeddings and unembedding, read off the files."""


def weights(stem: str) -> dict[str, Array]:
    tensors = onnx.load(FOLDER / f"{stem}.onnx").graph.initializer
    return {each.name: onnx.numpy_helper.to_array(each).astype(np.float64) for each in tensors}


def tables(stem: str) -> tuple[Array, Array]:
    """(embeddings [tokens, d_model], unembedding [d_model, tokens])."""
    own = weights(stem)
    return own[TABLES[stem][0]], own[TABLES[stem][1]]


def unit(vector: Array) -> Array:
    return np.asarray(vector / np.linalg.norm(vector))


def directions(index: HeadIndex, name: str, place: int) -> dict[str, Array]:
    """By the definitions: columns and rows of neurons, singular vectors of explicit products of original heads."""
    own = {part: index[f"{name}.{part}"] for part in ("W_Q", "W_K", "W_V", "W_O")}
    if "mlp" in name:
        count = len(own["W_V"])
        group = next(
            head for head in range(place, count, index["blocks.0.mlp_heads.W_V"].shape[0]) if own["W_V"][head].any()
        )
        return {"Q": own["W_Q"][place][:, 0], "V": own["W_V"][group][:, 0], "O": own["W_O"][group][0]}
    u, _, v = np.linalg.svd(own["W_V"][place] @ own["W_O"][place])
    q, _, k = np.linalg.svd(own["W_Q"][place] @ own["W_K"][place].T)
    return {"V": u[:, 0], "O": v[0], "Q": q[:, 0], "K": k[0]}


@pytest.mark.parametrize("stem", ["silu-decoder", "relu-decoder"])
def test_scores_are_products_with_the_tables(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_ENTRIES", 50)
    index, (table, out) = heads(FOLDER / f"{stem}.onnx", wide=True), tables(stem)
    found = head_tokens(
        index, top=VOCABULARY, names=["blocks.0.mlp_heads.7", "blocks.1.mlp_heads.100", "blocks.?.attn.2"]
    )
    assert len(found.rows) == 2 * 2 + 2 * 4
    rows = {(row.head, side): row for row in found.rows for side in row.side}
    assert found.missing == {}
    for head in {head for head, _ in rows}:
        sublayer, _, place = head.rpartition(".")
        wanted = directions(index, sublayer, int(place))
        turned: dict[str, float] = {}
        for side, direction in wanted.items():
            row = rows[head, side]
            scores = out.T @ unit(direction) if side == "O" else table @ unit(direction)
            got = np.zeros(VOCABULARY)
            for token, score in row.top:
                got[token] = score
            turned[side] = np.sign(got @ scores)
            assert np.abs(got * turned[side] - scores).max() <= 1e-10
            assert [token for token, _ in row.top] == np.argsort(-got, kind="stable").tolist()
            assert row.bottom == tuple(reversed(row.top))
            assert row.selectivity == pytest.approx(np.abs(scores).max() / np.sqrt((scores**2).mean()))
        # Signs belong together: those of neurons are the weights' own, original heads may turn both sides.
        assert turned["V"] == turned["O"]
        if "attn" in sublayer:
            assert turned["Q"] == turned["K"]
            own = np.linalg.svd(index[f"{sublayer}.W_V"][int(place)] @ index[f"{sublayer}.W_O"][int(place)])[1]
            assert rows[head, "V"].share == pytest.approx(own[0] ** 2 / (own**2).sum(), abs=1e-10)
        else:
            assert set(turned.values()) == {1.0}


def test_scales_of_normalisations_are_folded_on_both_sides() -> None:
    stem, head = "silu-decoder", "blocks.1.mlp_heads.5"
    plain, (table, out) = heads(FOLDER / f"{stem}.onnx", wide=True), tables(stem)
    (last,) = [array for name, array in weights(stem).items() if name.endswith("ln_f.weight")]
    rows = {
        r.side: r for r in head_tokens(heads(FOLDER / f"{stem}.onnx", wide=True, fold_ln=True), names=head, top=3).rows
    }
    rows = {side: row for sides, row in rows.items() for side in sides}
    read = table @ unit(plain["blocks.1.ln2.w"] * plain["blocks.1.mlp_heads.W_V"][5, :, 0])
    write = (last[:, None] * out).T @ unit(plain["blocks.1.mlp_heads.W_O"][5, 0])
    assert [score for _, score in rows["V"].top] == pytest.approx(np.sort(read)[:-4:-1], abs=1e-10)
    assert [score for _, score in rows["O"].top] == pytest.approx(np.sort(write)[:-4:-1], abs=1e-10)


@pytest.mark.parametrize(
    ("stem", "sides", "missing"),
    [
        ("gelu-vision", {"O"}, {"reads": "no table of embeddings is read at token ids"}),
        ("gelu-encoder", {"Q", "K", "V"}, {"writes": "there is no unembedding"}),
        ("conformer-encoder", set(), {"reads": "no table", "writes": "is not on the stream"}),
    ],
)
def test_what_is_missing_is_said(stem: str, sides: set[str], missing: dict[str, str]) -> None:
    found = head_tokens(FOLDER / f"{stem}.onnx", names="*.attn.0", top=2)
    assert {row.side for row in found.rows} == sides
    assert set(found.missing) == set(missing)
    assert all(words in found.missing[what] for what, words in missing.items())


def tokenizer(path: Path) -> Path:
    words = {f"word{number}": number for number in range(VOCABULARY - 1)} | {"\x1b[31m<b>\n": VOCABULARY - 1}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "word0"}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    data: dict[str, Any] = {"version": "1.0", **dict.fromkeys(parts), "added_tokens": [], "model": model}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_tokens_as_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    found = head_tokens(
        FOLDER / "silu-decoder.onnx", names="blocks.0.attn.0", top=2, tokenizer=tokenizer(tmp_path / "tokenizer.json")
    )
    row = found.to_json()["rows"][0]
    assert all(text == f"'word{token}'" for token, text, _ in row["top"])
    assert found.told(VOCABULARY - 1) == "'\N{REPLACEMENT CHARACTER}[31m<b>\\n'"
    assert found.told(4000) == "4000"


def test_refusals(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    bad = tmp_path / "bad.json"
    bad.write_text("{", encoding="utf-8")
    path = FOLDER / "silu-decoder.onnx"
    for options, message in (
        ({"tokenizer": bad}, "is not a tokenizer.json"),
        ({"tokenizer": tmp_path / "none.json"}, "no such file"),
        ({"top": 0}, "take 1 or more"),
        ({"names": "x.*"}, "no head matches"),
    ):
        with pytest.raises(UsageError, match=message):
            head_tokens(path, **options)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'attnonly\[text\]'"):
        head_tokens(FOLDER / "silu-decoder.onnx", tokenizer="tokenizer.json")
