"""`rewrite heads`, `run`, `attribute`, `graph` and `rank`: files and tables that agree with the functions; refusals."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from rewriter import ModelError, Text, attribute, attribution_graph, compositions, head_tokens, run_with_cache, why
from rewriter import heads as index_of
from tests.committed import FOLDER, feeds
from tests.conftest import Ran
from tests.textmodels import SILU, mlp, word_tokenizer

MODEL = FOLDER / "silu-decoder.onnx"
WORDS = ["the", "cat", "sat", *(f"word{number}" for number in range(125))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with inputs and nothing else."""
    monkeypatch.chdir(tmp_path)
    arrays: dict[str, Any] = dict(feeds(onnx.load(MODEL), tokens=6))
    np.savez("x.npz", **arrays)
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    word_tokenizer(WORDS).save(str(path))
    return path


def told(ran: Ran, command: str, *options: str, model: Path = MODEL) -> str:
    return ran(0, [command, str(model), *options]).out


GIVEN, LOGIT = ["--inputs", "x.npz"], ["--inputs", "x.npz", "--logit", "5"]
PAGE = ["--html", "h.html", *GIVEN]
REFUSALS: tuple[tuple[str, list[str], str], ...] = (
    ("heads", ["-o", "heads.bin"], "must end in .safetensors"),
    ("heads", GIVEN, "--inputs is for the page; add --html FILE.html"),
    ("heads", ["--logit", "5"], "--logit is for the page; add --html FILE.html"),
    ("heads", ["--text", "a"], "there is no tokenizer.json beside the model; add --tokenizer FILE"),
    ("heads", ["--html", "h.html"], "--html shows heads on inputs; add --inputs FILE.npz"),
    ("heads", ["--html", "none/h.html", *GIVEN], "does not exist"),
    ("heads", ["--html", "x.npz", *GIVEN], "would replace another file"),
    ("heads", [*PAGE, "--report", "h.html"], "would replace another file"),
    ("run", [*GIVEN, "--cache", "cache.bin"], "must end in .npz"),
    ("run", [*GIVEN, "--cache", "missing/cache.npz"], "does not exist"),
    ("run", [*GIVEN, "--cache", "x.npz"], "exists; remove it, or choose another output"),
    ("run", [*GIVEN, "--cache", "cache.npz", "--names", "nothing"], "no hook matches 'nothing'"),
    ("attribute", [*GIVEN, "--logit", "4000"], "there is no logit 4000"),
    ("attribute", GIVEN, "pass --logit N or --why HEAD"),
    ("attribute", [*LOGIT, "--why", "blocks.0.attn[1]"], "not both"),
    ("attribute", [*GIVEN, "--why", "blocks.0.attn[1]:x"], "is not HEAD[:QUERY[:KEY]], such as blocks.1.attn[0]:6:2"),
    ("attribute", ["--logit", "5"], "pass --inputs FILE.npz, or --text TEXT"),
    ("attribute", [*LOGIT, "--text", "a"], "not both"),
    ("attribute", [*LOGIT, "--tokenizer", "t.json"], "'t.json': no such file"),
    ("graph", [*GIVEN, "--logit", "5-x"], "'5-x' is not N[-M][:TOKEN], such as 318, 318-262 or 318:5"),
    ("graph", [*LOGIT, "-o", "nowhere/graph.json"], "does not exist"),
    ("rank", ["--top", "0"], "0 is not in the range x>=1"),
    ("rank", ["--against", str(MODEL)], "--against needs --inputs or --text"),
    ("rank", GIVEN, "--inputs and --text are for --against"),
    ("rank", ["--against", str(MODEL), "--tokens", *GIVEN], "pass --tokens or --against, not both"),
    ("rank", ["--report", "nowhere/x.json"], "does not exist"),
    ("rank", ["--report", str(MODEL)], "would replace another file"),
)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("command", "options", "message"), REFUSALS)
def test_refusals(command: str, options: list[str], message: str, folder: Path, ran: Ran) -> None:
    assert message in ran(2, [command, str(MODEL), *options]).refusal
    assert [each.name for each in folder.iterdir()] == ["x.npz"]


def test_list_of_heads(ran: Ran) -> None:
    lines = told(ran, "heads", model=FOLDER / "gated-decoder.onnx").splitlines()
    assert " ".join(lines[0].split()) == (
        "blocks.0.attn 4 heads, 2 per key and value, rotary model.model.layers.0.self_attn"
    )
    assert "192 heads of 96 neurons, silu(gate) * value as silu_gate" in lines[1]
    assert lines[-1] == "392 heads in 4 sublayers, 44 tensors"
    text = told(ran, "heads", model=FOLDER / "gelu-encoder.onnx")
    assert "not understood: block model.pooler.dense: its output is an output of the graph" in text


def test_file_of_heads(folder: Path, ran: Ran) -> None:
    told(ran, "heads", "-o", "heads.safetensors")
    data = (folder / "heads.safetensors").read_bytes()
    assert set(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) >= {
        *(f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("attn.W_O", "mlp_heads.W_O", "ln1.w", "ln1.b")),
        "__metadata__",
    }
    assert "exists; remove it, or choose another output" in ran(2, ["heads", str(MODEL), "-o", "heads.safetensors"]).err
    found = json.loads(told(ran, "heads", "--json", model=FOLDER / "relu-decoder.onnx"))
    facts = found["sublayers"]["blocks.0.mlp_heads"]
    assert (facts["kind"], facts["heads"], facts["activation"]) == ("neurons", 128, "relu")
    assert facts["heads_per_neuron"][0]["head"]["beta"] > 1e9


def test_remarks_about_no_node(tmp_path: Path, ran: Ran) -> None:
    quantize_dynamic(MODEL, tmp_path / "q.onnx")
    *_, remark, _ = told(ran, "heads", model=tmp_path / "q.onnx").splitlines()
    assert remark.endswith("rounds activations")


def test_models_without_heads(tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "model.onnx"
    model = mlp("y = Relu(h)")
    del model.graph.node[:]
    ends = [model.graph.input[0].name], [model.graph.output[0].name]
    model.graph.node.append(onnx.helper.make_node("Identity", *ends))
    onnx.save(model, path)
    reason = "no heads were found: the model has no attention and no MLP block"
    for command, printed in (("heads", ("", f"rewrite: {reason}\n")), ("rank", ("no heads were found\n", ""))):
        assert ran(3, [command, str(path)]) == printed
    onnx.save(mlp(SILU, first="f = com.microsoft.FusedMatMul<alpha = 0.5>(x, W1) y = Add(f, b1)"), path)
    told_last = ran(3, ["heads", str(path)]).err.splitlines()[-1]
    assert told_last == "rewrite: no heads were found; 1 MLP block is listed above with the reason"
    onnx.save(mlp(SILU), path)  # one sublayer, which nothing reads
    assert told(ran, "rank", model=path).splitlines()[-1] == "8 heads in 1 sublayer"


def test_broken_models(tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(MODEL.read_bytes()[:5000])
    assert ran(4, ["heads", str(path), "-o", str(tmp_path / "heads.safetensors")]).refusal
    assert not (tmp_path / "heads.safetensors").exists()


def test_weights_that_disappear(tmp_path: Path) -> None:
    """The data file is replaced between indexing and reading: one line, and no half-written file."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(MODEL), path, save_as_external_data=True, location="weights", size_threshold=0)
    index = index_of(path)
    (tmp_path / "weights").write_bytes(b"short")
    with pytest.raises(ModelError):
        index.write(tmp_path / "heads.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "weights"]


def data_of(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    return dict(json.loads(text))


@pytest.mark.slow
def test_page_with_and_without_a_logit(folder: Path, ran: Ran) -> None:
    for options, logit in (([], None), (["--logit", "5-6"], "5 - 6")):
        (folder / "heads.html").unlink(missing_ok=True)
        lines = told(ran, "heads", "--html", "heads.html", *GIVEN, *options).splitlines()
        assert lines[-1] == "264 heads in 4 sublayers, 50 tensors, page written to heads.html"
        data = data_of(folder / "heads.html")
        assert (data["logit"] and data["logit"]["entry"]) == logit
        assert sum(head["kind"] == "neuron" for head in data["heads"]) == 200
    ids = np.load("x.npz")["input_ids"][0]
    assert [token["text"] for token in data["tokens"]] == [str(token) for token in ids]


@pytest.mark.slow
def test_a_folder_with_its_tokenizer(tokenizer: Path, folder: Path, ran: Ran) -> None:
    (folder / "model.onnx").write_bytes(MODEL.read_bytes())
    (folder / "other.onnx").write_bytes(b"")
    for text in (["--text", "the cat"], ["--inputs", "x.npz"]):
        told(ran, "heads", "--html", "heads.html", *text, model=folder)
        tokens = [token["text"] for token in data_of(folder / "heads.html")["tokens"]]
        ids = range(2) if text[0] == "--text" else np.load("x.npz")["input_ids"][0]
        assert tokens == [f"'{WORDS[each]}'" for each in ids]
        (folder / "heads.html").unlink()
    (folder / "model.onnx").rename(folder / "another.onnx")
    assert "holds 2 ONNX files: name one of 'another.onnx', 'other.onnx'" in ran(2, ["heads", str(folder)]).err
    (folder / "empty").mkdir()
    assert "holds 0 ONNX files: name the file of a model" in ran(2, ["heads", str(folder / "empty")]).err


def test_run_writes_what_python_gives(folder: Path, ran: Ran) -> None:
    lines = told(ran, "run", *GIVEN, "--cache", "cache.npz", "--names", "blocks.1.mlp_heads.*").splitlines()
    assert lines[0].split() == ["blocks.1.mlp_heads.hook_pre", "[3,", "6,", "128]"]
    assert lines[-1] == f"{len(lines) - 1} arrays written to cache.npz"
    wanted = run_with_cache(MODEL, "x.npz", names="blocks.1.mlp_heads.*")
    outputs = {f"outputs/{name}": array for name, array in wanted.outputs.items()}
    with np.load("cache.npz") as archive:
        assert set(archive.files) == {*wanted.cache, *outputs, "__metadata__"}
        for name, array in {**wanted.cache, **outputs}.items():
            np.testing.assert_array_equal(archive[name], array)


def test_a_failed_run_leaves_no_file(folder: Path, ran: Ran) -> None:
    bad: dict[str, Any] = dict(feeds(onnx.load(MODEL)))
    bad["input_ids"] = bad["input_ids"] + 10**6
    np.savez("x.npz", **bad)
    assert ran(1, ["run", str(MODEL), *GIVEN, "--cache", "cache.npz"]).refusal
    assert [each.name for each in folder.iterdir()] == ["x.npz"]


@pytest.mark.slow
def test_run_on_texts(tokenizer: Path, folder: Path, ran: Ran) -> None:
    texts = ["--text", "the cat sat", "--text", "sat", "--tokenizer", str(tokenizer)]
    found = told(ran, "run", *texts, "--cache", "cache.npz", "--names", "*.hook_resid_post")
    assert "tokens: the | cat | sat\ntokens: sat\n" in found
    wanted = run_with_cache(MODEL, Text(["the cat sat", "sat"], tokenizer), names="*.hook_resid_post")
    assert wanted.tokens == (("the", "cat", "sat"), ("sat",))
    with np.load("cache.npz") as archive:
        assert archive["0/blocks.1.hook_resid_post"].shape == (1, 3, 32)
        for name, array in wanted.cache.items():
            np.testing.assert_array_equal(archive[name], array)


@pytest.mark.slow
def test_table_of_attributions(folder: Path, ran: Ran) -> None:
    lines = told(ran, "attribute", *LOGIT, "--top", "3").splitlines()
    wanted = attribute(MODEL, "x.npz", 5)
    assert lines[0] == f"logit {wanted.logit:.6g}"
    rows = [line.split() for line in lines if line.startswith("  ")]
    assert len(rows) == 6
    sizes = [abs(float(value)) for value, _ in rows]
    assert sizes[:3] == sorted(sizes[:3], reverse=True)
    name, _, place = rows[0][1].rstrip("]").partition("[")
    assert float(rows[0][0]) == pytest.approx(float(wanted.direct[name].reshape(-1)[int(place or 0)]), abs=1e-6)
    found = json.loads(told(ran, "attribute", *GIVEN, "--logit", "5-6", "--json"))
    assert sum(float(np.sum(part)) for part in found["paths"].values()) == pytest.approx(found["logit"], abs=1e-9)
    assert abs(found["residuals"]["direct"]) < 1e-9
    found = json.loads(told(ran, "attribute", *GIVEN, "--logit", "5:2", "--json"))
    assert found["logit"] == pytest.approx(attribute(MODEL, "x.npz", 5, position=2).logit, abs=1e-12)
    assert found["logit"] != pytest.approx(wanted.logit, abs=1e-3)


@pytest.mark.slow
def test_attribution_of_a_text(tokenizer: Path, folder: Path, ran: Ran) -> None:
    given: dict[str, Any] = {"input_ids": np.array([[0, 1, 2]]), "attention_mask": np.ones((1, 3), np.int64)}
    np.savez("x.npz", **given)
    text = ["--text", "the cat sat", "--tokenizer", str(tokenizer)]
    found = told(ran, "attribute", *text, "--logit", "5-1", "--top", "400")
    plain = told(ran, "attribute", *GIVEN, "--logit", "5-1", "--top", "400")
    assert told(ran, "attribute", *GIVEN, *text[2:], "--logit", "5-1", "--top", "400") == found
    assert " 'word2' - 'cat'\n" in found
    assert "embed[1] 'cat'\n" in found
    for place, word in enumerate(("the", "cat", "sat")):
        found = found.replace(f"embed[{place}] '{word}'", f"embed[{place}]")
    assert found.replace(" 'word2' - 'cat'", "") == plain
    facts = json.loads(told(ran, "attribute", *text, "--logit", "5", "--json"))
    assert (facts["tokens"], facts["entries"]) == (["the", "cat", "sat"], ["word2"])


@pytest.mark.slow
def test_why(folder: Path, ran: Ran) -> None:
    score = why(MODEL, "x.npz", "blocks.1.attn[2]", query=3, key=1)
    lines = told(ran, "attribute", *GIVEN, "--why", "blocks.1.attn[2]:3:1", "--top", "2").splitlines()
    assert lines[0] == f"score {score.total:.6g} of blocks.1.attn[2] at token 3 for token 1"
    assert lines[2:] == [f"  {value:+12.6f}  {row} x {column}" for row, column, value in score.top(2)]
    found = json.loads(told(ran, "attribute", *GIVEN, "--why", "blocks.1.mlp_heads.7:2", "--json"))
    neuron = why(MODEL, "x.npz", "blocks.1.mlp_heads[7]", query=2)
    assert (found["head"], found["query"], found["key"]) == (neuron.head, 2, None)
    assert dict(zip(found["sources"], found["table"], strict=True)) == dict(
        zip(neuron.sources, neuron.table.tolist(), strict=True)
    )


NODE = {
    *("node_id", "feature", "layer", "ctx_idx", "feature_type", "token_prob", "is_target_logit", "run_idx"),
    *("reverse_ctx_idx", "jsNodeId", "clerp", "influence", "activation"),
}
SCORE = {"score", "qk_tracing_results"}
METADATA = {"slug", "scan", "transcoder_list", "prompt_tokens", "prompt", "node_threshold", "schema_version"}
"""Names of circuit-tracer's data model, version 1, and of Neuronpedia's terms of scores."""


@pytest.mark.slow
def test_file_of_the_graph(folder: Path, ran: Ran) -> None:
    lines = told(ran, "graph", *LOGIT, "-o", "graph.json").splitlines()
    data = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    assert {*data} == {"metadata", "qParams", "nodes", "links", "qk_only_nodes"}
    assert {*data["metadata"]} > METADATA
    assert {*data["qParams"]} == {"pinnedIds", "supernodes", "linkType", "clickedId", "sg_pos"}
    assert all(
        {*node} == NODE | (SCORE if node["feature_type"] == "attention head" else {*()}) for node in data["nodes"]
    )
    assert all(isinstance(node[key], int) for node in data["nodes"] for key in ("feature", "ctx_idx", "run_idx"))
    assert all(isinstance(node[key], str) for node in data["nodes"] for key in ("node_id", "layer", "jsNodeId"))
    assert {frozenset(link) for link in data["links"]} == {frozenset({"source", "target", "weight"})}
    nodes = {node["node_id"]: node for node in data["nodes"]}
    assert len(nodes) == len({node["jsNodeId"] for node in data["nodes"]}) == len(data["nodes"])
    assert all(link[end] in nodes for link in data["links"] for end in ("source", "target"))
    ids = np.load("x.npz")["input_ids"][0]
    assert data["metadata"]["prompt_tokens"] == [str(number) for number in ids]
    assert [node["node_id"] for node in data["nodes"] if node["layer"] == "E"] == [
        f"E_{number}_{place}" for place, number in enumerate(ids)
    ]
    (target,) = [node for node in data["nodes"] if node["is_target_logit"]]
    assert (target["node_id"], target["feature_type"]) == ("3_5_5", "logit")
    assert {node["feature_type"] for node in data["nodes"]} >= {"embedding", "neuron", "attention head", "logit"}
    # Names and weights are those of the graph.
    found = attribution_graph(MODEL, "x.npz", 5)
    own = {(node.name, node.index, node.token): place for place, node in enumerate(found.nodes)}
    checked = 0
    for link in data["links"]:
        ends = [nodes[link[end]] for end in ("target", "source")]
        if all(end["feature_type"] in ("neuron", "attention head") for end in ends):
            named = [(*end["clerp"].rstrip("]").split("["), end["ctx_idx"]) for end in ends]
            target_place, source_place = (own[name, int(index), token] for name, index, token in named)
            assert link["weight"] == found.adjacency[target_place, source_place]
            assert ends[0]["activation"] == found.nodes[target_place].activation
            checked += 1
    assert checked > 20
    # Scores: the largest terms, of nodes that are in the file.
    known = nodes | data["qk_only_nodes"]
    assert len(known) == len(nodes) + len(data["qk_only_nodes"]) > len(nodes)
    for place, score in found.why.items():
        node = nodes[found.ids[place]]
        assert all(getattr(score, key) == value for key, value in node["score"].items())
        traced = node["qk_tracing_results"]
        assert traced["pair_wise_contributors"] == [list(row) for row in score.top(10)]
        sums = dict(zip(score.keys, score.table.sum(axis=0).tolist(), strict=True))
        assert all(sums[name] == value for name, value in traced["top_k_marginal_contributors"])
        assert all(name in known for rows in traced.values() for *names, _ in rows for name in names)
    # Layers and indices: neurons first, then original heads.
    for node in nodes.values():
        if node["feature_type"] in ("neuron", "attention head"):
            name, index = node["clerp"].rstrip("]").split("[")
            first = 128 if name.endswith("attn") else 0
            assert node["node_id"] == f"{name.split('.')[1]}_{first + int(index)}_{node['ctx_idx']}"
    assert lines[0] == f"logit {found.logit:.6g}"
    assert lines[1].startswith(f"all: {len(found.nodes)} nodes, in-edges off by ")
    assert lines[2].startswith(f"pruned: {len(nodes)} nodes, {len(data['links'])} edges, replacement score 0.")
    assert lines[2].endswith("written to graph.json")
    assert lines[3].startswith(f"scores of {len(found.why)} heads, as sums over pairs of nodes: off by ")
    # It is kept.
    before = (folder / "graph.json").read_bytes()
    error = ran(2, ["graph", str(MODEL), *LOGIT, "-o", "graph.json"]).err
    assert "exists; remove it, or choose another output" in error
    assert (folder / "graph.json").read_bytes() == before


def test_graph_of_a_text(tokenizer: Path, folder: Path, ran: Ran) -> None:
    text = ["--text", "the cat sat", "--tokenizer", str(tokenizer), "--logit", "5-1"]
    assert told(ran, "graph", *text, "-o", "graph.json").partition("\n")[0].endswith(" 'word2' - 'cat'")
    made = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    assert [made["metadata"][key] for key in ("prompt", "prompt_tokens")] == ["the cat sat", ["the", "cat", "sat"]]
    (logit,) = [node for node in made["nodes"] if node["is_target_logit"]]
    assert logit["clerp"].startswith('Output "word2" - "cat" (p=')
    assert {node["node_id"] for node in made["nodes"]} >= {"E_0_0", "E_1_1", "E_2_2"}
    before = tokenizer.read_bytes()
    ran(2, ["graph", str(MODEL), *text, "-o", str(tokenizer)])
    assert tokenizer.read_bytes() == before


@pytest.mark.slow
def test_tables_of_rankings(folder: Path, ran: Ran) -> None:
    lines = told(ran, "rank", "--top", "3").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "composition, without the scales of normalisations; unrelated weights: 0.177"
    assert [line.split() for line in lines[2:5]] == [
        [each.kind, each.reader, each.writer, f"{each.score:.4f}"] for each in compositions(MODEL, top=3).strongest(3)
    ]
    lines = told(ran, "rank", "--tokens", "--top", "3", "--json", "rank.json").splitlines()
    data = json.loads((folder / "rank.json").read_text(encoding="utf-8"))
    assert {*data} == {"model", "tokens"}
    assert {row["side"] for row in data["tokens"]["rows"]} >= {"Q", "K", "V", "O"}
    assert max(map(len, lines)) <= 80
    row = head_tokens(MODEL, top=3).selective(1)[0]
    place = next(number for number, line in enumerate(lines) if line.startswith("tokens"))
    assert lines[place + 1].split() == [row.head, "writes"]
    assert lines[place + 2].split()[:2] == [str(row.top[0][0]), f"{row.top[0][1]:+.3g}"]
    assert lines[-1] == "264 heads in 4 sublayers"
    lines = told(ran, "rank", "--against", str(MODEL), *GIVEN, "--top", "1", "--json", "same.json").splitlines()
    assert lines[0] == "changed heads; the outputs are off by 0 of their norm"
    assert lines[2].split() == ["blocks.0.attn.0", "0", "0", "0.00%"]
    assert len(json.loads((folder / "same.json").read_text(encoding="utf-8"))["rows"]) == 264
