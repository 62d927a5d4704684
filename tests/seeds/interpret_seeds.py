"""Runs tasks' Triton seeds in Triton's interpreter on small cases; prints their errors as JSON.

A process of its own: TRITON_INTERPRET decides at import what `triton.jit` returns.

    TRITON_INTERPRET=1 python interpret_seeds.py seeds/softmax seeds/gelu
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from kagent_sandbox.data.task import load_task
from kagent_sandbox.judge.interpreter_memory import remember
from seed_cases import arguments, import_seed, worst_share

MAX_ROWS = 12
MAX_COLUMNS = 5000


def shares_of(folder):
    """Worst share of the tolerance, by seed and case."""
    task = load_task(folder)
    reference = task.reference()
    shares = {}
    for file in sorted(folder.glob("triton_*.py")):
        entry = getattr(import_seed(file), task.entry)
        for case in task.gpu.check:
            # The interpreter cuts bfloat16 off where hardware rounds.
            if case.dtype == "bfloat16" or case.dims["N"] > MAX_COLUMNS:
                continue
            case = case.model_copy(update={"M": min(case.dims["M"], MAX_ROWS)})
            given = arguments(task, reference, case, seed=1)
            shares[f"{task.name} {file.stem} {case.name}"] = worst_share(
                task, reference, given, entry(*given.values())
            )
    return shares


def main(folders):
    remember()
    # Host code asks for the number of multiprocessors; few make persistent programs loop.
    torch.cuda.get_device_properties = lambda _device: SimpleNamespace(multi_processor_count=2)
    found = {}
    for folder in folders:
        found |= shares_of(Path(folder))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
