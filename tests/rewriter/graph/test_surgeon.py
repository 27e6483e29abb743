"""Fragments of new nodes: names, constants, bodies of functions."""

import numpy as np
import onnx
import pytest

from rewriter.graph.surgeon import Fragment


@pytest.mark.parametrize(
    "values",
    [
        np.float32(0.5),
        np.array([[1, 2], [3, 4]], np.float32).T,
        np.array([], np.int64),
        np.array([[1.5]], np.float16),
        np.array([True, False]),
    ],
    ids=["scalar", "transposed", "empty", "half", "truth"],
)
def test_constants_keep_values_shape_and_type(values: np.ndarray) -> None:
    fragment = Fragment("")
    fragment.constant("c", np.asarray(values))
    (tensor,) = fragment.initializers()
    made = onnx.numpy_helper.to_array(tensor)
    np.testing.assert_array_equal(made, values)
    assert (tensor.name, made.shape, made.dtype) == ("c", np.shape(values), values.dtype)
