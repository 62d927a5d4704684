"""Fuzz every reader of untrusted bytes for as long as you like.

    python benchmarks/fuzz.py --seconds 600               # all targets in turn, spoiled seeds
    python benchmarks/fuzz.py --only plan,binary --seed 7
    python benchmarks/fuzz.py --only binary --atheris     # by coverage, needs `pip install atheris`

Inputs that break a reader are written to --out, with the traceback on standard error; the exit
status is then 1. Each becomes a line of `CRASHES` in tests/fuzz/test_fuzz.py.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))
from mutate import seeds, spoiled
from targets import TARGETS

SLOW_S = 10.0  # of processor time: a reader that takes longer for a megabyte is broken, too


def main() -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=None, help="of the mutations (random)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-crashes"))
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; one target")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {min(unknown)}: there are {', '.join(TARGETS)}")
    if options.atheris:
        return _guided(names[0], options.seconds, options.out)
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    return _spoiled(names, options.seconds, seed, options.out)


def _spoiled(names: list[str], seconds: float, seed: int, out: Path) -> int:
    """Sound inputs with a few faults; what is refused neither at once nor by name is spoiled on."""
    rng = random.Random(seed)
    corpus = {name: list(seeds(name)) for name in names}
    tried = dict.fromkeys(names, 0)
    broken = 0
    end = time.monotonic() + seconds
    for name in itertools.cycle(names):
        if time.monotonic() >= end:
            break
        for _ in range(50):
            data = spoiled(rng.choice(corpus[name]), rng)
            broken += _tried(name, data, out)
            tried[name] += 1
            if rng.random() < 0.02 and len(corpus[name]) < 400:
                corpus[name].append(data)  # faults upon faults
    for name, count in tried.items():
        sys.stdout.write(f"{name:14} {count:9,} inputs\n")
    sys.stdout.write(f"seed {seed}, {broken} broke a reader\n")
    return 1 if broken else 0


def _tried(name: str, data: bytes, out: Path) -> bool:
    """Whether an input broke a reader."""
    began = time.process_time()
    try:
        TARGETS[name](data)
    except Exception:  # noqa: BLE001 - what a fuzzer is after
        traceback.print_exc()
    else:
        took_s = time.process_time() - began
        if took_s < SLOW_S:
            return False
        sys.stderr.write(f"{name}: {took_s:.1f} s for {len(data)} bytes\n")
    out.mkdir(exist_ok=True)
    path = out / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    sys.stderr.write(f"{path}\n")
    return True


def _guided(name: str, seconds: float, out: Path) -> int:
    """One target under atheris, which ends the process itself."""
    atheris = importlib.import_module("atheris")
    folder = out / f"{name}-corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(seeds(name)):
        (folder / str(i)).write_bytes(data)
    atheris.instrument_all()
    words = [sys.argv[0], str(folder), f"-max_total_time={int(seconds)}", "-max_len=65536"]
    atheris.Setup([*words, f"-artifact_prefix={out}/"], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
