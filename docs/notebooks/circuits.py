"""`python -m docs.notebooks.circuits MODEL...`: which scores find the circuits of standard questions.

The questions are those of `models.training.questions`, as text and the same text with one word changed. A *node* is an
original head or a neuron; patching it means that at every token it gives what it gives on the changed text. The metric
m is the logit of the right next word minus that of the wrong one; of an encoder of sentences, whose embedding is the
normalised mean over tokens, the cosine with the right paraphrase minus that with the wrong one. A node is scored by

    activation patching   how much m falls when the node alone is patched: the yardstick, one run per node
    attribute             `rewriter.attribute`, which never sees the changed text
    RelP                  the same held network (patterns, gates, denominators), times the difference of both texts
    RelP, patterns free   the same, with the gradient through the patterns (Jafari et al., 2025, arXiv 2508.21258)
    attribution patching  the model's own gradient times the difference
    integrated gradients  the mean of that gradient along the way between the embeddings of both texts
    random                the control

The *circuit* of a size has the nodes with the largest scores; all others are patched. Its faithfulness is
f = (m(circuit) - m(none)) / (m(all) - m(none)), with means over prompts that the scores have not seen. As in MIB
(Mueller et al., 2025, arXiv 2504.13151), CPR is the area under f against size (more is better; the largest scores
first) and CMD the area between f and 1 (less is better; the largest magnitudes first). Size is the share of nodes.
Completeness asks the opposite: the area under f of what is left when the circuit is patched, which should be 0.

Of a gated product h(g) u, `attribute` and RelP give half to what g reads and half to what u reads. Correlations are
also measured with all of it to gates or to values, and with gates free: the gradient of the product.

Any ONNX file of a decoder like GPT-2 or Llama or an encoder like BERT can be asked, with its `tokenizer.json`
(`--tokenizer`). Needs PyTorch for gradients: the network is built again (`docs.notebooks.replica`), and compared with
the file first. The scores of `attribute` are those of the held network in PyTorch, which are compared with `attribute`
itself on one prompt, of an encoder for the difference of two entries of the last token. With `--form`, models are
rewritten and scored again, on every seed; with `--forms-only` that is all that is measured.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.common import RESULTS, print_table, write_json
from docs.notebooks.attribution import Network, correlations
from docs.notebooks.replica import GATES, RULES, Past, Replica
from models.training.questions import FURTHER, QUESTIONS, SENTENCES, Prompt
from rewriter import attribute, rewrite
from rewriter.errors import RewriteError, UsageError
from rewriter.files.load import load_model
from rewriter.files.tokenizer import open_tokenizer

Array = NDArray[Any]

SIZES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of circuits, as in MIB: shares of all nodes."""
_POINTS = 8
_BESIDE = ", gates "
"""In the names of other rules for gates, of which only correlations are measured."""
_LONGEST = 24
"""Tokens of a prompt."""
_ASKED, _ATTRIBUTED = 64, 1
"""Prompts that show how often a model is right, and prompts on which `attribute` itself is run."""
_ROWS = 512
"""Sequences in one run."""
_TOLERANCE = 1e-3
"""How far the replica may be from the file, relative to the largest logit; float32 leaves about 1e-6."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts of one question, filled up on the right.

    Attributes:
        ids: [B, T].
        start: embeddings [B, T, D] of the text.
        changed: those of the changed text.
        last: [B], the token whose logits are read.
        directions: [D, B], what the metric reads of the normalised stream there, or of the sentence's embedding.
        entries: [B, 2], the right and the wrong token; of an encoder two entries of its output.
        metric: the constant of the metric, [B].
    """

    ids: Array
    start: Tensor
    changed: Tensor
    last: Tensor
    directions: Tensor
    entries: Array
    metric: Tensor

    def first(self, count: int) -> "Batch":
        """The first prompts."""
        rows = {name: getattr(self, name)[:count] for name in ("ids", "start", "changed", "last", "entries", "metric")}
        return replace(self, **rows, directions=self.directions[:, :count])


class Subject:
    """A model with its questions.

    Attributes:
        path: its file.
        tokenizer: that of its prompts.
        network: its file, cut behind the embeddings.
        replica: the same in PyTorch.
        owner: sublayer to the node of each channel, [C].
        nodes: how many there are.
        questions: what it can be asked: its tokenizer has the words.
        stage: [nodes], the stage of each node; nodes are in the order of stages.
        is_head: [nodes], whether it is an original head.
    """

    def __init__(self, path: Path, tokenizer: Any) -> None:
        """Raises UsageError: the replica does not know this kind of model."""
        kinds = {each.type.tensor_type.elem_type for each in load_model(path, mapped=True).proto.graph.input}
        if kinds - {onnx.TensorProto.INT64, onnx.TensorProto.INT32}:
            raise UsageError(f"{path.name} has inputs other than tokens; export it without a key-value cache")
        self.path, self.tokenizer = path, tokenizer
        self.network = Network(path)
        self.replica = Replica(path, self.network.feeds(np.arange(_LONGEST)[None] % self.network.vocabulary))
        known, generator = {**QUESTIONS, **FURTHER} if self.replica.causal else SENTENCES, np.random.default_rng(0)
        self.questions = {name: ask for name, ask in known.items() if any(map(self._ids, _drawn(ask, generator, 100)))}
        self.owner: dict[str, Tensor] = {}
        stages, heads = list[Tensor](), list[bool]()
        for place, each in ((place, each) for place, stage in enumerate(self.replica.stages) for each in stage):
            members = len(each.weights["W_O"]) // each.width
            self.owner[each.name] = len(heads) + torch.arange(members * each.width) // each.width
            stages.append(torch.full((members,), place))
            heads += [each.function is None] * members
        self.stage, self.is_head, self.nodes = torch.cat(stages), np.array(heads), len(heads)
        self.gated = any("W_V" in each.weights for each in self.replica.sublayers if each.function is not None)

    def _ids(self, prompt: Prompt) -> tuple[list[int], list[int], tuple[int, int]] | None:
        """Both texts and the first tokens of both answers; None if a word, unlike a number, has several tokens."""
        texts = [self.tokenizer.encode(text).ids for text in (prompt.text, prompt.corrupted)]
        answers = [0, 1]
        for place, answer in enumerate((prompt.right, prompt.wrong) if self.replica.causal else ()):
            ids, count = self.tokenizer.encode(prompt.text + answer).ids, len(texts[0])
            if ids[:count] != texts[0] or not (len(ids) == count + 1 or answer.isdigit()):
                return None
            answers[place] = ids[count]
        if self.replica.causal and answers[0] == answers[1]:
            return None
        differ = len(texts[0]) == len(texts[1]) and sum(a != b for a, b in zip(*texts, strict=True)) == 1
        return (*texts, (answers[0], answers[1])) if differ else None

    def prompts(
        self, ask: Callable[[np.random.Generator], Prompt], count: int, generator: np.random.Generator
    ) -> Batch:
        """Draw prompts; an encoder's are equally long. Raises UsageError: the tokenizer splits most words."""
        drawn, found = list[Prompt](), list[tuple[list[int], list[int], tuple[int, int]]]()
        for prompt in _drawn(ask, generator, 100 * count):
            made = self._ids(prompt)
            if made is not None and (self.replica.causal or not found or len(made[0]) == len(found[0][0])):
                drawn.append(prompt)
                found.append(made)
            if len(found) == count:
                break
        else:
            raise UsageError("the tokenizer takes the words of the question apart; leave it out with --question")
        longest = max(len(each[0]) for each in found)
        ids = np.zeros((2, count, longest), np.int64)
        for row, each in enumerate(found):
            for side in (0, 1):
                ids[side, row, : len(each[0])] = each[side]
        entries = np.array([each[2] for each in found])
        if longest > self.replica.tokens:
            raise UsageError(f"a prompt has {longest} tokens; at most {self.replica.tokens} are asked here")
        if max(ids.max(), entries.max()) >= self.network.vocabulary:
            raise UsageError("the tokenizer knows more tokens than the model")
        start, changed = (self._embedded(each) for each in ids)
        last = torch.tensor([len(each[0]) - 1 for each in found])
        batch = self.of_entries(Batch(ids[0], start, changed, last, torch.empty(0), entries, torch.empty(0)))
        if self.replica.causal:
            return batch
        answers = [self._sentence(prompt.right) - self._sentence(prompt.wrong) for prompt in drawn]
        return replace(batch, directions=torch.stack(answers, 1), metric=torch.zeros(count))

    def of_entries(self, batch: Batch) -> Batch:
        """The same with the difference of its entries at the last token as metric."""
        read = self.replica.unembedding[:, batch.entries]  # [D, B, 2]
        bias = self.replica.logits(torch.zeros(len(read)))[batch.entries]
        return replace(batch, directions=read[..., 0] - read[..., 1], metric=bias[:, 0] - bias[:, 1])

    def _embedded(self, ids: Array) -> Tensor:
        """What the replica starts from, [B, T, D], of tokens [B, T]."""
        return torch.from_numpy(self.network.embedded(ids).astype(np.float32))

    def _sentence(self, text: str) -> Tensor:
        """The embedding of a sentence, [D]."""
        with torch.no_grad():
            return _pooled(self.replica.run(self._embedded(np.array([self.tokenizer.encode(text).ids])))[0], ())[0]

    def off(self, batch: Batch) -> float:
        """How far the replica's logits are from the file's, relative to the largest. Raises UsageError: too far."""
        worst = 0.0
        with torch.no_grad():
            end = self.replica.run(batch.start[:4])[0]
        for row, last in enumerate(batch.last[:4].tolist()):
            ids = batch.ids[row, : last + 1]
            wanted = self.network.entries(self.network.embedded(ids[None]), ids)[0]
            made = self.replica.logits(end[row, last]).numpy()
            worst = max(worst, float(np.abs(made - wanted).max() / np.abs(wanted).max()))
        if worst > _TOLERANCE:
            raise UsageError(f"{self.path.name} computes something else than its replica (off by {worst:.0e})")
        return worst

    def at_last(self, batch: Batch, end: Tensor, _held: Sequence[str] = ()) -> Tensor:
        """What the batch's directions read of the last token, [..., B], of a stream [..., B, T, D]."""
        read = end[..., torch.arange(len(batch.last)), batch.last, :]
        return torch.einsum("...bd,db->...b", read, batch.directions) + batch.metric

    def metric(self, batch: Batch, end: Tensor, held: Sequence[str] = ()) -> Tensor:
        """[..., B] of a stream [..., B, T, D]."""
        if self.replica.causal:
            return self.at_last(batch, end)
        return torch.einsum("...bd,db->...b", _pooled(end, held), batch.directions)

    def slopes(
        self, batch: Batch, start: Tensor, held: Sequence[str], metric: Callable[..., Tensor] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(sublayer to the metric's gradient at its channels; sublayer to its channels), [B, T, C]."""
        end, found = self.replica.run(start.clone().requires_grad_(), held)
        made = torch.autograd.grad((metric or self.metric)(batch, end, held).sum(), list(found.values()))
        return dict(zip(found, made, strict=True)), {name: each.detach() for name, each in found.items()}

    def by_node(self, channels: Mapping[str, Tensor]) -> Array:
        """[nodes]: products [B, T, C], summed over tokens and channels; their mean over prompts."""
        total = torch.zeros(self.nodes, dtype=torch.float64)
        for name, products in channels.items():
            total.index_add_(0, self.owner[name], products.double().sum(dim=(0, 1)) / len(products))
        return np.asarray(total)

    def patched(self, batch: Batch, away: Tensor) -> Tensor:
        """[K]: the metric, its mean over prompts, when the nodes that `away` [K, nodes] says are patched.

        Tokens before the changed word of a decoder's text, and stages before the first patched node, are not run again.
        """
        with torch.no_grad():
            past, batch = self._begun(batch)
            own, other = (self.replica.run(each, past=past)[1] for each in (batch.start, batch.changed))
            count, begun = len(batch.last), self.stage[away.int().argmax(1)]
            order, found = begun.argsort(), torch.zeros(len(away), dtype=torch.float64)
            for places in order.split(max(1, _ROWS // count)):
                rows, first = away[places], int(begun[places[0]])
                masks = {name: rows[:, owner][:, None, None] for name, owner in self.owner.items()}

                def change(name: str, made: Tensor, masks: Any = masks, size: int = len(rows)) -> Tensor:
                    each = made.unflatten(0, (size, count))
                    return torch.where(masks[name], other[name], each).flatten(0, 1)

                stream = self.replica.reached(batch.start, own, first).repeat(len(rows), 1, 1)
                end = self.replica.run(stream, change=change, past=past, first=first)[0]
                found[places] = self.metric(batch, end.unflatten(0, (len(rows), count))).mean(-1).double()
        return found

    def _begun(self, batch: Batch) -> tuple[Past | None, Batch]:
        """What tokens leave that are the same in all texts and before any changed one, and the prompts behind them."""
        differs = (batch.start != batch.changed).any(-1).any(0)
        first, past = int(differs.int().argmax()) if self.replica.causal else 0, Past()
        if not first:
            return None, batch
        self.replica.run(batch.start[:, :first], past=past)
        rest = (batch.start[:, first:], batch.changed[:, first:], batch.last - first)
        return past, replace(batch, start=rest[0], changed=rest[1], last=rest[2])


def _drawn(
    ask: Callable[[np.random.Generator], Prompt], generator: np.random.Generator, count: int
) -> Iterator[Prompt]:
    return (ask(generator) for _ in range(count))


def _pooled(end: Tensor, held: Sequence[str]) -> Tensor:
    """Embeddings of sentences [..., D]: the mean over tokens of a stream [..., T, D], normalised."""
    mean = end.mean(-2)
    length = mean.norm(dim=-1, keepdim=True)
    return mean / (length.detach() if "norms" in held else length)


def attributed(subject: Subject, batch: Batch) -> Array:
    """[nodes]: the effects that `rewriter.attribute` gives, on the difference of the entries of the first prompts."""
    total = np.zeros(subject.nodes)
    for row, last in enumerate(batch.last[:_ATTRIBUTED].tolist()):
        right, wrong = (int(entry) for entry in batch.entries[row])
        ids = batch.ids[row : row + 1, : last + 1]
        effects = attribute(subject.path, subject.network.feeds(ids), right, minus=wrong).effects
        total += np.concatenate([effects[each.name].sum(axis=0) for each in subject.replica.sublayers])
    return np.asarray(total / len(batch.last[:_ATTRIBUTED]))


def scores(subject: Subject, batch: Batch, seed: int) -> tuple[dict[str, Array], float, Array]:
    """(method to [nodes], how far `attribute` and the replica with everything held differ, what `attribute` gives)."""
    with torch.no_grad():
        other = subject.replica.run(batch.changed)[1]

    def differences(held: Sequence[str]) -> Array:
        found, own = subject.slopes(batch, batch.start, held)
        return subject.by_node({name: each * (own[name] - other[name]) for name, each in found.items()})

    def products(asked: Batch, held: Sequence[str], metric: Callable[..., Tensor] | None = None) -> Array:
        found, own = subject.slopes(asked, asked.start, held, metric)
        return subject.by_node({name: each * own[name] for name, each in found.items()})

    few = subject.of_entries(batch.first(_ATTRIBUTED))
    ours, again = attributed(subject, few), products(few, RULES, subject.at_last)
    with torch.no_grad():
        own = subject.replica.run(batch.start)[1]
    means = {name: torch.zeros_like(each) for name, each in own.items()}
    for point in range(_POINTS):
        between = batch.changed + (point + 0.5) / _POINTS * (batch.start - batch.changed)
        for name, each in subject.slopes(batch, between, ())[0].items():
            means[name] += each / _POINTS
    made = {
        "attribute": products(batch, RULES),
        "RelP": differences(RULES),
        "RelP, patterns free": differences(RULES[:2]),
        "attribution patching": differences(()),
        "integrated gradients": subject.by_node(
            {name: each * (own[name] - other[name]) for name, each in means.items()}
        ),
        "random": np.random.default_rng(seed).standard_normal(subject.nodes),
    }
    for rule in (f"{_BESIDE}free", *GATES) if subject.gated else ():
        if rule not in RULES:
            held = ("norms", "patterns", rule)
            made |= {f"attribute{rule}": products(batch, held), f"RelP{rule}": differences(held)}
    return made, float(np.abs(ours - again).max() / np.abs(ours).max()), ours


def areas(subject: Subject, batch: Batch, found: Array) -> dict[str, Any]:
    """CPR, CMD and completeness of the circuits that scores [nodes] give, with the curves."""
    counts = [round(size * subject.nodes) for size in SIZES]
    masks = []
    for ranked in (np.argsort(-found, kind="stable"), np.argsort(-np.abs(found), kind="stable")):
        place = np.empty_like(ranked)
        place[ranked] = np.arange(len(ranked))
        masks += [place >= count for count in counts]  # patched: all but the circuit
    masks += [~mask for mask in masks[len(SIZES) :]]
    m = subject.patched(batch, torch.from_numpy(np.array(masks))).numpy().reshape(3, -1)
    f = (m - m[0, 0]) / (m[0, -1] - m[0, 0])
    return {
        "CPR": float(np.trapezoid(f[0], SIZES)),
        "CMD": float(np.trapezoid(np.abs(1 - f[1]), SIZES)),
        "completeness": float(np.trapezoid(f[2], SIZES)),
        "faithfulness": f[1].tolist(),
        "without": f[2].tolist(),
    }


def rewritten(subject: Subject, question: str, seeds: int, count: int, form: str) -> list[dict[str, float]]:
    """For each seed, method to how far scores are off in what the model is rewritten to, relative to the largest."""
    with tempfile.TemporaryDirectory(prefix="attnonly-circuits-") as folder:
        sizes: dict[str, Any] = {"max_tokens": _LONGEST} if form == "whole" else {}
        path = Path(folder) / subject.path.name
        rewrite(subject.path, path, form=form, validate=False, **sizes)
        pair, found = (subject, Subject(path, subject.tokenizer)), list[dict[str, float]]()
        for seed in range(seeds):
            ask = subject.questions[question]
            batches = [each.prompts(ask, count, np.random.default_rng(seed)) for each in pair]
            (ours, _, run), (theirs, beside, again) = map(scores, pair, batches, (seed, seed))
            ours, theirs = {**ours, "attribute itself": run}, {**theirs, "attribute itself": again}
            off = {name: float(np.abs(theirs[name] - own).max() / np.abs(own).max()) for name, own in ours.items()}
            found.append({**off, "attribute beside replica": beside})
    return found


def answer(subject: Subject, question: str, seed: int, count: int, neurons: int) -> dict[str, Any]:
    """The row of one question and seed."""
    generator = np.random.default_rng((seed, list(subject.questions).index(question)))
    batch, fresh, asked = (
        subject.prompts(subject.questions[question], each, generator) for each in (count, count, _ASKED)
    )
    off = subject.off(batch)
    ways, differ, _ = scores(subject, batch, seed)
    chosen = subject.is_head.copy()
    others = np.flatnonzero(~subject.is_head)
    chosen[others if len(others) <= neurons else generator.choice(others, neurons, replace=False)] = True
    alone = torch.zeros(int(chosen.sum()) + 1, subject.nodes, dtype=torch.bool)
    alone[torch.arange(1, len(alone)), torch.from_numpy(np.flatnonzero(chosen))] = True
    m = subject.patched(batch, alone).numpy()
    yardstick = m[0] - m[1:]
    if chosen.all():
        ways["activation patching"] = yardstick
    kind = subject.is_head[chosen]
    with torch.no_grad():
        each = subject.metric(asked, subject.replica.run(asked.start)[0])
    row: dict[str, Any] = {
        "model": subject.path.stem,
        "question": question,
        "seed": seed,
        "nodes": {"heads": int(subject.is_head.sum()), "neurons": len(others), "patched alone": int(chosen.sum())},
        "right": float((each > 0).double().mean()),
        "logit difference": float(each.mean()),
        "replica": off,
        "attribute beside replica": differ,
        "methods": {},
    }
    for name, way in ways.items():
        pairs = {
            part: correlations(way[chosen][of], yardstick[of]) for part, of in (("heads", kind), ("neurons", ~kind))
        }
        row["methods"][name] = {"correlation": pairs, **({} if _BESIDE in name else areas(subject, fresh, way))}
    return row


COLUMNS = ("heads", "neurons", "ranks of neurons", "CPR", "CMD", "completeness")


def _numbers(found: Mapping[str, Any]) -> tuple[float, ...]:
    """A method's entries of the table."""
    pairs = found["correlation"]
    shown = (pairs["heads"][0], pairs["neurons"][0], pairs["neurons"][1])
    return (*shown, *(found.get(name, np.nan) for name in COLUMNS[3:]))


def tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """For each model and question its title and lines: means over seeds and their standard errors."""
    for model, question in dict.fromkeys((row["model"], row["question"]) for row in rows):
        own = [row for row in rows if (row["model"], row["question"]) == (model, question)]
        right = np.mean([row["right"] for row in own])
        lines = []
        for name in own[0]["methods"]:
            made = np.array([_numbers(row["methods"][name]) for row in own])
            errors = made.std(axis=0, ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.zeros(len(COLUMNS))
            numbers = zip(made.mean(axis=0), errors, strict=True)
            lines.append((name, *("" if np.isnan(mean) else f"{mean:.2f} +- {error:.2f}" for mean, error in numbers)))
        yield f"{model}, {question}: right in {right:.0%} of prompts", lines


def tables_of_forms(
    rows: Sequence[Mapping[str, Any]], forms: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """For each model its title and lines: the mean over questions and seeds, and the largest."""
    for model in dict.fromkeys(row["model"] for row in rows if forms):
        own = [row["rewritten"] for row in rows if row["model"] == model]
        lines = []
        for name in own[0][forms[0]]:
            made = np.array([[found[form][name] for form in forms] for found in own])
            pairs = zip(made.mean(axis=0), made.max(axis=0), strict=True)
            lines.append((name, *(f"{mean:.1e}, at most {largest:.1e}" for mean, largest in pairs)))
        yield f"{model}, rewritten", lines


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--tokenizer",
    "tokenizer_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A tokenizer.json. Default: the one beside a model, with or without its name.",
)
@click.option(
    "--question", "questions", multiple=True, type=click.Choice([*QUESTIONS, *SENTENCES]), help="Default: all."
)
@click.option("--prompts", "count", type=click.IntRange(min=2), default=16, help="To score; as many to measure.")
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--neurons", type=click.IntRange(min=2), default=2048, help="The most that are patched alone.")
@click.option("--form", "forms", multiple=True, help="Also score what models are rewritten to.")
@click.option("--forms-only", is_flag=True, help="Measure only how far those scores are off.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "interpret.json")
def main(
    models: tuple[Path, ...],
    *,
    tokenizer_path: Path | None,
    questions: tuple[str, ...],
    count: int,
    seeds: int,
    neurons: int,
    forms: tuple[str, ...],
    forms_only: bool,
    json_path: Path,
) -> None:
    """Measure which scores find the circuits of standard questions."""
    rows = list[dict[str, Any]]()
    try:
        for path in models:
            beside = (path.with_name(name) for name in (f"{path.stem}-tokenizer.json", "tokenizer.json"))
            found = tokenizer_path or next(filter(Path.exists, beside), None)
            if found is None:
                raise UsageError(f"{path.name} has no tokenizer beside it; name one with --tokenizer")
            subject = Subject(path, open_tokenizer(found))
            for question in (each for each in subject.questions if not questions or each in questions):
                for seed in range(seeds):
                    click.echo(f"{path.name}: {question}, seed {seed}", err=True)
                    named: dict[str, Any] = {"model": path.stem, "question": question, "seed": seed}
                    rows.append(named if forms_only else answer(subject, question, seed, count, neurons))
                for form in forms:
                    click.echo(f"{path.name}: {question}, form {form}", err=True)
                    for row, off in zip(rows[-seeds:], rewritten(subject, question, seeds, count, form), strict=True):
                        row.setdefault("rewritten", {})[form] = off
    except RewriteError as error:
        raise click.ClickException(str(error)) from error
    write_json(json_path, "interpret", {"prompts": count, "sizes": SIZES, "points": _POINTS}, rows)
    for title, lines in () if forms_only else tables(rows):
        print_table(title, ("correlation with activation patching of", *COLUMNS), lines)
    for title, lines in tables_of_forms(rows, forms):
        print_table(title, ("scores, off by of the largest", *forms), lines)


if __name__ == "__main__":
    main()
