"""The comparison that comes with onnxruntime's transformer optimiser; run by a Python that has onnxruntime.

`python ort_parity.py ORIGINAL OTHER VOCABULARY TOKENS`. Its command line cannot be told the size of the vocabulary
and takes 1024, so that its function is called: 100 random inputs, seed 3, rtol 1e-3, atol 1e-4, as by default.
"""

import sys

from onnxruntime.transformers.compare_bert_results import run_test

_, _original, _other, _vocabulary, _tokens = sys.argv
_, _passed = run_test(
    _original,
    _other,
    output_dir=None,
    batch_size=1,
    sequence_length=int(_tokens),
    use_gpu=False,
    test_cases=100,
    seed=3,
    verbose=False,
    rtol=1e-3,
    atol=1e-4,
    input_ids_name="input_ids",
    segment_ids_name=None,
    input_mask_name="attention_mask",
    mask_type=2,
    dictionary_size=int(_vocabulary),
)
sys.exit(not _passed)
