"""The snapshot of what the rewriter makes sees every edit, and no metadata."""

import pytest

from rewriter import rewrite
from tests.changes import copied, run
from tests.textmodels import SILU, mlp
from tools.snapshot import differences, digests

EDITS = {
    "attribute(m.graph.node[-1], more=1)": ["m {}: node out changed"],
    'nudge(weight(m, "W1"))': ["m {}: initializer W1 changed"],
    'm.functions[0].node[0].op_type = "Abs"': ["m {}: function NeuronAttention changed"],
    'add_weight(m, "more", 1)': ["m {}: order changed", "m {}: initializer more is new"],
    "m.opset_import[0].version += 1": ["m {}: inputs, outputs and opsets changed"],
    'm.metadata_props.add(key="a", value="b"); m.graph.node[0].metadata_props.add(key="a", value="b")': [],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_seen(edit: str) -> None:
    before = rewrite(mlp(SILU), validate=False).rewritten
    after = copied(before)
    run(edit, m=after)
    assert sorted(differences({"m {}": digests(before)}, {"m {}": digests(after)})) == sorted(EDITS[edit])
