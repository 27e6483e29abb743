"""Compositions, tokens and duplicates against explicit products in numpy; which heads are compared at all."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter import ModelError, UsageError, compositions, head_tokens, heads
from rewriter.arrays import Array, largest_places
from rewriter.interpret import rank
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.rank import Best
from rewriter.interpret.sublayers import Attention
from tests.committed import FILES, FOLDER, VOCABULARY
from tests.textmodels import text_model, word_tokenizer

pytestmark = pytest.mark.sample(1)

ALL = 10**6


def explicit(index: HeadIndex) -> dict[str, dict[str, Array]]:
    """Head to its W_OV, W_QK and W_QK^T, [d_model, d_model] each, by the definitions."""
    found: dict[str, dict[str, Array]] = {}
    for named in index.sublayers:
        own = {part: index[f"{named.name}.{part}"] for part in ("W_Q", "W_K", "W_V", "W_O")}
        count = named.heads
        for place in range(named.count):
            if isinstance(named, Attention):
                ov, qk = own["W_V"][place] @ own["W_O"][place], own["W_Q"][place] @ own["W_K"][place].T
                found[f"{named.name}.{place}"] = {"O": ov, "V": ov, "Q": qk, "K": qk.T}
                continue
            # The heads of a neuron, of which some have constant values or keys.
            group = range(place, count, named.count)
            ov = next(own["W_V"][head] @ own["W_O"][head] for head in group if own["W_V"][head].any())
            keys = {
                head: np.vstack([index[f"{named.name}.b_K"][head], index[f"{named.name}.bias_K"][head]])
                for head in group
            }
            qk = next(
                each for each in (own["W_Q"][h] @ np.nan_to_num(keys[h], neginf=0.0).T for h in group) if each.any()
            )
            found[f"{named.name}.{place}"] = {"O": ov, "V": ov, "Q": qk}
            moved = next((own["W_K"][head] for head in group if own["W_K"][head].any()), None)
            if moved is not None:
                found[f"{named.name}.{place}"]["K"] = moved
    return found


def score(writer: Array, reader: Array) -> float:
    return float(np.linalg.norm(writer @ reader) / (np.linalg.norm(writer) * np.linalg.norm(reader)))


@pytest.mark.parametrize("fold_ln", [False, True])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scores_are_those_of_explicit_products(path: Path, fold_ln: bool) -> None:
    index = heads(path, wide=True, fold_ln=fold_ln)
    wanted, order = explicit(index), [each.name for each in index.sublayers]
    assert any(each.ndim == 2 and each.shape == (32, 32) for each in wanted["blocks.0.attn.1"].values())
    found = compositions(index, top=ALL)
    assert found.baseline == 32**-0.5
    rng = np.random.default_rng(0)
    for reader in [*rng.choice(list(wanted), 12, replace=False), "blocks.1.attn.0", "blocks.1.attn.3"]:
        place = order.index(reader.rpartition(".")[0])
        writers = [each for each in wanted if order.index(each.rpartition(".")[0]) < place]
        for kind in "QKV":
            reads = found.of(reader, kind)
            if kind not in wanted[reader]:
                assert reads == []
                continue
            assert [each.score for each in reads] == sorted((each.score for each in reads), reverse=True)
            assert {each.writer for each in reads} == set(writers)
            for each in reads:
                assert abs(each.score - score(wanted[each.writer]["O"], wanted[reader][kind])) <= 1e-10


@pytest.mark.slow
def test_the_strongest_are_the_largest_of_all() -> None:
    found = compositions(FOLDER / "silu-decoder.onnx", top=5)
    everything = compositions(FOLDER / "silu-decoder.onnx", top=ALL)
    names = everything.heads
    assert len(names) == 264
    scores = {
        (each.kind, each.reader, each.writer): each.score
        for name, kind in product(names, "QKV")
        for each in everything.of(name, kind)
    }
    for name, kind in product(names, "QKV"):
        assert [each.score for each in found.of(name, kind)] == [each.score for each in everything.of(name, kind)][:5]
    top = found.strongest(5)
    largest = sorted({(value, *pair) for (_, *pair), value in scores.items()}, reverse=True)[:5]
    part = compositions(FOLDER / "silu-decoder.onnx", top=5, every_head=False).strongest(5)
    assert [each.reader for each in part] == [each.reader for each in top]
    assert [each.score for each in top] == pytest.approx([value for value, *_ in largest], abs=1e-6)
    assert {each.kind for each in top} == {"QV"}
    assert all(abs(scores[kind, each.reader, each.writer] - each.score) <= 1e-6 for each in top for kind in each.kind)


@pytest.mark.parametrize("inner", [1, 8])
def test_bounds_leave_out_most_and_lose_none(inner: int) -> None:
    rng = np.random.default_rng(inner)
    ours, theirs = (rng.normal(size=(each, inner, 256)) * 0.1 ** np.arange(inner)[:, None] for each in (300, 200))
    ours[7] += theirs[3]
    ours, theirs = (each / np.linalg.norm(each, axis=(1, 2), keepdims=True) for each in (ours, theirs))
    (a, b), scores, part = map(rank._Factors, (ours, theirs)), rank.block_scores(ours, theirs), slice(5, 250)
    for least in (scores[part].max() - 1e-9, 0.5):
        rows, columns = rank._likely(least, a, b, part)
        assert np.outer(rows, columns)[scores[part] > least].all()
        assert rows.sum() < 60
    assert not rank._likely(1.01, a, b, part)[0].any()


SUBLAYER = (
    "f{0} = MatMul({1}, W1) y{0} = Add(f{0}, b1) s{0} = Sigmoid(y{0}) h{0} = Mul(y{0}, s{0}) o{0} = MatMul(h{0}, W2)"
)


def test_only_what_is_in_the_sum_is_read() -> None:
    parallel = [SUBLAYER.format("a", "x"), SUBLAYER.format("b", "x"), "r = Add(oa, ob)", "m = Add(x, r)"]
    norm = ["n = LayerNormalization(m, w, w)", SUBLAYER.format("c", "n"), "t = Add(m, oc)"]
    apart = ["p = MatMul(t, U)", SUBLAYER.format("d", "p"), "out = Add(p, od)"]
    ones, map_between = np.ones(4), np.eye(4) * 2.0
    model = text_model(" ".join([*parallel, *norm, *apart]), constants={"w": ones, "U": map_between})
    index = heads(model)
    assert len(index.sublayers) == 4
    a, b, c, d = (each.name for each in index.sublayers)
    read = {(reader.sublayer.name, writer.sublayer.name) for reader, writers in rank.pairs(index) for writer in writers}
    assert read == {(c, a), (c, b)}
    assert compositions(index).of(f"{d}.0", "V") == []


def test_heads_without_weights_have_no_scores() -> None:
    first, second, third = (SUBLAYER.format(*each) for each in ("ax", "bm", "ct"))
    second = second.replace("W2", "Z2")
    body = f"{first} m = Add(x, oa) {second} t = Add(m, ob) {third} out = Add(t, oc)"
    rows = np.ones((8, 4))
    rows[3] = 0.0
    found = compositions(text_model(body, constants={"Z2": rows}), top=ALL)
    names = list(dict.fromkeys(head.rpartition(".")[0] for head in found.heads))
    writers = {each.writer for each in found.of(f"{names[2]}.2", "V")}
    assert len(writers) == 15
    assert f"{names[1]}.3" not in writers


def test_weights_that_are_not_finite() -> None:
    broken = text_model(
        f"{SUBLAYER.format('a', 'x').replace('W2', 'N2')} m = Add(x, oa) {SUBLAYER.format('b', 'm')} out = Add(m, ob)",
        constants={"N2": np.full((8, 4), np.nan)},
    )
    with pytest.raises(ModelError, match="are not finite"):
        compositions(broken)


def test_what_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="do not fit into memory; take a smaller --top"):
        Best(40_000, 1_000, np.dtype(np.float32))


@pytest.mark.parametrize("k", [1, 4, 60])
def test_the_largest_of_blocks_are_the_largest(k: int) -> None:
    rng = np.random.default_rng(k)
    whole = np.abs(rng.normal(size=(20, 50))) + np.linspace(0.0, 3.0, 50)  # later columns are larger
    best = Best(20, k, np.dtype(np.float64))
    for columns, rows in product(np.array_split(rng.permutation(50), 7), np.array_split(rng.permutation(20), 3)):
        best.add(rows, whole[np.ix_(rows, columns)], columns)
    wanted = -np.sort(-whole, axis=1)[:, :k]
    assert (best.scores[:, :50] == wanted).all()
    assert (np.take_along_axis(whole, best.places[:, :50], axis=1) == wanted).all() if k <= 50 else True
    assert (best.places[:, 50:] == -1).all()
    numbers = rng.integers(1_000, size=5_000)  # some are equal
    assert largest_places(numbers, k) == np.argsort(-numbers, kind="stable")[:k].tolist()


TABLES = {  # embeddings and unembeddings, read off the files
    "silu-decoder": ("model.transformer.wte.weight", "onnx::MatMul_569"),
    "relu-decoder": ("model.lm_head.weight", "val_210"),
}


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
    monkeypatch.setattr(rank, "_MAX_PRODUCT_ENTRIES", 50)
    index, (table, out) = heads(FOLDER / f"{stem}.onnx", wide=True), tables(stem)
    names = ["blocks.0.mlp_heads.7", "blocks.1.mlp_heads.100", "blocks.?.attn.[23]"]
    found = head_tokens(index, top=VOCABULARY, names=names)
    assert len(found.rows) == 2 * 2 + 4 * 4
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
    folded = heads(FOLDER / f"{stem}.onnx", wide=True, fold_ln=True)
    rows = {side: row for row in head_tokens(folded, names=head, top=3).rows for side in row.side}
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


def test_tokens_as_text(tmp_path: Path) -> None:
    words = [*(f"word{number}" for number in range(VOCABULARY - 1)), "\x1b[31m<b>\n"]
    path = tmp_path / "tokenizer.json"
    word_tokenizer(words).save(str(path))
    found = head_tokens(FOLDER / "silu-decoder.onnx", names="blocks.0.attn.0", top=2, tokenizer=path)
    row = found.to_json()["rows"][0]
    assert all(text == f"'word{token}'" for token, text, _ in row["top"])
    assert found.text_of(VOCABULARY - 1) == "'\N{REPLACEMENT CHARACTER}[31m<b>\\n'"
    assert found.text_of(4000) == "4000"


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    for name, message in (("bad", "is not a tokenizer.json"), ("none", "no such file")):
        with pytest.raises(UsageError, match=message):
            head_tokens(FOLDER / "silu-decoder.onnx", tokenizer=tmp_path / f"{name}.json")
