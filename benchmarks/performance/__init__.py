"""`python -m benchmarks all`: whole models, rewritten and original, and docs/performance.md."""
