"""Kernels' files, loaded with a configuration, and tensors as kernels were checked to take them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes. Kernels were checked with tensors of torch's allocator, which gives no less; a vector load
from an odd address would take the whole CUDA context down."""

_PITCH = 8
"""Elements: rows were checked this much further apart than they are long."""


def load(
    package: str, path: Path, entry: str, config: Mapping[str, object], suffix: str
) -> Callable[..., Any]:
    """The entry function of a kernel's file, in a module of its own with its tunables set.

    Args:
        package: The library's package, from which the file imports.
        path: The file.
        entry: Name of its host function.
        config: Values of module globals; a mapping is the configuration of the autotuned Triton
            kernel of that name.
        suffix: Sets the module apart from those with other configurations.
    """
    name = f"{package}.kernels.{path.stem}_{suffix}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks its kernels' modules up
    try:
        spec.loader.exec_module(module)
        for key, value in config.items():
            _set(module, key, value)
        function = getattr(module, entry)
    except BaseException:
        del sys.modules[name]
        raise
    assert callable(function)
    return function  # type: ignore[no-any-return]


def _set(module: object, name: str, value: object) -> None:
    old = getattr(module, name)
    tuner = _autotuner(old)
    if tuner is not None and isinstance(value, Mapping):
        same = [c for c in tuner.configs if _described(c) == dict(value)]
        if not same:
            raise ValueError(f"{name}: none of its configurations is {dict(value)}")
        tuner.configs = same[:1]
    elif type(old).__name__ == "constexpr":
        setattr(module, name, type(old)(value))
    else:
        setattr(module, name, value)


def _autotuner(value: Any) -> Any:
    """Triton's Autotuner, perhaps below @triton.heuristics; None of anything else."""
    while type(value).__name__ == "Heuristics":
        value = value.fn
    return value if hasattr(value, "configs") and hasattr(value, "fn") else None


def _described(config: Any) -> dict[str, object]:
    """A triton.Config as a portfolio has it."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.num_ctas != 1:
        options["num_ctas"] = config.num_ctas
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    plain = (int, float, bool, str)
    own = {k: v if isinstance(v, plain) else str(v) for k, v in config.kwargs.items()}
    return {**own, **options}


def as_checked(args: Sequence[Any], tensors: Collection[int], *, pitched: bool) -> list[Any]:
    """Arguments with tensors that a kernel was not checked with copied.

    Args:
        args: Of a call.
        tensors: Which of them are tensors.
        pitched: Whether it was checked with rows that are further apart than they are long.
    """
    found = list(args)
    if pitched and _pitched_alike([args[i] for i in tensors]):
        return found
    for i in tensors:
        if not args[i].is_contiguous() or args[i].data_ptr() % ALIGNMENT:
            found[i] = args[i].clone(memory_format=torch.contiguous_format)
    return found


def _pitched_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have rows as far apart, and else lie as dense tensors do, as in the checks."""
    paddings = set()
    for t in tensors:
        if t.data_ptr() % ALIGNMENT:
            return False
        if t.dim() < 2:
            if not t.is_contiguous():
                return False
            continue
        pitch = t.stride(-2)
        dense = pitch
        for size, stride in zip(reversed(t.shape[:-1]), reversed(t.stride()[:-1]), strict=True):
            if stride != dense:
                return False
            dense *= size
        if t.stride(-1) != 1:
            return False
        paddings.add(pitch - t.shape[-1])
    return len(paddings) == 1 and all(p >= 0 and p % _PITCH == 0 for p in paddings)
