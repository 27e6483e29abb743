"""`rewrite graph`: the file in its published schema, what is printed, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from rewriter import attribution_graph
from rewriter.cli import run
from tests.committed import FOLDER

MODEL = FOLDER / "silu-decoder.onnx"
TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
SCHEMA = {
    "type": "object",
    "required": ["metadata", "qParams", "nodes", "links"],
    "additionalProperties": False,
    "properties": {
        "metadata": {
            "type": "object",
            "required": ["slug", "scan", "transcoder_list", "prompt_tokens", "prompt", "node_threshold"],
            "properties": {
                "slug": TEXT,
                "scan": TEXT,
                "transcoder_list": {"type": "array", "items": TEXT},
                "prompt_tokens": {"type": "array", "items": TEXT},
                "prompt": TEXT,
                "node_threshold": NUMBER,
                "schema_version": {"const": 1},
            },
        },
        "qParams": {
            "type": "object",
            "required": ["pinnedIds", "supernodes", "linkType", "clickedId", "sg_pos"],
        },
        "nodes": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId"],
                "additionalProperties": False,
                "properties": {
                    **dict.fromkeys(("node_id", "layer", "feature_type", "jsNodeId", "clerp"), TEXT),
                    **dict.fromkeys(("feature", "ctx_idx", "run_idx", "reverse_ctx_idx"), WHOLE),
                    "token_prob": NUMBER,
                    "is_target_logit": {"type": "boolean"},
                    **{name: {"type": ["number", "null"]} for name in ("influence", "activation")},
                },
            },
        },
        "links": {
            "type": "array",
            "items": {
                "required": ["source", "target", "weight"],
                "additionalProperties": False,
                "properties": {"source": TEXT, "target": TEXT, "weight": NUMBER},
            },
        },
    },
}
"""Names and types of circuit-tracer's data model, version 1."""


def test_the_file(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, arguments = tmp_path / "graph.json", ["graph", str(MODEL), "--inputs", str(given), "--logit", "5"]
    assert run([*arguments, "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    data = json.loads(out.read_text(encoding="utf-8"))
    jsonschema.validate(data, SCHEMA)
    nodes = {node["node_id"]: node for node in data["nodes"]}
    assert len(nodes) == len({node["jsNodeId"] for node in data["nodes"]}) == len(data["nodes"])
    assert all(link[end] in nodes for link in data["links"] for end in ("source", "target"))
    ids = np.load(given)["input_ids"][0]
    assert data["metadata"]["prompt_tokens"] == [str(number) for number in ids]
    assert [node["node_id"] for node in data["nodes"] if node["layer"] == "E"] == [
        f"E_{number}_{place}" for place, number in enumerate(ids)
    ]
    (target,) = [node for node in data["nodes"] if node["is_target_logit"]]
    assert (target["node_id"], target["feature_type"]) == ("3_5_5", "logit")
    assert {node["feature_type"] for node in data["nodes"]} >= {"embedding", "neuron", "attention head", "logit"}
    # Names and weights are those of the graph.
    found = attribution_graph(MODEL, given, 5)
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
    # Layers and indices: neurons first, then original heads.
    for node in nodes.values():
        if node["feature_type"] in ("neuron", "attention head"):
            name, index = node["clerp"].rstrip("]").split("[")
            first = 128 if name.endswith("attn") else 0
            assert node["node_id"] == f"{name.split('.')[1]}_{first + int(index)}_{node['ctx_idx']}"
    assert lines[0] == f"logit {found.logit:.6g}"
    assert "replacement score 1.0000, completeness score 1.0000" in lines[1]
    assert lines[2].startswith(f"pruned: {len(nodes)} nodes, {len(data['links'])} edges, replacement score 0.")
    assert lines[2].endswith(f"written to {out}")


def test_json(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["graph", str(MODEL), "--inputs", str(given), "--logit", "5-6", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    found = attribution_graph(MODEL, given, 5, minus=6)
    assert facts["all_nodes"] == len(found.nodes)
    assert 0.0 < facts["largest_residual"] < 1e-10


def test_thresholds(given: Path) -> None:
    facts = []
    for threshold in (0.5, 1.0):
        made = attribution_graph(
            MODEL, given, 5, minus=6, max_nodes=50, node_threshold=threshold, edge_threshold=threshold
        )
        facts.append(made.to_json())
    assert len(facts[0]["links"]) < len(facts[1]["links"])
    scores = [each["metadata"]["pruned_completeness_score"] for each in facts]
    assert scores[0] < scores[1]
    assert facts[1]["metadata"]["pruned_replacement_score"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit", "4000"], "there is no logit 4000"),
        ([], "Missing option '--logit'"),
        (["--logit", "5-x"], "'5-x' is neither N nor N-M, such as 318 or 318-262"),
        (["--logit", "5", "-o", "nowhere/graph.json"], "does not exist"),
    ],
)
def test_refusals(options: list[str], message: str, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["graph", str(MODEL), "--inputs", str(given), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_existing_files_are_kept(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.json"
    out.write_text("{}", encoding="utf-8")
    arguments = ["graph", str(MODEL), "--inputs", str(given), "--logit", "5", "-o", str(out)]
    assert run(arguments) == 2
    assert "exists; remove it, or choose another output" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "{}"
