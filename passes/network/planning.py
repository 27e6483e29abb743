"""Planning with a bias token that is carried through the network (`--option bias_token=network`).

Which conversions can read a carried bias token, along which `Route`, and the same conversions in the graph that
carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx

from passes.conversion import Conversion
from passes.match.linear import Miss
from passes.network.carry import carried_name, carry, raw_shape
from passes.network.route import Route, find_route
from rewriter.graph.view import GraphView, all_views

_MOST_AXES = 3
_NAMED = 3


@dataclass(frozen=True)
class Carried:
    """A graph that carries the bias tokens, and what to convert in it."""

    model: onnx.ModelProto
    views: tuple[GraphView, ...]
    conversions: tuple[Conversion, ...]


def unfit(conversion: Conversion, instead: str) -> Miss | None:
    """Why a block cannot read a carried bias token, and what to use `instead`; None where it can."""
    block, projections = conversion.block, conversion.projections
    if block.path:
        return Miss("it is in a subgraph of control flow, which the network's bias token does not enter", block.output)
    if projections is None:
        return Miss(
            f"it cannot read the network's bias token, since {conversion.by_reference}; use {instead}",
            block.output,
        )
    if max(projections.rank, projections.result_rank) > _MOST_AXES:
        return Miss(f"its input has more axes than batch, tokens and channels; use {instead}", block.output)
    return None


def route_for(view: GraphView, conversions: Sequence[Conversion], instead: str) -> Route | Miss:
    """The route of the bias token, or why there is none and what to use `instead`."""
    found = find_route(view, [conversion.block for conversion in conversions])
    if isinstance(found, Miss):
        return Miss(
            f"the bias token cannot be carried through the network: {found.reason}; use {instead}",
            found.node,
        )
    return found


def asides_of(route: Route) -> tuple[str, ...]:
    """What the report says about operators that bias tokens do not pass."""
    nodes = [aside.node for aside in route.asides]
    if not nodes:
        return ()
    more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    what = "see the tokens alone; bias tokens have zeros where the results join the stream"
    return (f"convolutions or relative positions {what}: {', '.join(nodes[:_NAMED])}{more}",)


def carry_out(model: onnx.ModelProto, view: GraphView, route: Route, conversions: Sequence[Conversion]) -> Carried:
    """The graph that carries as many bias tokens as the conversions need, and the conversions in it."""
    # One stream serves all blocks, so it has as many bias tokens as the largest program; others mask the rest.
    m = max(conversion.program.bias_tokens for conversion in conversions)
    longer = carry(model, view, route, m)
    views = all_views(longer)
    on_route = tuple(replace(moved(conversion, view, views[0], route), carried=m) for conversion in conversions)
    return Carried(longer, views, on_route)


def moved(conversion: Conversion, old: GraphView, new: GraphView, route: Route) -> Conversion:
    """The conversion with its region's nodes as indices of the new view, which carries bias tokens along `route`."""
    block = conversion.block
    projections = conversion.projections
    if projections is not None:
        # `carry` renamed the Shape outputs from which it subtracts m.
        shapes = (raw if (raw := raw_shape(name)) in new.producer else name for name in projections.shapes)
        # The entry and outputs of the graph have their bias tokens under another name.
        query, value = (
            replace(each, data=carried_name(old, route, each.data)) for each in (projections.query, projections.value)
        )
        result = carried_name(old, route, projections.result)
        projections = replace(projections, query=query, value=value, result=result, shapes=tuple(shapes))
    nodes = tuple(sorted(new.producer[old.nodes[index].output[0]] for index in block.region.nodes))
    return replace(conversion, projections=projections, block=replace(block, region=replace(block.region, nodes=nodes)))
