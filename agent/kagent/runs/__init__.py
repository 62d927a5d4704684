"""Runs: lineage, asks, events, costs; and the run's folder on disk."""
