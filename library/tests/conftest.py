"""Tests of the library that is installed; of the sources beside this folder, if none is."""

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("kagent_kernels") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build/torch-universal"))


@pytest.fixture(autouse=True)
def _kernels_on_small_shapes(monkeypatch):
    """Below the smallest measured shape the library calls torch; its tests have small shapes, and
    test its kernels.
    """
    from harness import every_operator

    from kagent_kernels import _portfolio

    monkeypatch.setattr(_portfolio, "elements", lambda dims: 1)
    for operator in every_operator():
        monkeypatch.setattr(operator, "least", 0)
