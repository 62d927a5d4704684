"""Timing: timed blocks, comparisons, races, baselines."""
