"""GPT-2 in numpy, from the initializers of a file: the truth of attributions, which knows nothing of the tool."""

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx

from tests.attention import Array
from tests.committed import FOLDER
from tests.oracle_operators import softmax

HEADS = 4
LAYERS = (0, 1)
Changes = Mapping[str, Callable[[Array], Array]]
NOTHING: Changes = {}


class Decoder:
    """One sequence; then the network with patterns, gates and denominators held at what they were.

    Names are the tool's: `blocks.0.attn`, `blocks.0.mlp_heads`; constants `blocks.0.attn.b_V`, `.ln.b`, `.b_O`.
    A sublayer read `streams` [T, D], when the sources in `before` had `written`; `held` are its gates or patterns.
    """

    def __init__(self, stem: str, ids: Array) -> None:
        model = onnx.load(FOLDER / f"{stem}.onnx")
        arrays = {each.name: onnx.numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer}
        self.own = {name.removeprefix("model.transformer."): array for name, array in arrays.items()}
        head = next(node for node in reversed(model.graph.node) if node.op_type == "MatMul").input[1]
        tied = self.own.get("model.lm_head.weight")
        self._out = tied.T if tied is not None else arrays[head]
        table = self.own["wte.weight"] if tied is None else tied
        self.written = {"embed": table[ids], "pos_embed": self.own["wpe.weight"][: len(ids)]}
        self.before: dict[str, tuple[str, ...]] = {}
        self.streams: dict[str, Array] = {}
        self.held: dict[str, Array] = {}
        for name in (f"blocks.{layer}.{kind}" for layer in LAYERS for kind in ("attn", "mlp_heads")):
            self.before[name], stream = tuple(self.written), np.asarray(sum(self.written.values()))
            self.streams[name], y = stream, self.read(name, stream, at=stream)
            if name.endswith("mlp_heads"):
                gate = np.vectorize(lambda each: (1 + math.erf(each / math.sqrt(2))) / 2)
                self.held[name] = gate(y) if stem.endswith("gelu") else 1 / (1 + np.exp(-y))
            else:
                query, key = (each.reshape(len(y), HEADS, -1) for each in np.split(y, 3, axis=1)[:2])
                scores = np.einsum("thk,shk->hts", query, key) / np.sqrt(key.shape[-1])
                self.held[name] = softmax(np.where(np.tri(len(y), dtype=bool), scores, -np.inf))
            parts = self.parts(name, self.made(name, stream))
            self.written |= {f"{name}[{place}]": parts[:, place] for place in range(parts.shape[1])}
            self.written[f"{name}.b_O"] = np.tile(self._projection(name)[1], (len(ids), 1))
        self.streams["end"] = np.asarray(sum(self.written.values()))
        self.logits = self.unembedded(self.streams["end"])

    def norm(self, data: Array, at: Array, place: str, *, bias: bool = True) -> Array:
        """LayerNorm of `data` with the denominators of the stream `at`."""
        spread = np.sqrt(at.var(axis=-1, keepdims=True) + float(np.float32(1e-5)))
        centred = (data - data.mean(axis=-1, keepdims=True)) / spread * self.own[f"{place}.weight"]
        return np.asarray(centred + self.own[f"{place}.bias"] * bias)

    def read(self, name: str, data: Array, *, at: Array | None = None, off: Collection[str] = ()) -> Array:
        """Pre-activations, or queries, keys and values, [T, channels], of a stream, some constants being off."""
        layer, neurons = name.split(".")[1], name.endswith("mlp_heads")
        at = self.streams[name] if at is None else at
        data = self.norm(data, at, f"h.{layer}.ln_{2 if neurons else 1}", bias=f"{name}.ln.b" not in off)
        place = f"h.{layer}.mlp.c_fc" if neurons else f"h.{layer}.attn.c_attn"
        bias = self.own[f"{place}.bias"] * (not {f"{name}.b_in", f"{name}.b_V"} & {*off})
        return np.asarray(data @ self.own[f"{place}.weight"] + bias)

    def made(self, name: str, data: Array, *, off: Collection[str] = ()) -> Array:
        """Activations [T, neurons] or z [T, heads, d_head] of a stream, gates and patterns held."""
        read = self.read(name, data, off=off)
        if name.endswith("mlp_heads"):
            return self.held[name] * read
        value = np.split(read, 3, axis=1)[2].reshape(len(read), HEADS, -1)
        return np.asarray(np.einsum("hts,shk->thk", self.held[name], value))

    def _projection(self, name: str) -> tuple[Array, Array]:
        layer, kind = name.split(".")[1], "mlp" if name.endswith("mlp_heads") else "attn"
        weight, bias = (self.own[f"h.{layer}.{kind}.c_proj.{part}"] for part in ("weight", "bias"))
        return (weight if kind == "mlp" else weight.reshape(HEADS, -1, weight.shape[1])), bias

    def parts(self, name: str, made: Array) -> Array:
        """[T, heads or neurons, D]: what each writes."""
        rows = self._projection(name)[0]
        return made[..., None] * rows if rows.ndim == 2 else np.asarray(np.einsum("thk,hkd->thd", made, rows))

    def unembedded(self, data: Array) -> Array:
        """[T, entries] of the stream at the end, denominators held."""
        return np.asarray(self.norm(data, self.streams["end"], "ln_f") @ self._out)

    def run(self, start: Array | None = None, *, off: Collection[str] = (), changes: Changes = NOTHING) -> Array:
        """[T, entries] of the held network from other embeddings, with constants off or what sublayers make changed."""
        data = self.streams["blocks.0.attn"] if start is None else start
        for name in self.before:
            made = changes.get(name, np.asarray)(self.made(name, data, off=off))
            data = data + self.parts(name, made).sum(axis=1) + self._projection(name)[1] * (f"{name}.b_O" not in off)
        return self.unembedded(data)
