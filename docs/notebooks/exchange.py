"""`python -m docs.notebooks.exchange`: how many attention heads of which width replace a trained MLP block.

A block of n neurons is n heads of width 1, exactly. Here other numbers of heads, of other widths, are fitted to what a
trained block computes. A head of width w attends from a token to itself and to one bias token; queries, keys and values
have w entries:

    q = x W_Q + b_Q,  a = softmax(q (x W_K + b_K), 0)[0],  output a (x W_V + b_V) W_O + b_O

The bias token's key and value are 0: others would only shift b_K, b_V and b_O. Of one head a times a constant is a
sigmoid of a quadratic form, so a neuron is such a head of width 1.

Fits minimise the squared error over what the block reads on docstrings by variable projection: given queries, keys and
values, W_O and b_O are a linear least-squares problem that is solved exactly, and L-BFGS moves only the others, in
coordinates in which what the block reads has unit covariance. Products of rows are in float32; normal equations, sums
and everything that is reported are in float64. A fit has *converged* when 100 iterations took less than 1 % off its
error, or when that is below 1e-4, a tenth of the finest error that is asked for. The *unexplained* part is the error
over the variance of the block's output, on docstrings that were not seen (`fitted`: on those that were). The loss is
that of the whole decoder with the fit in the block's place, in nats per token. Seeds are starts.

Controls: the best linear map; heads whose queries, keys and values are random, with the best W_O; heads fitted to
outputs of other tokens (shuffled); the block's own neurons, those that write most, disturbed and fitted further
(`kept`); all of them, not fitted (`exact`); ten times as strict a criterion (`stricter`).

Writes `results/exchange.json`, which docs/notebooks/exchange-rate.ipynb reads. Needs PyTorch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.common import RESULTS, ROOT, print_table, write_json
from docs.notebooks.attribution import Network
from docs.notebooks.replica import Replica, Sublayer
from models.training.data import docstrings

SIZES = ((16, 1), (64, 1), (160, 1), (4, 4), (16, 4), (4, 12), (5, 12))
"""Heads and width."""
KEPT, SHUFFLED, STRICTER = ((16, 1), (64, 1)), ((64, 1),), ((64, 1),)
"""Blocks that also start from their own neurons, are fitted to shuffled outputs, and have a stricter criterion."""
_LENGTH, _WINDOWS, _TEST, _TEXTS = 48, 250, 100, 2000
_SPAN, _TOLERANCE, _FINE = 100, 1e-2, 1e-4
"""A fit has converged when _SPAN iterations took less than _TOLERANCE off its error, or when that is below _FINE."""
_HISTORY = 30
_DISTURBED = 0.1
_FLAT = 1e-9
"""Directions in which what a block reads has less than that part of the largest variance are constant."""


@dataclass(frozen=True, eq=False)
class Block:
    """What a trained block does on docstrings.

    Attributes:
        sublayer: the block.
        read: what it reads, normalised, [rows, D].
        written: what it writes, [rows, D], and `fresh_*` the same of other docstrings.
    """

    sublayer: Sublayer
    read: Tensor
    written: Tensor
    fresh_read: Tensor
    fresh_written: Tensor

    def unexplained(self, made: Tensor) -> float:
        """The part of the variance of `fresh_written` that outputs [rows, D] miss."""
        wanted = self.fresh_written.double()
        return float((made - wanted).pow(2).sum() / (wanted - wanted.mean(0)).pow(2).sum())


def windows(path: Path, length: int, count: int) -> Tensor:
    """Tokens of docstrings, in random order, [count, length + 1], as the tokenizer beside a decoder has them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path.with_name("docstrings-tokenizer.json")))
    order, texts = torch.Generator().manual_seed(0), list(docstrings())
    drawn = "\n\n".join(texts[place] for place in torch.randperm(len(texts), generator=order)[:_TEXTS].tolist())
    ids = torch.tensor(tokenizer.encode(drawn).ids)
    starts = torch.randperm(len(ids) // length - 1, generator=order)[:count, None] * length
    return ids[starts + torch.arange(length + 1)]


class Text:
    """A decoder and the docstrings that it reads.

    Attributes:
        replica: the decoder.
        blocks: name to block.
    """

    def __init__(self, path: Path) -> None:
        self._ids, network = windows(path, _LENGTH, _WINDOWS + _TEST), Network(path)
        self._start = torch.from_numpy(network.embedded(self._ids[:, :-1].numpy()))
        self.replica = Replica(path, network.feeds(self._ids[:1, :-1].numpy()))
        self.blocks = dict(self._blocks())

    def _blocks(self) -> Any:
        stream = self._start
        with torch.no_grad():
            for each in self.replica.sublayers:
                written = each.written(each.channels(stream))
                if each.function is not None:
                    parts = (part.flatten(0, 1) for part in (each.read(stream, ()), written))
                    read, made = (part.split(_WINDOWS * _LENGTH) for part in parts)
                    yield each.name, Block(each, read[0], made[0], read[1], made[1])
                stream = stream + written

    def loss(self, name: str = "", made: Callable[[Tensor], Tensor] | None = None) -> float:
        """Of the decoder, with `made` of what a block reads in its place, in nats per token of the fresh docstrings."""
        stream = self._start[_WINDOWS:]
        with torch.no_grad():
            for each in self.replica.sublayers:
                own = (
                    each.written(each.channels(stream))
                    if each.name != name or made is None
                    else made(each.read(stream, ()))
                )
                stream = stream + own
            logits = self.replica.logits(self.replica.normalised(stream))
        return float(cross_entropy(logits.flatten(0, 1), self._ids[_WINDOWS:, 1:].flatten()))


class Heads:
    """Heads of one width beside one bias token, without their output projection.

    Attributes:
        sides: queries, keys and values of whitened rows and a one, [r + 1, 3 heads * width].
        count: how many heads.
    """

    def __init__(self, sides: Tensor, count: int) -> None:
        self.sides, self.count = sides, count

    def __call__(self, rows: Tensor) -> Tensor:
        """What they give to W_O, [rows, heads * width], of whitened rows and a one, [rows, r + 1]."""
        sides = (rows @ self.sides.to(rows.dtype)).unflatten(1, (3, self.count, -1))
        q, k, v = sides.unbind(1)
        weight = ((q * k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5).sigmoid()
        return (weight * v).flatten(1)


class Problem:
    """One block, in coordinates in which what it reads has mean 0 and unit covariance.

    Attributes:
        block: the block.
        rows: what it reads, whitened, with a one, [rows, r + 1].
    """

    def __init__(self, block: Block) -> None:
        self.block, read = block, block.read.double()
        self._mean = read.mean(0)
        variances, directions = torch.linalg.eigh((read - self._mean).T @ (read - self._mean) / len(read))
        used = variances > _FLAT * variances[-1]
        self._into = directions[:, used] / variances[used].sqrt()
        self._back = (directions[:, used] * variances[used].sqrt()).T
        self.rows = self.whitened(read)

    def whitened(self, read: Tensor) -> Tensor:
        """[..., r + 1] of [..., D]."""
        made = (read.double() - self._mean) @ self._into
        return torch.cat([made, torch.ones(*made.shape[:-1], 1, dtype=made.dtype)], -1)

    def random(self, count: int, width: int, seed: int) -> Heads:
        """Random heads."""
        generator, inner, size = torch.Generator().manual_seed(seed), self.rows.shape[1], count * width
        sides = torch.randn(inner, 3 * size, dtype=torch.float64, generator=generator) * inner**-0.5
        sides[-1] = 0.0
        sides[-1, size : 2 * size] = torch.randn(size, dtype=torch.float64, generator=generator)
        return Heads(sides, count)

    def own(self, count: int) -> Heads:
        """The block's neurons that write most, as heads of width 1: SiLU(y) = y softmax(y, 0)[0]."""
        w = self.block.sublayer.weights
        channels = self.block.sublayer.function(self.block.read @ w["W_in"] + w["b_in"])  # type: ignore[misc]
        most = (channels.var(0) * w["W_O"].pow(2).sum(1)).argsort(descending=True)[:count]
        weight, bias = w["W_in"][:, most].double(), w["b_in"][most].double()
        gates = torch.cat([self._back @ weight, (bias + self._mean @ weight)[None]])
        ones = torch.zeros_like(gates).index_fill(0, torch.tensor(len(gates) - 1), 1.0)
        return Heads(torch.cat([gates, ones, gates], 1), count)

    def mapped(self, heads: Heads, written: Tensor) -> Callable[[Tensor], Tensor]:
        """What heads with the best W_O write, of what the block reads, [..., D]."""
        best = solved(heads(self.rows), written)
        return lambda read: mapped(heads(self.whitened(read.flatten(0, -2))), best).unflatten(0, read.shape[:-1])

    def fitted(self, start: Heads, written: Tensor, tolerance: float, steps: int) -> tuple[Heads, list[float]]:
        """(heads fitted to outputs [rows, D], the unexplained part of these before and after each _SPAN iterations)."""
        sides = start.sides.clone().requires_grad_()
        heads, rows, wanted = Heads(sides, start.count), self.rows.float(), written.float()
        variance = (written - written.mean(0)).double().pow(2).sum() / len(written)

        def error() -> Tensor:
            made = heads(rows)
            with torch.no_grad():
                best = solved(made, written).float()  # optimal, so the gradient is that with W_O held
            return (mapped(made, best) - wanted).pow(2).sum(dtype=torch.float64) / variance

        def closure() -> Tensor:
            optimiser.zero_grad()
            made = error()
            made.backward()
            return made

        optimiser = torch.optim.LBFGS(
            [sides], max_iter=_SPAN, max_eval=2 * _SPAN, history_size=_HISTORY, line_search_fn="strong_wolfe",
            tolerance_grad=0.0, tolerance_change=0.0,
        )  # fmt: skip
        course = [float(error().detach()) / len(rows)]
        for _ in range(0, steps, _SPAN):
            optimiser.step(closure)
            course.append(float(error().detach()) / len(rows))
            if converged(course, tolerance):
                break
        return Heads(sides.detach(), start.count), course


def converged(course: list[float], tolerance: float) -> bool:
    """Whether the last iterations changed little, or little is left."""
    return course[-1] < _FINE or course[-2] - course[-1] < tolerance * course[-2]


def solved(data: Tensor, written: Tensor) -> Tensor:
    """The best linear map with a constant, [entries + 1, D], of rows [rows, entries]."""
    data, written = data.double(), written.double()
    mean, middle = data.mean(0), written.mean(0)
    gram = (data - mean).T @ (data - mean)
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())
    slope = torch.linalg.solve(gram, (data - mean).T @ (written - middle))
    return torch.cat([slope, (middle - mean @ slope)[None]])


def mapped(data: Tensor, found: Tensor) -> Tensor:
    """[rows, D]."""
    return data @ found[:-1] + found[-1]


@dataclass(frozen=True)
class Task:
    """One fit or control."""

    block: str
    what: str
    heads: int = 0
    width: int = 0
    seed: int = 0


def tasks(blocks: tuple[str, ...], seeds: int) -> Iterator[Task]:
    """All of them, what takes longest last."""
    for what in ("mean", "linear map"):
        yield from (Task(block, what) for block in blocks)
    yield from (Task(block, "exact", 160, 1) for block in blocks)
    fits = {"random": SIZES, "fitted": SIZES, "kept": KEPT, "shuffled": SHUFFLED, "stricter": STRICTER}
    every = [(count, width, what) for what, sizes in fits.items() for count, width in sizes]
    for count, width, what in sorted(every, key=lambda each: each[0] * each[1]):
        starts = 1 if what == "stricter" else seeds
        yield from (Task(block, what, count, width, seed) for block in blocks for seed in range(starts))


@cache
def opened(path: Path) -> tuple[Text, dict[str, Problem]]:
    """A decoder and its blocks, once per process."""
    torch.set_num_threads(1)
    text = Text(path)
    return text, {name: Problem(block) for name, block in text.blocks.items()}


def measured(path: Path, steps: int, task: Task) -> dict[str, Any]:
    """What a map of what the block reads leaves unexplained, and the decoder's loss with it."""
    text, problems = opened(path)
    problem, course = problems[task.block], list[float]()
    block = problem.block
    written, seed = block.written, 1000 * task.seed + 100 * task.width + task.heads
    if task.what == "mean":
        mean = written.mean(0)
        made: Callable[[Tensor], Tensor] = lambda read: mean.expand(read.shape)  # noqa: E731
    elif task.what == "linear map":
        made = partial(mapped, found=solved(block.read, written).float())
    elif task.what == "exact":
        made = problem.mapped(problem.own(task.heads), written)
    else:
        heads, tolerance = problem.random(task.heads, task.width, seed), _TOLERANCE
        if task.what == "kept":
            heads = Heads(problem.own(task.heads).sides + _DISTURBED * heads.sides, task.heads)
        elif task.what == "shuffled":
            written = written[torch.randperm(len(written), generator=torch.Generator().manual_seed(seed))]
        elif task.what == "stricter":
            tolerance, steps = tolerance / 10, 3 * steps
        if task.what != "random":
            heads, course = problem.fitted(heads, written, tolerance, steps)
        made = problem.mapped(heads, written)
    with torch.no_grad():
        left = block.unexplained(made(block.fresh_read))
        return {
            "unexplained": left,
            "loss": text.loss(task.block, lambda read: made(read).float()),
            **({"course": course, "converged": converged(course, tolerance)} if course else {}),
        }


def decoder_command(steps: int, results: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command on a decoder of docstrings, with the number of steps and of seeds, and the file of its results."""
    decoder = ROOT / "models/trained/docstrings-silu.onnx"
    options = (
        click.option("--model", "path", type=click.Path(path_type=Path, exists=True), default=decoder),
        click.option("--steps", type=click.IntRange(min=10), default=steps),
        click.option("--seeds", type=click.IntRange(min=1), default=3),
        click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / results),
    )

    def made(main: Callable[..., None]) -> click.Command:
        for option in reversed(options):
            main = option(main)
        return click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})(main)

    return made


@decoder_command(steps=1000, results="exchange.json")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Processes, of one thread each.")
def main(path: Path, *, steps: int, seeds: int, json_path: Path, jobs: int) -> None:
    """Fit heads to the blocks of a decoder of docstrings, in --steps iterations at most."""
    text, _ = opened(path)
    settings = {
        "model": path.stem, "iterations": steps, "seeds": seeds, "rows": _WINDOWS * _LENGTH, "span": _SPAN,
        "tolerance": _TOLERANCE, "loss": text.loss(),
    }  # fmt: skip
    rows: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    todo = list(tasks(tuple(text.blocks), seeds))
    with ProcessPoolExecutor(jobs) as pool:
        for task, made in zip(todo, pool.map(partial(measured, path, steps), todo), strict=True):
            key = (task.block, task.what, task.heads, task.width)
            row = rows.setdefault(key, dict(zip(("block", "what", "heads", "width"), key, strict=True)))
            for name, value in made.items():
                row.setdefault(name, []).append(value)
            click.echo(
                f"{task}: {made['unexplained']:.5f} after {_SPAN * (len(made.get('course', [0])) - 1)}", err=True
            )
            write_json(json_path, "exchange", settings, list(rows.values()))
    cells = [
        (
            row["block"],
            row["what"],
            f"{row['heads']} x {row['width']}",
            *(f"{sum(row[part]) / len(row[part]):.4f}" for part in ("unexplained", "loss")),
        )
        for row in rows.values()
    ]
    print_table(
        f"loss of the decoder itself: {settings['loss']:.4f}", ("block", "what", "heads", "unexplained", "loss"), cells
    )


if __name__ == "__main__":
    main()
