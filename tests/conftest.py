"""What all tests share: the `gpu` marker skips itself where there is no GPU; turns among workers."""

import functools
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest_plugins = ["turns"]


def pytest_configure():
    """Ctrl-C works in what tests start, also where a shell began the tests in the background.

    There the signal is ignored, which every process below inherits.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
