"""Kernels, as they were judged."""
