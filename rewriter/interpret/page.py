"""`head_pictures`: heads on one sequence as data for a page, which `rewriter.report.html.heads` renders.

A page has a bounded size: the neurons with the largest attributions to the logit, or without one the largest
activations, original heads by the same measure as far as their patterns fit, and a window of tokens.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.files.tokenizer import open_tokenizer, tokens_as_text
from rewriter.inputs.cases import Case
from rewriter.interpret.attribute import FrozenRun, Linear, Written, attribution_of, by_head
from rewriter.interpret.index import HeadIndex, indexed
from rewriter.interpret.original import Attention
from rewriter.interpret.rank import head_tokens
from rewriter.interpret.run import InputsOrText, Text, cases_of, hooks_of, recorded
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.interpret.why import ScoreTerms, scores_of

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
    if opened is not None and not isinstance(inputs, Text):
        inputs = Text((), opened, inputs)
    elif isinstance(inputs, Text) and inputs.tokenizer == tokenizer:
        inputs = replace(inputs, tokenizer=opened)
    index = indexed(model)
    if not index.sublayers:
        raise UsageError("no heads were found: there is nothing to show")
    given = cases_of(index, inputs)
    patterns, activations = _recorded(index, given.only)
    tokens = max(len(each) for each in activations.values())
    ids = given.token_ids(tokens)
    last = min(tokens, MAX_TOKENS)
    effects, shown_logit, embed = dict[str, Array](), None, None
    if logit is not None:
        run = FrozenRun(index, given)
        scores = scores_of(run)
        linear = run.linear(logit, minus, position, {tensor for each in scores.values() for tensor in each.needed})
        found = attribution_of(run, linear, ())
        effects, embed = dict(found.effects), found.paths["embed"]
        last = max(position % tokens + 1, last)
        asked = [logit] if minus is None else [logit, minus]
        names = [f"'{name}'" for name in run.spelled(asked)] or [*map(str, asked)]
        shown_logit = {"entry": " - ".join(names), "position": position, "value": found.logit}
    window = range(max(0, last - MAX_TOKENS), last)
    # The largest effect of each head or neuron: on the logit, else its activation.
    sizes = {name: np.abs(array).max(axis=0, initial=0.0) for name, array in {**activations, **effects}.items()}
    chosen = _chosen(index, sizes, most, tokens)
    read, missing = _read(index, chosen, opened)
    names, why = ([], {}) if logit is None else _explained(run, scores, linear, chosen, window)
    rows, shown = list[dict[str, Any]](), slice(window.start, window.stop)
    originals = sum(len(chosen[each.name]) for each in index.sublayers if isinstance(each.sublayer, Attention))
    least = _LEAST_WEIGHT if originals * len(window) ** 2 > _MAX_EXACT_ENTRIES else 0.0
    for each in index.sublayers:
        for number in chosen[each.name]:
            name, effect = each.members[number], effects[each.name][:, number] if each.name in effects else None
            row = {
                "name": name,
                "sublayer": each.name,
                "number": number,
                "kind": "neuron" if isinstance(each.sublayer, NeuronHeads) else "head",
                "cross": isinstance(each.sublayer, Attention) and each.sublayer.cross,
                "activation": [*map(_rounded, activations[each.name][shown, number])],
                "pattern": _pattern(each, number, patterns[each.name], shown, least),
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
            {
                "name": each.name,
                "kind": "neurons" if isinstance(each.sublayer, NeuronHeads) else "heads",
                "count": each.sublayer.count,
                "shown": len(chosen[each.name]),
            }
            for each in index.sublayers
        ],
        "heads": rows,
        "sources": names,
        "missing": missing,
        "notes": list(_notes(index, window, tokens, chosen, least, attributed=logit is not None)),
    }


def _recorded(index: HeadIndex, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """(patterns [heads, dest, src] or [tokens, heads, 1 + m], activations [tokens, members])."""
    hooks = {name: hook for name, hook in hooks_of(index).items() if name.endswith((".hook_pattern", ".hook_z"))}
    (found,) = recorded(index, [case], hooks)
    patterns, activations = dict[str, Array](), dict[str, Array]()
    for each in index.sublayers:
        patterns[each.name], z = found[f"{each.name}.hook_pattern"][0], found[f"{each.name}.hook_z"][0]
        if isinstance(each.sublayer, NeuronHeads):  # along its row of W2
            factors = np.array([group.factor for group in each.sublayer.groups], np.float64)
            activations[each.name] = np.einsum("tgn,g->tn", z.reshape(len(z), len(factors), -1), factors)
        else:  # the norm of what a head writes
            written = np.einsum("thk,hkd->thd", z.astype(np.float64), index[f"{each.name}.W_O"])
            activations[each.name] = np.linalg.norm(written, axis=-1)
    return patterns, activations


def _chosen(index: HeadIndex, sizes: Mapping[str, Array], most: int, tokens: int) -> dict[str, list[int]]:
    shown = max(min(tokens, MAX_TOKENS), 1)
    limits = {True: min(most, _MAX_ACTIVATIONS // shown), False: max(1, _MAX_PATTERN_ENTRIES // shown**2)}
    result: dict[str, list[int]] = {each.name: [] for each in index.sublayers}
    for neurons, limit in limits.items():
        own = [each.name for each in index.sublayers if isinstance(each.sublayer, NeuronHeads) is neurons]
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


def _pattern(named: Named, number: int, pattern: Array, shown: slice, least: float) -> list[Any]:
    """The patterns of a head, without weights below `least`, or of all heads of a neuron."""
    own = named.sublayer
    if isinstance(own, NeuronHeads):
        found = [pattern[shown, each] for each in range(number, own.heads, own.neurons)]
    else:
        weights = pattern[number, shown, slice(0, MAX_TOKENS) if own.cross else shown]
        found = [np.where(weights < least, 0.0, weights)]
    return [np.nan_to_num(each.astype(np.float64), posinf=0.0, neginf=0.0).round(4).tolist() for each in found]


def _explained(
    run: FrozenRun, scores: Mapping[str, ScoreTerms], linear: Linear, chosen: Mapping[str, list[int]], window: range
) -> tuple[list[str], dict[str, list[list[Any]]]]:
    """The scores of shown heads with the largest attention weights, as sums: (names of sources, head to its scores).

    A score is [query and key in the window, score, added part, largest terms as [source at query, at key, value]].
    """
    window = window[: max(len(linear.start) - window.start, 0)]  # an encoder may have more tokens
    own = slice(window.start, window.stop)
    names, rows, asked = dict[str, int](), dict[str, list[list[Any]]](), dict[str, list[tuple[int, int, int]]]()
    written = Written(linear.stages, run.beginning, by_head(window))
    # Keys of another sequence are one source.
    heads = [(name, place) for name, each in scores.items() if not each.cross for place in range(len(chosen[name]))]
    factors = np.where(np.array(window) == 0, _SINK_FACTOR, 1.0)
    weights = np.array([scores[name].pattern[chosen[name][place], own, own] * factors for name, place in heads])
    for largest in np.argsort(-weights, axis=None, kind="stable")[:_MAX_SCORES].tolist():
        head, query, key = (int(each) for each in np.unravel_index(largest, weights.shape))
        if weights[head, query, key]:
            name, place = heads[head]
            asked.setdefault(name, []).append((chosen[name][place], window[query], window[key]))
    for name, places in asked.items():
        explained = scores[name].whys(written, places)
        for number, *tokens in places:
            with suppress(UsageError):  # rotations that are not understood: scores cannot be explained
                why = explained(number, *tokens)
                terms = [
                    [*(names.setdefault(word, len(names)) for word in words), _rounded(value)]
                    for *words, value in why.top(_SCORE_TERMS)
                ]
                shown = (token - window.start for token in tokens)
                row = [*shown, _rounded(why.total), _rounded(why.added), terms]
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
        own = [each for each in index.sublayers if isinstance(each.sublayer, NeuronHeads) is neurons]
        shown, every = sum(len(chosen[each.name]) for each in own), sum(each.sublayer.count for each in own)
        if shown < every:
            measure = "attribution to the logit" if attributed else "activation on these tokens"
            yield f"Shown are {shown:,} of {every:,} {kind}, those with the largest {measure}."


def _rounded(value: float) -> float:
    """Four digits; 0 for numbers that JSON cannot represent."""
    return float(f"{float(value):.4g}") if np.isfinite(value) else 0.0
