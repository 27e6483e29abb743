"""`python -m docs.notebooks.attribution MODEL...`: attribution of tokens beside what replacing them does.

For each model and prompt, the score of every token for the logit that the model predicts: along all paths of the
frozen network (`attribute`), by gradient times input, by integrated gradients (Sundararajan et al., 2017), and by
replacing the token with others, which is the yardstick. Printed and written are correlations over the tokens of a
prompt, of the scores and of their ranks (one large score can make the first alone), as their mean over prompts and its
standard error. The answer must also be the same for the original, for every form, whose head programs differ; the
largest difference is printed last.

Derivatives are central differences of the model itself, along the embedding of one token: onnxruntime runs the part of
it behind the embeddings, with the perturbed embeddings as a batch. A prompt is a window of a docstring of Python's
standard library, or random tokens where there is no tokenizer beside the model.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RESULTS, print_table, write_json
from rewriter import attribute, rewrite
from rewriter.graph.edit import extract, split
from rewriter.interpret.index import heads
from rewriter.interpret.stream import chain_to
from rewriter.ort import open_session
from rewriter.proof.run import fed

Array = NDArray[Any]

METHODS = ("frozen paths", "gradient x input", "integrated gradients")
_STEP = 1e-2
"""Of an embedding: logits of a float32 model change by far more than its rounding, and the third order by 1e-4."""
_POINTS = 16
SPELLINGS: Mapping[str, Mapping[str, Any]] = {
    "local": {},
    "compact": {"form": "compact"},
    "masked": {"form": "masked"},
}
"""Ways to spell the same functions."""


class Network:
    """A model cut behind its embeddings.

    Attributes:
        vocabulary: how many tokens it knows.
    """

    def __init__(self, path: Path) -> None:
        """Cut a model of tokens, whose output is [batch, T, entries], behind its embeddings."""
        index = heads(path)
        self._model = replace(index.source, proto=index.runs, path=None)
        view, self._output = self._model.views[()], index.view.outputs[0]
        self._start = chain_to(index.view, index.sublayers, index.writes, self._output).stages[0].before
        self._given = tuple(view.inputs)
        self._ids = next(name for name in self._given if "mask" not in name and "type" not in name)
        self._embed, self._rest = self._opened(self._start), self._opened(self._output, self._start)
        read = {node.input[0] for node in view.nodes if node.op_type == "Gather"}.intersection(view.initializers)
        tables = [view.initializers[name].dims for name in read]
        self.vocabulary = max(dims[0] for dims in tables if len(dims) == 2)

    def _opened(self, output: str, *stops: str) -> Callable[[Mapping[str, Array]], Array]:
        """What computes a tensor, of values that may include those of the `stops`."""
        view = self._model.views[()]
        (cut,) = split(view, [output], np.inf, frozenset(stops))
        proto = extract(self._model.proto, view, cut)
        part = replace(self._model, proto=proto)
        zeros = dict.fromkeys(self._given, np.zeros((1, 1), np.int64)) | dict.fromkeys(stops, np.zeros(1, np.float32))
        read = fed(part, zeros)
        session = open_session(part.proto, base_dir=part.base_dir, threads=1)
        return lambda values: np.asarray(session.run({name: values[name] for name in read})[output])

    def feeds(self, ids: Array) -> dict[str, Array]:
        """The inputs of the model for tokens [batch, T]: nothing is padded."""
        made = {name: np.ones_like(ids) if "mask" in name else np.zeros_like(ids) for name in self._given}
        return {**made, self._ids: ids}

    def embedded(self, ids: Array) -> Array:
        """[batch, T, D]."""
        return self._embed(self.feeds(ids))

    def entries(self, embedded: Array, ids: Array) -> Array:
        """[batch, entries] at the last token, of embeddings [batch, T, D]."""
        every = np.ascontiguousarray(np.broadcast_to(ids, (len(embedded), ids.shape[-1])))
        made = self._rest({**self.feeds(every), self._start: embedded})
        return np.asarray(made[:, -1], dtype=np.float64)

    def predicted(self, ids: Array) -> int:
        """The largest entry at the last token."""
        return int(self.entries(self.embedded(ids[None]), ids)[0].argmax())


def along(network: Network, ids: Array, at: Array, directions: Array, entry: int) -> Array:
    """[T] derivatives of an entry, at embeddings [T, D], along the direction [T, D] of each token alone."""
    count = len(at)
    moves = np.zeros((2, count, *at.shape), np.float32)
    for token in range(count):
        moves[0, token, token], moves[1, token, token] = _STEP * directions[token], -_STEP * directions[token]
    found = network.entries((at + moves).reshape(2 * count, *at.shape), ids)[:, entry]
    return np.asarray((found[:count] - found[count:]) / (2 * _STEP))


def replacing(network: Network, ids: Array, entry: int, others: Array) -> Array:
    """[T]: how much lower the entry is, on average, where a token is one of the `others`."""

    def one(tokens: Array) -> Array:
        return network.entries(network.embedded(tokens), tokens)[:, entry]

    made = np.repeat(ids[None], ids.size * len(others), axis=0)
    for token in range(ids.size):
        made[token * len(others) : (token + 1) * len(others), token] = others
    return np.asarray(float(one(ids[None])[0]) - one(made).reshape(ids.size, len(others)).mean(axis=1))


def scores(path: Path, network: Network, ids: Array, others: Array) -> dict[str, Array]:
    """Method to [T]."""
    embedded, entry = network.embedded(ids[None])[0], network.predicted(ids)
    base = network.embedded(others[:, None].repeat(ids.size, axis=1)).mean(axis=0)  # the mean token in each place
    way = embedded - base
    steps = [along(network, ids, base + (k + 0.5) / _POINTS * way, way, entry) for k in range(_POINTS)]
    return {
        "frozen paths": attribute(path, network.feeds(ids[None]), entry).paths["embed"],
        "gradient x input": along(network, ids, embedded, embedded, entry),
        "integrated gradients": np.mean(steps, axis=0),
        "replacing": replacing(network, ids, entry, others),
    }


def correlations(one: Array, other: Array) -> tuple[float, float]:
    """Of the scores, and of their ranks."""
    first, second = one.argsort().argsort(), other.argsort().argsort()
    return float(np.corrcoef(one, other)[0, 1]), float(np.corrcoef(first, second)[0, 1])


def spelled(path: Path, ids: Array, network: Network, folder: Path) -> float:
    """How far a token's score is off in what the model is rewritten to, relative to the largest score."""
    feeds, entry = network.feeds(ids[None]), network.predicted(ids)
    own, worst = attribute(path, feeds, entry).paths["embed"], 0.0
    for name, options in SPELLINGS.items():
        made = folder / f"{path.stem}-{name}.onnx"
        if not made.exists():
            rewrite(path, made, validate=False, **options)
        theirs = attribute(made, feeds, entry).paths["embed"]
        worst = max(worst, float(np.abs(theirs - own).max() / np.abs(own).max()))
    return worst


def prompts(path: Path, network: Network, count: int, length: int) -> Iterator[Array]:
    """Token ids [T]."""
    generator = np.random.default_rng(0)
    beside = next(iter(sorted(path.parent.glob("*tokenizer.json"))), None)
    if beside is None:
        for _ in range(count):
            yield generator.integers(0, network.vocabulary, length)
        return
    from tokenizers import Tokenizer

    from models.training.data import docstrings

    texts = [text for text in docstrings() if len(text) > 10 * length]
    tokenizer = Tokenizer.from_file(str(beside))
    for place in generator.choice(len(texts), count, replace=False):
        yield np.asarray(tokenizer.encode(texts[place]).ids[:length], np.int64)


def measured(path: Path, count: int, length: int, told: Callable[[str], None]) -> dict[str, Any]:
    """The row of one model."""
    network, found = Network(path), list[dict[str, tuple[float, float]]]()
    others = np.random.default_rng(1).choice(network.vocabulary, 32, replace=False)
    drawn = tuple(prompts(path, network, count, length))
    for number, ids in enumerate(drawn):
        made = scores(path, network, ids, others)
        yardstick = made.pop("replacing")
        found.append({name: correlations(each, yardstick) for name, each in made.items()})
        told(f"{path.name}: prompt {number + 1} of {count}")
    with tempfile.TemporaryDirectory(prefix="attnonly-attribution-") as folder:
        worst = spelled(path, drawn[0], network, Path(folder))
    told("")
    columns = {name: np.array([each[name] for each in found]) for name in METHODS}  # [prompts, 2]
    errors = {name: each.std(axis=0, ddof=1) / len(each) ** 0.5 for name, each in columns.items()}
    return {
        "model": path.stem if path.parent.name == "trained" else f"{path.parent.name}/{path.stem}",
        "prompts": count,
        "length": length,
        **{
            name: {"mean": each.mean(axis=0).tolist(), "error": errors[name].tolist()} for name, each in columns.items()
        },
        "spellings": worst,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--prompts", "count", type=click.IntRange(min=2), default=40)
@click.option("--length", type=click.IntRange(min=4), default=20, help="Tokens of a prompt.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "attribution.json")
def main(models: tuple[Path, ...], *, count: int, length: int, json_path: Path) -> None:
    """Correlate attributions of tokens with what replacing them does."""
    rows = [
        measured(path, count, length, lambda text: click.echo(f"\r\033[K{text}", nl=False, err=True)) for path in models
    ]
    write_json(json_path, "attribution", {"others": 32, "points": _POINTS}, rows)
    for place, what in enumerate(("scores", "ranks")):
        cells = [
            (row["model"], *(f"{row[each]['mean'][place]:.2f} +- {row[each]['error'][place]:.2f}" for each in METHODS))
            for row in rows
        ]
        print_table(f"correlation of {what} with replacing tokens", ("model", *METHODS), cells)
    print_table(
        "how far spellings are off",
        ("model", "at most"),
        [(each["model"], f"{each['spellings']:.0e}") for each in rows],
    )


if __name__ == "__main__":
    main()
