"""Planning form `whole`: what it does on the route of the bias tokens, and the conversions in its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx

from passes.conversion import Conversion
from passes.forms.positions import default_omega
from passes.match.linear import Miss
from passes.network.planning import Carried, moved
from passes.network.route import Route
from passes.network.sizes import Size
from passes.options import WHOLE
from passes.whole.follow import Whole, find_whole
from passes.whole.three import groups_in
from passes.whole.widen import stream_of, wide_name, widen
from rewriter.graph.view import GraphView, all_views

_SCORES = 2.0**60
"""Omega is at least so much, that it outweighs any score of the network's own heads."""


def whole_for(view: GraphView, route: Route, conversions: Sequence[Conversion]) -> Whole | Miss:
    """What form `whole` does on the route, or what it cannot do and what to use instead."""
    read = [name for conversion in conversions for name in conversion.inputs]
    other = next((name for name in read if route.sizes[name][-1] not in (None, Size(route.width))), None)
    if other is not None:
        why = f"a block reads '{other}', which has other channels than the stream's {route.width}"
        return Miss(f"the network cannot be attention only: {why}; use form masked", other)
    groups = tuple(group for conversion in conversions for group in groups_in(conversion))
    if route.elem_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        return Miss("form whole needs a residual stream in float32 or float64, whose numbers can hold omega", "")
    omega = conversions[0].options.omega or max(default_omega(groups, route.elem_type), _SCORES)
    found = find_whole(view, route, conversions, omega)
    if isinstance(found, Miss):
        return Miss(f"the network cannot be attention only: {found.reason}; use form masked", found.node)
    return found


def left_over(block: str) -> str:
    """Why a network cannot be whole if one of its blocks is not converted."""
    return f"the network cannot be attention only: '{block}' is left; use form masked"


def notes_of(whole: Whole) -> tuple[str, ...]:
    """What the report says about masks that stay."""
    return tuple(
        f"the mask '{mask}' depends on data and stays, without the pairs that W_QK forbids by position"
        for mask in whole.data
    )


def stream_before(whole: Whole, conversion: Conversion) -> str:
    """The stream that a block reads; with three sublayers the one that they add to."""
    step = whole.three.get(conversion.outputs[0])
    return stream_of(whole, conversion.inputs[0]) if step is None else wide_name(whole, step.stream)


def carry_whole(model: onnx.ModelProto, view: GraphView, whole: Whole, conversions: Sequence[Conversion]) -> Carried:
    """The graph on the wide residual stream, and the conversions that read it."""
    wider = widen(model, view, whole)
    views = all_views(wider)
    on_stream = tuple(
        replace(
            moved(conversion, view, views[0], whole.route),
            carried=whole.bias_tokens,
            form=WHOLE,
            stream=stream_before(whole, conversion),
            hidden=whole.hidden,
        )
        for conversion in conversions
    )
    return Carried(wider, views, on_stream)
