"""`head_pictures`: heads on one sequence as data for a page, which `rewriter.report.html.heads` renders.

A page has a bounded size: the neurons with the largest attributions to the logit, or without one the largest
activations, original heads by the same measure as far as their patterns fit, and a window of tokens.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.files.tokenizer import open_tokenizer, tokens_as_text
from rewriter.interpret.attribute import FrozenRun, FrozenStage, ScoreTerms, Written, by_head
from rewriter.interpret.index import HeadIndex, indexed
from rewriter.interpret.rank import head_tokens
from rewriter.interpret.run import Hook, InputsOrText, Text, Values, cases_of, hooks_of, tensors_of, values_of
from rewriter.interpret.sublayers import Attention, NeuronHeads, Sublayer

MAX_TOKENS = 256  # of the sequence, on the page
_MAX_PATTERN_ENTRIES, _MAX_ACTIVATIONS = 5 * 2**19, 5 * 2**11  # of all original heads; of all neurons
_MAX_EXACT_ENTRIES, _LEAST_WEIGHT = 2**18, 0.01  # with more entries of patterns, smaller weights are left out
_MAX_SCORES, _SCORE_TERMS = 2**11, 5  # of all explained original heads; terms of each
_SINK_FACTOR = 0.1  # for weights of the first token, when scores are chosen: many heads rest on it
_LISTED_TOKENS = 8  # at either end of what a head reads or writes


def head_pictures(
    model: Source | HeadIndex,
    inputs: InputsOrText,
    *,
    logit: int | None = None,
    minus: int | None = None,
    position: int = -1,
    tokenizer: str | os.PathLike[str] | None = None,
    most: int = 200,
) -> dict[str, Any]:
    """JSON-ready data for a page of heads on one sequence: arguments and errors are those of `attribute`.

    The model may be the result of `heads`. Without a `logit` nothing is attributed. A `tokenizer.json` gives tokens as
    text; `most` neurons are shown, of long sequences fewer.
    """
    if most < 0:
        raise UsageError(f"there cannot be {most} neurons")
    opened = None if tokenizer is None else open_tokenizer(tokenizer)  # once
    told = tokens_as_text(opened)
    if opened is not None:
        inputs = replace(inputs, tokenizer=opened) if isinstance(inputs, Text) else Text((), opened, inputs)
    index = indexed(model)
    if not index.sublayers:
        raise UsageError("no heads were found: there is nothing to show")
    given = cases_of(index, inputs)
    hooks = (hook for name, hook in hooks_of(index).items() if name.endswith((".hook_pattern", ".hook_z")))
    values = values_of(index, given.only, tensors_of(hooks))
    effects, shown_logit, embed = dict[str, Array](), None, None
    if logit is not None:
        run = FrozenRun(index, given)
        linear = run.linear(logit, minus, position)
        stages, effects, embed = linear.stages, linear.effects, linear.embed
        asked = [logit] if minus is None else [logit, minus]
        names = [f"'{name}'" for name in given.entries(asked, len(linear.entries))] or [*map(str, asked)]
        shown_logit = {"entry": " - ".join(names), "position": position, "value": linear.value}
        del linear  # the gradients are large
    tokens, chosen, patterns, activations = _recorded(index, values, effects, most)
    del values
    effects = {name: array[:, chosen[name]] for name, array in effects.items()}
    ids = given.token_ids(tokens)
    last = max(min(tokens, MAX_TOKENS), 0 if logit is None else position % tokens + 1)
    window = range(max(0, last - MAX_TOKENS), last)
    read, missing = _read(index, chosen, opened)
    names, why = ([], {}) if logit is None else _explained(run, stages, chosen, window)
    rows, shown = list[dict[str, Any]](), slice(window.start, window.stop)
    originals = sum(len(chosen[each.name]) for each in index.sublayers if isinstance(each, Attention))
    least = _LEAST_WEIGHT if originals * len(window) ** 2 > _MAX_EXACT_ENTRIES else 0.0
    for each in index.sublayers:
        for place, number in enumerate(chosen[each.name]):
            name, effect = each.members[number], effects[each.name][:, place] if each.name in effects else None
            row = {
                "name": name,
                "sublayer": each.name,
                "number": number,
                "kind": each.kind,
                "cross": isinstance(each, Attention) and each.cross,
                "activation": [*map(_rounded, activations[each.name][shown, place])],
                "pattern": _pattern(each, patterns[each.name][place], shown, least),
                "tokens": read.get(name, []),
                "scores": why.get(name),
                "effects": None if effect is None else [*map(_rounded, effect[shown])],
                "effect": None if effect is None else _rounded(effect.sum()),
            }
            rows.append(row)
    return {
        "model": "model in memory" if index.source.path is None else index.source.path.name,
        "tokens": [{"place": at, "text": f"#{at}" if ids is None else told(ids[at])} for at in window],
        "logit": shown_logit,
        "embed": None if embed is None else [*map(_rounded, embed[shown])],  # what each token contributes to the logit
        "sublayers": [
            {"name": each.name, "kind": f"{each.kind}s", "count": each.count, "shown": len(chosen[each.name])}
            for each in index.sublayers
        ],
        "heads": rows,
        "sources": names,
        "missing": missing,
        "notes": list(_notes(index, window, tokens, chosen, least, attributed=logit is not None)),
    }


def _recorded(
    index: HeadIndex, values: Values, effects: Mapping[str, Array], most: int
) -> tuple[int, dict[str, list[int]], dict[str, Array], dict[str, Array]]:
    """(tokens, chosen members, their patterns [members, heads of each, dest, src], activations [tokens, members])."""
    hooks = hooks_of(index)

    def activation(own: Sublayer, hooks: Mapping[str, Hook], members: Sequence[int]) -> Array:
        """[tokens, members]."""
        z = hooks[f"{own.name}.hook_z"].make(values)[0]
        if isinstance(own, NeuronHeads):  # along its row of W2
            factors = np.array([[group.factor] for group in own.groups], np.float64)
            return np.asarray((z.reshape(len(z), len(factors), len(members)) * factors).sum(axis=1))
        # The norm of what a head writes.
        made = z[:, members].swapaxes(0, 1).astype(np.float64) @ index[f"{own.name}.W_O"][members]
        return np.asarray(np.linalg.norm(made, axis=-1).T)

    others = (each for each in index.sublayers if each.name not in effects)
    sizes = {**effects, **{each.name: activation(each, hooks, range(each.count)) for each in others}}
    tokens = max(len(each) for each in sizes.values())
    chosen = _chosen(index, {name: np.abs(each).max(axis=0, initial=0.0) for name, each in sizes.items()}, most, tokens)
    hooks, patterns, activations = hooks_of(index, chosen), dict[str, Array](), dict[str, Array]()
    for own in index.sublayers:
        numbers, pattern = chosen[own.name], hooks[f"{own.name}.hook_pattern"].make(values)[0]
        if isinstance(own, NeuronHeads):
            apart = pattern.reshape(len(pattern), len(own.groups), len(numbers), 1 + own.program.bias_tokens)
            patterns[own.name] = apart.transpose(2, 1, 0, 3)
        else:
            patterns[own.name] = pattern[numbers, None]
        activations[own.name] = activation(own, hooks, numbers)
    return tokens, chosen, patterns, activations


def _chosen(index: HeadIndex, sizes: Mapping[str, Array], most: int, tokens: int) -> dict[str, list[int]]:
    shown = max(min(tokens, MAX_TOKENS), 1)
    limits = {True: min(most, _MAX_ACTIVATIONS // shown), False: max(1, _MAX_PATTERN_ENTRIES // shown**2)}
    result: dict[str, list[int]] = {each.name: [] for each in index.sublayers}
    for neurons, limit in limits.items():
        own = [each.name for each in index.sublayers if isinstance(each, NeuronHeads) is neurons]
        ranked = sorted((-size, name, number) for name in own for number, size in enumerate(sizes[name].tolist()))
        for _, name, number in ranked[:limit]:
            result[name].append(number)
    return {name: sorted(numbers) for name, numbers in result.items()}


def _read(
    index: HeadIndex, chosen: Mapping[str, list[int]], tokenizer: Any
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """(head to the tokens that it reads and writes, missing items with reasons)."""
    names, rows = [f"{name}.{number}" for name in chosen for number in chosen[name]], dict[str, list[dict[str, Any]]]()
    if not names:
        return {}, {}
    made = head_tokens(index, names=names, top=_LISTED_TOKENS, tokenizer=tokenizer)
    for row in made.to_json()["rows"]:
        ends = {end: [[text, _rounded(score)] for _, text, score in row[end]] for end in ("top", "bottom")}
        rows.setdefault(row["head"], []).append({"side": row["side"], "share": round(row["share"], 4), **ends})
    return rows, dict(made.missing)


def _pattern(own: Sublayer, pattern: Array, shown: slice, least: float) -> list[Any]:
    """The pattern of an original head, without weights below `least`, or those of a neuron's heads."""
    found = pattern[:, shown]
    if isinstance(own, Attention):
        found = found[..., slice(0, MAX_TOKENS) if own.cross else shown]
        found = np.where(found < least, 0.0, found)
    return list(np.nan_to_num(found.astype(np.float64), posinf=0.0, neginf=0.0).round(4).tolist())


def _explained(
    run: FrozenRun, stages: Sequence[FrozenStage], chosen: Mapping[str, list[int]], window: range
) -> tuple[list[str], dict[str, list[list[Any]]]]:
    """The scores of shown heads with the largest attention weights, as sums: (names of sources, head to its scores).

    A score is [query and key in the window, score, added part, largest terms as [source at query, at key, value]].
    """
    start = run.beginning
    window = window[: max(len(start["embed"]) - window.start, 0)]  # an encoder may have more tokens
    own = slice(window.start, window.stop)
    names, rows, asked = dict[str, int](), dict[str, list[list[Any]]](), dict[str, list[tuple[int, int, int]]]()
    written = Written(stages, start, by_head(window))
    # Keys of another sequence are one source.
    heads = [(name, number) for name, each in run.attention.items() if not each.cross for number in chosen[name]]
    factors = np.where(np.array(window) == 0, _SINK_FACTOR, 1.0)
    weights = np.array([run.hooked(f"{name}.hook_pattern")[number, own, own] * factors for name, number in heads])
    for largest in np.argsort(-weights, axis=None, kind="stable")[:_MAX_SCORES].tolist():
        head, query, key = (int(each) for each in np.unravel_index(largest, weights.shape))
        if weights[head, query, key]:
            name, number = heads[head]
            asked.setdefault(name, []).append((number, window[query], window[key]))
    for name, places in asked.items():
        explained = ScoreTerms(run, name).whys(written, places)
        for number, *tokens in places:
            with suppress(UsageError):  # rotations that are not understood: scores cannot be explained
                why = explained(number, *tokens)
                terms = [
                    [*(names.setdefault(word, len(names)) for word in words), _rounded(value)]
                    for *words, value in why.top(_SCORE_TERMS)
                ]
                row = [*(token - window.start for token in tokens), _rounded(why.total), _rounded(why.added), terms]
                rows.setdefault(f"{name}.{number}", []).append(row)
    return list(names), rows


def _notes(
    index: HeadIndex, window: range, tokens: int, chosen: Mapping[str, list[int]], least: float, *, attributed: bool
) -> Iterator[str]:
    if len(window) < tokens:
        yield f"Shown are tokens {window.start} to {window.stop - 1} of {tokens}."
    if least:
        yield f"Attention weights of original heads below {least} are left out."
    for neurons, kind in ((True, "neurons"), (False, "original heads")):
        own = [each for each in index.sublayers if isinstance(each, NeuronHeads) is neurons]
        shown, every = sum(len(chosen[each.name]) for each in own), sum(each.count for each in own)
        if shown < every:
            measure = "attribution to the logit" if attributed else "activation on these tokens"
            yield f"Shown are {shown:,} of {every:,} {kind}, those with the largest {measure}."


def _rounded(value: float) -> float:
    """Four digits; 0 for numbers that JSON cannot represent."""
    return float(f"{float(value):.4g}") if np.isfinite(value) else 0.0
