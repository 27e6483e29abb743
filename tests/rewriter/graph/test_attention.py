"""A variant of attention that only GPUs have a kernel for; the others are tried in `tests/rewriter/evaluate`."""

import numpy as np
import onnx
import onnx.parser
import pytest

from rewriter.arrays import Array
from rewriter.files.load import load_model
from rewriter.proof.run import open_model, open_reference
from tests.cases import run


@pytest.mark.parametrize("packed", [False, True])
def test_norms_that_only_gpus_have_a_kernel_for(packed: bool) -> None:
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2}
    rows = {name: rng.normal(size=(1, 5, count, 16)).astype(np.float32) for name, count in heads.items()}
    scales = {name: rng.normal(size=16).astype(np.float32) for name in ("qn", "kn")}
    normed = {name: rows[name] / np.sqrt(np.square(rows[name]).mean(-1, keepdims=True) + 0.1) for name in "qk"}
    normed = {"q": normed["q"] * scales["qn"], "k": normed["k"] * scales["kn"], "v": rows["v"]}

    def made(sides: dict[str, Array], norms: str, more: str = "") -> tuple[onnx.ModelProto, dict[str, Array]]:
        feeds = {name: each.reshape(1, 5, -1) for name, each in sides.items()}
        if packed:
            feeds = {"q": np.concatenate(list(feeds.values()), axis=-1)}
        operands = f"{', '.join([*feeds, *[''] * (3 - len(feeds))])}, , , lengths, total{norms}"
        given = ", ".join(f"float[1, 5, {each.shape[-1]}] {name}" for name, each in feeds.items())
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> agraph ({given}, int32[1] lengths, '
            f"int32 total) => (float[1, 5, 64] z) {{ z = com.microsoft.GroupQueryAttention<num_heads = 4, "
            f"kv_num_heads = 2{more}>({operands}) }}"
        )
        return model, {**feeds, "lengths": np.array([4], np.int32), "total": np.array(5, np.int32)}

    plain, feeds = made(normed, "")
    (wanted,) = run(plain, **feeds).values()
    model, feeds = made(rows, ", , , , , , , , qn, kn", ", qk_norm_epsilon = 0.1")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(each, name) for name, each in scales.items())
    session = open_model(load_model(model), "cpu", optimise=False)
    assert session.defined == ("GroupQueryAttention with q_norm_weight",)
    np.testing.assert_allclose(session.run(feeds)["z"], wanted, atol=1e-6)
    np.testing.assert_allclose(open_reference(load_model(model))(feeds)["z"], wanted, atol=1e-6)
