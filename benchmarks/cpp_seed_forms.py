"""What the C++ seeds that `kagent new` writes owe to what it tells g++.

    python benchmarks/cpp_seed_forms.py [FUNCTION ...] [--work DIR]

For each function, makes a task with `kagent new` and lets `kagent bench` race, on the CPU, its seed
beside the same seed without a word on aliases, without functions of vectors, without extremes in
any order, and without all three. Prints the seed's ratio to the best of torch, case by case, and to
each of these forms, with 95 % intervals. A form that is the seed itself is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FUNCTIONS = {
    "rms_norm": "x * (x.square().mean(-1, True) + 1e-5).rsqrt()",
    "standardise": "(x - x.mean(-1, True)) / x.std(-1, keepdim=True)",
    "log_softmax": "x.log_softmax(-1)",
    "entropy": "(lambda p: -(p * p.clamp_min(1e-9).log()).sum(-1))(x.softmax(-1))",
    "gelu": "torch.nn.functional.gelu(x)",
    "silu": "torch.nn.functional.silu(x)",
    "mish": "torch.nn.functional.mish(x)",
}
FILE = "import torch\n\ndef make_inputs():\n    return (torch.randn(1536, 1024),)\n"
FORMS = {
    "no_aliases": (" __restrict__", ""),
    "no_vectors": ("VECTOR_MATH = 1", "VECTOR_MATH = 0"),
    "no_extremes": (r" *#pragma omp simd reduction\(m\w+_propagate_nan.*\n", ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("functions", nargs="*", choices=[[], *FUNCTIONS], metavar="FUNCTION")
    parser.add_argument("--work", type=Path, default=Path("cpp_seed_forms"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "functions.py"
    file.write_text(
        FILE + "".join(f"\ndef {n}(x):\n    return {e}\n" for n, e in FUNCTIONS.items())
    )
    device = ""
    for name in options.functions or FUNCTIONS:
        task = options.work / name
        if not (task / "task.toml").exists():
            kagent("new", f"{file}:{name}", "--to", str(task))
        found = json.loads(
            kagent("bench", *forms(task), "--task", str(task), "--device", "cpu", "--json")
        )
        if not device:
            device = found["device"]["key"]
            print(device)
        print(f"{name}: {line(found['race']['overall']['cpp_inductor'])}", flush=True)


def forms(task: Path) -> list[str]:
    """A seed's file, and those of its forms, which are written beside the task's folder."""
    seed = task / "cpp_inductor.py"
    text = bare = seed.read_text()
    found = {text: seed}
    for form, (old, new) in FORMS.items():
        found.setdefault(re.sub(old, new, text), task.parent / f"{form}_{task.name}.py")
        bare = re.sub(old, new, bare)
    found.setdefault(bare, task.parent / f"bare_{task.name}.py")
    for changed, path in found.items():
        if path != seed:
            path.write_text(changed)
    return [str(path) for path in found.values()]


def line(ratios: list[dict[str, Any]]) -> str:
    """The seed's ratios over all cases, as `--json` has them."""
    return "; ".join(
        f"{r['against']} {r['ratio']:.2f} ({r['low']:.2f}–{r['high']:.2f})"
        for r in ratios
        if r["against"] not in ("eager", "compile")
    )


def kagent(*words: str) -> str:
    """Output of a command."""
    done = subprocess.run(
        (sys.executable, "-m", "kagent", *words), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"kagent {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
