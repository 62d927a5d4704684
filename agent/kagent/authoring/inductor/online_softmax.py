"""Largest element and sum of exponentials of a row in one reading, as torch.compile has them.

Inductor has the pattern among passes that run after autograd's, with others that a candidate has no
use for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor import config, inductor_prims, lowering
from torch._inductor.fx_passes import post_grad
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement


def read_softmaxes_once(module: torch.fx.GraphModule) -> None:
    """Have each softmax and log-softmax on a GPU read its input once before it is written."""
    if _pass().apply(module.graph):
        module.recompile()


@contextlib.contextmanager
def any_length() -> Iterator[None]:
    """Have Inductor do so with rows of any length; of a symbol it does not know that 8 is less."""
    prim = inductor_prims.prepare_softmax_online
    made = lowering.lowerings[prim]

    def lower(*given: Any) -> Any:
        with config.patch(unroll_reductions_threshold=1):
            return made(*given)

    with mock.patch.dict(lowering.lowerings, {prim: lower}):
        yield


@functools.cache
def _pass() -> Any:
    found = PatternMatcherPass()
    register_replacement(
        post_grad.prepare_softmax_pattern,
        post_grad.prepare_softmax_replacement,
        [torch.empty(4, 8)],
        fwd_only,
        found,
        extra_check=post_grad.prepare_softmax_extra_check,
        scalar_workaround={"dim": -1},
    )
    return found
