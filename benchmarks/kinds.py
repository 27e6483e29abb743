"""Time by kind of node, from onnxruntime's profile of a session.

Everything outside converted blocks is the original's, under the same names. The nodes that only one of two models has
are therefore those of the blocks, with whatever onnxruntime fused them into.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.ort import load_onnxruntime, require_provider

Of = Callable[[list[float]], Any]
"""Makes one number of the seconds of several runs."""

_KERNEL = "_kernel_time"
_WARM, _RUNS = 1, 16
"""Runs that do not count, and runs that do."""


@dataclass(frozen=True)
class Node:
    """A node that onnxruntime ran.

    Attributes:
        kind: its operator.
        provider: the execution provider that ran it, by onnxruntime's name.
        seconds: median over the runs, unless told.
        bytes: of what it reads and writes, without constants.
    """

    kind: str
    provider: str
    seconds: float
    bytes: int = 0


def nodes_of(
    model: Path, provider: str, feeds: Mapping[str, NDArray[Any]], threads: int = 0, of: Of = np.median
) -> dict[str, Node]:
    """Run a model with profiling on: node name to node. The names are those after onnxruntime's optimisation."""
    ort = load_onnxruntime()
    with TemporaryDirectory(prefix="attnonly-profile-") as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.enable_profiling = threads, True
        options.profile_file_prefix = str(Path(folder) / "run")
        session = ort.InferenceSession(str(model), options, providers=require_provider(provider).onnxruntime)
        for _ in range(_WARM + _RUNS):
            session.run(None, dict(feeds))
        return read_profile(Path(session.end_profiling()).read_text(encoding="utf-8"), skip=_WARM, of=of)


def read_profile(text: str, *, skip: int = 0, of: Of = np.median) -> dict[str, Node]:
    """The nodes of a profile; the first `skip` runs of each do not count, of the others what `of` makes of them."""
    found: dict[str, list[float]] = defaultdict(list)
    about: dict[str, Any] = {}
    for event in json.loads(text):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            key = name.removesuffix(_KERNEL)
            found[key].append(1e-6 * float(event["dur"]))
            about[key] = event["args"]
    return {
        key: Node(
            about[key]["op_name"],
            about[key]["provider"],
            float(of(times[skip:] or times)),
            sum(int(about[key].get(size, 0)) for size in ("activation_size", "output_size")),
        )
        for key, times in found.items()
    }


@dataclass(frozen=True)
class KindTime:
    """The nodes of one kind that one model has and its counterpart lacks.

    Attributes:
        model: the model.
        kind: the operator; `all others` for all nodes that both models have.
        nodes: how many ran.
        milliseconds: their time in one run.
        share: of the time of all nodes, from 0 to 1.
    """

    model: str
    kind: str
    nodes: int
    milliseconds: float
    share: float


OTHERS = "all others"


def kind_times(model: str, own: Mapping[str, Node], counterparts: Sequence[Mapping[str, Node]]) -> tuple[KindTime, ...]:
    """The nodes that not every counterpart has, by kind, the slowest first; then all others.

    A node without a name is called after its operator and its place, and counts among the others.
    """
    total = sum(node.seconds for node in own.values()) or 1.0
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, node in own.items():
        unnamed = name.removeprefix(f"{node.kind}_").isdigit()
        shared = unnamed or all(name in other for other in counterparts)
        kinds[OTHERS if shared else node.kind].append(node.seconds)
    rows = [
        KindTime(model, kind, len(times), 1e3 * sum(times), min(sum(times) / total, 1.0))
        for kind, times in kinds.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.kind == OTHERS, -row.milliseconds)))
