"""Check local functions: each defined once, none recursive, bounded in size when inlined.

onnxruntime inlines local functions, so a small file of n functions that each call the previous one twice would grow to
2**n nodes. The nodes are counted here, before onnxruntime runs out of memory there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx

from rewriter.errors import ModelError
from rewriter.files.walk import iter_nodes
from rewriter.text import quoted

MAX_INLINED = 10_000_000
"""Maximum number of nodes of a model once its functions are inlined."""

RUNTIME_DOMAINS = frozenset(
    ("com.microsoft", "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.ml")
)
"""The domains whose operators onnxruntime has kernels for. Which of them it knows depends on how it was built."""

_Key = tuple[str, str, str]


def check_functions(model: onnx.ModelProto) -> None:
    """Check the local functions of a model, in time linear in its size.

    Raises:
        ModelError: a function is defined twice, unnamed, named like an operator of ONNX, in a domain of onnxruntime,
            or recursive (directly or mutually), or inlining would yield more than `MAX_INLINED` nodes.
    """
    functions: dict[_Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name, function.overload)
        if not all(isinstance(part, str) for part in key) or not function.name:
            raise ModelError(f"a local function has the unusable name {quoted(function.name)}; export the model again")
        if key in functions:
            raise ModelError(f"local function {quoted(function.name)} is defined twice; export the model again")
        if (not key[0] and onnx.defs.has(function.name)) or key[0] in RUNTIME_DOMAINS:
            fault = f"is in onnxruntime's domain {quoted(key[0])}" if key[0] else "has the name of an ONNX operator"
            raise ModelError(
                f"local function {quoted(function.name)} {fault}; runtimes differ in which of the two they run: move "
                "it to a domain of its own"
            )
        functions[key] = function
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    inlined: dict[_Key, int] = {}
    for key in _callees_first(calls):
        inlined[key] = len(functions[key].node) + sum(inlined[callee] * n for callee, n in calls[key].items())
    main = _calls(model.graph.node, functions)
    if sum(inlined[callee] * n for callee, n in main.items()) > MAX_INLINED:
        raise ModelError(
            f"inlining the local functions of this model yields more than {MAX_INLINED:,} nodes; export it without "
            "functions"
        )


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _calls(nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto]) -> Counter[_Key]:
    if not functions:
        return Counter()
    keys = ((_domain(node.domain), node.op_type, node.overload) for node in iter_nodes(nodes))
    return Counter(key for key in keys if key in functions)


def _callees_first(calls: dict[_Key, Counter[_Key]]) -> list[_Key]:
    # Depth first with an explicit stack: a chain of calls may be longer than Python's recursion limit.
    done: dict[_Key, bool] = {}  # False while its callees are being visited
    order: list[_Key] = []
    for start, first in calls.items():
        stack = [(start, iter(first))] if start not in done else []
        done.setdefault(start, False)
        while stack:
            key, callees = stack[-1]
            callee = next(callees, None)
            if callee is None:
                stack.pop()
                done[key] = True
                order.append(key)
            elif callee not in done:
                done[callee] = False
                stack.append((callee, iter(calls[callee])))
            elif not done[callee]:
                raise ModelError(
                    f"local function {quoted(callee[1])} calls itself, directly or through others, which "
                    "ONNX forbids; export the model again"
                )
    return order
