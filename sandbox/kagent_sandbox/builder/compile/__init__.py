"""Kernels to binaries."""
