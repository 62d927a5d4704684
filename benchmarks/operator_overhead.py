"""What a call of an exported operator costs in Python, beyond its kernel.

    .venv/bin/python benchmarks/operator_overhead.py

The library is a real one but for its kernels, which return an empty tensor: what is left is the
functional form, the look at its arguments and at who would see the call in torch's dispatcher, and
the choice of a kernel. On a GPU the same Python runs. Prints µs of processor time per call: the
median over 30 blocks, beside the fake kernel alone. On a GPU nobody
looks at targets: that is 3 µs of the two losses' figures here.
"""

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from call_time import us_per_call

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "agent" / "export"))

from library_package import assemble  # noqa: E402 - the tests' way to a package without a run

FAKES = {
    "gelu": "def gelu(x): return torch.empty_like(x)",
    "softmax": "def softmax(x): return torch.empty_like(x)",
    "attention": "def attention(q, k, v, causal): return torch.empty_like(q)",
    "cross_entropy": "def cross_entropy(logits, target, ignore_index):\n"
    "    return logits.new_empty(()), torch.empty_like(logits)",
    "linear_cross_entropy": "def linear_cross_entropy(x, weight, target, ignore_index):\n"
    "    return x.new_empty(()), torch.empty_like(x), torch.empty_like(weight)",
}


def us(function: Callable[..., object], *args: object) -> float:
    call = functools.partial(function, *args)
    (found,) = us_per_call(call, clock=time.thread_time)
    return found


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        package = assemble(Path(folder) / "lib", "overhead", tuple(FAKES))
        for task, source in FAKES.items():
            package.add_kernel(task, f"import torch\n{source}\n")
        lib = package.imported("overhead_lib")
        x, target = torch.randn(8, 16), torch.randint(16, (8,))
        weight, q = torch.randn(16, 16), torch.randn(1, 2, 4, 8)
        cube = torch.randn(2, 4, 16)
        calls = {
            "gelu [M, N]": (lib.gelu.gelu, (x,), lambda: torch.empty_like(x)),
            "gelu [A, B, N]": (lib.gelu.gelu, (cube,), lambda: torch.empty_like(x)),
            "softmax [M, N]": (lib.softmax.softmax, (x,), lambda: torch.empty_like(x)),
            "attention": (lib.attention.attention, (q, q, q), lambda: torch.empty_like(q)),
            "cross_entropy": (
                lib.cross_entropy.cross_entropy,
                (x, target),
                lambda: (x.new_empty(()), torch.empty_like(x)),
            ),
            "linear_cross_entropy": (
                lib.linear_cross_entropy.linear_cross_entropy,
                (x.clone().requires_grad_(), weight, target),
                lambda: (x.new_empty(()), torch.empty_like(x), torch.empty_like(weight)),
            ),
        }
        print(
            f"{'':24}{'call':>8}{'kernel':>8}{'overhead':>10}   {'with a gradient asked for':>10}"
        )
        for name, (function, args, kernel) in calls.items():
            call, alone = us(function, *args), us(kernel)
            leaves = tuple(
                a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args
            )
            asked = us(function, *leaves) - alone
            print(f"{name:24}{call:8.2f}{alone:8.2f}{call - alone:10.2f}{asked:12.2f}")


if __name__ == "__main__":
    main()
