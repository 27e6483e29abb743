"""`python -m docs.notebooks.circuits MODEL...`: which scores find the circuits of three standard questions.

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

Any ONNX file of a decoder like GPT-2 or an encoder like BERT can be asked, with its `tokenizer.json` (`--tokenizer`).
Needs PyTorch for gradients: the network is built again from the weights that `heads` reads, and compared with the file
first. `attribute` knows logits, not cosines: of an encoder, its scores are those of the held network in PyTorch, which
are compared with `attribute` for the difference of two entries of the last token.
"""

from __future__ import annotations

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
from docs.notebooks.replica import RULES, Replica
from models.training.questions import QUESTIONS, SENTENCES, Prompt
from rewriter import attribute
from rewriter.errors import RewriteError, UsageError
from rewriter.files.load import load_model
from rewriter.files.tokenizer import open_tokenizer

Array = NDArray[Any]

SIZES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of circuits, as in MIB: shares of all nodes."""
_POINTS = 8
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


class Subject:
    """A model with its questions.

    Attributes:
        path: its file.
        network: its file, cut behind the embeddings.
        replica: the same in PyTorch.
        owner: sublayer to the node of each channel, [C].
        nodes: how many there are.
        questions: what it can be asked.
        is_head: [nodes], whether it is an original head.
    """

    def __init__(self, path: Path, tokenizer: Any) -> None:
        """Raises UsageError: the model is neither a decoder like GPT-2 nor an encoder like BERT."""
        kinds = {each.type.tensor_type.elem_type for each in load_model(path, mapped=True).proto.graph.input}
        if kinds - {onnx.TensorProto.INT64, onnx.TensorProto.INT32}:
            raise UsageError(f"{path.name} has inputs other than tokens; export it without a key-value cache")
        self.path, self._tokenizer = path, tokenizer
        self.network, self.replica = Network(path), Replica(path)
        self.questions = QUESTIONS if self.replica.causal else SENTENCES
        self.owner: dict[str, Tensor] = {}
        self.nodes = 0
        for each in self.replica.sublayers:
            channels = len(each.weights["W_O"])
            self.owner[each.name] = self.nodes + torch.arange(channels) // each.width
            self.nodes += channels // each.width
        counts = [len(each.weights["W_O"]) // each.width for each in self.replica.sublayers]
        self.is_head = np.repeat([each.function is None for each in self.replica.sublayers], counts)

    def _ids(self, prompt: Prompt) -> tuple[list[int], list[int], tuple[int, int]] | None:
        """Both texts and both answers; None if a word is not one token."""
        texts = [self._tokenizer.encode(text).ids for text in (prompt.text, prompt.corrupted)]
        answers = [0, 1]
        for place, answer in enumerate((prompt.right, prompt.wrong) if self.replica.causal else ()):
            *before, answers[place] = self._tokenizer.encode(prompt.text + answer).ids
            if before != texts[0]:
                return None
        differ = len(texts[0]) == len(texts[1]) and sum(a != b for a, b in zip(*texts, strict=True)) == 1
        return (*texts, (answers[0], answers[1])) if differ else None

    def prompts(
        self, ask: Callable[[np.random.Generator], Prompt], count: int, generator: np.random.Generator
    ) -> Batch:
        """Draw prompts; an encoder's are equally long. Raises UsageError: the tokenizer splits most words."""
        drawn, found = list[Prompt](), list[tuple[list[int], list[int], tuple[int, int]]]()
        for _ in range(100 * count):
            prompt = ask(generator)
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
            return _pooled(self.replica.run(self._embedded(np.array([self._tokenizer.encode(text).ids])))[0], ())[0]

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
            known = "a decoder like GPT-2" if self.replica.causal else "an encoder like BERT"
            raise UsageError(f"{self.path.name} computes something else than {known} (off by {worst:.0e})")
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
        """[K]: the metric, its mean over prompts, when the nodes that `away` [K, nodes] says are patched."""
        with torch.no_grad():
            other = self.replica.run(batch.changed)[1]
            count, found = len(batch.last), []
            for rows in away.split(max(1, _ROWS // count)):
                masks = {name: rows[:, owner][:, None, None] for name, owner in self.owner.items()}

                def change(name: str, made: Tensor, masks: Any = masks, size: int = len(rows)) -> Tensor:
                    each = made.unflatten(0, (size, count))
                    return torch.where(masks[name], other[name], each).flatten(0, 1)

                end = self.replica.run(batch.start.repeat(len(rows), 1, 1), change=change)[0]
                found.append(self.metric(batch, end.unflatten(0, (len(rows), count))).mean(-1))
        return torch.cat(found).double()


def _pooled(end: Tensor, held: Sequence[str]) -> Tensor:
    """Embeddings of sentences [..., D]: the mean over tokens of a stream [..., T, D], normalised."""
    mean = end.mean(-2)
    length = mean.norm(dim=-1, keepdim=True)
    return mean / (length.detach() if "norms" in held else length)


def attributed(subject: Subject, batch: Batch) -> Array:
    """[nodes]: the effects that `rewriter.attribute` gives, on the difference of the batch's entries."""
    total = np.zeros(subject.nodes)
    for row, last in enumerate(batch.last.tolist()):
        right, wrong = (int(entry) for entry in batch.entries[row])
        ids = batch.ids[row : row + 1, : last + 1]
        effects = attribute(subject.path, subject.network.feeds(ids), right, minus=wrong).effects
        total += np.concatenate([effects[each.name].sum(axis=0) for each in subject.replica.sublayers])
    return np.asarray(total / len(batch.last))


def scores(subject: Subject, batch: Batch, seed: int) -> tuple[dict[str, Array], float]:
    """(method to [nodes], how far `attribute` and the replica with everything held differ)."""
    with torch.no_grad():
        other = subject.replica.run(batch.changed)[1]

    def differences(held: Sequence[str]) -> Array:
        found, own = subject.slopes(batch, batch.start, held)
        return subject.by_node({name: each * (own[name] - other[name]) for name, each in found.items()})

    def products(asked: Batch, metric: Callable[..., Tensor]) -> Array:
        found, own = subject.slopes(asked, asked.start, RULES, metric)
        return subject.by_node({name: each * own[name] for name, each in found.items()})

    ours, again = attributed(subject, batch), products(subject.of_entries(batch), subject.at_last)
    with torch.no_grad():
        own = subject.replica.run(batch.start)[1]
    means = {name: torch.zeros_like(each) for name, each in own.items()}
    for point in range(_POINTS):
        between = batch.changed + (point + 0.5) / _POINTS * (batch.start - batch.changed)
        for name, each in subject.slopes(batch, between, ())[0].items():
            means[name] += each / _POINTS
    made = {
        "attribute": ours if subject.replica.causal else products(batch, subject.metric),
        "RelP": differences(RULES),
        "RelP, patterns free": differences(RULES[:2]),
        "attribution patching": differences(()),
        "integrated gradients": subject.by_node(
            {name: each * (own[name] - other[name]) for name, each in means.items()}
        ),
        "random": np.random.default_rng(seed).standard_normal(subject.nodes),
    }
    return made, float(np.abs(ours - again).max() / np.abs(ours).max())


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


def answer(subject: Subject, question: str, seed: int, count: int, neurons: int) -> dict[str, Any]:
    """The row of one question and seed."""
    generator = np.random.default_rng((seed, list(subject.questions).index(question)))
    batch, fresh = (subject.prompts(subject.questions[question], count, generator) for _ in range(2))
    off = subject.off(batch)
    ways, differ = scores(subject, batch, seed)
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
        each = subject.metric(fresh, subject.replica.run(fresh.start)[0])
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
        row["methods"][name] = {"correlation": pairs, **areas(subject, fresh, way)}
    return row


COLUMNS = ("heads", "neurons", "ranks of neurons", "CPR", "CMD", "completeness")


def _numbers(found: Mapping[str, Any]) -> tuple[float, ...]:
    """A method's entries of the table."""
    pairs = found["correlation"]
    shown = (pairs["heads"][0], pairs["neurons"][0], pairs["neurons"][1])
    return (*shown, *(found[name] for name in COLUMNS[3:]))


def tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """For each model and question its title and lines: means over seeds and their standard errors."""
    for model, question in dict.fromkeys((row["model"], row["question"]) for row in rows):
        own = [row for row in rows if (row["model"], row["question"]) == (model, question)]
        right = np.mean([row["right"] for row in own])
        lines = []
        for name in own[0]["methods"]:
            made = np.array([_numbers(row["methods"][name]) for row in own])
            errors = made.std(axis=0, ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.zeros(len(COLUMNS))
            lines.append(
                (name, *(f"{mean:.2f} +- {error:.2f}" for mean, error in zip(made.mean(axis=0), errors, strict=True)))
            )
        yield f"{model}, {question}: right in {right:.0%} of prompts", lines


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
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "interpret.json")
def main(
    models: tuple[Path, ...],
    *,
    tokenizer_path: Path | None,
    questions: tuple[str, ...],
    count: int,
    seeds: int,
    neurons: int,
    json_path: Path,
) -> None:
    """Measure which scores find the circuits of standard questions."""
    rows = []
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
                    rows.append(answer(subject, question, seed, count, neurons))
    except RewriteError as error:
        raise click.ClickException(str(error)) from error
    write_json(json_path, "interpret", {"prompts": count, "sizes": SIZES, "points": _POINTS}, rows)
    for title, lines in tables(rows):
        print_table(title, ("correlation with activation patching of", *COLUMNS), lines)


if __name__ == "__main__":
    main()
