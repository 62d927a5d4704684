"""A simulated landscape: a task, and how long its candidates take, in a few lines of arithmetic.

A candidate's text is a module with tunables X and Y; its time is a smooth function of them plus a
pinch that depends on its text, so that equal texts always measure alike.
"""

import ast
import hashlib
import math
from pathlib import Path

from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.syntax import parse

TASK_TOML = """
name = "toy"
summary = "A toy"
entry = "toy"
signature = "toy(x: Tensor[M, N]) -> Tensor[M, N]"
bytes = "2 * M * N * itemsize"
flops = "0"
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]

[cpu]
check = [{ name = "c", dtype = "float32", M = 2, N = 3 }]
bench = [
  { name = "short", dtype = "float32", M = 8, N = 16 },
  { name = "middle", dtype = "float32", M = 8, N = 64 },
  { name = "long", dtype = "float32", M = 8, N = 256 },
]
[gpu]
check = [{ name = "gc", dtype = "float32", M = 2, N = 3 }]
bench = [{ name = "gb", dtype = "float32", M = 2, N = 3 }]
"""


REFERENCE = """
import torch


def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    return {"x": torch.randn(shape, generator=generator, device=device)}


def reference(x):
    return 2 * x.double()


def eager(x):
    return x * 2


def experts():
    return {}
"""


def toy_task(folder: Path) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(TASK_TOML)
    (folder / "reference.py").write_text(REFERENCE)
    return load_task(folder)


def toy_source(x=1, y=1, flavour="plain", extra="", name="toy"):
    return f'''"""{flavour}"""
import torch

X = {x!r}  # how wide
Y = {y!r}
TUNE = {{"X": [1, 2, 4, 8, 16, 32], "Y": [1, 2, 3, 4]}}
FLAVOUR = "{flavour}"
{extra}

def {name}(x):
    return torch.empty_like(x)
'''


def values(source):
    found = {}
    for node in parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return found


N = {"short": 16, "middle": 64, "long": 256}


def case_times(source):
    """µs per benchmark case; a recombined file takes the time of the part that serves the case."""
    v = values(source)
    second = next((n.removeprefix("FLAVOUR") for n in v if n.startswith("FLAVOUR_")), "")
    other = {n: v.get(n + second) for n in ("X", "Y", "FLAVOUR")}
    pinch = int(hashlib.sha256(source.encode()).hexdigest()[:4], 16) / 65535 * 0.002
    return {
        case: part_us(v if n <= v.get("N_SPLIT", n) else other, case) * (1 + pinch)
        for case, n in N.items()
    }


def part_us(v, case):
    width, depth = math.log2(v.get("X", 1)), v.get("Y", 1)
    base = 100 * (1 + 0.06 * (width - 4) ** 2 + 0.05 * (depth - 3) ** 2)
    slope = {"plain": 1.0, "wide": 1.6}.get(v.get("FLAVOUR"), 1.2)
    return {"short": base * slope, "middle": base, "long": base / slope}[case]
