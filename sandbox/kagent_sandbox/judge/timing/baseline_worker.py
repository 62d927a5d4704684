"""Measures baselines in a process of its own.

It is run as `python -m kagent_sandbox.judge.timing.baseline_worker`.

Trusted code: torch, expert libraries and the task's reference.py. It reads one JSON request from
standard input and writes one JSON object per line: {"start": [case, name]} before a baseline, then
{"done": [case, name], "us", "captured", "peak_bytes"} or {"failed": [case, name], "reason"}. When
it dies, the line that is missing says of what.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_sandbox.data.records import from_json
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.device.baseline_calls import (
    BaselineCall,
    BaselineUnavailableError,
    all_names,
    forget_compiled,
    make_call,
)
from kagent_sandbox.device.cpu.baselines import CpuBaseline
from kagent_sandbox.process.exit import exit_fast, exit_when_peer_closes

SAMPLES = 30
_CPU_SECONDS = 2.0  # per baseline, beyond the least number of samples
_LEAST_SAMPLES = 5


def main() -> None:
    """Serve one request, and end the process."""
    request = json.load(sys.stdin)
    # output of libraries must not be taken for answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    exit_when_peer_closes(answers.fileno(), 0.0)  # nobody reads them any more
    skip, wanted = {tuple(pair) for pair in request["skip"]}, request["names"]
    measure: Callable[[BaselineCall], dict[str, object]] = _cpu
    if request["kind"] == "gpu":
        compiler_cache.use(compiler_cache.shared_folder())
        measure = _gpu_measurer(request["index"])
    for record in request["calls"]:
        call = from_json(BaselineCall, record)
        for name in all_names(call.reference, request["kind"]):
            pair = [call.case["name"], name]
            if tuple(pair) in skip or (wanted is not None and name not in wanted):
                continue
            answers.write(json.dumps({"start": pair}) + "\n")
            answer = _attempt(measure, dataclasses.replace(call, name=name), pair)
            answers.write(json.dumps(answer) + "\n")
        forget_compiled()
        gc.collect()
    exit_fast()


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
    from kagent_sandbox.device.cuda.baselines import ready
    from kagent_sandbox.device.cuda.memory import make_current
    from kagent_sandbox.device.cuda.timing import Clock

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
    baseline = CpuBaseline(make_call(call, torch.device("cpu")))
    times: list[float] = []
    deadline = time.monotonic() + _CPU_SECONDS
    while len(times) < SAMPLES and (len(times) < _LEAST_SAMPLES or time.monotonic() < deadline):
        times += baseline.samples(1)
    us = statistics.median(times)
    return {"us": us, "captured": False, "peak_bytes": 0}


if __name__ == "__main__":
    main()
