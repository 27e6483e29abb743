"""`python -m docs.notebooks.survival`: does an attention-only network stay one when it is trained further?

A trained decoder is written as form `whole` has it (docs/forms.md), in PyTorch and with nothing held back: one stream
of D + 1 + R + T columns, every W_Q, W_K, W_V and W_O dense on it, every mask as W_QK between positions. Then it is
trained on, with AdamW, weight decay and dropout, on the docstrings that it was trained on before; embeddings and the
unembedding stay. The ways differ in omega, the penalty of forbidden pairs, and in what may change: nothing but
the weights that the construction has (*zeros held*), all but what is written to the further columns (*writes held*),
all but positions, W_QK between them and bias tokens (*positions held*), or everything.

Measured on fresh docstrings, along the way:

    loss          in nats per token
    repaired      the same after the construction is put back: zeros, positions, bias tokens and W_QK as they were
    leakage       attention of neuron heads to other tokens, and of original heads to later tokens and bias tokens
    gates         neuron heads whose attention to the token itself is between 1 and 99 %, as a share
    bias rows     norm of the bias tokens' D columns behind the last sublayer, over the norm of tokens there
    untied        ||W_Q - W_V|| / ||W_Q|| of neuron heads, whose query and value are one pre-activation at first

Controls: the decoder with its MLPs, trained the same way; the same network from random weights; shuffled targets.
Writes `results/survival.json`, which docs/notebooks/training-a-construction.ipynb reads. Needs PyTorch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout

from benchmarks.common import print_table, write_json
from docs.notebooks.attribution import Network
from docs.notebooks.exchange import decoder_command, windows
from docs.notebooks.replica import Normalisation, Replica

LENGTH, FRESH = 16, 96
"""T, and how many windows are fresh."""
_WINDOWS, _BATCH, _RATE, _DECAY, _DROPOUT = 3000, 8, 3e-4, 0.1, 0.1
_POINTS = (1, 3, 10, 30, 100)
"""Steps after which is measured, beside none and all."""
_R = 1
_LARGE, _SHUT = 2.0**60, 0.01

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        omega: the penalty of forbidden pairs; 0 for MLPs, which have none.
        held: whether positions, W_QK between them and bias tokens are held.
        zeros: of which weights the entries that the construction has as 0 are held, too, by the end of their names.
        start: `trained` or `random` weights.
        shuffled: whether the tokens of the docstrings are shuffled.
    """

    omega: float
    held: bool = False
    zeros: str = "none of them"
    start: str = "trained"
    shuffled: bool = False


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "MLP": Way(0.0, held=True, zeros=""),
        "zeros held": Way(_LARGE, held=True, zeros=""),
        "writes held": Way(_LARGE, held=True, zeros="_O"),
        "positions held": Way(_LARGE, held=True),
        "omega 2^60": Way(_LARGE),
        "omega 30": Way(30.0),
        "random": Way(_LARGE, held=True, start="random"),
        "shuffled": Way(_LARGE, held=True, zeros="", shuffled=True),
    }
)


class Stream:
    """The construction of a decoder.

    Attributes:
        replica: the decoder.
        parameters: what it starts with, by name.
        zeros: name to whether the construction has 0 there, of the dense matrices.
        places: what belongs to positions and bias tokens.
    """

    def __init__(self, replica: Replica, omega: float) -> None:
        self.replica, self.places = replica, {"tokens", "bias_tokens"}
        self.width = len(replica.unembedding)
        size = self.width + 1 + _R + LENGTH
        tokens = torch.cat([torch.ones(LENGTH, 1), torch.eye(LENGTH, _R + LENGTH).roll(_R, 1)], 1)
        bias = torch.zeros(_R, size).index_fill(1, torch.tensor([self.width + 1]), 1.0)
        made: Parameters = {"tokens": tokens, "bias_tokens": bias}
        apart = torch.full((_R + LENGTH, _R + LENGTH), -omega)
        apart[:_R, _R - 1] = 0.0
        for each in replica.sublayers:
            w, pairs = each.weights, apart.clone()
            if each.function is None:
                for side in ("Q", "K", "V"):
                    made[f"{each.name}.W_{side}"] = self._wide(w[f"W_{side}"], w[f"b_{side}"])
                pairs[_R:, _R:] = torch.full((LENGTH, LENGTH), -omega).triu(1)
            else:
                for side in ("Q", "V"):
                    made[f"{each.name}.W_{side}"] = self._wide(w["W_in"].T[..., None], w["b_in"][:, None])
                made[f"{each.name}.W_K"] = self._wide(torch.zeros(1, self.width, 1), torch.ones(1, 1))
                pairs[_R:, :_R] = 0.0
                pairs[_R:, _R:].fill_diagonal_(0.0)
            heads = w["W_O"].unflatten(0, (-1, each.width))
            made[f"{each.name}.W_O"] = torch.cat([heads, torch.zeros(*heads.shape[:2], size - self.width)], 2)
            made[f"{each.name}.b_O"] = torch.cat([w["b_O"], torch.zeros(size - self.width)])
            made[f"{each.name}.W_QK"] = pairs
            self.places.add(f"{each.name}.W_QK")
            if each.norm is not None:
                made[f"{each.name}.ln.w"], made[f"{each.name}.ln.b"] = each.norm.scale, each.norm.bias
        self.parameters = {name: each.clone() for name, each in made.items()}
        self.zeros = {name: each == 0 for name, each in made.items() if name not in self.places}

    def _wide(self, weight: Tensor, bias: Tensor) -> Tensor:
        """[heads, D', w] of weights [heads, D, w], the bias being the row of the column *is token*."""
        return torch.cat([weight, bias[:, None], torch.zeros(len(weight), _R + LENGTH, weight.shape[2])], 1)

    def run(
        self, own: Parameters, start: Tensor, rate: float = 0.0, *, mlp: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(logits [B, T, vocabulary], what is measured on the way), of embeddings [B, T, D]."""
        d, batch = self.width, len(start)
        stream = torch.cat(
            [torch.cat([start, own["tokens"].expand(batch, -1, -1)], 2), own["bias_tokens"].expand(batch, -1, -1)], 1
        )
        found: dict[str, Tensor] = {}
        for each in self.replica.sublayers:
            name = each.name
            data, ones = stream[..., :d], stream[..., d : d + 1]
            if each.norm is not None:
                norm = Normalisation(own[f"{name}.ln.w"], torch.zeros(()), each.norm.epsilon, centred=True)
                data = norm(data, held=False) + ones * own[f"{name}.ln.b"]
            data = torch.cat([data, stream[..., d:]], 2)
            q, k, v = (torch.einsum("bnd,hdw->bhnw", data, own[f"{name}.W_{side}"]) for side in ("Q", "K", "V"))
            if mlp and each.function is not None:
                z = each.function(q)
            else:
                positions = stream[..., d + 1 :]
                product = q * k.mT if q.shape[3] == 1 else q @ k.mT  # the same, but faster
                scores = product * each.scale + (positions @ own[f"{name}.W_QK"] @ positions.mT)[:, None]
                found[name] = scores.softmax(-1)
                pattern = dropout(found[name], rate, training=rate > 0)
                z = (pattern * v.mT).sum(-1, keepdim=True) if v.shape[3] == 1 else pattern @ v
            written = torch.einsum("bhnw,hwd->bnd", z, own[f"{name}.W_O"]) + ones * own[f"{name}.b_O"]
            stream = stream + dropout(written, rate, training=rate > 0)
        found["bias rows"] = stream[:, LENGTH:, :d].norm(dim=-1).mean() / stream[:, :LENGTH, :d].norm(dim=-1).mean()
        return self.replica.logits(self.replica.normalised(stream[:, :LENGTH, :d])), found

    def repaired(self, own: Parameters) -> Parameters:
        """Parameters with what the construction says put back."""
        return {
            name: each.masked_fill(self.zeros[name], 0.0) if name in self.zeros else self.parameters[name]
            for name, each in own.items()
        }


def leakage(stream: Stream, patterns: Mapping[str, Tensor]) -> dict[str, float]:
    """Attention that the construction forbids, and the share of gates that are neither open nor shut."""
    found: dict[str, list[float]] = {"leakage of neurons": [], "leakage of heads": [], "gates between": []}
    for each in stream.replica.sublayers:
        if each.name in patterns:
            pattern, neurons = patterns[each.name][:, :, :LENGTH], each.function is not None
            own = torch.eye(LENGTH) if neurons else torch.ones(LENGTH, LENGTH).tril()
            allowed = torch.cat([own, torch.full((LENGTH, _R), float(neurons))], 1)
            lost = float((pattern * (1 - allowed)).sum(-1).mean())
            found["leakage of neurons" if neurons else "leakage of heads"].append(lost)
            if neurons:
                gate = pattern[..., :LENGTH].diagonal(dim1=2, dim2=3)
                found["gates between"].append(float(((gate > _SHUT) & (gate < 1 - _SHUT)).double().mean()))
    return {name: float(np.mean(each)) if each else 0.0 for name, each in found.items()}


def measured(stream: Stream, own: Parameters, start: Tensor, wanted: Tensor, *, mlp: bool) -> dict[str, float]:
    """One point on the way."""

    def loss(parameters: Parameters) -> tuple[float, dict[str, Tensor]]:
        logits, found = stream.run(parameters, start, mlp=mlp)
        return float(cross_entropy(logits.flatten(0, 1), wanted.flatten())), found

    with torch.no_grad():
        now, found = loss(own)
        pairs = [
            (own[f"{each.name}.W_Q"], own[f"{each.name}.W_V"]) for each in stream.replica.sublayers if each.function
        ]
        return {
            "loss": now,
            "repaired": loss(stream.repaired(own))[0],
            **leakage(stream, found),
            "bias rows": float(found["bias rows"]),
            "untied": float(np.mean([float((q - v).norm() / q.norm()) for q, v in pairs])),
        }


def trained(way: Way, replica: Replica, data: tuple[Tensor, Tensor], seed: int, steps: int) -> list[dict[str, float]]:
    """The points of one way and seed, from embeddings [windows, T, D] and next tokens [windows, T]."""
    generator, mlp = torch.Generator().manual_seed(seed), way.omega == 0
    torch.manual_seed(seed)  # dropout
    stream = Stream(replica, way.omega or _LARGE)
    start, wanted = (each[FRESH:] for each in data)
    own = stream.parameters
    if way.start == "random":
        own = {
            name: torch.randn(each.shape, generator=generator) * each.std()
            if name in stream.zeros and each.ndim > 1
            else each
            for name, each in own.items()
        }
        own = stream.repaired(own)
    own = {name: each.clone().requires_grad_(not (way.held and name in stream.places)) for name, each in own.items()}
    optimiser = torch.optim.AdamW([each for each in own.values() if each.requires_grad], lr=_RATE, weight_decay=_DECAY)
    found = [{"step": 0.0, **measured(stream, own, data[0][:FRESH], data[1][:FRESH], mlp=mlp)}]
    for step in range(1, steps + 1):
        rows = torch.randint(len(start), (_BATCH,), generator=generator)
        targets = wanted[rows]
        if way.shuffled:
            targets = targets.flatten()[torch.randperm(targets.numel(), generator=generator)].view_as(targets)
        logits, _ = stream.run(own, start[rows], _DROPOUT, mlp=mlp)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()  # gradients are not clipped: those of omega times as much would leave the others none
        optimiser.step()
        now = {name: each.detach() for name, each in own.items()}
        for name, where in stream.zeros.items():
            if name.endswith(way.zeros):
                now[name].masked_fill_(where, 0.0)
        if step in _POINTS or step == steps:
            found.append({"step": float(step), **measured(stream, now, data[0][:FRESH], data[1][:FRESH], mlp=mlp)})
    return found


@decoder_command(steps=200, results="survival.json")
def main(path: Path, *, steps: int, seeds: int, json_path: Path) -> None:
    """Train the attention-only form of a decoder of docstrings further."""
    ids = windows(path, LENGTH, _WINDOWS + FRESH)
    network, rows = Network(path), list[dict[str, Any]]()
    data = torch.from_numpy(network.embedded(ids[:, :-1].numpy())), ids[:, 1:]
    replica = Replica(path, network.feeds(ids[:1, :-1].numpy()))
    for name, way in WAYS.items():
        for seed in range(seeds):
            rows.append({"way": name, "seed": seed, "points": trained(way, replica, data, seed, steps)})
            click.echo(f"{name}, seed {seed}: {rows[-1]['points'][-1]}", err=True)
    settings = {
        "model": path.stem,
        "steps": steps,
        "batch": _BATCH,
        "rate": _RATE,
        "decay": _DECAY,
        "dropout": _DROPOUT,
    }
    write_json(json_path, "survival", settings, rows)
    columns = tuple(rows[0]["points"][0])[1:]
    cells = [
        (
            name,
            *(
                f"{np.mean([row['points'][-1][column] for row in rows if row['way'] == name]):.3g}"
                for column in columns
            ),
        )
        for name in WAYS
    ]
    print_table(f"after {steps} steps", ("way", *columns), cells)


if __name__ == "__main__":
    main()
