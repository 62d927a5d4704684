"""The judge: references, hidden inputs, tolerances, the clock, the verdict."""
