"""Evolve GPU kernels and keep only the speed-ups that can be proved."""
