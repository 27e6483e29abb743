"""The Python API, and the composition of the engine with the pass: one file per verb.

Apart from the command line, these are the only modules of `rewriter` that import `passes`. `rewriter` itself says where
each verb is, and imports it when it is used: a rewriting does not need what compares models.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import rewriter

    return getattr(rewriter, name)
