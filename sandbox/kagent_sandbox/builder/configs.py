"""Tunables: `TUNE` and `@triton.autotune` become configurations, one plan each.

    TUNE = {"BLOCK": [1024, 2048, 4096], "WARPS": [4, 8]}
    BLOCK = 2048
    WARPS = 8

`TUNE` names module globals; their plain assignments are the default. An autotuned kernel
contributes its configurations under its own name. The default (globals as assigned, each kernel's
first configuration) comes first, then those that differ from it least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.autotuner import Autotuner

from kagent_sandbox.builder.policy import BuildRejected, ConfigDropped
from kagent_sandbox.data.verdict import Stage, Status

_MOST_VALUES = 64
_SEARCHED = 20_000  # of a huge product, only configurations near the default are considered
Tunable = int | float | bool | str

_chosen: dict[
    int, object
] = {}  # id of an autotuner -> description of the configuration that it uses


def enumerate_configs(module: ModuleType, limit: int) -> tuple[Mapping[str, object], ...]:
    """List at most `limit` configurations, the declared one first. The order follows from the
    source.

    Raises:
        BuildRejected: `TUNE` is malformed.
    """
    axes = dict(_axes(module))
    names = list(axes)
    default = {n: values[0] for n, values in axes.items()}
    found = itertools.islice(_nearest(axes), max(1, limit))
    return tuple({n: chosen.get(n, default[n]) for n in names} for chosen in found)


def apply_config(module: ModuleType, config: Mapping[str, object]) -> None:
    """Set the module's globals and choose its autotuned kernels' configurations."""
    tuners = dict(_autotuners(module))
    for name, value in config.items():
        if name in tuners:
            _chosen[id(tuners[name])] = value
        else:
            old = getattr(module, name)
            wrapped = isinstance(old, tl.constexpr)
            setattr(module, name, type(old)(value) if wrapped else value)


def pin_config(module: ModuleType, config: Mapping[str, object]) -> None:
    """Set the module's globals, and leave each autotuned kernel the one configuration that was
    chosen: Triton itself then has nothing to time.
    """
    apply_config(module, config)
    for name, tuner in _autotuners(module):
        chosen = config.get(name)
        tuner.configs = [c for c in tuner.configs if _describe(c) == chosen] or tuner.configs[:1]


def _axes(module: ModuleType) -> Iterator[tuple[str, list[object]]]:
    tune = getattr(module, "TUNE", None) or {}
    if not isinstance(tune, Mapping):
        raise _malformed(f"TUNE is a {type(tune).__name__}")
    for name, values in tune.items():
        if not isinstance(name, str) or not hasattr(module, name):
            raise _malformed(f"TUNE names {name!r}, which is no global of the file")
        if (
            not isinstance(values, Sequence)
            or isinstance(values, str)
            or not 0 < len(values) <= _MOST_VALUES
            or not all(isinstance(v, Tunable) for v in values)
        ):
            raise _malformed(f"TUNE[{name!r}] is not a list of 1 to {_MOST_VALUES} plain values")
        current = getattr(module, name)
        current = current.value if isinstance(current, tl.constexpr) else current
        yield name, list(dict.fromkeys([current, *values]))
    for name, tuner in _autotuners(module):
        yield name, list(_unique([_describe(c) for c in tuner.configs]))


def _malformed(what: str) -> BuildRejected:
    return BuildRejected(
        Stage.PARSE,
        Status.POLICY,
        f'{what}: write TUNE = {{"BLOCK": [64, 128]}} beside a plain default, BLOCK = 64',
    )


def _autotuners(module: ModuleType) -> Iterator[tuple[str, Autotuner]]:
    seen: set[int] = set()
    for name, value in vars(module).items():
        tuner = value
        while tuner is not None and not isinstance(tuner, Autotuner):
            tuner = getattr(tuner, "fn", None) if type(tuner).__name__ == "Heuristics" else None
        if tuner is not None and id(tuner) not in seen:
            seen.add(id(tuner))
            yield name, tuner


def _describe(config: Any) -> dict[str, object]:
    """A triton.Config as plain data: the kernel's own arguments, and Triton's options."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.num_ctas != 1:
        options["num_ctas"] = config.num_ctas
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    own = {k: v if isinstance(v, Tunable) else str(v) for k, v in config.kwargs.items()}
    return {**own, **options}


def _nearest(axes: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    """Combinations by the number of names that differ from the default, then in declared order."""
    names = list(axes)
    budget = _SEARCHED
    for changed in range(len(names) + 1):
        for subset in itertools.combinations(names, changed):
            for values in itertools.product(*(axes[n][1:] for n in subset)):
                if budget == 0:
                    return
                budget -= 1
                yield dict(zip(subset, values, strict=True))


# -- autotune ------------------------------------------------------------------------------------


def install_autotuner() -> None:
    """Make autotuned kernels use the chosen configuration instead of timing all of them."""
    Autotuner.run = _run  # type: ignore[method-assign]


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Autotuner.run` without the timing: same hooks, same arguments."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = _choice(self, kwargs)
    self.best_config = config
    options = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **options})
    result = self.fn.run(*args, **kwargs, **options)
    self.nargs = None
    return result


def _choice(tuner: Any, kwargs: Mapping[str, Any]) -> Any:
    survivors = tuner.prune_configs(dict(kwargs))
    first = _describe(tuner.configs[0])
    wanted = _chosen.get(id(tuner), first)
    for config in survivors:
        if _describe(config) == wanted:
            return config
    if wanted == first:
        return survivors[0]
    raise ConfigDropped(
        Stage.BUILD,
        Status.RESOURCE_LIMIT,
        f"configuration {wanted} of {tuner.base_fn.__name__} is pruned by prune_configs_by here",
    )


def _unique(values: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    kept: list[dict[str, object]] = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept
