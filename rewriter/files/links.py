"""External data behind the links of a Hugging Face cache, where a user allows them.

Such a cache has one directory per model: files in `snapshots/REVISION/` are links to `../../blobs/HASH`. The locations
of a model's external data are rewritten as paths below that directory, without a link: `blobs/HASH`. From then on the
rules of `rewriter.files.external` hold as ever: every part is opened without following links. So a link only ever says
which of the blobs is meant; whatever it is changed to, nothing outside of `blobs` is opened through it.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from rewriter.errors import ModelError
from rewriter.files.external import location_parts
from rewriter.files.walk import is_external, iter_tensors
from rewriter.text import quoted

_BLOBS, _SNAPSHOTS = "blobs", "snapshots"


def without_links(proto: onnx.ModelProto, folder: Path) -> Path:
    """Let the external data of `proto` name the files that its links point to.

    Args:
        proto: a model that was read from `folder`; changed in place if one of its data files is a link.
        folder: the directory of the model.

    Returns:
        The directory in which external data is resolved from now on: `folder` if no data file is a link, else that
        of the cache.

    Raises:
        ModelError: a link is not one of a Hugging Face cache, or does not lead into its `blobs`.
    """
    tensors = [tensor for tensor in iter_tensors(proto) if is_external(tensor)]
    entries = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    parts = {entry.value: location_parts(entry.value, "") for entry in entries}
    links = {location: found for location, each in parts.items() if (found := _link(folder.joinpath(*each), location))}
    if not links:
        return folder
    here = folder.resolve()
    cache = _cache_of(here)
    if cache is None:
        raise ModelError(
            f"external data {quoted(next(iter(links)))} is a link, and the model is not in a Hugging Face cache: "
            "--allow-links follows links from snapshots/REVISION into blobs only; copy the model with `cp -rL`"
        )
    inside = here.relative_to(cache)
    for entry in entries:
        plain, location = inside.joinpath(*parts[entry.value]), entry.value
        entry.value = _blob(plain, links[location], location) if location in links else plain.as_posix()
    return cache


def _link(path: Path, location: str) -> str | None:
    """Where a data file points to; None if it is not a link."""
    try:
        return os.readlink(path) if path.is_symlink() else None  # noqa: PTH115 - the text, not a path
    except OSError as error:
        raise ModelError(f"external data {quoted(location)} cannot be read: {error.strerror}; run again") from error


def _cache_of(folder: Path) -> Path | None:
    """The cache directory of the model whose snapshot is or holds `folder`."""
    for parent in folder.parents:
        if parent.name == _SNAPSHOTS and parent != folder.parents[-1]:
            cache, blobs = parent.parent, parent.parent / _BLOBS
            return cache if blobs.is_dir() and not blobs.is_symlink() else None
    return None


def _blob(plain: Path, target: str, location: str) -> str:
    """The blob that a link at `plain`, relative to the cache directory, points to. Raises ModelError."""
    # By its text alone: parts of the way that are links themselves lead elsewhere, and are never opened.
    found = os.path.normpath(plain.parent / target)
    if Path(target).is_absolute() or Path(found).parent.as_posix() != _BLOBS or "\0" in target:
        raise ModelError(
            f"external data {quoted(location)} is a link to {quoted(target)}, which is not in {_BLOBS} of its own "
            "cache directory; download the model again, or copy it with `cp -rL`"
        )
    return Path(found).as_posix()
