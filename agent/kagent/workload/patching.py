"""Effect of a patch on a script's steps, observed in the script's process: numbers, or times."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from kagent_sandbox.device.interference import HostReading, host_notes, read_host
from torch.utils._pytree import tree_leaves

from kagent.workload.steps import Done, ScriptFailed, Steps, now_s, seed_all

_SAMPLED = 1 << 16  # elements of a tensor that are compared, at a regular distance


def observe(request: Mapping[str, Any], run: Callable[[], None]) -> dict[str, Any]:
    """Run a script with a patch.

    Args:
        request: `mode`: "numbers" or "times"; `patch`: the patch's file; `kind` (of steps);
            `seed`. For numbers: `configuration` (`sites`, and `rest` of graphs; or None for the
            script as it is), `rounded` (instead of the patch, round what the replaced functions
            return), `steps`, and `file` for the numbers. For times: `configurations`, `warmup` and
            `pairs`.
        run: Runs the script.

    Raises:
        ScriptFailed: The script fails, has too few steps, or has not what is to be replaced.
    """
    patch = _imported(Path(request["patch"]))
    _prepare(patch, request.get("configurations", [None, request.get("configuration")]))
    observer = _Times(patch, request) if request["mode"] == "times" else _Numbers(patch, request)
    seed_all(request["seed"])
    with Steps(observer, request["kind"]) as steps:
        try:
            run()
        finally:
            patch.disable()
    if not observer.finished:
        raise ScriptFailed(
            f"it must run at least {observer.needed} steps, and ended after {steps.seen}: a step "
            "ends with optimizer.step(), or with a call of the outermost module without gradients"
        )
    return observer.result()


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_kagent_patch", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for Dynamo
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # noqa: BLE001 - whatever a library raises
        raise ScriptFailed(f"the library cannot be imported: {type(e).__name__}: {e}") from None
    return module


Configuration: TypeAlias = "Mapping[str, Any] | None"
"""`sites`, and `rest` of captured graphs. Without a site, graphs are still captured. None: the
script runs as it is."""


def _prepare(patch: ModuleType, configurations: Sequence[Configuration]) -> None:
    """Announce all that graphs are to be compiled for."""
    regions = getattr(patch, "REGIONS", None)
    if regions is None or not any(configurations):
        return
    settings: list[Any] = []
    for c in configurations:
        found = [n for n in c["sites"] if n in regions] if c else []
        # A function's replacement alone captures nothing.
        captures = c is not None and (found or not c["sites"])
        patterns = [patch.Pattern(n, regions[n][0]) for n in found]
        settings.append((c["rest"], patterns) if c is not None and captures else None)
    patch.prepare(settings)


def _enable(patch: ModuleType, configuration: Configuration) -> None:
    try:
        if configuration is None:
            patch.disable()
        elif hasattr(patch, "REGIONS"):
            patch.enable(configuration["sites"], configuration["rest"])
        else:
            patch.enable(configuration["sites"])
    except (ImportError, AttributeError, KeyError, ValueError) as e:
        raise ScriptFailed(f"there is nothing to replace: {e}") from None


class _Numbers:
    """Keeps loss and gradients, or outputs, of the first steps. Step 0 is never patched: what the
    script defines is there from its end on.
    """

    def __init__(self, patch: ModuleType, request: Mapping[str, Any]) -> None:
        self.finished = False
        self.needed = request["steps"] + 1
        self._patch, self._request = patch, request
        self._calls: Counter[str] = Counter()
        self._now: dict[str, torch.Tensor] = {}
        self._steps: list[dict[str, torch.Tensor]] = []
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._before_backward

    def _before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for i, tensor in enumerate(tree_leaves(tensors)):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
                name = "loss" if i == 0 else f"loss {i}"
                self._now[name] = self._now.get(name, 0) + tensor.detach().double().cpu().view(1)
        return self._backward(tensors, *args, **kwargs)

    def call_begins(self) -> None:
        """Nothing is to be done before it is called."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients."""
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    name = f"gradient {g}.{p} {list(parameter.shape)}"
                    self._now[name] = _sampled(parameter.grad)

    def step_ends(self, index: int, optimizer: torch.optim.Optimizer | None, output: Any) -> None:
        """Keep the outputs; begin the next step."""
        if optimizer is None:
            for i, tensor in enumerate(tree_leaves(output)):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    self._now[f"output {i} {list(tensor.shape)}"] = _sampled(tensor)
        if index > 0:
            self._steps.append(self._now)
        self._now = {}
        if index == self._request["steps"]:
            self.finished = True
            raise Done
        if index == 0:
            configuration = self._request["configuration"]
            for site in configuration["sites"] if configuration else ():
                table = self._patch.SITES
                if site not in table:
                    table = self._patch.REGIONS
                *where, make = table[site]
                table[site] = *where, self._seen(site, make)
            _enable(self._patch, configuration)
            seed_all(self._request["seed"])  # step 0 may draw differently from run to run

    def _seen(self, site: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A replacement that counts its calls, or one that rounds what the original returns."""

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = _rounded(original) if self._request["rounded"] else make(original)

            def counted(*args: Any, **kwargs: Any) -> Any:
                self._calls[site] += 1
                return replacement(*args, **kwargs)

            return counted

        return wrapped

    def result(self) -> dict[str, Any]:
        """Write the numbers; calls by site, and descriptions of graphs."""
        torch.autograd.backward = self._backward
        torch.save(self._steps, self._request["file"])
        of_patch = {
            name.lower(): getattr(self._patch, name, ()) for name in ("GRAPHS", "COMPILED", "NOTES")
        }
        return {"calls": dict(self._calls), **of_patch}


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().to_dense().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().clone()


def _rounded(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results, and their gradients, are off by up to one rounding."""
    generators: dict[torch.device, torch.Generator] = {}

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if device not in generators:  # the script's own random numbers stay as they are
            generators[device] = torch.Generator(device).manual_seed(1)
        noise = torch.empty(tensor.shape, device=device).uniform_(
            -1, 1, generator=generators[device]
        )
        return tensor * (1 + torch.finfo(tensor.dtype).eps * noise).to(tensor.dtype)

    class RoundingNoise(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return _off(tensor, noisy)

        @staticmethod
        def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return _off(grads[0], noisy)

    def function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return RoundingNoise.apply(result)  # type: ignore[no-untyped-call]
        if isinstance(result, tuple):
            return tuple(RoundingNoise.apply(r) for r in result)  # type: ignore[no-untyped-call]
        return result

    return function


def _off(tensor: torch.Tensor, noisy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return noisy(tensor) if tensor.is_floating_point() else tensor.clone()


class _Times:
    """Times steps of several configurations of a patch, interleaved."""

    def __init__(self, patch: ModuleType, request: Mapping[str, Any]) -> None:
        self.finished = False
        self._patch = patch
        self._configurations: list[Configuration] = request["configurations"]
        count, warmup, pairs = len(self._configurations), request["warmup"], request["pairs"]
        # In each round in another order: what is next to what, and who comes first, changes.
        order = random.Random(0)  # noqa: S311 - no secret
        shuffled = list(range(count))
        self._plan = [c for c in shuffled for _ in range(warmup)]
        for _ in range(pairs):
            order.shuffle(shuffled)
            self._plan += shuffled
        self._warm = count * warmup
        self.needed = len(self._plan) + 1
        self._us: list[list[float]] = [[] for _ in self._configurations]
        self._host: list[HostReading] = []  # when times began and ended
        self._begun_s = 0.0

    def call_begins(self) -> None:
        """Nothing is to be done before it is called."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is to be done before it steps."""

    def step_ends(self, index: int, optimizer: torch.optim.Optimizer | None, output: Any) -> None:
        """Keep the step's time, and switch to the next configuration."""
        del optimizer, output
        us = (now_s() - self._begun_s) * 1e6
        if index > self._warm:
            self._us[self._plan[index - 1]].append(us)
        if index in (self._warm, len(self._plan)):
            self._host.append(read_host())
        if index == len(self._plan):
            self.finished = True
            raise Done
        _enable(self._patch, self._configurations[self._plan[index]])
        self._begun_s = now_s()

    def result(self) -> dict[str, Any]:
        """µs of each configuration, round by round, and what disturbed them."""
        return {"us": self._us, "disturbed": host_notes(*self._host)}


def differences(plain: Path, other: Path) -> Iterator[tuple[int, str, float]]:
    """Relative differences of two runs' numbers.

    Args:
        plain: What a run without a patch kept.
        other: What another run kept.

    Yields:
        Step, name of the number, and |other - plain| / |plain| (of vectors, by their norms); inf
        where one of them is not there, or not finite where the other is.
    """
    first, second = torch.load(plain), torch.load(other)
    for step, (a, b) in enumerate(zip(first, second, strict=True), 1):
        for name in dict.fromkeys([*a, *b]):
            yield step, name, _difference(a.get(name), b.get(name))


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
        return 0.0
    distance = float((a.double() - b.double()).norm() / a.double().norm())
    return float("inf") if math.isnan(distance) else distance
