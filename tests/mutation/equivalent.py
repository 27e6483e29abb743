"""Mutants that compute the same, or nothing that matters, and why: no test could, or should, tell them apart."""

from __future__ import annotations

_COMPARE = "rewriter/compare"
_PROOF = "rewriter/proof"
_MERGED = "found = {name: merge([compare(name, b[name], a[name]) for b, a in zip(old, new, strict=True)])"

EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    (f"{_COMPARE}/weights.py", "place: int = 1", "the first difference overwrites it"),
    (
        f"{_COMPARE}/weights.py",
        "return cls(len(data), None, data, - 2, None)",
        "data in memory has no file to read from",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        "lead = (batch, tokens) if inputs[ -1][name].ndim == 3 else (tokens,)",
        "a tensor has the same rank in every case",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        '(batch * keys * (keys // 2 + 1), f"in chunks of {keys // 2 | 1} queries"),',
        "only the description; either number of queries leaves an uneven last chunk",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        '(batch * keys * (keys // 2 | 1), f"in chunks of {keys // 2 + 1} queries"),',
        "either number of queries leaves an uneven last chunk",
    ),
    (
        f"{_PROOF}/statistics.py",
        "step = max(_PIECE | width, 1)",
        "pieces of any size give the same statistics (tested); larger ones take more memory",
    ),
    (
        "passes/match/bounds.py",
        "return view.nodes[index].input[1 - slot], constant.reshape(constant.shape[- 2:])",
        "a leading axis of 1 more, which broadcasts",
    ),
    (
        f"{_COMPARE}/graphs.py",
        "data: bytes = plain.SerializeToString(deterministic=False)",
        "it orders the entries of maps, which an attribute does not have",
    ),
    (
        f"{_COMPARE}/weights.py",
        "_PIECE = 8 * 2** 21",
        "pieces of any size compare the same; larger ones take more memory",
    ),
    (
        "rewriter/files/datafiles.py",
        "and entry.is_file(follow_symlinks=True)",
        "a link has no digest, so it is not taken either",
    ),
    (
        "rewriter/files/tensors.py",
        "return (count_elements(tensor.dims, tensor.name, bits) * bits + 6) // 8",
        "rounds up as well: every element type has an even number of bits",
    ),
    (
        "rewriter/graph/edit.py",
        "for index in sorted(replaced, reverse=False):",
        "readers are counted down, in any order, before anything is looked at",
    ),
    (
        f"{_PROOF}/statistics.py",
        "_PIECE = 1 << 21",
        "pieces of any size give the same statistics (tested); larger ones take more memory",
    ),
    (
        f"{_PROOF}/unchanged/scopes.py",
        'sides = (pair.old.inputs, pair.new.inputs) if what <= "input" else (pair.old.outputs, pair.new.outputs)',
        "the other one is `output`",
    ),
    (
        "passes/programs/line.py",
        "ends = [head.c * value for _, _, value in self.keys[: 3]]",
        "the keys between the ends have the value 0, and make no heads",
    ),
    (
        "passes/match/linear.py",
        "pointwise = shape is not None and all(size <= 1 for size in shape[2:])",
        "a kernel has no size of 0",
    ),
    (
        f"{_COMPARE}/weights.py",
        "return cls(len(data), None, data, not 1, None)",
        "data in memory has no file to read from",
    ),
    (
        "rewriter/files/modelfile.py",
        "data = file.read(status.st_size + 2)  # one byte more, to notice a file that grows",
        "two bytes more notice it as well",
    ),
    (
        "rewriter/graph/elementwise.py",
        "return lambda args, _: function(args[0] + args[1] if len(args) != 1 else args[0])",
        "an operator has an operand",
    ),
    (
        "rewriter/graph/types.py",
        'inputs = node.input[: 2] if operator == "Identity" else node.input',
        "inference reads the first operand of an Identity, whatever follows it",
    ),
    (
        f"{_PROOF}/unchanged/model.py",
        "if old.ir_version is not new.ir_version:",
        "Python holds small numbers once",
    ),
    ("rewriter/files/external.py", "_READ = 64 * 1**20", "pieces of any size give the same bytes (tested)"),
    (
        "rewriter/files/soundness/operators.py",
        "return _Arity(least, 2** 32 if most is None else most, named)",
        "no node has that many inputs",
    ),
)
"""Module, the changed line with the change, and why it makes no difference."""


def reason_of(module: str, after: str) -> str | None:
    """Why a mutant is equivalent, if it is known to be."""
    return next((why for where, line, why in EQUIVALENT if (where, line) == (module, after)), None)
