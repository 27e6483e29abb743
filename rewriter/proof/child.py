"""The process that an isolated proof runs in: `python -m rewriter.proof.child`.

Comes in: on standard input, a pickled `Request` from `rewriter.proof.sandbox`. Goes out: on standard output, one
JSON object a line: `progress`, then `result` or `error`. The process ends with its parent: it watches its standard
input.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rewriter.errors import RewriteError
from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim, Variants
from rewriter.proof.messages import one_line
from rewriter.proof.settings import Settings

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """What is to be proved: the arguments of `validate`."""

    original: LoadedModel
    rewritten: LoadedModel
    claims: tuple[Claim, ...]
    settings: Settings
    variants: Variants


def main() -> None:
    """Read a request, carry the proof out, and tell how it went."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what native code prints is no part of the protocol

    def tell(message: dict[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    # From our parent, who starts this process for nothing else.
    request: Request = pickle.load(sys.stdin.buffer)  # noqa: S301
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _limit(request.settings.memory_limit_mb)
    tell(_outcome(request, tell))


def _outcome(request: Request, tell: Tell) -> dict[str, Any]:
    from rewriter.proof.validate import validate

    settings = replace(request.settings, isolate=False)
    try:
        found = validate(
            request.original,
            request.rewritten,
            request.claims,
            settings,
            lambda what, done, total: tell({"progress": [what, done, total]}),
            request.variants,
        )
    except MemoryError:
        return {"error": "MemoryError", "message": ""}
    except RewriteError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        return {"error": type(error).__name__, "message": one_line(error)}
    return {"result": asdict(found)}


def _end_with_the_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _limit(megabytes: int | None) -> None:
    """Bound what this process may allocate, and leave no core file behind when it crashes."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes is not None:
        # Linux counts private writable memory under DATA; AS would count what is only reserved, too.
        kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        resource.setrlimit(kind, (megabytes * 10**6, megabytes * 10**6))


if __name__ == "__main__":
    main()
