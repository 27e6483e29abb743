"""How large tensors get: the original model, run on the inputs that it will be proved on.

Comes in: a model, names of tensors of its main graph, and settings. Goes out: the largest finite |entry| of each. A
fitted head program holds on a domain, which is chosen from these.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import with_outputs
from rewriter.proof.claims import Side
from rewriter.proof.distance import magnitude
from rewriter.proof.inputs import load_cases, make_cases
from rewriter.proof.sessions import open_session
from rewriter.proof.validate import Settings


def largest_magnitudes(model: LoadedModel, tensors: Sequence[str], settings: Settings) -> dict[str, float]:
    """The largest finite |entry| of each tensor over all inputs that the model accepts.

    Raises:
        ValidationError: the model runs on none of them.
    """
    side = Side.of(model)
    wanted = [name for name in dict.fromkeys(tensors) if name in side.main.producer]
    if not wanted:
        return {}
    tapped = with_outputs(model.proto, side.main, wanted)
    session = open_session(tapped, "cpu", optimise=False, base_dir=model.base_dir)
    if settings.inputs is not None:
        cases = load_cases(settings.inputs, model.proto)
    else:
        cases = make_cases(model.proto, seed=settings.seed, dims=settings.dims)
    reached: dict[str, float] = {}
    refused = ""
    for case in cases:
        try:
            values = session.run(case.feeds, wanted)
        except ValidationError as error:
            refused = str(error)
            continue
        for name in wanted:
            reached[name] = max(reached.get(name, 0.0), magnitude(values[name]))
    if not reached:
        raise ValidationError(f"the model runs on none of {len(cases)} inputs: {refused}")
    return reached
