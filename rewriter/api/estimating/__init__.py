"""Time and memory of a run before it starts: counts from a plan, for dry runs and for `rewrite doctor`."""
