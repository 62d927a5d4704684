"""Inspection of binaries: their kernels and resources."""
