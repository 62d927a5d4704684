"""Kernels come back from a compile fork through the cache; what it cannot do, who asks does."""

import importlib.util
import types

import pytest
from kagent_sandbox.builder.compile import fork as compile_fork
from kagent_sandbox.builder.compile.time_limit import too_slow
from kagent_sandbox.builder.policy import BuildRejected

SOURCE = """
import triton
import triton.language as tl
from triton.experimental import gluon


@triton.jit
def plain(x): pass


@gluon.jit
def explicit(x): pass


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
    assert found == {
        "plain": module.plain,
        "explicit": module.explicit,
        "tuned": module.tuned.fn,
    }


def test_a_dead_compile_fork_and_unusual_values_leave_the_work_to_who_asks(module):
    known = compile_fork.module_kernels(module)

    def gone():
        raise SystemExit

    fork = compile_fork.CompileFork(known, gone)
    try:
        compile_fork.use(fork.channel, known)
        options = types.SimpleNamespace(num_warps=4)
        for kernel, constants in ((module.plain, {}), (module.plain, {(0,): object()}), (any, {})):
            found = compile_fork.compile_ahead(kernel, {"x": "i32"}, constants, {}, options)
            assert found == []
    finally:
        compile_fork.use(None, {})
        fork.close()


@pytest.mark.parametrize(("name", "language"), [("plain", "TRITON"), ("explicit", "GLUON")])
def test_a_kernel_is_compiled_as_one_of_its_own_language(module, monkeypatch, name, language):
    known = compile_fork.module_kernels(module)
    sources = []
    monkeypatch.setattr(compile_fork.triton, "compile", lambda source, **_: sources.append(source))
    active = types.SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(compile_fork.driver, "_active", active)
    asked = (name, known[name].cache_key, {"x": "i32"}, {}, {}, {})
    compile_fork._compile(known, repr(asked), None)
    assert [(s.language.name, s.fn) for s in sources] == [(language, known[name])]


def test_what_took_too_long_in_one_fork_is_not_compiled_by_another(module, monkeypatch, tmp_path):
    known = compile_fork.module_kernels(module)
    compiles = []

    def compile_(*_, **__):
        compiles.append(1)
        raise too_slow("plain", 20.0)

    monkeypatch.setattr(compile_fork.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compile_fork.triton, "compile", compile_)
    active = types.SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(compile_fork.driver, "_active", active)
    asked = repr(("plain", known["plain"].cache_key, {"x": "i32"}, {}, {}, {}))
    for _ in range(2):
        with pytest.raises(BuildRejected, match="kernel plain took longer than 20 s"):
            compile_fork._compile(known, asked, 20.0)
    assert len(compiles) == 1
