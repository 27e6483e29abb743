"""`run_with_cache`: run a model on given inputs and record what its heads do.

Tensors inside the model become outputs, in groups whose values fit into bounded memory; each group is a run of its own,
without graph optimisation, so that the arithmetic is that of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from rewriter.api.interpret.hooks import Hook, hooks_of
from rewriter.api.interpret.index import HeadIndex, heads
from rewriter.arrays import Array
from rewriter.compare.depth import GROUP_BYTES, groups, open_tapped
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import Source
from rewriter.graph.extract import with_outputs
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText, Text, as_given
from rewriter.proof.inputs.read import Tokens, load_cases, tokenized
from rewriter.proof.reference.float64 import NoReference, open_reference


@dataclass(frozen=True, eq=False)
class Cached:
    """The results of a run.

    Attributes:
        outputs: the model's outputs.
        cache: hook to what was recorded there.
        index: the heads of the model.
        tokens: the tokens of each text; empty where inputs are arrays.
    """

    outputs: Mapping[str, Array]
    cache: Mapping[str, Array]
    index: HeadIndex
    tokens: tuple[tuple[str, ...], ...] = ()


def run_with_cache(
    model: Source | HeadIndex,
    inputs: InputsOrText,
    *,
    names: str | Sequence[str] = "*",
    program: str = "fewest",
    provider: str = "cpu",
) -> Cached:
    """Run a model and record what its heads do; see `rewriter.api.interpret.hooks` for names and shapes.

    Args:
        model: path of an ONNX file, original or rewritten, a model in memory, or the result of `heads`.
        inputs: an npz file, arrays by input name, a list of those, or a `Text`; the names or numbers of several cases
            become prefixes, as in `case/hook`.
        names: globs of the hooks to record.
        program: as for `heads`.
        provider: execution provider.

    Raises:
        UsageError: no hook matches, or the inputs do not fit the model.
        ModelError: the model is unreadable, malformed or unsafe.
        ProviderError: the execution provider is not available.
        ValidationError: onnxruntime does not run the model on these inputs.
    """
    index = model if isinstance(model, HeadIndex) else heads(model, program=program)
    wanted = (names,) if isinstance(names, str) else tuple(names)
    recording = Recording.of(index, inputs, wanted, provider)
    cache = dict(recording.arrays())
    spelled = () if recording.tokens is None else recording.tokens.spelled
    return Cached(recording.outputs, cache, index, spelled)


def values_in_float64(index: HeadIndex, case: Case, names: Sequence[str]) -> dict[str, Array]:
    """The values of tensors, the model evaluated in float64.

    Raises:
        ValidationError: an operator has no float64 form.
    """
    side = side_of(index)
    inside = [name for name in names if name not in case.feeds]
    try:
        reference = open_reference(with_outputs(index.proto, side.main, inside), index.source.base_dir)
        found = reference.run(case.feeds)
    except NoReference as reason:
        raise ValidationError(f"the model cannot be evaluated in float64: {reason}") from reason
    return {name: np.asarray(case.feeds.get(name, found.get(name))) for name in names}


def values_of(side: Side, case: Case, names: Sequence[str], provider: str) -> dict[str, Array]:
    """The values of some tensors by onnxruntime; without names the model's outputs.

    Raises:
        ValidationError: onnxruntime does not run the model.
    """
    inside = [name for name in names if name not in case.feeds]
    session = open_tapped(side, inside, provider)
    found = session.run(case.feeds, inside or side.main.outputs) if inside or not names else {}
    return {**found, **{name: case.feeds[name] for name in names if name in case.feeds}}


def side_of(index: HeadIndex) -> Side:
    """The indexed model as what runs."""
    return Side.of(replace(index.source, proto=index.proto, path=None))


@dataclass(frozen=True, eq=False)
class Recording:
    """What will be recorded; `arrays` runs the model.

    Attributes:
        index: the heads of the model.
        cases: the inputs.
        hooks: what to record.
        provider: execution provider.
        outputs: the model's outputs, filled by `arrays`; with the case as a prefix if there are several.
        tokens: the texts that the cases are made of; None where inputs are arrays.
        group_bytes: largest size of the recorded tensors of one run.
    """

    index: HeadIndex
    cases: Sequence[Case]
    hooks: Mapping[str, Hook]
    provider: str
    outputs: dict[str, Array]
    tokens: Tokens | None = None
    group_bytes: int = GROUP_BYTES

    @classmethod
    def of(cls, index: HeadIndex, inputs: InputsOrText, names: Sequence[str], provider: str) -> Recording:
        """Check the inputs and the names. Raises UsageError."""
        tokens: Tokens | None = None
        if isinstance(inputs, Text):
            tokens = tokenized(inputs, index.proto)
            cases = tokens.cases
        else:
            cases = load_cases(as_given(inputs), index.proto)
        known = hooks_of(index)
        for glob in names:
            if not any(fnmatchcase(name, glob) for name in known):
                raise UsageError(f"no hook matches '{glob}'; there are, for example, {', '.join(list(known)[:8])}")
        chosen = {name: hook for name, hook in known.items() if any(fnmatchcase(name, glob) for glob in names)}
        return cls(index, cases, chosen, provider, {}, tokens)

    def noted(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Array]]:
        """The same arrays, then the outputs as `outputs/NAME`; their shapes are noted in `shapes`."""
        for name, array in self.arrays():
            shapes[name] = array.shape
            yield name, array
        for name, array in self.outputs.items():
            shapes[f"outputs/{name}"] = array.shape
            yield f"outputs/{name}", array

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Name to array, a group of tensors at a time."""
        side = side_of(self.index)
        for case in self.cases:
            prefix = f"{case.name}/" if len(self.cases) > 1 else ""
            self.outputs.update({f"{prefix}{name}": array for name, array in self._values(side, case, ()).items()})
            for hooks in self._groups(side, case):
                values = self._values(side, case, tuple({name for hook in hooks.values() for name in hook.tensors}))
                for name, hook in hooks.items():
                    yield f"{prefix}{name}", hook.make(values)

    def _groups(self, side: Side, case: Case) -> Iterator[dict[str, Hook]]:
        """Hooks that are recorded in one run: those whose tensors are in one group, or in all groups so far."""
        tensors = list(dict.fromkeys(name for hook in self.hooks.values() for name in hook.tensors))
        left = dict(self.hooks)
        for group in groups(side.main, tensors, (case,), self.group_bytes):
            own = {name: hook for name, hook in left.items() if set(hook.tensors) <= {*group}}
            left = {name: hook for name, hook in left.items() if name not in own}
            if own:
                yield own
        # Hooks whose tensors fell into different groups.
        for name, hook in left.items():
            yield {name: hook}

    def _values(self, side: Side, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """The values of some tensors; without names the model's outputs."""
        return values_of(side, case, names, self.provider)
