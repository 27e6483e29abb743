"""Planning form `whole`: which conversions it takes, what it does on the route of the bias tokens, its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.sublayer import default_omega
from passes.match.linear import Miss
from passes.programs.groups import groups_of
from passes.sizes import Size
from passes.whole.follow import Whole, find_whole
from passes.whole.route import Route, find_route
from passes.whole.widen import carried_name, raw_shape, stream_of, widen
from rewriter.graph.view import GraphView, all_views

_SCORES = 2.0**60
"""Omega is at least so much, that it outweighs any score of the network's own heads."""
_MOST_AXES = 3
_MEGABYTE = 2**20


def unfit(conversion: Conversion) -> Miss | None:
    """Why a block cannot read the network's bias tokens; None where it can."""
    block, projections = conversion.block, conversion.projections
    if block.path:
        return Miss("it is in a subgraph of control flow, which the network's bias token does not enter", block.output)
    if projections is None or max(projections.rank, projections.result_rank) > _MOST_AXES:
        return Miss("its input has more axes than batch, tokens and channels; use form masked", block.output)
    return None


def whole_for(view: GraphView, conversions: Sequence[Conversion], longest: int | None) -> Whole | Miss:
    """What form `whole` does on the route of the bias tokens, or what it cannot do and what to use instead.

    `longest` is the largest number of tokens; None: the number that the model fixes, or the largest whose patterns stay
    within the limit.
    """
    found = _whole(view, conversions, longest)
    if isinstance(found, Miss):
        return Miss(f"the network cannot be attention only: {found.reason}; use form masked", found.node)
    return found


def _whole(view: GraphView, conversions: Sequence[Conversion], longest: int | None) -> Whole | Miss:
    route = find_route(view, [conversion.block for conversion in conversions])
    if isinstance(route, Miss):
        return route
    read = [name for conversion in conversions for name in conversion.inputs]
    other = next((name for name in read if route.sizes[name][-1] not in (None, Size(route.width))), None)
    if other is not None:
        return Miss(f"a block reads '{other}', which has other channels than the stream's {route.width}", other)
    if route.elem_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        return Miss("its residual stream is not in float32 or float64, whose numbers can hold omega", route.entry)
    groups = tuple(group for conversion in conversions for group in groups_of(conversion.program))
    omega = max(default_omega(groups, route.elem_type), _SCORES)
    fixed = (view.type_of(route.entry).shape or (None, None))[1]
    fitting, tightest = min(((_fitting(each), each) for each in conversions), key=lambda pair: pair[0])
    if longest is not None and longest > fitting:
        options, heads = tightest.options, tightest.block.neurons or 0
        rows = longest + 1 + tightest.program.bias_tokens
        size = heads * rows * rows * np.dtype(tightest.dtype).itemsize / _MEGABYTE
        return Miss(
            f"the patterns of {heads} heads over {rows} rows take {size:.0f} MB, more than "
            f"--option max_pattern_mb={options.max_pattern_mb:g}; lower --max-tokens to {fitting}, or raise that limit",
            tightest.block.output,
        )
    longest = longest or (fixed if isinstance(fixed, int) else min(fitting, tightest.options.positions))
    return find_whole(view, route, conversions, omega, longest)


def _fitting(conversion: Conversion) -> int:
    """The largest number of tokens for which the patterns of all heads stay within the limit."""
    one = (conversion.block.neurons or 1) * np.dtype(conversion.dtype).itemsize / _MEGABYTE
    rows = int((conversion.options.max_pattern_mb / one) ** 0.5)
    return max(1, rows - 1 - conversion.program.bias_tokens)


def left_over(block: str) -> str:
    """Why a network cannot be whole if one of its blocks is not converted."""
    return f"the network cannot be attention only: '{block}' is left; use form masked"


def notes_of(whole: Whole) -> tuple[str, ...]:
    """What the report says about the route, and about masks that stay."""
    return (
        f"the bias tokens are appended to '{whole.route.entry}' and carried through the network; blocks are proved one "
        "by one with bias tokens of their own, the file end to end",
        *(
            f"the mask '{mask}' depends on data and stays, without the pairs that W_QK forbids by position"
            for mask in whole.data
        ),
    )


def carry_whole(
    model: onnx.ModelProto, view: GraphView, whole: Whole, conversions: Sequence[Conversion]
) -> tuple[onnx.ModelProto, tuple[GraphView, ...], tuple[Conversion, ...]]:
    """The graph on the wide residual stream, its views, and the conversions that read it."""
    wider = widen(model, view, whole)
    views = all_views(wider)
    on_stream = tuple(
        replace(
            _moved(conversion, view, views[0], whole.route),
            carried=whole.bias_tokens,
            stream=stream_of(whole, conversion.inputs[0]),
        )
        for conversion in conversions
    )
    return wider, views, on_stream


def _moved(conversion: Conversion, old: GraphView, new: GraphView, route: Route) -> Conversion:
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
