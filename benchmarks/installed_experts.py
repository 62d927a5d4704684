"""Kernels of installed libraries as candidates: FlashAttention 4's attention and Quack's softmax.

    python benchmarks/installed_experts.py [--device cuda:0] [--work DIR] [--only NAME]

Each is a file of a few lines that calls the library, which kagent traces to a plan (CuTe DSL). Runs
`kagent check` and `kagent bench` of it, beside the task's own seed that `BESIDE` names. Quack's
kernel takes rows that are multiples of 16 bytes and begin at one: its task is softmax without other
rows. Needs flash-attn-4, quack-kernels and kagent[cute]; a library that is missing is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEEDS = HERE.parent / "seeds"
FA4 = """from flash_attn.cute import flash_attn_func


def attention(q, k, v, causal):
    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(1, 2)
"""
QUACK = """from quack.softmax import softmax_fwd


def softmax(x):
    return softmax_fwd(x)
"""
CANDIDATES = {
    "fa4": ("flash_attn", FA4, "attention"),
    "quack": ("quack", QUACK, "softmax8"),
}
BESIDE = {"attention": "attention/gluon_hopper.py", "softmax8": "softmax/cuda_packed.py"}
_LENGTHS = re.compile(r"\bN = \{ min = (\d+), max = (\d+)(?:, prime = true)? \}")


def softmax_of_8(task: str) -> str:
    """The text of softmax's task.toml without rows that Quack's kernel does not take."""
    kept = []
    for table in re.split(r"(?m)^(?=\[\[)", task):
        name = table.partition("]]")[0].lstrip("[")
        columns = re.search(r"(?m)^N = (\d+)", table)
        odd = columns is not None and int(columns[1]) % 8
        moved = re.search(r"(?m)^(noncontiguous = true|offset = \d)", table)
        if name.endswith(".check") and (odd or moved):
            continue
        if ".hidden_" in name:
            table = re.sub(r"(?m)^(noncontiguous|offset) = .*\n", "", table)
            table = _LENGTHS.sub(_of_8, table)
        kept.append(table)
    return "".join(kept).replace('name = "softmax"', 'name = "softmax8"', 1)


def _of_8(found: re.Match[str]) -> str:
    least, most = max(64, -(-int(found[1]) // 8) * 8), max(128, int(found[2]) // 8 * 8)
    return f"N = {{ min = {least}, max = {most}, multiple = 8 }}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", type=Path, default=Path("installed_experts"))
    parser.add_argument("--only", choices=sorted(CANDIDATES))
    options = parser.parse_args()
    folder = options.work / "softmax8"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(softmax_of_8((SEEDS / "softmax/task.toml").read_text()))
    shutil.copy(SEEDS / "softmax/reference.py", folder)
    for name, (package, source, task) in CANDIDATES.items():
        if options.only not in (None, name):
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed")
            continue
        file = options.work / f"{name}.py"
        file.write_text(source)
        where = str(folder) if task == folder.name else task
        words = ("--task", where, "--device", options.device)
        for files in (("check", file), ("bench", file, SEEDS / BESIDE[task])):
            print(f"== {' '.join(map(str, files))}", flush=True)
            subprocess.run((sys.executable, "-m", "kagent", *map(str, files), *words), check=False)


if __name__ == "__main__":
    main()
