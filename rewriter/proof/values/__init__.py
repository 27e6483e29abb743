"""Two models compared by the values of their tensors in a finite field: equal values, equal functions."""
