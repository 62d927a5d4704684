"""Places where a library's operators can stand in for other functions.

A site is a function or method that can be looked up by name, with the call of the library that
replaces it. Those of torch are known; a user gives further ones in words:

    model:RMSNorm.forward(self, x) = rmsnorm(x, self.weight)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kagent_sandbox.errors import UserError

Rest: TypeAlias = Literal["operations", "inductor"]
"""The rest of a graph in which a region is replaced: run operation by operation, or compiled."""


@dataclass(frozen=True, slots=True)
class Site:
    """A function that is replaced."""

    module: str  # where it is looked up: "torch.nn.functional"
    attribute: str  # its name there: "softmax", "RMSNorm.forward"
    parameters: str  # as written in a `def`
    call: str  # an expression over parameters and operators' names
    operator: str  # the operator's name in the library
    condition: str = ""  # an expression over parameters: where it does not hold, nothing changes
    task: str = ""  # of a region of the model's graphs: its reference has the operations

    @property
    def name(self) -> str:
        """torch.nn.functional.softmax, model.RMSNorm.forward, or region NAME."""
        if self.task:
            return f"region {self.task}"
        return f"{self.module}.{self.attribute}"


_SOFTMAX = "isinstance(dim, int) and dtype is None"
_OF_TORCH = (
    Site(
        "torch.nn.functional",
        "softmax",
        "input, dim=None, _stacklevel=3, dtype=None",
        "softmax(input, dim)",
        "softmax",
        _SOFTMAX,
    ),
    Site("torch", "softmax", "input, dim=None, dtype=None, **more", "softmax(input, dim)",
         "softmax", f"not more and {_SOFTMAX}"),
    Site("torch", "Tensor.softmax", "self, dim=None, dtype=None", "softmax(self, dim)", "softmax",
         _SOFTMAX),
    Site("torch.nn.functional", "gelu", "input, *, approximate='none'", "gelu(input)", "gelu",
         "approximate == 'tanh'"),
    Site(
        "torch.nn.functional",
        "scaled_dot_product_attention",
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more",
        "attention(query, key, value, is_causal=is_causal)",
        "attention",
        "attn_mask is None and dropout_p == 0.0 and more.get('scale') is None",
    ),
    Site(
        "torch.nn.functional",
        "cross_entropy",
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, "
        "reduction='mean', label_smoothing=0.0",
        "cross_entropy(input, target, ignore_index)",
        "cross_entropy",
        "weight is None and size_average is None and reduce is None and reduction == 'mean' and "
        "label_smoothing == 0.0 and input.dtype is torch.float32",
    ),
)  # fmt: skip


def sites_of_torch(operators: Sequence[str]) -> list[Site]:
    """Functions of torch that the built-in tasks' operators compute.

    Args:
        operators: Names of a library's functions.
    """
    return [s for s in _OF_TORCH if s.operator in operators]


def region_site(operator: str, task: str) -> Site:
    """A region of a model's graphs.

    Args:
        operator: The operator's name in the library.
        task: Name of its task, whose reference the library has.
    """
    return Site("", "", "", operator, operator, task=task)


def parse_site(text: str, operators: Sequence[str]) -> Site:
    """Read a site in a user's words: MODULE:NAME(PARAMETERS) = CALL.

    Args:
        text: Such as "model:RMSNorm.forward(self, x) = rmsnorm(x, self.weight)".
        operators: Names of the libraries' functions; the call has one of them.

    Raises:
        UserError: It is something else.
    """
    example = "for example 'model:RMSNorm.forward(self, x) = rmsnorm(x, self.weight)'"
    found = re.fullmatch(r"\s*([\w.]+):([\w.]+)\((.*?)\)\s*=(?!=)\s*(.+?)\s*", text, re.DOTALL)
    if found is None:
        raise UserError(f"--replace {text!r}: expected MODULE:NAME(PARAMETERS) = CALL, {example}")
    module, attribute, parameters, call = found.groups()
    try:
        ast.parse(f"def f({parameters}): return {call}")
        names = [n.id for n in ast.walk(ast.parse(call, mode="eval")) if isinstance(n, ast.Name)]
    except SyntaxError as e:
        raise UserError(f"--replace {text!r}: {e.msg}: expected Python, {example}") from None
    operator = next((n for n in names if n in operators), None)
    if operator is None:
        raise UserError(
            f"--replace {text!r}: the call names no function of the library: it has "
            f"{', '.join(sorted(operators))}"
        )
    return Site(module, attribute, parameters, call, operator)
