"""Whether builds work on this machine: a file that is known to build.

A builder's process that is lost for no reason of its own (killed by the kernel for memory that
others took, by a person, by a full disk) says nothing of the candidate.
"""

from __future__ import annotations

import dataclasses

from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.process.temporary_space import says_full

_X = TensorSpec("x", (4, 32), (32, 1), "float32")
_CASES = (BuildCase("known", (_X,), (dataclasses.replace(_X, name="y"),)),)
_CPP = '''
import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = """
#include <cstdint>
extern "C" void twice(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
}
"""


def known(x):
    y = torch.empty_like(x)
    cpp_kernel("twice", SOURCE)(x, y, x.numel())
    return y
'''
_TRITON = """
import torch
import triton
import triton.language as tl


@triton.jit
def _twice(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, 2 * tl.load(x + i))


def known(x):
    y = torch.empty_like(x)
    _twice[(1,)](x, y, N=x.numel())
    return y
"""
_MOST_CHARS = 300  # of a rejection in another message


def known_request(target: str) -> BuildRequest:
    """A request for a file that builds on every machine that builds anything for this target."""
    return BuildRequest(_CPP if target == "cpu" else _TRITON, "known", target, _CASES)


def disk_was_full(found: Built | Rejected) -> bool:
    """Whether a rejection, or the loss of a configuration, may be a full disk's doing: a candidate
    can fill its own folder, too.
    """
    texts = found.dropped if isinstance(found, Built) else (found.message,)
    return any(says_full(text) for text in texts)


def first_line(rejected: Rejected) -> str:
    """The line of a rejection that says most: of a full disk, or the first one."""
    lines = [line.strip() for line in rejected.message.splitlines() if line.strip()]
    return next((line for line in lines if says_full(line)), lines[0] if lines else "")[
        :_MOST_CHARS
    ]
