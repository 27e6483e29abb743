"""`python -m benchmarks.exchange`: how many attention heads of which width replace a trained MLP block.

A block of n neurons is n heads of width 1, exactly. Here other numbers of heads, of other widths, are fitted to what a
trained block computes. A head of width w attends from a token to itself and to one bias token; queries, keys and values
have w entries:

    q = x W_Q + b_Q,  a = softmax(q (x W_K + b_K), q k)[0],  output (a (x W_V + b_V) + (1 - a) v) W_O

k and v being the bias token's. Of one head a times a constant is a sigmoid of a quadratic form, so a neuron is such a
head of width 1. Fits minimise the squared error over what the block reads on docstrings; the *unexplained* part is that
error over the variance of the block's output, on docstrings that were not seen. The loss is that of the whole decoder
with the fit in the block's place, in nats per token.

Controls: the best linear map; heads whose queries, keys and values are random, with the best W_O; heads fitted to
outputs of other tokens (shuffled); the block's own neurons, those that write most, fitted further (`kept`).

Writes `results/exchange.json`, which docs/notebooks/exchange-rate.ipynb reads. Needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.attribution import Network
from benchmarks.common import RESULTS, ROOT, print_table, write_json
from benchmarks.replica import Replica, Sublayer
from models.training.data import docstrings

WIDTHS = {1: (16, 64, 160), 4: (4, 16, 40), 12: (4, 16)}
"""Width to numbers of heads."""
LONGER, SHUFFLED = ((64, 1), (16, 12), (16, 4)), ((64, 1), (16, 12))
"""Heads and width of those that are also fitted three times as long, and to shuffled outputs."""
_LENGTH, _WINDOWS, _TEST, _TEXTS = 48, 500, 100, 2000
_BATCH, _RATE = 128, 1e-2

Parameters = dict[str, Tensor]


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

    def unexplained(self, made: Tensor) -> Tensor:
        """[seeds] of outputs [seeds, rows, D]: the part of the variance that they miss."""
        centred = self.fresh_written - self.fresh_written.mean(0)
        return (made - self.fresh_written).pow(2).sum((-1, -2)) / centred.pow(2).sum()


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
        self.replica = Replica(path)
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


def fresh(seeds: int, count: int, width: int, size: int, generator: torch.Generator) -> Parameters:
    """Random heads, [seeds, count, ...], for D = size."""

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(seeds, count, *shape, generator=generator) * scale

    inner = size**-0.5
    return {
        **{f"W_{side}": normal(size, width, scale=inner) for side in ("Q", "K", "V")},
        **{f"b_{side}": torch.zeros(seeds, count, width) for side in ("Q", "V")},
        "b_K": normal(width, scale=1.0),
        "bias_K": torch.zeros(seeds, count, width),
        "bias_V": torch.zeros(seeds, count, width),
        "W_O": normal(width, size, scale=(count * width) ** -0.5),
        "b_O": torch.zeros(seeds, size),
    }


def kept(block: Block, seeds: int, count: int) -> Parameters:
    """The block's neurons that write most, as heads of width 1: SiLU(y) = y softmax(y, 0)[0]."""
    w = block.sublayer.weights
    channels = block.sublayer.function(block.read @ w["W_in"] + w["b_in"])  # type: ignore[misc]
    most = (channels.var(0) * w["W_O"].pow(2).sum(1)).argsort(descending=True)[:count]
    left = torch.ones(len(w["b_in"]), dtype=torch.bool).index_fill(0, most, value=False)
    zero = torch.zeros(count, 1)
    one = {
        "W_Q": w["W_in"].T[most][..., None], "b_Q": w["b_in"][most][:, None],
        "W_V": w["W_in"].T[most][..., None], "b_V": w["b_in"][most][:, None],
        "W_K": torch.zeros(count, len(w["W_in"]), 1), "b_K": zero + 1.0, "bias_K": zero, "bias_V": zero,
        "W_O": w["W_O"][most][:, None], "b_O": w["b_O"] + channels[:, left].mean(0) @ w["W_O"][left],
    }  # fmt: skip
    return {name: each.repeat(seeds, *[1] * each.ndim) for name, each in one.items()}


def values(heads: Parameters, read: Tensor) -> Tensor:
    """What heads give to W_O, [seeds, heads, rows, w], of [rows, D]."""
    q, k, v = (
        torch.einsum("rd,shdw->shrw", read, heads[f"W_{side}"]) + heads[f"b_{side}"][:, :, None]
        for side in ("Q", "K", "V")
    )
    scale = q.shape[-1] ** -0.5
    weight = (scale * (q * (k - heads["bias_K"][:, :, None])).sum(-1, keepdim=True)).sigmoid()
    other = heads["bias_V"][:, :, None]
    return other + weight * (v - other)


def output(heads: Parameters, read: Tensor) -> Tensor:
    """[seeds, rows, D]."""
    return torch.einsum("shrw,shwd->srd", values(heads, read), heads["W_O"]) + heads["b_O"][:, None]


def fitted(heads: Parameters, block: Block, written: Tensor, steps: int, generator: torch.Generator) -> Parameters:
    """Heads fitted to outputs [rows, D], all seeds at once; each seed is a start of its own."""
    own = {name: each.clone().requires_grad_() for name, each in heads.items()}
    optimiser = torch.optim.Adam(own.values(), lr=_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps, pct_start=0.1)
    scale = written.var(0).mean()
    for _ in range(steps):
        rows = torch.randint(len(written), (_BATCH,), generator=generator)
        loss = (output(own, block.read[rows]) - written[rows]).pow(2).mean((1, 2)).sum() / scale
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    made = {name: each.detach() for name, each in own.items()}
    for seed in range(len(made["b_O"])):  # the best W_O for what the heads became
        best = solved(stacked(of_seed(made, seed), block.read), written)
        made["W_O"][seed], made["b_O"][seed] = best[:-1].view_as(made["W_O"][seed]), best[-1]
    return made


def solved(data: Tensor, written: Tensor) -> Tensor:
    """The best linear map with a constant, [entries + 1, D], of rows [rows, entries]."""
    with_one = torch.cat([data, torch.ones(len(data), 1)], 1).double()
    gram = with_one.T @ with_one + 1e-6 * len(data) * torch.eye(with_one.shape[1])
    return torch.linalg.solve(gram, with_one.T @ written.double()).float()


def mapped(data: Tensor, found: Tensor) -> Tensor:
    """[rows, D]."""
    return data @ found[:-1] + found[-1]


def of_seed(heads: Parameters, seed: int) -> Parameters:
    return {name: each[seed : seed + 1] for name, each in heads.items()}


def stacked(heads: Parameters, read: Tensor) -> Tensor:
    """What heads of one seed give to W_O, [..., heads * w]."""
    made = values(heads, read.flatten(0, -2))[0].transpose(0, 1).flatten(1)
    return made.unflatten(0, read.shape[:-1])


def unfitted(heads: Parameters, block: Block) -> Callable[[Tensor], Tensor]:
    """Heads of one seed as they are, but with the best W_O."""
    best = solved(stacked(heads, block.read), block.written)
    return lambda read: mapped(stacked(heads, read), best)


def control(text: Text, name: str, found: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """What a map of what the block reads leaves unexplained, and the decoder's loss with it."""
    block = text.blocks[name]
    with torch.no_grad():
        made = float(block.unexplained(found(block.fresh_read)[None])[0])
        return {"unexplained": made, "loss": text.loss(name, found)}


def measured(text: Text, name: str, steps: int, seeds: int, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of one block."""
    block, rows = text.blocks[name], list[dict[str, Any]]()
    size = block.read.shape[1]

    def row(what: str, count: int, width: int, each: Collection[Mapping[str, float]]) -> None:
        found = {part: [one[part] for one in each] for part in ("unexplained", "loss")}
        rows.append({"block": name, "what": what, "heads": count, "width": width, **found})
        told(f"{name} {what} {count} x {width}: {sum(found['unexplained']) / seeds:.4f}")

    def of(heads: Parameters) -> list[dict[str, float]]:
        def one(seed: int) -> Callable[[Tensor], Tensor]:
            own = of_seed(heads, seed)
            return lambda read: output(own, read.flatten(0, -2))[0].unflatten(0, read.shape[:-1])

        return [control(text, name, one(seed)) for seed in range(seeds)]

    linear = solved(block.read, block.written)
    row("linear map", 0, 0, [control(text, name, lambda read: mapped(read, linear))] * seeds)
    mean = block.written.mean(0)
    row("mean", 0, 0, [control(text, name, lambda read: mean.expand(read.shape))] * seeds)
    for width, counts in WIDTHS.items():
        for count in counts:
            generator = torch.Generator().manual_seed(count * 100 + width)
            start = fresh(seeds, count, width, size, generator)
            row("fitted", count, width, of(fitted(start, block, block.written, steps, generator)))
            random = [control(text, name, unfitted(of_seed(start, seed), block)) for seed in range(seeds)]
            row("random", count, width, random)
            if width == 1:
                most = kept(block, seeds, count)
                row("kept", count, width, of(fitted(most, block, block.written, steps, generator)))
    for count, width in LONGER:
        generator = torch.Generator().manual_seed(width)
        start = fresh(seeds, count, width, size, generator)
        if (count, width) in SHUFFLED:
            shuffled = block.written[torch.randperm(len(block.written), generator=generator)]
            row("shuffled", count, width, of(fitted(start, block, shuffled, steps, generator)))
        row("longer", count, width, of(fitted(start, block, block.written, 3 * steps, generator)))
    return rows


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
def main(path: Path, *, steps: int, seeds: int, json_path: Path) -> None:
    """Fit heads to the blocks of a decoder of docstrings."""
    text = Text(path)
    settings = {"model": path.stem, "steps": steps, "seeds": seeds, "rows": _WINDOWS * _LENGTH, "loss": text.loss()}
    rows = [
        row
        for name in text.blocks
        for row in measured(text, name, steps, seeds, lambda line: click.echo(line, err=True))
    ]
    write_json(json_path, "exchange", settings, rows)
    cells = [
        (
            row["block"],
            row["what"],
            f"{row['heads']} x {row['width']}",
            *(f"{sum(row[part]) / seeds:.4f}" for part in ("unexplained", "loss")),
        )
        for row in rows
    ]
    print_table(
        f"loss of the decoder itself: {settings['loss']:.4f}", ("block", "what", "heads", "unexplained", "loss"), cells
    )


if __name__ == "__main__":
    main()
