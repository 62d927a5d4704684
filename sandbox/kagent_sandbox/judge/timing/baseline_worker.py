"""Measures baselines in a process of its own.

It is run as `python -m kagent_sandbox.judge.timing.baseline_worker`; with `--ahead` it imports the
compiler before it reads its request, which comes later.

Trusted code: torch, expert libraries and the task's reference.py. It reads one JSON request from
standard input and writes one JSON object per line: {"start": [case, name]} before a baseline, then
{"done": [case, name], "us", "captured", "peak_bytes"} or {"failed": [case, name], "reason"}, or
{"full": [case, name], "reason"} where all that it lacked may be memory that others hold. The last
line is {"complete": true}, or a failure that has "last": true, after which nothing runs in this
process. When it dies, the line that is missing says of what.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_sandbox.data.records import from_json
from kagent_sandbox.device import device_memory
from kagent_sandbox.device.baseline_calls import (
    AHEAD,
    BaselineCall,
    BaselineUnavailableError,
    ContextLostError,
    MeasuredBaseline,
    all_names,
    forget_compiled,
)
from kagent_sandbox.device.table import find_device
from kagent_sandbox.process.exit import exit_fast, exit_when_peer_closes


def main() -> None:
    """Serve one request, and end the process."""
    if AHEAD in sys.argv:
        importlib.import_module("torch._inductor.compile_fx")
    gc.freeze()  # what was imported stays: collections after each case do not look at it
    request = json.load(sys.stdin)
    # output of libraries must not be taken for answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    exit_when_peer_closes(answers.fileno(), 0.0)  # nobody reads them any more
    skip, wanted = {tuple(pair) for pair in request["skip"]}, request["names"]
    entry = find_device(request["device"])
    measure = entry.baselines(request["index"])
    for record in request["calls"]:
        call = from_json(BaselineCall, record)
        for name in all_names(call.reference, entry.traits.compile_modes):
            pair = [call.case["name"], name]
            if tuple(pair) in skip or (wanted is not None and name not in wanted):
                continue
            answers.write(json.dumps({"start": pair}) + "\n")
            answer = _attempt(measure, dataclasses.replace(call, name=name), pair)
            answers.write(json.dumps(answer) + "\n")
            if "last" in answer:
                exit_fast()
        forget_compiled()
        gc.collect()
    answers.write(json.dumps({"complete": True}) + "\n")
    # Whoever reads that kills this process and the compiler's own, which take seconds to end.
    exit_fast()


def _attempt(
    measure: Callable[[BaselineCall], MeasuredBaseline], call: BaselineCall, pair: Sequence[Any]
) -> dict[str, object]:
    had_bytes = device_memory.begin_request(_device())
    try:
        return {"done": pair, **dataclasses.asdict(measure(call))}
    except BaselineUnavailableError as e:
        return {"failed": pair, "reason": str(e)}
    except ContextLostError as e:
        return {"failed": pair, "reason": f"it ended the device's context: {e}", "last": True}
    except Exception as e:  # noqa: BLE001 - a baseline that fails is recorded, whatever it raises
        full = device_memory.shared_lack(e, _device(), had_bytes)
        if full is not None:  # with that memory it may be the fastest
            return {"full": pair, "reason": str(full)}
        first = str(e).strip().partition("\n")[0][:300]
        return {"failed": pair, "reason": f"{type(e).__name__}: {first}"}


def _device() -> torch.device:
    """The one that baselines run on, of which this process has the context."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if used else "cpu")


if __name__ == "__main__":
    main()
