"""From the hotspots of a small transformer to its patched step, on the CPU of this machine.

    python benchmarks/patch_step.py FOLDER [--budget 2] [--pairs 120]

Two regions become tasks: GELU and its gradient. Their first kernels are the built-in tasks', with
the regions' names of arguments. The built-in tuner searches their parameters; the winners are
exported and put back into the training script. The last line is the step before and after, for
docs/results.md. The number of pairs is fixed before; nothing is measured again if it is not FASTER.
The folder must be new: it gets the icicle, the tasks, the runs,
the library and the patch. It is meant for cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "small_transformer.py"
REGIONS = {"mlp_gelu": ("forward", "gelu"), "mlp_gelu_gradient": ("backward", "gelu_backward")}
"""Tasks, and direction and title of their regions. Of several the most frequent is taken; a region
that differs from it in sizes alone is replaced as well.
"""
KERNELS = {
    "mlp_gelu": (
        "gelu",
        ("def gelu(x:", "def mlp_gelu(x0:"),
        ("x = x.contiguous()", "x = x0.contiguous()"),
    ),
    "mlp_gelu_gradient": (
        "gelu_backward",
        (
            "def gelu_backward(grad: torch.Tensor, x:",
            "def mlp_gelu_gradient(x0: torch.Tensor, x1:",
        ),
        (
            "grad, x = grad.contiguous(), x.contiguous()",
            "grad, x = x0.contiguous(), x1.contiguous()",
        ),
    ),
}
"""The built-in task of each, and what takes the places of its host code's names."""


def first_kernel(task: str) -> str:
    """Text of the task's first candidate."""
    seed, *changes = KERNELS[task]
    text = (HERE.parent / f"seeds/{seed}/cpp_simd.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def kagent(*words: object, folder: Path, may_end: tuple[int, ...] = (0,)) -> str:
    """Run a command; what it printed. Ends if it ends otherwise than it may."""
    command = [sys.executable, "-m", "kagent", *map(str, words)]
    print(f"$ kagent {' '.join(command[3:])}", flush=True)
    begun_s = time.monotonic()
    ended = subprocess.run(command, cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
    if "--json" not in words:
        print(ended.stdout, flush=True)
    print(f"  {time.monotonic() - begun_s:.0f} s, exit code {ended.returncode}", flush=True)
    if ended.returncode not in may_end:
        sys.exit(ended.returncode)
    return ended.stdout


def make_task(task: str, regions: list[dict[str, Any]], folder: Path) -> None:
    """Make a region a task with a first kernel."""
    alike = [r for r in regions if (r["phase"], r["title"]) == REGIONS[task]]
    key = max(alike, key=lambda r: int(r["count"]))["key"]
    words = ("hotspots", SCRIPT, "--take", key, "--to", ".", "--json")
    kagent(*words, folder=folder)
    kagent("new", f"region_{key}.py:region", "--name", task, "--no-seeds", folder=folder)
    (folder / task / "cpp_first.py").write_text(first_kernel(task), encoding="utf-8")


def summary(found: dict[str, Any], options: argparse.Namespace, took_s: float) -> str:
    """Describe the measurement in a line of a table."""

    def interval(ratio: dict[str, Any] | None) -> str:
        if ratio is None:
            return "-"
        return f"{ratio['value']:.3f}× ({ratio['low']:.3f}–{ratio['high']:.3f})"

    sites = []
    for site in found["sites"]:
        trials = [f"{t['rest']} {interval(t['ratio'])} {t['verdict']}" for t in site["trials"]]
        outcome = "kept" if site["kept"] else site["why"]
        sites.append(f"{site['site']}: {', '.join(trials)}; {outcome}")
    graphs = [f"{rest} {interval(ratio)}" for rest, ratio in found["captured"].items()]
    after = "-" if found["after_us"] is None else f"{found['after_us'] / 1e3:.2f} ms"
    cells = [
        f"{found['before_us'] / 1e3:.2f} ms",
        after,
        interval(found["ratio"]),
        f"{options.pairs} pairs",
        "; ".join(sites),
        f"graphs without a kernel: {', '.join(graphs) or '-'}",
        f"disturbed: {'; '.join(found['disturbed'])}" if found["disturbed"] else "undisturbed",
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, {took_s:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=120)
    options = parser.parse_args()
    here = options.folder.resolve()
    here.mkdir(parents=True)
    begun_s = time.monotonic()
    hotspots = kagent("hotspots", SCRIPT, "--page", "hotspots.html", "--json", folder=here)
    regions = json.loads(hotspots)["regions"]
    for task in REGIONS:
        make_task(task, regions, here)
        budget = ("--budget", options.budget, "--runs", "runs", "--proposer", "tune")
        kagent("evolve", f"./{task}", *budget, folder=here, may_end=(0, 3))
    runs = [max((here / "runs").glob(f"{task}-*")) for task in REGIONS]
    kagent("export", *runs, "--to", "my_kernels", "--allow-slower", folder=here)
    words = ("patch", SCRIPT, "my_kernels", "--pairs", options.pairs, "--json")
    script = ("--", "--steps", 20 * options.pairs + 1000)
    found = json.loads(kagent(*words, *script, folder=here, may_end=(0, 3)))
    (here / "patch.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(summary(found, options, time.monotonic() - begun_s))


if __name__ == "__main__":
    main()
