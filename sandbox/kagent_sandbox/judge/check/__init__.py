"""Correctness: inputs, references, errors, tolerances."""
