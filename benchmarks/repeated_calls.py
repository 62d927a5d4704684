"""Host time of calls of exported GPU kernels: through their host function, and repeated.

    python benchmarks/repeated_calls.py [--library library]

The kernels are those that a library ships, with the configuration that it chooses first. On a GPU
they run, on small tensors; without one, Triton compiles them for an H100 and launches through a
driver that does nothing, and the runtime's launches are taken from it before they are packed, so
that the figures are of the host functions alone. Prints µs of processor time a call: medians over
30 blocks of 100 calls, the two in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from call_time import us_per_call
from kagent.export.library._kernels import load
from kagent.export.library._repeated import Repeated
from kagent_sandbox.builder.trace.triton import Driver
from kagent_sandbox.data.target import parse_target

ROOT = Path(__file__).resolve().parents[1]
CALLS, ALIGNMENT = 100, 512
BF16, FP32 = torch.bfloat16, torch.float32
QUERY = (BF16, 1, 4, 256, 128)
LAYER = ((BF16, 128, 64), (BF16, 64, 64), (BF16, 64), (BF16, 128))
ARGUMENTS: Mapping[str, tuple[object, ...]] = {
    "adamw": (*[(BF16, 64, 1024)] * 4, (FP32,), (FP32,), 0.9, 0.999, 1e-8, 0.01),
    "adamw_tensors": (
        *LAYER,
        *LAYER,
        *[(FP32, *sizes) for _, *sizes in LAYER] * 2,
        *[(FP32,), (FP32,), 0.9, 0.999, 1e-8, 0.01],
    ),
    "attention": (QUERY, QUERY, QUERY, True),
    "attention_train": (QUERY, QUERY, QUERY, True),
    "attention_backward": (*[QUERY] * 5, (FP32, 1, 4, 256), True),
    "cross_entropy": ((BF16, 64, 4096), (torch.int64, 64), -100),
    "fp8_linear": (
        *[(torch.float8_e4m3fn, 128, 512), (torch.float8_e4m3fn, 256, 512)],
        *[(FP32, 1), (FP32, 1)],
    ),
    "gelu": ((BF16, 64, 1024),),
    "gelu_backward": ((BF16, 64, 1024), (BF16, 64, 1024)),
    "int8_linear": ((BF16, 1, 1024), (torch.int8, 512, 1024), (BF16, 512)),
    "linear_cross_entropy": (
        *[(BF16, 128, 256), (BF16, 512, 256)],
        *[(torch.int64, 128), -100],
    ),
    "rms_norm_backward": ((BF16, 64, 128), (BF16, 64, 128), (BF16, 128), 1e-6),
    "softmax": ((BF16, 64, 4096),),
    "softmax_backward": ((BF16, 64, 4096), (BF16, 64, 4096)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", type=Path, default=ROOT / "library")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "no GPU, a driver of nothing"
    print(f"{where}, torch {torch.__version__}, triton {triton.__version__}\n")
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    print(f"{'µs a call':20}{'host function':>14}{'repeated':>10}")
    functions = host_functions(options.library)
    runtime = next(options.library.glob("build/torch-universal/*/_runtime"), None)
    with contextlib.nullcontext() if device == "cuda" else _without_a_gpu(runtime):
        for name in sorted(functions.keys() & ARGUMENTS):
            function = functions[name]()
            args = [made(a, device) if isinstance(a, tuple) else a for a in ARGUMENTS[name]]
            repeated = Repeated(function)
            for _ in range(3):
                repeated(*args)
            if repeated._repeat is None:  # noqa: SLF001 - the figure would be of something else
                print(f"{name:20}{'is not repeated':>24}")
                continue
            both = (functools.partial(f, *args) for f in (function, repeated))
            host_us, repeated_us = us_per_call(
                *both, clock=time.thread_time, settle=settle, calls=CALLS
            )
            print(f"{name:20}{host_us:14.1f}{repeated_us:10.1f}", flush=True)


def host_functions(library: Path) -> dict[str, Callable[[], Callable[..., object]]]:
    """What loads the host function of each task that the library has a kernel of."""
    (package,) = (p.parent for p in library.glob("build/torch-universal/*/portfolio"))
    if str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))  # kernels' files import the library's runtime
    found = {}
    for path in sorted(package.glob("portfolio/*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        for name, kernel in table["kernels"].items():
            file, config = package / "kernels" / f"{name}.py", kernel["configs"][0]
            found[path.stem] = functools.partial(
                load, package.name, file, table["entry"], config, "0"
            )
    return found


def made(shape: tuple[Any, ...], device: str) -> torch.Tensor:
    """Zeros that begin where torch's allocator would have them begin on a GPU."""
    dtype, *sizes = shape
    nbytes = math.prod(sizes) * dtype.itemsize
    room = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % ALIGNMENT
    return room[first : first + nbytes].view(dtype).view(sizes)


@contextlib.contextmanager
def _without_a_gpu(runtime: Path | None) -> Iterator[None]:
    """A driver that loads and launches nothing, for an H100; the same of a library's runtime."""
    target = parse_target("sm_90a")
    driver: Any = Driver(target)
    driver.launcher_cls = lambda *_: lambda *_: None
    about = SimpleNamespace(multi_processor_count=target.multiprocessors)
    patches = contextlib.ExitStack()
    if runtime is not None:
        watch = importlib.import_module(f"{runtime.parent.name}._runtime.launches").watch
        for name, value in (("instead", lambda *_: True), ("any", True)):
            patches.enter_context(mock.patch.object(watch, name, value))
    with (
        patches,
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=about),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        yield


if __name__ == "__main__":
    main()
