"""Tracing without torch's dynamo, which takes a process seconds to import and never runs here."""

from __future__ import annotations

import gc
import importlib
import inspect
import types

from torch._compile import _disable_dynamo

_IMPORTED_WHEN_TRACING = (
    "kagent_sandbox.builder.trace.dispatch",
    "torch._refs",
    "torch.fx.experimental.symbolic_shapes",  # with sympy, for empty_like
)


def keep_dynamo_out() -> None:
    """Have torch's Python functions not import all of dynamo, which would cost each fork seconds.

    Torch wraps dispatch modes and meta functions so that dynamo, which never runs here, would skip
    them; the wrapper imports it when first called. A wrapper that already holds its function calls
    that instead.
    """
    for module in _IMPORTED_WHEN_TRACING:
        importlib.import_module(module)
    call_wrapped_functions_directly()


def call_wrapped_functions_directly() -> None:
    """Have the wrappers that there are by now call their functions, and import nothing first."""
    code = _disable_dynamo(len).__code__
    for found in gc.get_objects():
        if type(found) is types.FunctionType and found.__code__ is code:
            function = inspect.getclosurevars(found).nonlocals.get("fn")
            if isinstance(function, types.FunctionType):
                setattr(function, "__dynamo_disable", function)
