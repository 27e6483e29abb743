"""Names in a model are text from a stranger: no output may carry what drives a terminal, or markup, or floods it."""

import json
from pathlib import Path

import onnx
import pytest

from rewriter.cli import run
from tests.textmodels import ERF_GELU, SILU, mlp

NAMES = {
    "escape": "a\x1b[31mb\x1b]0;title\x07",
    "C1": "a\x9b31mb\x85c",
    "lines": "a\r\nERROR\x0b\u2028b\x00",
    "direction": "a\u202e\u2066gnp.exe\u200b",
    "markup": "[red]a[/] [link=http://x]b[/link]",
    "HTML": "<script>alert(1)</script>'\"&amp;",
    "template": "{{ 7 * 7 }}{% x %}%s{0}",
    "long": "n" * 20_000,
    "options": "--force",
    "path": "../../../../etc/passwd",
}

COMMANDS = {
    "dry run": "MODEL --dry-run -v",
    "rewrite": "MODEL -o OUT --no-validate -v --html PAGE --report JSON",
    "proof": "MODEL -o OUT -v --html PAGE --report JSON",
    "streams": "MODEL --dry-run --report -",
    "inspect": "inspect MODEL --report JSON",
    "inspect streams": "inspect MODEL --report -",
    "heads": "heads MODEL --report JSON",
    "rank": "rank MODEL --tokens --report JSON",
    "diff": "diff MODEL OTHER -v --report JSON",
    "certify": "certify MODEL OTHER -o JSON",
    "validate": "validate MODEL OTHER -v --report JSON",
}

RUNNING = ("proof", "diff", "validate")
"""Commands that run models, which takes longer."""

LONGEST = 40_000
"""Characters that a terminal may get: those of two of the long names."""


def hostile(body: str, name: str) -> onnx.ModelProto:
    """A model of two blocks in which every name of a node, tensor, dimension, graph and property holds `name`."""
    second = "m = MatMul(h, W2) y2 = MatMul(m, W1) h2 = Relu(y2) out = MatMul(h2, W2)"
    model = mlp(body, second=second)
    graph = model.graph
    for number, node in enumerate(graph.node):
        node.name = f"{name}/{number}"
        node.doc_string = name
        node.input[:] = [each and f"{each}{name}" for each in node.input]
        node.output[:] = [f"{each}{name}" for each in node.output]
    for each in (*graph.input, *graph.output, *graph.initializer):
        each.name = f"{each.name}{name}"
    for value in (graph.input[0], graph.output[0]):
        for dim in value.type.tensor_type.shape.dim[:2]:
            dim.dim_param += name
    graph.name = name
    graph.doc_string = model.producer_name = name
    model.metadata_props.add(key=name, value=name)
    return model


CASES = {
    f"{what}-{kind}": (COMMANDS[what], NAMES[kind])
    for what in COMMANDS
    for kind in NAMES
    if what not in RUNNING or kind in ("escape", "markup", "long")
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("command", "name"), CASES.values(), ids=CASES)
def test_no_output_carries_what_names_hold(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {word: str(tmp_path / file) for word, file in FILES.items()}
    onnx.save(hostile(SILU, name), files["MODEL"])
    onnx.save(hostile(ERF_GELU, name), files["OTHER"])
    status = run([files.get(word, word) for word in command.split()])
    shown = capsys.readouterr()
    assert status in (0, 1, 3), shown.err[-300:]
    for text in (shown.out, shown.err):
        assert harmful(text) == set()
        if "--report -" not in command:
            assert len(text) < LONGEST
    report = Path(files["JSON"])
    if report.exists():
        assert harmful(report.read_text(encoding="utf-8")) == set()
        json.loads(report.read_text(encoding="utf-8"))
    page = Path(files["PAGE"])
    if page.exists():
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text
        assert "\x1b" not in text


FILES = {"MODEL": "m.onnx", "OTHER": "other.onnx", "OUT": "out.onnx", "PAGE": "page.html", "JSON": "report.json"}


def harmful(text: str) -> set[str]:
    """Characters that are neither printable nor a line break."""
    return {char for char in text if not char.isprintable() and char != "\n"}
