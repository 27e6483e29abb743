"""Sizes that a model accepts, where it refuses all usual inputs: a short table of positions, a tower of convolutions.

One kind of length is varied at a time (samples, frames, tokens, height with width), then all together. The model is run
on each size, so this is for models that are loaded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.inputs.cases import Case, Maker
from rewriter.proof.inputs.roles import Kind, kind_of
from rewriter.proof.inputs.sizes import Setting
from rewriter.proof.settings import LARGE, Settings
from rewriter.text import quoted

_LENGTHS = ((Kind.SAMPLES,), (Kind.FRAMES,), (Kind.SEQUENCE,), (Kind.ENCODER,), (Kind.HEIGHT, Kind.WIDTH))
_LARGEST = 16384
"""The largest size that is tried; images end at 1024."""

_MULTIPLES = {Kind.SAMPLES: (1, 16, 160), Kind.HEIGHT: (1, 14, 16)}
"""Sizes are rounded up to multiples of these; others to multiples of 1 and 16. 160 samples are 10 ms at 16 kHz; images
are cut into patches."""

_GROWTH, _SPAN, _KEPT = 1.2, 4, 4
"""Sizes grow by this factor; once a size is accepted, sizes up to so many times as large are tried; so many of those
that are accepted are kept."""


def other_cases(model: LoadedModel, settings: Settings, provider: str = "cpu") -> tuple[Case, ...]:
    """Cases of sizes that the model accepts, if it refused all usual ones; the smallest and largest found among them.

    None for models above `LARGE` bytes, and none instead of given inputs.
    """
    maker = _maker(model, settings)
    if maker is None:
        return ()
    session = open_session(model.proto, provider, optimise=False, base_dir=model.base_dir)
    groups = _groups(maker)
    together = tuple(kind for group in groups for kind in group)
    for group in (*groups, *((together,) if len(groups) > 1 else ())):
        found: list[int] = []
        for size in _sizes(group):
            if found and size > _SPAN * found[0]:
                break
            if _accepts(session, _case(maker, group, size, 1)):
                found.append(size)
        if found:
            kept = sorted({found[round(place * (len(found) - 1) / (_KEPT - 1))] for place in range(_KEPT)})
            cases = [_case(maker, group, size, batch) for size in kept for batch in (1, 3)]
            # The model may fix the batch.
            distinct = {tuple((name, array.shape) for name, array in case.feeds.items()): case for case in cases[::-1]}
            return tuple(case for case in list(distinct.values())[::-1] if _accepts(session, case))
    return ()


def tried_sizes(model: LoadedModel, settings: Settings) -> str:
    """What to say about sizes that `other_cases` searched in vain; empty if it searched none."""
    maker = _maker(model, settings)
    if maker is None:
        return ""
    kinds = {kind for group in _groups(maker) for kind in group}
    listed = ", ".join(
        f"{f'dimension {quoted(dim)} of ' if dim else 'the open dimension of '}input {quoted(spec.name)}"
        for spec in maker.specs
        for axis, dim in enumerate(spec.shape)
        if not isinstance(dim, int) and kind_of(spec, axis) in kinds
    )
    return f"; other sizes of {listed} were tried too, up to {_LARGEST:,}" if listed else ""


def _maker(model: LoadedModel, settings: Settings) -> Maker | None:
    if settings.inputs is not None or model.size > LARGE:
        return None
    return Maker(model.proto, seed=settings.seed, dims=settings.dims)


def _accepts(session: Session, case: Case) -> bool:
    try:
        session.run(case.feeds)
    except ValidationError:
        return False
    return True


def _groups(maker: Maker) -> list[tuple[Kind, ...]]:
    """The lengths that the model leaves open."""
    groups = (tuple(kind for kind in group if kind in maker.open_kinds) for group in _LENGTHS)
    return [group for group in groups if group]


def _sizes(group: Sequence[Kind]) -> list[int]:
    """The sizes that are tried, in order."""
    most = 1024 if Kind.HEIGHT in group else _LARGEST
    multiples = {each for kind in group for each in _MULTIPLES.get(kind, (1, 16))}
    grown = [1.0]
    while grown[-1] < most:
        grown.append(max(grown[-1] * _GROWTH, grown[-1] + 1.0))
    sizes = {-(-int(size) // multiple) * multiple for size in grown for multiple in multiples}
    return sorted(size for size in sizes if size <= most)


def _case(maker: Maker, group: Sequence[Kind], size: int, batch: int) -> Case:
    return maker.case(Setting(batch, size if Kind.SEQUENCE in group else 17), dict.fromkeys(group, size))
