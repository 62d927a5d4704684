"""From the hotspots of a small transformer to its patched step, on the CPU of this machine.

    python benchmarks/patch_step.py FOLDER [--budget 20]

The folder gets the icicle, the runs, the library and the patch. Takes some ten minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("small_transformer.py")
TASKS = ("gelu", "softmax")


def kagent(*words: object, folder: Path, may_end: tuple[int, ...] = (0,)) -> None:
    command = [sys.executable, "-m", "kagent", *map(str, words)]
    print(f"$ kagent {' '.join(command[3:])}", flush=True)
    ended = subprocess.run(command, cwd=folder, check=False).returncode
    if ended not in may_end:
        sys.exit(ended)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=int, default=20)
    options = parser.parse_args()
    here = options.folder.resolve()
    here.mkdir(parents=True, exist_ok=True)
    script = SCRIPT.resolve()
    kagent("hotspots", script, "--page", "hotspots.html", folder=here)
    for task in TASKS:
        budget = ("--budget", options.budget, "--runs", "runs")
        kagent("evolve", task, *budget, folder=here, may_end=(0, 3))
    runs = [max((here / "runs").glob(f"{task}-*")) for task in TASKS]
    kagent("export", *runs, "--to", "my_kernels", "--allow-slower", folder=here)
    # Shapes that the tasks' cases on a CPU cover: elsewhere libraries call torch.
    shapes = ("--heads", "1", "--batch", "1", "--length", "1200")
    modes: tuple[tuple[str, ...], ...] = (shapes, (*shapes, "--infer"))
    for mode in modes:
        kagent("patch", script, "my_kernels", "--", *mode, folder=here, may_end=(0, 3))


if __name__ == "__main__":
    main()
