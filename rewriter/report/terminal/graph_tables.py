"""Tables of the differences between two model files, side by side."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from rewriter.compare.graphs import GraphDifference
from rewriter.report.table import Column, Table, columns
from rewriter.report.tables import operator_table
from rewriter.report.terminal.layout import plain

_FEW = 12
"""Maximum number of rows of a table, unless everything is to be printed."""

_PLAIN_TEXT = 60
"""Maximum length of a metadata value, in characters."""


def graph_parts(found: GraphDifference, names: tuple[str, str], *, verbose: bool) -> Iterator[Table | Text]:
    """All tables and lines about the graphs."""
    most = len(found.nodes) + len(found.tensors) if verbose else _FEW
    if found.fields or found.remarks:
        yield _fields(found, names)
    if any(a != b for a, b in found.operators.values()):
        yield _operators(found, names)
    if found.nodes:
        yield _nodes(found, names, most)
        yield from _more(len(found.nodes) - most, "nodes")
    if found.tensors:
        yield _tensors(found, names, most)
        yield from _more(len(found.tensors) - most, "weights")
    renamed = f" ({found.renamed:,} under other names)" if found.renamed else ""
    yield plain(
        f"the same in both: {found.same_nodes:,} nodes{renamed}, {found.same_tensors:,} weights bit for bit"
        f"{'; only names and remarks differ' if found.same and (found.renamed or found.remarks) else ''}"
    )


def _more(count: int, what: str) -> Iterator[Table | Text]:
    if count > 0:
        yield plain(f"and {count:,} more {what}, -v shows them", "yellow")


def _fields(found: GraphDifference, names: tuple[str, str]) -> Table:
    changes = (*found.fields, *found.remarks)
    rows = tuple((each.what, each.name, _short(each.a), _short(each.b)) for each in changes)
    return Table("Models", columns("text", "", "", *names), rows)


def _operators(found: GraphDifference, names: tuple[str, str]) -> Table:
    before, after = ({name: counts[side] for name, counts in found.operators.items()} for side in (0, 1))
    a, b = sum(before.values()), sum(after.values())
    heads = (Column(""), *columns("count", *names), Column("change", "change"))
    return Table("Operators", heads, operator_table(before, after).rows, (("all nodes", a, b, b - a),))


def _nodes(found: GraphDifference, names: tuple[str, str], most: int) -> Table:
    rows = []
    for node in found.nodes[:most]:
        where = f" in {node.scope}" if node.scope else ""
        what = ", ".join(node.what) if node.what else node.status.replace("A", names[0]).replace("B", names[1])
        rows.append((node.a, node.b, what + where))
    return Table("Nodes that differ", columns("text", *names, "change"), tuple(rows))


def _tensors(found: GraphDifference, names: tuple[str, str], most: int) -> Table:
    heads = (*columns("text", "", *names), *columns("count", "elements", "largest difference", "at"))
    rows = []
    for each in found.tensors[:most]:
        largest = None if each.max_difference is None else f"{each.max_difference:.3g}"
        index = ",".join(map(str, each.index)) if each.index else None
        rows.append((each.name, *(kind or None for kind in each.kind), each.elements, largest, index))
    return Table("Weights that differ", heads, tuple(rows))


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _PLAIN_TEXT else f"{text[: _PLAIN_TEXT - 3]}..."
