"""Kernels come back from a compile fork through the cache; what it cannot do, who asks does."""

import importlib.util
import types

import pytest
from kagent_sandbox.builder.compile import fork as compile_fork

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def plain(x): pass


@triton.autotune([triton.Config({"B": 16})], key=[])
@triton.jit
def tuned(x, B: tl.constexpr): pass


other = 3
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("kernels_to_find", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_kernels_of_a_module_are_found_in_their_decorators(module):
    found = compile_fork.module_kernels(module)
    assert found == {"plain": module.plain, "tuned": module.tuned.fn}


def test_a_dead_compile_fork_and_unusual_values_leave_the_work_to_who_asks(module):
    known = compile_fork.module_kernels(module)

    def gone():
        raise SystemExit

    fork = compile_fork.CompileFork(known, gone)
    try:
        compile_fork.use(fork.channel, known)
        options = types.SimpleNamespace(num_warps=4)
        compile_fork.compile_ahead(module.plain, {"x": "i32"}, {}, {}, options)
        compile_fork.compile_ahead(module.plain, {"x": "i32"}, {(0,): object()}, {}, options)
        compile_fork.compile_ahead(object(), {}, {}, {}, options)
    finally:
        compile_fork.use(None, {})
        fork.close()
