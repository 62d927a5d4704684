"""Environment of the processes that kagent starts: named variables of the caller's alone.

Any other one may change what is measured: `OMP_NUM_THREADS=1`, which schedulers of clusters set,
makes torch's baselines twice as slow and leaves candidates as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

FURTHER = "KAGENT_PASS"
"""Environment variable: names of further variables that trusted processes get, with commas."""
_CONFINED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CPATH",
    "LIBRARY_PATH",
)
_TRUSTED = (
    *_CONFINED,
    *("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "XDG_CACHE_HOME"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CXX"),
    *("KAGENT_ISOLATION", "KAGENT_LANGUAGES", "KAGENT_LOCKS", FURTHER),
)


def for_confined() -> dict[str, str]:
    """Environment of a server of confined processes: places of compilers, libraries and devices."""
    return _chosen(_CONFINED)


def for_trusted() -> dict[str, str]:
    """Environment of the judge, which runs a task's reference.py and torch's baselines."""
    return _chosen((*_TRUSTED, *passed()))


def passed() -> Mapping[str, str]:
    """Variables that the user passes on to trusted processes, by name."""
    names = [name.strip() for name in os.environ.get(FURTHER, "").split(",")]
    return _chosen(sorted(n for n in names if n))


def _chosen(names: tuple[str, ...] | list[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}
