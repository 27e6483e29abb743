"""Generate the inputs on which a model is proved.

Each entry of `_SETTINGS` exercises one aspect of the model (padding, one token, a past, a long sequence), instead of
all combinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from rewriter.graph.view import view_model
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.dims import Setting, Sizes, check_dims, resolve
from rewriter.proof.inputs.embedding_tables import find_tables, main_scope
from rewriter.proof.inputs.npz import load_cases
from rewriter.proof.inputs.roles import InputSpec, Kind, Role, input_specs, kind_of
from rewriter.proof.inputs.values import Request, make_values, masks_tokens
from rewriter.proof.inputs.weight_hints import find_hints

__all__ = ["Case", "Maker", "load_cases", "make_cases"]

_SETTINGS = (
    Setting(1, 17), Setting(3, 17), Setting(1, 1), Setting(3, 2), Setting(1, 64), Setting(3, 9, special=True),
)  # fmt: skip
_WITH_PAST = (
    Setting(1, 17), Setting(3, 17), Setting(1, 1, past=9), Setting(3, 1, past=17), Setting(1, 2, past=5),
    Setting(1, 64), Setting(3, 3, past=6, special=True),
)  # fmt: skip
_WITH_BRANCHES = (
    Setting(1, 17), Setting(3, 17), Setting(1, 1, past=9), Setting(3, 1, past=17), Setting(1, 64),
    Setting(1, 1, past=1), Setting(3, 1, past=6, special=True),
)  # fmt: skip
_FIRST = (Setting(3, 17), Setting(1, 64))
"""The settings that come first, because only the first cases feed the proofs of the blocks: several sequences, and a
long one."""
_NAMED = (Kind.BATCH, Kind.SEQUENCE, Kind.PAST, Kind.ENCODER, Kind.FRAMES, Kind.SAMPLES)


@dataclass(frozen=True)
class _Plan:
    sizes: Sizes
    cached: bool
    special: bool
    setting: Setting


class Maker:
    """Makes inputs for one model.

    Attributes:
        specs: the inputs.
    """

    def __init__(self, model: onnx.ModelProto, *, seed: int = 0, dims: Mapping[str, int] | None = None) -> None:
        """As `make_cases`. Raises UsageError if `dims` names a dimension that the model does not have."""
        view = view_model(model)
        self.specs = input_specs(model, view)
        self._seed, self._fixed = seed, dict(dims or {})
        check_dims(self.specs, self._fixed)
        scope = main_scope(model, view)
        self._tables, self._hints = find_tables(scope), find_hints(scope)
        self._masked = any(masks_tokens(spec) for spec in self.specs)

    @property
    def open_kinds(self) -> frozenset[Kind]:
        """The kinds of dimensions that neither the model nor the caller fixes."""
        free = [
            (spec, axis)
            for spec in self.specs
            for axis, dim in enumerate(spec.shape)
            if not isinstance(dim, int) and dim not in self._fixed
        ]
        return frozenset(kind_of(spec, axis) for spec, axis in free)

    def usual(self, longest: int = 0) -> tuple[Case, ...]:
        """The cases of `make_cases`."""
        branches = any(spec.role is Role.FLAG and _is_branch(spec) for spec in self.specs)
        plans = [self._plan(setting) for setting in _settings(self.specs, branches=branches, longest=longest)]
        # Numbered before they are sorted: the number seeds the values, which stay the same if the order changes.
        numbered = sorted(enumerate(_distinct(plans, branches=branches)), key=lambda entry: _place(entry[1][1].setting))
        return tuple(self._case(name, plan, number) for number, (name, plan) in numbered)

    def case(self, setting: Setting, sizes: Mapping[Kind, int]) -> Case:
        """A case in which these kinds of dimensions have these sizes, where the model leaves them open."""
        plan = self._plan(setting, sizes)
        return self._case(_name(plan, branches=False), plan, 0)

    def _plan(self, setting: Setting, given: Mapping[Kind, int] | None = None) -> _Plan:
        sizes = resolve(
            self.specs,
            setting,
            hints=self._hints,
            fixed=self._fixed,
            longest=None if given else self._tables.sequence,
            given=given or {},
        )
        return _Plan(sizes, setting.past > 0, setting.special, setting)

    def _case(self, name: str, plan: _Plan, number: int) -> Case:
        def request(spec: InputSpec) -> Request:
            rows = self._tables.rows.get(spec.name)
            return Request(spec, plan.sizes, rows, plan.cached, plan.special, self._masked, self._seed, number)

        return Case(name, {spec.name: make_values(request(spec)) for spec in self.specs})


def make_cases(
    model: onnx.ModelProto, *, seed: int = 0, dims: Mapping[str, int] | None = None, longest: int = 0
) -> tuple[Case, ...]:
    """Generate inputs for `model` that are valid by construction: ids within their tables, masks with padding.

    Args:
        model: the model; its weights are not read.
        seed: the same seed gives the same inputs; the values of an input do not depend on the other inputs.
        dims: maps a symbolic dimension to the size that it has in every case.
        longest: a sequence of so many tokens is among the cases, if the model takes it.

    Returns:
        Two to eight cases.

    Raises:
        UsageError: `dims` names a dimension that the model does not have, or no values can be made for an input.
    """
    return Maker(model, seed=seed, dims=dims).usual(longest)


def _place(setting: Setting) -> int:
    return _FIRST.index(setting) if setting in _FIRST else len(_FIRST)


def _is_branch(spec: InputSpec) -> bool:
    return "cache" in spec.name or "branch" in spec.name


def _settings(specs: Sequence[InputSpec], *, branches: bool, longest: int) -> tuple[Setting, ...]:
    cached = any(spec.role is Role.PAST for spec in specs)
    settings = _WITH_BRANCHES if branches else _WITH_PAST if cached else _SETTINGS
    rows = any(spec.role is Role.IDS or masks_tokens(spec) for spec in specs)
    if longest > max(setting.sequence for setting in settings):
        settings = (*settings, Setting(1, longest))
    return tuple(setting for setting in settings if rows or not setting.special)


def _distinct(plans: Sequence[_Plan], *, branches: bool) -> list[tuple[str, _Plan]]:
    """The distinct plans with their names; at least two, so that a fixed shape is tried with different values."""
    # Settings collapse into one where the model fixes what distinguishes them.
    seen: dict[tuple[object, ...], tuple[str, _Plan]] = {}
    for plan in plans:
        key = (tuple(plan.sizes.shapes.values()), plan.cached if branches else None, plan.special)
        seen.setdefault(key, (_name(plan, branches=branches), plan))
    chosen = list(seen.values())
    if len(chosen) == 1:
        name, plan = chosen[0]
        return [(f"{name}, values 1", plan), (f"{name}, values 2", plan)]
    return chosen


def _name(plan: _Plan, *, branches: bool) -> str:
    sizes = plan.sizes
    parts = [f"{kind.value} {sizes.kinds[kind]}" for kind in _NAMED if kind in sizes.varied]
    if branches:
        parts.append("cache branch on" if plan.cached else "cache branch off")
    parts = parts or ["fixed shapes"]
    return ", ".join([*parts, "special rows"] if plan.special else parts)
