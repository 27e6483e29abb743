"""A model's vocabulary: its embedding and unembedding matrices, found in the graph, and tokens as text.

The embedding is the constant that a Gather reads at the token ids; the unembedding is the linear operator between the
last normalisation and the output.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from passes.heads.residual import parts_of
from passes.heads.tensors import Affine
from rewriter.api.interpret.chain import chain_to
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.graph.constants import Constants
from rewriter.graph.layout import SAME_NUMBERS
from rewriter.proof.inputs.read import open_tokenizer, spelling
from rewriter.proof.inputs.roles import Role, input_specs
from rewriter.text import quoted

Told = Callable[[int], str]
"""A token id in words."""

_LONGEST = 40


def embedding_table(index: HeadIndex, tensor: str, width: int) -> str:
    """The name of the constant [tokens, width] whose rows the stream begins with that `tensor` is part of.

    Raises:
        UsageError: there is none; the message says why.
    """
    view, constants = index.view, Constants(index.view)
    ids = {spec.name for spec in input_specs(index.proto, view) if spec.role in (Role.IDS, Role.INTEGERS)}
    found: list[str] = []
    for part in parts_of(view, constants, tensor, ()):
        node = view.made_by(part)
        if node is None or node.op_type != "Gather" or node.input[0] not in constants:
            continue
        source = node.input[1]
        while source not in ids and (maker := view.made_by(source)) is not None and maker.op_type in SAME_NUMBERS:
            source = maker.input[0]
        if source in ids:
            found.append(node.input[0])
    if len(set(found)) != 1:
        many = (
            "several tables of embeddings begin the stream" if found else "no table of embeddings is read at token ids"
        )
        raise UsageError(many)
    shape = constants.shape(found[0])
    if shape is None or len(shape) != 2 or shape[1] != width:
        raise UsageError(f"the embeddings have shape {list(shape or ())}, and the stream has {width} channels")
    return found[0]


def embedding(index: HeadIndex, table: str) -> Array:
    """[tokens, d_model]."""
    return np.asarray(_wide(index.constant(table)))


def unembedding(index: HeadIndex, output: str | None = None) -> Array:
    """[d_model, tokens], with the last normalisation's scale where the index has normalisations folded.

    Raises:
        UsageError: the output is not a linear map of the normalised stream; the message says why.
    """
    name = index.view.outputs[0] if output is None else output
    if name not in index.view.outputs:
        raise UsageError(f"the model has no output {quoted(name)}")
    chain = chain_to(index, name)
    if chain.unembedding is None:
        raise UsageError(f"output {name} is the normalised stream itself: there is no unembedding")
    norm = index.folded(chain.norm.output)
    return np.asarray(_wide(Affine(chain.unembedding, index.value_of, norm).weight()))


def _wide(array: Array) -> Array:
    return array.astype(np.result_type(array.dtype, np.float32), copy=False)


def tokens_as_text(tokenizer: str | os.PathLike[str] | None) -> Told:
    """Token ids in words: by a `tokenizer.json`, or as numbers without one.

    Raises:
        UsageError: the package tokenizers is missing, or it does not read the file.
    """
    if tokenizer is None:
        return str
    opened = open_tokenizer(tokenizer)

    def told(token: int) -> str:
        text = spelling(opened, token)[:_LONGEST]
        return f"'{text}'" if text else str(token)

    return told
