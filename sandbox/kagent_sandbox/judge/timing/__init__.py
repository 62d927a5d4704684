"""How fast: timed blocks, comparisons, races, baselines."""
