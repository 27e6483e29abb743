"""Greedy generation with two models side by side: through the key-value cache, if they have one, or without.

Both models read the tokens that A chooses, so that every step compares them on the same context; each has a cache of
its own, so that errors in it accumulate as they would in use. Every input of past keys and values must have an output
that continues it; one that is dropped or does not grow is an error, not a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.specs import InputSpec, Kind, Role, input_specs, is_float
from rewriter.proof.rule import Judgement
from rewriter.proof.run import open_model
from rewriter.text import one_line, quoted

_PROMPT = 8
"""Tokens of the input that are read before the first one is generated."""

_MOST_SHOWN = 3

Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class Generation:
    """Tokens that two models generate.

    Attributes:
        output: the output that is ranked.
        cache: pairs of an input and the output that continues it; empty if the models have no cache.
        tokens: what A generated, by sequence.
        steps: number of steps.
        agreement: share of choices in which B agrees.
        differences: choices in which it does not, with how much larger A's value of its own token is.
        failures: those that the error allowed for this output does not explain: A's preference is more than twice that.
        stopped: why it ended early; empty if it did not.
    """

    output: str
    cache: tuple[tuple[str, str], ...]
    tokens: tuple[tuple[int, ...], ...]
    steps: int
    agreement: float
    differences: tuple[str, ...]
    failures: tuple[str, ...]
    stopped: str = ""


def generate(
    models: tuple[LoadedModel, LoadedModel],
    cases: Sequence[Case],
    provider: str,
    steps: int,
    judged: Mapping[str, Judgement],
    tolerated: Sequence[str] = (),
) -> Generation:
    """Generate with both models.

    Args:
        models: A and B.
        cases: inputs that A accepts; the prompt is taken from the one with the most tokens.
        provider: execution provider.
        steps: number of tokens.
        judged: the error that is allowed by output: a share of the norm, or in the units of those of `tolerated`.
        tolerated: outputs that were judged by a given tolerance.

    Raises:
        UsageError: the models do not generate text, or their caches cannot be followed.
        ValidationError: a model does not run.
    """
    proto = models[0].proto
    specs = {each.name: each for each in input_specs(proto)}
    ids = next((each for each in specs.values() if each.role is Role.IDS and len(each.shape) == 2), None)
    if ids is None:
        raise UsageError("--generate needs a model that reads token ids [batch, tokens]; this one has no such input")
    cases = [case for case in cases if case.feeds[ids.name].size]
    if not cases:
        raise UsageError("--generate needs an input with at least one token")
    given = max(cases, key=lambda each: each.feeds[ids.name].shape[1]).feeds
    outputs = {value.name: value for value in proto.graph.output}
    cache = matched([each.name for each in specs.values() if each.role is Role.PAST], list(outputs))
    output = _ranked({name: value for name, value in outputs.items() if name not in cache.values()}, ids.rows)
    tokens = fresh = given[ids.name][:, :_PROMPT]
    batch, prompt = tokens.shape
    empty = {name: np.zeros(_past_shape(specs[name], given[name].shape, batch), specs[name].dtype) for name in cache}
    sessions = [open_model(each, provider, optimise=True) for each in models]
    pasts: list[Mapping[str, Array]] = [empty, empty]
    differences: list[str] = []
    failures: list[str] = []
    made, stopped = 0, ""
    for step in range(steps):
        new = fresh if cache else tokens
        feeds = {**given, **_step(specs, given, batch, tokens.shape[1], new.shape[1]), ids.name: new}
        rows = []
        try:
            for place, session in enumerate(sessions):
                found = session.run({**feeds, **pasts[place]})
                rows.append(_last(found[output]))
                pasts[place] = {name: found[present] for name, present in cache.items()}
                _check_grown(pasts[place], specs, cache, tokens.shape[1])
        except ValidationError as error:
            if not step or "continues" in str(error):
                raise
            stopped = one_line(f"step {step}: {error}", 160)
            break
        made += 1
        for row, ours, theirs in zip(rows[0], *(each.argmax(-1) for each in rows), strict=True):
            if ours != theirs:
                lead = float(row[ours] - row[theirs])
                text = f"step {step}: token {theirs} instead of {ours}, which is larger by {lead:.3g}"
                unit = 1.0 if output in tolerated else float(np.linalg.norm(row))
                differences.append(text)
                failures += [f"generation, {text}"] if lead > 2 * judged[output].allowed * unit else []
        fresh = rows[0].argmax(-1)[:, None].astype(tokens.dtype)
        tokens = np.concatenate([tokens, fresh], axis=1)
    return Generation(
        output=output,
        cache=tuple(cache.items()),
        tokens=tuple(tuple(map(int, row[prompt:])) for row in tokens),
        steps=made,
        agreement=1 - len(differences) / (made * batch),
        differences=tuple(differences),
        failures=tuple(failures[:_MOST_SHOWN]),
        stopped=stopped,
    )


def _step(specs: Mapping[str, InputSpec], given: Feeds, batch: int, total: int, new: int) -> dict[str, Array]:
    """Masks, positions and lengths of a step that reads the last `new` of `total` tokens."""
    before = total - new
    values: dict[Role, Array | int | bool] = {
        Role.MASK: np.ones((batch, total)),
        Role.POSITIONS: np.broadcast_to(np.arange(before, total), (batch, new)),
        Role.TOKEN_TYPES: np.zeros((batch, new)),
        Role.PAST_LENGTH: before,
        Role.TOTAL_LENGTH: total,
        Role.LAST_INDEX: total - 1,
        Role.FLAG: before > 0,
    }
    feeds = {}
    for name, spec in specs.items():
        if spec.role in values and "encoder" not in name:
            value = np.asarray(values[spec.role], spec.dtype)
            feeds[name] = value if value.ndim else np.full(given[name].shape, value)
    return feeds


def _past_shape(spec: InputSpec, given: tuple[int, ...], batch: int) -> list[int]:
    sizes = {Kind.BATCH: batch, Kind.PAST: 0}
    return [sizes.get(kind, size) for kind, size in zip(spec.kinds, given, strict=True)]


def _check_grown(past: Feeds, specs: Mapping[str, InputSpec], cache: Mapping[str, str], total: int) -> None:
    """A cache that loses tokens makes another model."""
    for name, value in past.items():
        for kind, size in zip(specs[name].kinds, value.shape, strict=False):
            if kind is Kind.PAST and size != total:
                raise ValidationError(
                    f"output {quoted(cache[name])}, which continues {quoted(name)}, has {size} tokens after {total}; "
                    "caches of fixed size cannot be followed"
                )


def _ranked(outputs: Mapping[str, onnx.ValueInfoProto], rows: int | None) -> str:
    """The output of logits: by its name, or one as wide as the vocabulary."""
    dims = {name: value.type.tensor_type.shape.dim for name, value in outputs.items()}
    wide = [name for name in outputs if len(dims[name]) == 3]
    named = [name for name in wide if "logits" in name.lower()]
    # An encoder's hidden states have the same rank, but their entries are no tokens.
    if named or (wide and dims[wide[0]][2].dim_value == (rows or -1)):
        return (named or wide)[0]
    raise UsageError("--generate needs an output [batch, tokens, vocabulary]; this model has none")


def matched(pasts: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Past input to present output: by the numbers in their names and whether they are keys or values.

    Raises:
        UsageError: an input has no output that continues it, or several.
    """
    found: dict[str, str] = {}
    for name in pasts:
        fits = [output for output in outputs if _signature(output) == _signature(name)]
        if len(fits) > 1:
            fits = [output for output in fits if re.search(r"present|cache|past", output.lower())]
        if len(fits) != 1 or fits[0] in found.values():
            what = "several outputs continue" if len(fits) > 1 else "no output continues"
            raise UsageError(f"--generate: {what} the input {quoted(name)}, so its cache cannot be followed")
        found[name] = fits[0]
    return found


def _signature(name: str) -> tuple[tuple[str, ...], str, bool]:
    """The numbers of a name, whether it is a key or a value, and whether of an encoder."""
    lowered = name.lower().replace("key_values", "kv").replace("key_value", "kv")
    kind = re.search(r"key|value|(?<![a-z])[kv](?![a-z])", lowered)
    return tuple(re.findall(r"\d+", lowered)), kind[0][0] if kind else "", "encoder" in lowered


def _last(logits: Array) -> Array:
    if logits.ndim != 3 or not is_float(logits.dtype) or not logits.shape[1]:
        raise UsageError("--generate: the output to rank is not [batch, tokens, vocabulary] of floats")
    return np.asarray(logits[:, -1].astype(np.float64))
