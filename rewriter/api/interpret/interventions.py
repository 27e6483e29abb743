"""`ablate`, `patch`, `freeze`: models in which named heads do something else.

    ablate  what a head writes, before the output projection, is 0, its mean, or that of another sequence
    patch   it is what it was in another run
    freeze  the pattern is what it was in another run; values follow the input as before

The results are models in memory that onnxruntime runs and `validate` compares. They can be changed again, in any order
of calls: what is recorded always comes from the model without interventions. Names: `rewriter.api.interpret.selection`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rewriter.api.interpret.edits import Constant, Edit
from rewriter.api.interpret.freezing import norms_on, patterns_on
from rewriter.api.interpret.selection import Names
from rewriter.api.interpret.targets import Target
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source, like
from rewriter.proof.inputs.given import InputsOrText

HOW = ("zero", "mean", "resample")


def ablate(model: Source, names: Names, how: str = "zero", *, inputs: InputsOrText | None = None, seed: int = 0) -> Any:
    """The model without what some heads write.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory, such as a result of this function.
            The result is of the same kind; for a path it is an onnx.ModelProto.
        names: names or globs of heads.
        how: `zero`; `mean`, over all tokens of all `inputs`; or `resample`, what the head writes at the same token of
            another sequence of `inputs`, drawn at random. The result of `resample` runs on as many sequences and tokens
            as `inputs` has; one recorded sequence serves any number of them.
        inputs: an npz file, arrays by input name, or a list of those; not for `zero`.
        seed: of the random draw.

    Raises:
        UsageError: no head matches, `inputs` is missing or does not fit, or the model has 2 GiB or more.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: onnxruntime does not run the model on the inputs.
    """
    if how not in HOW:
        raise UsageError(f"unknown ablation '{how}'; known are: {', '.join(HOW)}")
    if (inputs is None) != (how == "zero"):
        raise UsageError(f"ablation by {how} takes {'no ' if how == 'zero' else ''}inputs")
    target = Target.of(model)
    sites = list(target.sites(names))
    if inputs is None:
        edits = [Edit(site.tensor, Constant(np.zeros((), site.dtype)), site.where) for site in sites]
    elif how == "mean":
        edits = target.means(sites, inputs)
    else:
        rng = np.random.default_rng(seed)
        edits = target.recorded(sites, inputs, lambda count: _cycle(rng, count))
    return like(model, target.changed(edits))


def patch(model: Source, names: Names, inputs: InputsOrText) -> Any:
    """The model in which some heads write what they write on `inputs`.

    Args:
        model: as for `ablate`.
        names: names or globs of heads.
        inputs: arrays by input name, or an npz file with one case. The result runs on as many sequences and tokens as
            they have; one sequence serves any number of them.

    Raises:
        As `ablate`.
    """
    target = Target.of(model)
    return like(model, target.changed(target.recorded(list(target.sites(names)), inputs, np.arange)))


def freeze(model: Source, names: Names, inputs: InputsOrText, *, norms: bool = False, output: str | None = None) -> Any:
    """The model in which some heads have the patterns that they have on `inputs`.

    A neuron whose pattern is frozen is affine in what its value reads. With all heads and `norms`, the model is the
    linear network of `attribute`.

    Args:
        model: as for `ablate`.
        names: names or globs of heads.
        inputs: as for `patch`.
        norms: hold the denominators of the normalisations on the residual stream, too.
        output: the output to which that stream leads; default: the first one.

    Raises:
        UsageError: also where a pattern is inside an operator, or the file has no tensor of a neuron's pre-activation.
        ModelError, ValidationError: as `ablate`.
    """
    target = Target.of(model)
    edits = patterns_on(target, names, inputs) + (norms_on(target, inputs, output) if norms else [])
    return like(model, target.changed(edits))


def _cycle(rng: np.random.Generator, count: int) -> Array:
    """A random permutation that leaves nothing in its place, if there is more than one."""
    order = rng.permutation(count)
    found = np.empty(count, np.int64)
    found[order] = np.roll(order, 1)
    return found
