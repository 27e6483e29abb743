"""Every form on every architecture: the theorems' network in numpy and float64, float32 as accurate as the original."""

import numpy as np
import onnx
import pytest

from passes.forms import FORMS
from passes.plan import Plan, apply
from rewriter.ort import open_session
from tests import cases
from tests.committed import FOLDER as MODELS
from tests.committed import feeds, in_float64
from tests.oracle import evaluate, tensors
from tests.whole import ARCHITECTURES, layers_of, network, without_padding

LONGEST = 40
"""Positions; two sequences of 20 tokens are 40 rows to OPT's MLPs, which in these forms are one sequence."""
BOUND = 1e-12
DIFFERENCES = 9e-9
"""What gates of float32 models are off by in forms that compute them as small differences (docs/programs.md)."""

ALL_FORMS = tuple(FORMS)

PAIRS = [(name, form) for name in ARCHITECTURES for form in ALL_FORMS]


def load(name: str) -> onnx.ModelProto:
    return without_padding(onnx.load(MODELS / f"{name}.onnx"))


def planned(model: onnx.ModelProto, form: str) -> Plan:
    return cases.planned(model, 2, form=form, max_tokens=LONGEST)


def stream_of(plan: Plan) -> tuple[str, str]:
    """The residual stream behind the embeddings, and behind the last layer."""
    view = plan.views[0]
    made = {cases.result_of(plan.conversions[0])}  # what depends on a sublayer
    entry = ""
    for node in view.nodes:
        others = [name for name in node.input if name not in made and name not in view.constants]
        if node.op_type == "Softmax" or not made.isdisjoint(node.input):
            made.update(node.output)
            entry = entry or (
                others[0] if node.op_type == "Add" and others and view.type_of(others[0]).rank == 3 else ""
            )
    last = cases.result_of(plan.conversions[-1])
    while len(found := view.readers(last)) == 1 and found[0].op_type in ("Add", "Reshape"):
        last = found[0].output[0]
    return entry, last


def largest_difference(model: onnx.ModelProto, architecture: str, form: str) -> float:
    """The distance of the stream behind the last layer from the theorems' network, over the largest of its entries."""
    plan = planned(model, form)
    entry, last = stream_of(plan)
    fed = feeds(model, 0, 2, 9)
    made, embedded = tensors(apply(plan), fed), tensors(model, fed)[entry]
    stream = made[last].reshape(embedded.shape)
    net, programs = layers_of(model, architecture), [each.program.as_heads for each in plan.conversions]
    expected = np.array([network(tokens, net, programs) for tokens in embedded])
    return float(np.abs(stream - expected).max() / np.abs(expected).max())


def check_float64_against_the_original(model: onnx.ModelProto, form: str) -> None:
    """Every output of a float64 model, within the bound of its largest entry."""
    fed = feeds(model, 1, 2, 9)
    before, after = evaluate(model, fed), evaluate(apply(planned(model, form)), fed)
    for output, values in before.items():
        assert np.abs(after[output] - values).max() <= BOUND * np.abs(values).max()


def float32_ratio(model: onnx.ModelProto, form: str) -> float:
    """The largest error of an output over that of the original, as norms: the largest entry is a matter of luck."""
    cases = [feeds(model, seed, 2, LONGEST // 2 - 5 * (seed % 3)) for seed in range(12)]
    truth = [evaluate(model, fed) for fed in cases]
    ratios = []
    for optimise in (True, False):
        sessions = [open_session(each, optimise=optimise) for each in (model, apply(planned(model, form)))]
        runs = [[session.run(fed) for fed in cases] for session in sessions]
        for name in truth[0]:
            pairs = [zip(run, truth, strict=True) for run in runs]
            old, new = (sum(float(np.sum((a[name] - b[name]) ** 2)) for a, b in each) for each in pairs)
            ratios.append(float(np.sqrt(new / old)))
    return max(ratios)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_float64_is_the_network_of_the_theorems(name: str, form: str) -> None:
    assert largest_difference(in_float64(load(name)), ARCHITECTURES[name], form) <= BOUND


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "form"), [PAIRS[at] for at in range(len(PAIRS)) if (at + at // len(ALL_FORMS)) % 2])
def test_float32_models_are_the_network_of_the_theorems(name: str, form: str) -> None:
    small = name == "gated-decoder" and form != "local"
    assert largest_difference(load(name), ARCHITECTURES[name], form) <= (DIFFERENCES if small else BOUND)
