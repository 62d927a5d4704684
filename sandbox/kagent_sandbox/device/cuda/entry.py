"""NVIDIA GPUs in the table of devices. Needs neither torch nor a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kagent_sandbox.device.cuda.traits import TIMING_VERSION, TRAITS
from kagent_sandbox.device.detect import gpu_alone, gpu_uuid, has_gpu
from kagent_sandbox.device.entry import TableEntry
from kagent_sandbox.errors import INSTALL_CUDA, DeviceError

if TYPE_CHECKING:
    from kagent_sandbox.data.device import DeviceFacts
    from kagent_sandbox.device.baseline_calls import BaselineCall, MeasuredBaseline
    from kagent_sandbox.device.interface import Backend


@contextlib.contextmanager
def _bindings() -> Iterator[None]:
    """Imports of what drives a GPU. Launchers import cuda.core; torch alone brings the rest.

    Raises:
        DeviceError: A package is missing; the text says what to install.
    """
    try:
        if importlib.util.find_spec("cuda.core") is None:
            raise ImportError("No module named 'cuda.core'")  # noqa: TRY301
        yield
    except ImportError as e:
        raise DeviceError(f"no GPU can be used here ({e}): {INSTALL_CUDA}") from None


def _facts(index: int) -> DeviceFacts:
    with _bindings():
        from kagent_sandbox.device.cuda.facts import gpu_facts
    return gpu_facts(index)


def _load() -> None:
    with _bindings():
        from kagent_sandbox.device.cuda import backend
    backend.load()


def _open(index: int, *, products: bool) -> Backend:
    with _bindings():
        from kagent_sandbox.device.cuda.backend import GpuBackend
    return GpuBackend(index, products=products)


def _baselines(index: int) -> Callable[[BaselineCall], MeasuredBaseline]:
    with _bindings():
        from kagent_sandbox.device.cuda.baselines import measurer
    return measurer(index)


ENTRY = TableEntry(
    name="gpu",
    kind="gpu",
    traits=TRAITS,
    environment={},
    unit=gpu_uuid,
    alone=gpu_alone,
    available=has_gpu,
    facts=_facts,
    timing_version=lambda: TIMING_VERSION,
    load=_load,
    open=_open,
    baselines=_baselines,
)
