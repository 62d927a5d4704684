"""Gluon kernels on values, without a GPU: a simulation of what Hopper does asynchronously."""
