"""Is it right: inputs, references, errors, tolerances."""
