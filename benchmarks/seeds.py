"""Every seed of every task: checked on all cases, then timed beside all baselines.

    python benchmarks/seeds.py [--task NAME ...] [--device gpu|cpu] [--configs K] [--out FOLDER]

Prints one Markdown table per task with the machine and versions, and writes the races as JSON.
"""

import argparse
import importlib.metadata
import json
import platform
import time
from pathlib import Path

from kagent.candidate_file import Benched, bench_files
from kagent.config.settings import load_config
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.data.race import BEST_OF_TORCH
from kagent_sandbox.data.records import to_json
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import KagentError

VERSIONS = ("torch", "triton", "cuda-core", "numpy")


def markdown(result: Benched, *, matrix: bool) -> str:
    rate = "TFLOP/s" if matrix else "GB/s"
    lines = [f"| case | kernel | ms | {rate} | roofline | × best of torch (95 %) |"]
    lines.append("|---|---|---|---|---|---|")
    for case in result.race.cases:
        timings = {**case.baselines, **case.candidates}
        for name, t in sorted(timings.items(), key=lambda item: item[1].kernel_us):
            r = case.ratio(name, BEST_OF_TORCH)
            ratio = f"{r.value:.3f} ({r.low:.3f}–{r.high:.3f})" if r else ""
            shown = f"**{name}**" if name in case.candidates else name
            value = t.tflop_per_s if matrix else t.gb_per_s
            lines.append(
                f"| {case.case} | {shown} | {t.kernel_us / 1e3:.4f} | {value:.0f} "
                f"| {t.roofline_share:.0%} | {ratio} |"
            )
    for name, passed in result.measured.items():
        if name not in result.race.overall:
            lines += [
                f"| {t.case} | {name}, by itself | {t.kernel_us / 1e3:.4f} "
                f"| {t.tflop_per_s if matrix else t.gb_per_s:.0f} | {t.roofline_share:.0%} | |"
                for t in passed.timings
            ]
    for name, verdict in {**result.rejected, **result.race.failed}.items():
        text = f"{verdict.status}: {verdict.message[:300]}"
        lines.append(f"| {verdict.case or ''} | {name} | {text} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", action="append", choices=task_names())
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu" if has_gpu() else "cpu")
    parser.add_argument("--configs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    versions = ", ".join(f"{v} {importlib.metadata.version(v)}" for v in VERSIONS)
    for name in options.task or task_names():
        task = find_task(name)
        gpu = options.device == "gpu"
        files = [s.path for s in seeds_of(task) if (s.language != "cpp") == gpu]
        began = time.monotonic()
        try:
            result = bench_files(
                task,
                files,
                jobs=load_config().jobs,
                configs=options.configs,
                say=lambda text: print("  ", text, flush=True),
            )
        except KagentError as e:
            print(f"## {name}: {type(e).__name__}: {e}\n", flush=True)
            continue
        where = f"{result.facts.name}, {versions}, Python {platform.python_version()}"
        took = time.monotonic() - began
        print(f"## {name} ({where}, {time.strftime('%Y-%m-%d')}, {took:.0f} s)\n")
        print(markdown(result, matrix=task.matrix) + "\n", flush=True)
        if result.failure is not None:
            print(f"The race failed: {result.failure}\n", flush=True)
        if options.out:
            rejected = {n: to_json(v) for n, v in result.rejected.items()}
            measured = {n: to_json(v) for n, v in result.measured.items()}
            data = {
                "where": where,
                "race": to_json(result.race),
                "measured": measured,
                "rejected": rejected,
            }
            (options.out / f"{name}.json").write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
