"""Search for the CUDA toolkit's headers: in NVIDIA's wheels or in a toolkit on the host.

NVRTC needs a few parts of the C library besides; those are in `nvrtc_include`, next to this file,
and come first.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from .errors import ToolkitMissing

OWN_HEADERS = Path(__file__).with_name("nvrtc_include")
_NEEDED = ("cuda_fp16.h", "cuda_bf16.h", "mma.h", "cooperative_groups.h", "cuda_runtime.h")


@functools.cache
def include_dirs() -> tuple[str, ...]:
    """Folders for NVRTC to search, in order.

    Raises:
        ToolkitMissing: There is no toolkit; the text says what to install.
    """
    for folder in _candidates():
        if all((folder / name).is_file() for name in _NEEDED):
            found = [OWN_HEADERS, folder]
            found += [d for d in _libcudacxx(folder) if (d / "cuda" / "barrier").is_file()][:1]
            return tuple(str(d) for d in found)
    raise ToolkitMissing(
        "the headers of the CUDA toolkit are neither in NVIDIA's wheels nor under /usr/local/cuda"
    )


def wheel_folders() -> list[Path]:
    """Return the folders of NVIDIA's wheels, wherever Python finds them."""
    nvidia = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (nvidia.submodule_search_locations or ())] if nvidia else []


def _candidates() -> Iterator[Path]:
    """Include folders, the likeliest to fit the installed NVRTC first."""
    for root in wheel_folders():
        yield root / "cu13" / "include"  # CUDA 13's wheels share one folder
        yield root / "cuda_runtime" / "include"
    yield Path("/usr/local/cuda/include")
    yield from sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)
    yield Path("/opt/cuda/include")
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:  # a copy without libcu++, so without cuda/barrier
        yield Path(triton.origin).parent / "backends" / "nvidia" / "include"


def _libcudacxx(toolkit: Path) -> Iterator[Path]:
    yield toolkit / "cccl"
    yield toolkit
    yield toolkit.parent / "cccl"
    yield toolkit.parent.parent / "cuda_cccl" / "include"
    yield toolkit.parent.parent / "cu13" / "include" / "cccl"
    yield Path("/usr/local/cuda/include/cccl")
