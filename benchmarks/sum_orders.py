"""What a softmax errs in float32 by the order in which its rows are added up.

    python benchmarks/sum_orders.py [--columns 16384,1000] [--tries 15]

Exponentials and divisions are rounded correctly: what differs is the sum. Lanes add up every n-th
column one after the other; their sums are added up in a tree, or again one after the other, in
warps' or lanes' random order, as atomics would. Printed are the worst row's error over its norm,
median and maximum of the tries, and what the contract allows: twice the most that torch's softmax
errs here in as many tries, and two epsilons.
"""

import argparse
import platform
import time

import numpy as np
import torch
from kagent.tasks import find_task
from kagent_sandbox.judge.check import numerics

ROWS = 6
SCALES = (1e-6, 1e-3, 1.0, 4.0)


def chain(terms: np.ndarray) -> np.ndarray:
    """Sums along the last axis, one term after the other."""
    total = np.zeros(terms.shape[:-1], np.float32)
    for i in range(terms.shape[-1]):
        total += terms[..., i]
    return total


def tree(terms: np.ndarray) -> np.ndarray:
    """Sums along the last axis, by halves; its length is a power of two."""
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]


def shares(e: np.ndarray, lanes: int) -> np.ndarray:
    """What each lane has added up: [rows, lanes]."""
    whole = np.pad(e, ((0, 0), (0, -e.shape[1] % lanes)))
    return chain(whole.reshape(len(e), -1, lanes).swapaxes(1, 2))


def any_order(terms: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return chain(terms[:, rng.permutation(terms.shape[1])])


ORDERS = {
    "1024 lanes, tree": lambda e, _: tree(shares(e, 1024)),
    "256 lanes, tree": lambda e, _: tree(shares(e, 256)),
    "32 lanes, tree: a warp per row": lambda e, _: tree(shares(e, 32)),
    "8 lanes, tree: a vector of AVX2": lambda e, _: tree(shares(e, 8)),
    "1024 lanes, 32 warps in any order": lambda e, rng: any_order(
        tree(shares(e, 1024).reshape(len(e), 32, 32)), rng
    ),
    "1024 lanes in any order": lambda e, rng: any_order(shares(e, 1024), rng),
    "one after the other": lambda e, _: chain(e),
}


def table(columns: int, tries: int) -> None:
    """Print the errors of rows of so many columns."""
    result = find_task("softmax").results[0]
    found: dict[str, list[str]] = {name: [] for name in ("allowed", *ORDERS)}
    for scale in SCALES:
        rng = np.random.default_rng(0)
        errors: dict[str, list[float]] = {name: [] for name in ORDERS}
        torchs = numerics.Errors(0.0, 0.0, 0.0)
        for _ in range(tries):
            x = (rng.standard_normal((ROWS, columns)) * scale).astype(np.float32)
            e = np.exp((x - x.max(1, keepdims=True)).astype(np.float64)).astype(np.float32)
            given = torch.from_numpy(x)
            ref = torch.softmax(given.double(), 1)
            torchs |= numerics.measure_errors(torch.softmax(given, 1), ref, 1)
            for name, add_up in ORDERS.items():
                y = torch.from_numpy(e / add_up(e, rng)[:, None])
                errors[name].append(numerics.measure_errors(y, ref, 1).row)
        found["allowed"].append(f"{numerics.allowed(torchs, result, torch.float32).row:.1e}")
        for name, those in errors.items():
            found[name].append(f"{np.median(those):.1e}, {max(those):.1e}")
    print(f"\n| {columns} columns | " + " | ".join(f"inputs times {s:g}" for s in SCALES) + " |")
    print("|---|" + "---|" * len(SCALES))
    for name, cells in found.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", default="16384,1000")
    parser.add_argument("--tries", type=int, default=15)
    options = parser.parse_args()
    versions = f"numpy {np.__version__}, torch {torch.__version__}"
    print(f"{versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    for columns in options.columns.split(","):
        table(int(columns), options.tries)


if __name__ == "__main__":
    main()
