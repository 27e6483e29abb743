"""The end-to-end judgement on results made by hand: each line of the rule, just within and just beyond it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from rewriter.files.load import LoadedModel
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Claim
from rewriter.proof.diagnosis.doubt import Doubt
from rewriter.proof.end_to_end import (
    CPU,
    Allowance,
    Evaluations,
    ProviderProof,
    _Aside,
    coarsest_allowance,
    judge_end_to_end,
)
from rewriter.proof.inputs.cases import Case
from rewriter.proof.pass_rule import CAP, FACTOR, SLACK, Channels
from rewriter.proof.run.whole import ModelRuns, Ran, Way
from rewriter.proof.settings import LARGE
from tests.plans import Silu
from tests.textmodels import text_model

Array = NDArray[Any]

EPS = 2.0**-23
PLAIN, OPTIMISED = Way("cpu", optimise=False), Way("cpu", optimise=True)
TRUTH = np.array([[1.0, -2.0], [0.5, 1.5]])
"""[samples, channels]; the channels' scales are 1 and 2."""

CLAIM = Claim("mlp", ("y",), "h", ("x",), ("out",), 1e-6, 0.0, TensorProto.FLOAT, Silu())


def model(size: int = LARGE + 1) -> LoadedModel:
    """A model too large to be run with noise, so that nothing is ever run."""
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 2])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["out"])], "g", [], [out])
    return LoadedModel(helper.make_model(graph), None, None, (), size)


def off(by: Any, place: tuple[int, int] = (0, 0), start: Array = TRUTH) -> Array:
    """The truth with one entry off."""
    values = start.copy()
    values[place] += by
    return values


def runs(values: Mapping[Way, Array], truth: Array | None, fallen: tuple[str, ...] | None = ()) -> ModelRuns:
    ways = {way: Ran([{"out": value}], 0.5 if way.optimise else 0.25, fallen) for way, value in values.items()}
    cases = (Case("one", {}),)
    return ModelRuns(cases, (), ways, (), None if truth is None else [{"out": truth}], "")


def evaluations(
    old: Array = TRUTH,
    new: Array = TRUTH,
    *,
    plain: Array | None = None,
    plain_new: Array | None = None,
    truth: Array | None = TRUTH,
    planned: Array | None = TRUTH,
    rebuilt: Array | None = TRUTH,
    shaken: Array | None = None,
    lowered: Array | None = None,
) -> Evaluations:
    single = [np.asarray(each, np.float32) if each.dtype.kind == "f" else each for each in (old, new)]
    plain, plain_new = (
        np.asarray(single[i] if x is None else x, single[i].dtype) for i, x in enumerate((plain, plain_new))
    )
    return Evaluations(
        before=runs({PLAIN: plain, OPTIMISED: single[0]}, truth),
        after=runs({PLAIN: plain_new, OPTIMISED: single[1]}, rebuilt),
        planned=None if planned is None else [{"out": planned}],
        shaken=None if shaken is None else [{"out": shaken}],
        lowered=None if lowered is None else [{"out": lowered}],
    )


def nobody_asks() -> Doubt:
    pytest.fail("the original is not in doubt")


def judged(given: Evaluations, *, claims: Sequence[Claim] = (CLAIM,), why: Any = nobody_asks) -> ProviderProof:
    return judge_end_to_end(model(), given, claims, "cpu", why)


def test_equal_models_pass() -> None:
    found = judged(evaluations())
    assert found.failures == ()
    assert found.error_ratio == 0.0
    assert found.distrusted == ()
    assert found.doubt == ""
    assert found.stand_in == {}
    assert found.control == {}
    assert found.load_seconds == (0.5, 0.5)
    assert (found.cpu_nodes, found.cpu_nodes_of_original) == ((), 0)
    # The original is exact, so that a channel of scale 1 may round by the spacing of floats.
    assert found.allowances == {"out": Allowance(0.0, 0.0, FACTOR * EPS, 0.0, 2.0)}


EXACT = FACTOR * SLACK * 2.0**-52
"""How far from its plan the rewritten model may be in float64 where the original rounds by the spacing of floats."""


@pytest.mark.parametrize(("by", "holds"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("channel", [0, 1])
def test_in_float64_the_rewritten_model_is_its_plan(by: float, holds: bool, channel: int) -> None:
    scale = (1.0, 2.0)[channel]
    failures = judged(evaluations(rebuilt=off(by * EXACT * scale, (0, channel)))).failures
    assert (failures == ()) is holds
    if not holds:
        (text,) = failures
        assert text.startswith("output out: in float64 the rewritten model differs from its plan by ")
        assert f"{EXACT * scale:.3g} that rounding explains" in text


@pytest.mark.parametrize(("by", "holds"), [(3, True), (5, False)])
@pytest.mark.parametrize("optimised", [False, True])
def test_on_a_provider_it_is_its_plan_to_rounding(by: int, holds: bool, optimised: bool) -> None:
    """Judged in either way, per channel: 4 times the spacing of floats at 1."""
    wrong = off(by * EPS)
    found = judged(evaluations(new=wrong, plain_new=TRUTH) if optimised else evaluations(plain_new=wrong))
    assert (found.failures == ()) is holds
    if not holds:
        way = "default optimisation" if optimised else "no optimisation"
        (text,) = found.failures
        assert text.startswith(f"output out: error {5 * EPS:.3g} in channel 0 exceeds the allowed {4 * EPS:.3g}")
        assert text.endswith(f"on cpu, {way}")
    assert found.allowances["out"].rewritten == pytest.approx(by * EPS)
    assert found.error_ratio == pytest.approx(by * EPS / (0.5 * EPS * 2.0))


def test_the_rounding_of_the_original_is_granted() -> None:
    """Four times twice the median channel, of [16, 0] here; four times its own error where that is more."""
    old = off(16 * EPS)
    for granted in (old, off(-16 * EPS)):
        assert judged(evaluations(old=granted, new=off(-63 * EPS))).failures == ()
        assert judged(evaluations(old=granted, new=off(-65 * EPS))).failures != ()
    assert judged(evaluations(old=old, rebuilt=off(15 * EXACT))).failures == ()
    assert judged(evaluations(old=old, rebuilt=off(17 * EXACT))).failures != ()
    assert judged(evaluations(old=old, new=off(-80 * EPS))).error_ratio == pytest.approx(80 / 16)


class _Noisy:
    """Noise moves the first of two channels by so much."""

    def __init__(self, by: float) -> None:
        self.by = by

    def errors(self, _name: str, channels: Channels) -> Array:
        return np.array([self.by, 0.0]) + np.zeros(channels.scale.shape)


def noisy(by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Aside, "own_rounding", _Noisy(by))


@pytest.mark.parametrize(("moved", "holds"), [(9.0, False), (11.0, True)])
@pytest.mark.parametrize("optimised", [False, True])
def test_one_run_may_show_too_little_rounding(
    moved: float, holds: bool, optimised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original is exact here by chance; noise shows what it could have been off by."""
    noisy(moved * EPS, monkeypatch)
    wrong = off(40 * EPS)
    found = judged(evaluations(new=wrong) if optimised else evaluations(plain_new=wrong))
    assert (found.failures == ()) is holds


@pytest.mark.parametrize(("moved", "holds"), [(9.0, False), (11.0, True)])
def test_in_float64_too(moved: float, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy(moved * EPS, monkeypatch)
    wrong = off(10 * FACTOR * SLACK * 2.0**-52)
    assert (judged(evaluations(rebuilt=wrong)).failures == ()) is holds
    assert (judged(evaluations(lowered=wrong)).failures == ()) is holds


def test_noise_counts_as_far_as_it_can_be_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that amplifies rounding to the size of its outputs excuses nothing."""
    noisy(1.0, monkeypatch)
    assert judged(evaluations(new=off(FACTOR * 255 * EPS))).failures == ()
    failures = judged(evaluations(new=off(FACTOR * 257 * EPS))).failures
    assert all("in channel 0 exceeds the allowed" in failure for failure in failures)
    assert len(failures) == 2


def test_the_larger_error_is_reported() -> None:
    for given in (
        evaluations(new=off(3 * EPS), plain_new=off(2 * EPS)),
        evaluations(new=off(2 * EPS), plain_new=off(3 * EPS)),
    ):
        assert judged(given).allowances["out"].rewritten == pytest.approx(3 * EPS)


@pytest.mark.parametrize(("by", "holds"), [(0.9, True), (1.1, False)])
def test_certified_errors_are_capped(by: float, holds: bool) -> None:
    moved = off(by * CAP * 2.0, (1, 1)) if holds else off(by * CAP)
    found = judged(evaluations(new=moved, planned=moved, rebuilt=moved))
    assert (found.failures == ()) is holds
    certified = np.abs(moved - TRUTH).max()
    assert found.allowances["out"].certified == pytest.approx(certified)
    assert found.allowances["out"].allowed == pytest.approx(certified + FACTOR * EPS * (2.0 if holds else 1.0))
    if not holds:
        (text,) = found.failures
        assert "the certified errors of the head programs amount to 0.0011 of the output's scale" in text
        assert "more than the 0.001 allowed; the largest certificate is that of mlp, 1e-06; ask for closer" in text


def test_how_long_either_model_took_to_load() -> None:
    """Optimised, as it is deployed."""
    given = evaluations()
    slower = {way: replace(ran, load_seconds=3 * ran.load_seconds) for way, ran in given.after.ways.items()}
    assert judged(replace(given, after=replace(given.after, ways=slower))).load_seconds == (0.5, 1.5)


def test_errors_that_were_asked_for_may_grow() -> None:
    moved = off(30 * 1e-2)
    given = evaluations(new=moved, planned=moved, rebuilt=moved)
    assert judged(given).failures != ()
    assert judged(given, claims=(CLAIM, replace(CLAIM, accuracy=0.95e-2))).failures == ()
    assert judged(given, claims=(CLAIM, replace(CLAIM, accuracy=0.93e-2))).failures != ()
    assert judged(evaluations(new=off(4e-3), planned=off(4e-3), rebuilt=off(4e-3)), claims=()).failures != ()


def test_half_precision_caps_at_four_times_its_spacing() -> None:
    """2^-10 is 1e-3 already."""
    moved = off(3.5 * 2.0**-10)
    given = evaluations(new=moved, planned=moved, rebuilt=moved)
    half = [
        replace(each, ways={way: replace(ran, results=[{"out": ran.results[0]["out"].astype(np.float16)}])
                            for way, ran in each.ways.items()})
        for each in (given.before, given.after)
    ]  # fmt: skip
    assert judged(replace(given, before=half[0], after=half[1])).failures == ()
    assert judged(given).failures != ()


def test_advice_names_the_largest_certificate() -> None:
    moved = off(1.0)
    given = evaluations(new=moved, planned=moved, rebuilt=moved)
    others = replace(CLAIM, name="other", max_error=1e-3), replace(CLAIM, name="last", max_error=1e-4)
    (text,) = judged(given, claims=(CLAIM, *others)).failures
    assert "the largest certificate is that of other, 0.001; ask for closer programs" in text
    (text,) = judged(given, claims=(CLAIM, replace(CLAIM, unstable=True))).failures
    assert "; keep gates' products in the graph with --gate product, ask for closer programs" in text


def test_rounding_of_unstable_programs_is_granted() -> None:
    """What the plan moves by under float64 rounding is no error of the emitted graph, and counts as certified."""
    shaken = off(2e-4)
    assert judged(evaluations(rebuilt=off(1.9e-4), shaken=shaken)).failures == ()
    assert judged(evaluations(rebuilt=off(2.1e-4), shaken=shaken)).failures != ()
    assert judged(evaluations(rebuilt=off(1.9e-4, (0, 1)), shaken=shaken)).failures != ()
    found = judged(evaluations(new=off(1.9e-4), shaken=shaken))
    assert found.failures == ()
    assert found.allowances["out"].certified == pytest.approx(2e-4)
    assert judged(evaluations(shaken=off(1.1e-3))).failures != ()


def test_the_lowered_original_is_the_original() -> None:
    """Lowering changes no number."""
    assert judged(evaluations(lowered=off(0.9 * EXACT))).failures == ()
    (text,) = judged(evaluations(lowered=off(1.1 * EXACT))).failures
    assert text.startswith("output out: the lowered original does not compute what the original does")


# -- where float64 is no measure ---------------------------------------------------------------------------------------

FAR = 65 * EPS
COARSE = 256 * EPS


def test_a_suspicious_original_is_looked_at() -> None:
    far = evaluations(old=off(FAR), new=off(FAR))
    found = judged(far, why=lambda: Doubt(True, "it amplifies rounding"))
    assert found.failures == ()
    assert (found.doubt, found.distrusted) == ("it amplifies rounding", ())
    assert judged(evaluations(old=off(63 * EPS), new=off(63 * EPS))).doubt == ""
    found = judged(far, why=lambda: Doubt(False, "an operator is wrong", wrong=True))
    assert (found.doubt, found.distrusted) == ("an operator is wrong", ("out",))
    # Not wrong, and not far: rounding decides something elsewhere.
    assert judged(far, why=lambda: Doubt(False, "a rounding decides")).distrusted == ()


@pytest.mark.parametrize(("trusted", "distrusted"), [(True, ()), (False, ("out",))])
def test_an_original_that_is_far_away_is_believed_if_it_amplifies(trusted: bool, distrusted: tuple[str, ...]) -> None:
    far = evaluations(old=off(0.4), new=off(0.4))
    assert judged(far, why=lambda: Doubt(trusted, "")).distrusted == distrusted


def test_where_the_original_stands_in() -> None:
    """It is the measure on the provider; in float64 the rewritten model is its plan all the same."""

    def found(given: Evaluations) -> ProviderProof:
        return judged(given, why=lambda: Doubt(False, "", wrong=True))

    old = off(0.4)
    assert found(evaluations(old=old, new=off(0.4 + 0.9 * COARSE * 1.4))).failures == ()
    texts = found(evaluations(old=old, new=off(0.4 + 1.1 * COARSE * 1.4))).failures
    assert [text.partition(" on ")[2] for text in texts] == [str(PLAIN), str(OPTIMISED)]
    result = found(evaluations(old=old, new=old))
    assert result.allowances == {}
    assert result.error_ratio == pytest.approx(1.0)
    assert result.stand_in == {"out": pytest.approx(COARSE / FACTOR)}
    assert found(evaluations(old=old, new=old, rebuilt=off(0.9 * EXACT))).failures == ()
    assert found(evaluations(old=old, new=old, rebuilt=off(1.1 * EXACT))).failures != ()


@pytest.mark.parametrize("size", [LARGE, LARGE + 1])
def test_noise_moves_a_model_from_what_it_gives_without_optimisation(size: int) -> None:
    """Claims of bodies, and of tensors that the original does not have, say nothing about it."""
    proto = text_model("a = Exp(x) b = MatMul(a, W1) out = Tanh(b)")
    feeds = {"x": np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)}
    made = {"out": open_session(proto, optimise=False).run(feeds)["out"]}
    before = ModelRuns(
        (Case("one", feeds),), (), {PLAIN: Ran([made], 0, ()), OPTIMISED: Ran([{"out": made["out"] + 9}], 0, ())},
        (), None, "",
    )  # fmt: skip
    original = LoadedModel(proto, None, None, (), size)
    claims = (CLAIM, replace(CLAIM, inputs=("out",), output="out", path=(("if", "elsewhere"),)))
    found = _Aside(original, Evaluations(before, before), claims, "cpu", nobody_asks).sensitivity
    if size > LARGE:
        assert found is None
        return
    assert found is not None
    assert 0.0 < found.moved["out"][0].max() < 1e-4


def test_the_noise_between_optimisation_levels_counts() -> None:
    given = evaluations(plain=off(0.1), plain_new=off(0.1), new=off(0.39), truth=None, planned=None, rebuilt=None)
    found = judged(given)
    assert found.failures == ()
    assert found.stand_in["out"] == pytest.approx(0.1)
    assert judged(replace(given, after=replace(given.after, ways={
        **given.after.ways, OPTIMISED: replace(given.after.ways[OPTIMISED], results=[{"out": off(0.41).astype("f4")}])
    }))).failures != ()  # fmt: skip


def test_without_a_float64_evaluation() -> None:
    nothing: dict[str, Any] = {"truth": None, "planned": None, "rebuilt": None}
    found = judged(evaluations(new=off(0.9 * COARSE), **nothing))
    assert found.failures == ()
    assert (found.error_ratio, found.distrusted, found.allowances) == (None, (), {})
    assert judged(evaluations(new=off(1.1 * COARSE), **nothing)).failures != ()
    # One evaluation that is missing is as good as none.
    for missing in nothing:
        one: dict[str, Any] = {missing: None}
        assert judged(evaluations(**one)).error_ratio is None


@pytest.mark.parametrize("holds", [True, False])
def test_every_output_is_judged(holds: bool) -> None:
    """Also those behind an output of integers, to which the rule for floats does not apply."""

    def with_integers(ran: ModelRuns) -> ModelRuns:
        numbers = {"ids": np.arange(3)}
        ways = {
            way: replace(each, results=[{**numbers, **values} for values in each.results])
            for way, each in ran.ways.items()
        }
        truth = None if ran.truth is None else [{**numbers, **values} for values in ran.truth]
        return replace(ran, ways=ways, truth=truth)

    given = evaluations(new=TRUTH if holds else off(1e-2))
    given = replace(given, before=with_integers(given.before), after=with_integers(given.after))
    found = judged(given)
    assert set(found.allowances) == {"out"}
    assert (found.failures == ()) == holds
    assert holds or "output out" in found.failures[0]


# -- what no tolerance forgives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (TRUTH, TRUTH[:1], "shape or element type differs"),
        (TRUTH, TRUTH.astype(np.int64), "shape or element type differs"),
        (TRUTH, off(np.nan), "NaN or infinite at other places than in the original"),
        (TRUTH, off(np.inf), "NaN or infinite at other places than in the original"),
        (off(np.nan), TRUTH, "NaN or infinite at other places than in the original"),
        (TRUTH > 0, TRUTH > 1, "its values are not floating-point and differ"),
    ],
)
def test_disparities(old: Array, new: Array, text: str) -> None:
    floats = old.dtype.kind == "f"
    nothing: dict[str, Any] = {} if floats else {"truth": old, "planned": old, "rebuilt": old}
    given = evaluations(old=old, new=old, **nothing)
    changed = np.asarray(new, np.float32) if new.dtype.kind == "f" else new
    for way, words in ((PLAIN, "no optimisation"), (OPTIMISED, "default optimisation")):
        ways = {**given.after.ways, way: replace(given.after.ways[way], results=[{"out": changed}])}
        failures = judged(replace(given, after=replace(given.after, ways=ways))).failures
        assert f"output out: {text} on cpu, {words}" in failures
    assert judged(given).failures == ()


def test_an_output_that_is_never_finite_was_not_compared() -> None:
    nothing = np.full((2, 2), np.nan)
    found = judged(evaluations(*[nothing] * 2, truth=nothing, planned=nothing, rebuilt=nothing))
    assert found.failures == ("output out: nothing could be compared: is NaN or infinite throughout, in every case",)


# -- around it ---------------------------------------------------------------------------------------------------------


def test_nodes_that_fall_back_to_the_cpu() -> None:
    given = evaluations()

    def fell(before: tuple[str, ...] | None, after: tuple[str, ...] | None) -> tuple[tuple[str, ...], int | None]:
        parts = [
            replace(each, ways={way: replace(ran, cpu_nodes=nodes) for way, ran in each.ways.items()})
            for each, nodes in ((given.before, before), (given.after, after))
        ]
        found = judged(replace(given, before=parts[0], after=parts[1]))
        return found.cpu_nodes, found.cpu_nodes_of_original

    assert fell(("a", "b"), ("b", "c", "d")) == (("c", "d"), 2)
    assert fell(None, ("c",)) == ((), None)
    assert fell(("a",), None) == ((), None)


def test_another_provider_has_the_cpu_as_its_control() -> None:
    given = evaluations()
    ways = {Way("cuda", optimise=False): PLAIN, Way("cuda", optimise=True): OPTIMISED}
    before = replace(given.before, ways={
        **{way: given.before.ways[other] for way, other in ways.items()},
        CPU: replace(given.before.ways[OPTIMISED], results=[{"out": off(0.25).astype(np.float32)}]),
    })  # fmt: skip
    after = replace(given.after, ways={way: given.after.ways[other] for way, other in ways.items()})
    found = judge_end_to_end(model(), replace(given, before=before, after=after), (CLAIM,), "cuda", nobody_asks)
    assert found.failures == ()
    assert found.control["out"].max_abs == 0.25


def typed(kind: int, *nodes: onnx.NodeProto, weight: int | None = None) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, kind, None) for name in ("x", "y")]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:])
    if weight is not None:
        graph.initializer.append(numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(weight)), "w"))
    return helper.make_model(graph)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (typed(TensorProto.FLOAT), 256 * 2.0**-23),
        (typed(TensorProto.DOUBLE), 256 * 2.0**-52),
        (typed(TensorProto.DOUBLE, weight=TensorProto.FLOAT), 256 * 2.0**-23),
        (typed(TensorProto.FLOAT16), 8 * 2.0**-10),
        (typed(TensorProto.BFLOAT16), 8 * 2.0**-7),
        (typed(TensorProto.FLOAT, weight=TensorProto.FLOAT16), 8 * 2.0**-10),
        (typed(TensorProto.FLOAT, helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)), 8 * 2.0**-10),
        (typed(TensorProto.FLOAT, helper.make_node("Clip", ["x"], ["y"], to=TensorProto.FLOAT16)), 256 * 2.0**-23),
        (typed(TensorProto.FLOAT, helper.make_node("QuantizeLinear", ["x", "s"], ["y"])), 2.0**-6),
        (typed(TensorProto.BFLOAT16, helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])), 2.0**-4),
    ],
)
def test_the_coarsest_arithmetic(given: onnx.ModelProto, allowed: float) -> None:
    assert coarsest_allowance(given) == allowed
