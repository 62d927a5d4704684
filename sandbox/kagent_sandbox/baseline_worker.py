"""Measures baselines in a process of its own: `python -m kagent_sandbox.baseline_worker`.

Trusted code: torch, expert libraries and the task's reference.py. It reads one JSON request from
standard input and writes one JSON object per line: {"start": [case, name]} before a baseline, then
{"done": [case, name], "us", "captured", "peak_bytes"} or {"failed": [case, name], "reason"}. When
it dies, the line that is missing says of what.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_sandbox.launch.baseline_calls import (
    COMPILE_MODES,
    EAGER,
    BaselineCall,
    BaselineUnavailableError,
    expert_names,
    forget_compiled,
    make_call,
)
from kagent_sandbox.launch.plan_ops import void
from kagent_sandbox.records import from_json

SAMPLES = 30
_SPAN_US = 300.0  # what is timed on a CPU outlasts the noise of a wake-up
_MOST_SETS = 48
_SETS_BYTES = 1 << 30  # of all input sets together
_CPU_SECONDS = 2.0  # per baseline, beyond the least number of samples
_LEAST_SAMPLES = 5
_WARM_UP = 2


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
    # what libraries print must not be taken for answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    skip = {tuple(pair) for pair in request["skip"]}
    measure: Callable[[BaselineCall], dict[str, object]] = _cpu
    if request["kind"] == "gpu":
        measure = _gpu_measurer(request["index"])
    for record in request["calls"]:
        call = from_json(BaselineCall, record)
        for name in _names(call.reference, request["kind"]):
            pair = [call.case["name"], name]
            if tuple(pair) in skip:
                continue
            answers.write(json.dumps({"start": pair}) + "\n")
            answer = _attempt(measure, dataclasses.replace(call, name=name), pair)
            answers.write(json.dumps(answer) + "\n")
        forget_compiled()
        gc.collect()


def _names(reference: str, kind: str) -> list[str]:
    modes = list(COMPILE_MODES) if kind == "gpu" else ["compile"]
    return [EAGER, *modes, *expert_names(reference)]


def _attempt(
    measure: Callable[[BaselineCall], dict[str, object]], call: BaselineCall, pair: Sequence[Any]
) -> dict[str, object]:
    try:
        return {"done": pair, **measure(call)}
    except BaselineUnavailableError as e:
        return {"failed": pair, "reason": str(e)}
    except Exception as e:  # noqa: BLE001 - a baseline that fails is recorded, whatever it raises
        first = str(e).strip().partition("\n")[0][:300]
        return {"failed": pair, "reason": f"{type(e).__name__}: {first}"}


def _gpu_measurer(index: int) -> Callable[[BaselineCall], dict[str, object]]:
    from kagent_sandbox.launch.gpu_baselines import ready
    from kagent_sandbox.launch.gpu_memory import make_current
    from kagent_sandbox.launch.gpu_timing import Clock

    torch.cuda.set_device(index)
    make_current(index)
    clock = Clock(torch.device("cuda", index))

    def measure(call: BaselineCall) -> dict[str, object]:
        with torch.cuda.stream(clock.stream):
            function = make_call(call, clock.device)
        baseline = ready(function, clock)
        us = statistics.median(clock.samples([baseline.work], SAMPLES))
        result: dict[str, object] = {
            "us": us,
            "captured": baseline.captured,
            "peak_bytes": baseline.peak_bytes,
        }
        baseline.close()
        del baseline, function
        gc.collect()
        torch.cuda.empty_cache()
        return result

    return measure


def _cpu(call: BaselineCall) -> dict[str, object]:
    """Slope of K calls against 2K, rotating over input sets, as candidates on the CPU are timed.

    K grows until a call's work outlasts the noise of a wake-up; more sets than caches hold keep
    every call cold.
    """
    function = make_call(call, torch.device("cpu"))
    for _ in range(_WARM_UP):
        void(function())
    sets = [function]
    first_us = min(_elapsed_us(sets) for _ in range(3))
    nbytes = sum(t.nbytes for t in function.keywords.values() if isinstance(t, torch.Tensor))
    wanted = max(3, min(_MOST_SETS, 3 * math.ceil(_SPAN_US / max(first_us, 1.0))))
    count = max(3, min(wanted, _SETS_BYTES // max(1, nbytes)))
    sets += [functools.partial(function.func, **_copies(function)) for _ in range(count - 1)]
    k = count // 3
    times: list[float] = []
    deadline = time.monotonic() + _CPU_SECONDS
    while len(times) < SAMPLES and (len(times) < _LEAST_SAMPLES or time.monotonic() < deadline):
        turn = len(times) * k % count
        order = sets[turn:] + sets[:turn]
        once, twice = order[:k], order[k : 3 * k]
        if len(times) % 2:
            long_us = _elapsed_us(twice)
            times.append((long_us - _elapsed_us(once)) / k)
        else:
            short_us = _elapsed_us(once)
            times.append((_elapsed_us(twice) - short_us) / k)
    return {"us": max(statistics.median(times), 1e-3), "captured": False, "peak_bytes": 0}


def _elapsed_us(functions: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for function in functions:
        function()
    return 1e6 * (time.perf_counter() - start)


def _copies(function: functools.partial[object]) -> dict[str, object]:
    """The function's arguments with tensors of their own, with the same strides."""
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v)
        if isinstance(v, torch.Tensor)
        else v
        for name, v in function.keywords.items()
    }


if __name__ == "__main__":
    main()
