"""What all tests share: the `gpu` marker skips itself where there is no GPU."""

import functools

import pytest


@functools.cache
def _gpu_missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    # A look at the driver that creates no context: a parent with a CUDA context cannot fork
    # launchers.
    return None if torch.cuda.is_available() else "no NVIDIA GPU here"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _gpu_missing()):
            item.add_marker(pytest.mark.skip(reason=reason))
