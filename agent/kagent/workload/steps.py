"""The steps of a script, found without a change to it.

A step of training ends with `optimizer.step()`: the first optimizer that steps sets the pace. A
step of inference ends with a call of the outermost module that no gradient is asked of. Both are
seen through torch's global hooks.
"""

from __future__ import annotations

import random
import sys
import time
import weakref
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from kagent.workload.step_kind import StepKind


class Done(BaseException):
    """Ends a script that has shown enough, at the end of a step.

    No `except Exception` of the script catches it.
    """


class ScriptFailed(Exception):  # noqa: N818
    """A user's script is of no use; the text says why."""


class Observer(Protocol):
    """Follows the steps of a script."""

    def step_ends(self, index: int, optimizer: torch.optim.Optimizer | None, output: Any) -> None:
        """Step `index` has ended, counted from 0. Step 0 includes all that the script does first.

        Args:
            index: Of the step.
            optimizer: That stepped; None in inference.
            output: What the outermost module returned; None in training.

        Raises:
            Done: Nothing more is wanted of the script.
        """

    def call_begins(self) -> None:
        """The outermost module is about to be called. Not asked once an optimizer has stepped."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: all gradients are there."""


class Steps:
    """Tells an observer of the steps while it is entered."""

    def __init__(self, observer: Observer, kind: StepKind = "auto") -> None:
        self.in_optimizer = False
        """Whether `optimizer.step()` is running."""
        self.seen = 0
        """Steps that have ended."""
        self._observer, self._kind = observer, kind
        self._depth = 0
        self._pace: weakref.ref[Any] | None = None  # the optimizer or module that ends a step
        self._hooks: list[Any] = []
        self._calls: list[Any] = []

    def __enter__(self) -> Self:
        if self._kind != "call":
            self._hooks = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]
        if self._kind != "optimizer":
            self._calls = [
                register_module_forward_pre_hook(self._before_call),
                register_module_forward_hook(self._after_call, always_call=True),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_calls()
        for hook in self._hooks:
            hook.remove()

    def _remove_calls(self) -> None:
        for hook in self._calls:
            hook.remove()
        self._calls = []

    def _before_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._calls:  # it trains: calls before the first step were of no model in training
            self._remove_calls()
            self._pace, self.seen = None, 0
        self.in_optimizer = True
        self._observer.optimizer_begins(optimizer)

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.in_optimizer = False
        self._ends(optimizer, optimizer, None)

    def _before_call(self, _module: nn.Module, _args: Any) -> None:
        if self._depth == 0:
            self._observer.call_begins()
        self._depth += 1

    def _after_call(self, module: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or not self._calls:
            return
        wanted = self._kind == "call" or not any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves(output)
        )
        if wanted:
            self._ends(module, None, output)

    def _ends(self, pace: Any, optimizer: Any, output: Any) -> None:
        if self._pace is None:
            self._pace = weakref.ref(pace)
        if self._pace() is not pace:
            return
        index = self.seen
        self.seen += 1
        self._observer.step_ends(index, optimizer, output)


def seed_all(seed: int) -> None:
    """Seed what scripts draw random numbers from. A script may seed again, by itself."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def now_s() -> float:
    """Time on a clock that only grows, after all that was asked of the GPU is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
