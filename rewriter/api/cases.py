"""The inputs of a comparison, generated for A or given by the user, reduced to those that A accepts.

A comparison in which nothing was compared must not pass. If the user's own inputs are the reason, that is a usage
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rewriter.compare.outputs import open_named
from rewriter.compare.verdicts import OutputVerdict, PairProof
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.generate import load_cases, make_cases
from rewriter.proof.inputs.given import Given
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.inputs.search import other_cases, tried_sizes
from rewriter.proof.settings import Settings
from rewriter.text import quoted


def accepted_cases(
    model: LoadedModel, provider: str, inputs: Given | None, dims: Mapping[str, int], seed: int
) -> tuple[list[Case], list[str]]:
    """The inputs that A accepts, and why it refused the others.

    Raises:
        UsageError: A accepts none of the inputs that the user gave.
        ValidationError: A accepts none of the generated inputs.
    """
    made = load_cases(inputs, model.proto) if inputs is not None else make_cases(model.proto, seed=seed, dims=dims)
    session = open_named("A", model, provider, optimise=False)
    kept, skipped = [], []
    for case in made:
        try:
            session.run(case.feeds)
            kept.append(case)
        except ValidationError as error:
            skipped.append(f"{case.name}: {error}")
    settings = Settings(inputs=inputs, seed=seed, dims=dims)
    if kept or (kept := list(other_cases(model, settings, provider))):
        return kept, skipped
    if inputs is not None:
        raise UsageError(f"nothing could be compared: model A refuses every case of {inputs.name} ({skipped[0]})")
    more = tried_sizes(model, settings)
    raise ValidationError(
        f"nothing could be compared: model A runs on none of the {len(made)} inputs tried{more}; give some with "
        f"--inputs or sizes with --dim ({skipped[0]})"
    )


def failures_of(providers: Mapping[str, PairProof]) -> tuple[str, ...]:
    """The failures of all outputs, each once."""
    return tuple(dict.fromkeys(each.failure for each in _verdicts(providers) if each.failure is not None))


def blame_inputs(inputs: Given | None, cases: Sequence[Case], providers: Mapping[str, PairProof]) -> None:
    """Raise a usage error if the given inputs kept outputs from being compared, and nothing else failed."""
    failed = [each for each in _verdicts(providers) if not each.passed]
    flaw = _flaw(cases)
    if inputs is not None and flaw is not None and failed and all(each.rule == "nothing" for each in failed):
        raise UsageError(f"{failed[0].failure}; in {inputs.name}, {flaw}")


def _flaw(cases: Sequence[Case]) -> str | None:
    """A defect of the inputs that may keep outputs from being compared."""
    for case in cases:
        where = f" in case {case.name}" if len(cases) > 1 else ""
        for name, array in case.feeds.items():
            if not array.size:
                return f"input {quoted(name)} has shape {list(array.shape)}{where}, which holds no elements"
            if is_float(array.dtype) and not np.isfinite(array.astype(np.float64)).all():
                return f"input {quoted(name)} holds NaN or infinities{where}"
    return None


def _verdicts(providers: Mapping[str, PairProof]) -> list[OutputVerdict]:
    return [each for proof in providers.values() for each in proof.outputs.values()]
