"""What the rewriter makes of the committed models: `python -m tools.snapshot OUT.json [--against OTHER.json]`.

OUT gets a digest of every node, function and initializer of every rewritten model. Before and after a change that
must not change results, OTHER is the one made before; what differs is listed, and the exit status is then 1.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from rewriter import rewrite
from tests.changes import copied, graphs
from tests.committed import FOLDER

CASES: tuple[Mapping[str, Any], ...] = (
    {},
    {"form": "compact", "max_tokens": 32},
    {"form": "masked"},
    {"form": "maskless", "max_tokens": 16},
    {"form": "staged", "max_tokens": 16},
    {"form": "whole", "max_tokens": 16},
    {"form": "masked", "expose": ("pattern,z",)},
    {"gate": "product"},
    {"scope": "all"},
    {"inline": True},
)

Digests = Mapping[str, str]


def digests(model: onnx.ModelProto) -> Digests:
    """A part's name to what it is; metadata, which no runtime reads, is left out."""
    bare = copied(model)
    nodes = [
        *(node for graph in graphs(bare.graph) for node in graph.node),
        *(n for f in bare.functions for n in f.node),
    ]
    for part in (bare, *bare.functions, *graphs(bare.graph), *nodes, *bare.graph.initializer):
        del part.metadata_props[:]
    found = {f"node {node.output[0]}": _digest(node) for node in bare.graph.node}
    found |= {f"function {each.name} {each.overload}".strip(): _digest(each) for each in bare.functions}
    found |= {f"initializer {each.name}": _digest(each) for each in bare.graph.initializer}
    found["order"] = hashlib.sha256(repr(list(found)).encode()).hexdigest()[:12]
    del bare.graph.node[:], bare.functions[:], bare.graph.initializer[:]
    return {**found, "inputs, outputs and opsets": _digest(bare)}


def _digest(part: Any) -> str:
    return hashlib.sha256(part.SerializeToString(deterministic=True)).hexdigest()[:12]


def taken(paths: Iterable[Path], cases: Iterable[Mapping[str, Any]] = CASES) -> dict[str, Digests]:
    """Model and options to the digests, and to what becomes of each block."""
    found: dict[str, Digests] = {}
    for path, case in ((path, case) for path in paths for case in cases):
        report = rewrite(path, validate=False, **case)
        blocks = {f"block {block.name}": f"{block.status} {block.reason}" for block in report.blocks}
        found[f"{path.stem} {case}"] = {**blocks, **(digests(report.rewritten) if report else {})}
    return found


def differences(before: Mapping[str, Digests], after: Mapping[str, Digests]) -> Iterator[str]:
    """One line for each part that is not the same."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, {}), after.get(key, {})
        for name in dict.fromkeys((*old, *new)):
            if old.get(name) != new.get(name):
                yield f"{key}: {name} " + ("is new" if name not in old else "is gone" if name not in new else "changed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.snapshot", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, metavar="OTHER")
    options = parser.parse_args()
    found = taken(sorted((*FOLDER.glob("*.onnx"), *FOLDER.glob("trained/*.onnx"))))
    options.out.write_text(json.dumps(found, indent=0), encoding="utf-8")
    lines = list(differences(json.loads(options.against.read_text("utf-8")), found)) if options.against else []
    sys.stdout.writelines(f"{line}\n" for line in (*lines, f"{len(found)} rewritten, {len(lines)} differences"))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
