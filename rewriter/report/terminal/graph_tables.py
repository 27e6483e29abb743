"""Tables of the differences between two model files, side by side."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from rewriter.compare.files.models import GraphDifference
from rewriter.report.terminal.layout import add_columns, new_table, plain

_FEW = 12
"""Maximum number of rows of a table, unless everything is to be printed."""

_PLAIN_TEXT = 60
"""Maximum length of a metadata value, in characters."""


def graph_parts(found: GraphDifference, names: tuple[str, str], *, verbose: bool) -> Iterator[RenderableType]:
    """All tables and lines about the graphs."""
    most = len(found.nodes) + len(found.tensors) if verbose else _FEW
    changed = [(name, counts) for name, counts in found.operators.items() if counts[0] != counts[1]]
    if found.fields or found.remarks:
        yield _field_table(found, names)
    if changed:
        yield _operator_table(changed, found, names)
    if found.nodes:
        yield _node_table(found, names, most)
        yield from _more(len(found.nodes) - most, "nodes")
    if found.tensors:
        yield _tensor_table(found, names, most)
        yield from _more(len(found.tensors) - most, "weights")
    renamed = f" ({found.renamed:,} under other names)" if found.renamed else ""
    yield plain(
        f"the same in both: {found.same_nodes:,} nodes{renamed}, {found.same_tensors:,} weights bit for bit"
        f"{'; only names and remarks differ' if found.same and (found.renamed or found.remarks) else ''}"
    )


def _more(count: int, what: str) -> Iterator[RenderableType]:
    if count > 0:
        yield plain(f"and {count:,} more {what}, -v shows them", "yellow")


def _field_table(found: GraphDifference, names: tuple[str, str]) -> Table:
    table = new_table("Models")
    add_columns(table, text=("", "", *names))
    for change in (*found.fields, *found.remarks):
        values = (change.a, change.b)
        cells = (plain("-", "dim") if value is None else plain(_short(value)) for value in values)
        table.add_row(change.what, plain(change.name), *cells)
    return table


def _operator_table(
    changed: list[tuple[str, tuple[int, int]]], found: GraphDifference, names: tuple[str, str]
) -> Table:
    table = new_table("Operators")
    add_columns(table, text=("",), numbers=(*names, "change"))
    for name, (a, b) in sorted(changed, key=lambda row: (-abs(row[1][1] - row[1][0]), row[0])):
        table.add_row(plain(name), f"{a:,}", f"{b:,}", f"{b - a:+,}")
    table.add_section()
    a, b = (sum(counts[side] for counts in found.operators.values()) for side in (0, 1))
    table.add_row("all nodes", f"{a:,}", f"{b:,}", f"{b - a:+,}")
    return table


def _node_table(found: GraphDifference, names: tuple[str, str], most: int) -> Table:
    table = new_table("Nodes that differ")
    add_columns(table, text=(*names, "change"))
    for node in found.nodes[:most]:
        where = f" in {node.scope}" if node.scope else ""
        what = ", ".join(node.what) if node.what else node.status.replace("A", names[0]).replace("B", names[1])
        cells = (plain("-", "dim") if text is None else plain(text) for text in (node.a, node.b))
        table.add_row(*cells, plain(what + where))
    return table


def _tensor_table(found: GraphDifference, names: tuple[str, str], most: int) -> Table:
    table = new_table("Weights that differ")
    add_columns(table, text=("", *names), numbers=("elements", "largest difference", "at"))
    for tensor in found.tensors[:most]:
        elements = "-" if tensor.elements is None else f"{tensor.elements:,}"
        largest = "-" if tensor.max_difference is None else f"{tensor.max_difference:.3g}"
        index = "-" if not tensor.index else ",".join(map(str, tensor.index))
        kinds = (plain("-", "dim") if not kind else plain(kind) for kind in tensor.kind)
        table.add_row(plain(tensor.name), *kinds, elements, largest, index)
    return table


def _short(text: str) -> str:
    return text if len(text) <= _PLAIN_TEXT else f"{text[: _PLAIN_TEXT - 3]}..."
