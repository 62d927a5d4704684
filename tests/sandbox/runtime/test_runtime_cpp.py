"""C++ kernels outside of a build: compiled here, kept, taken from a package, launched."""

import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import kagent_sandbox.runtime
import numpy as np
import pytest
import torch
from kagent_sandbox.runtime import (
    CompileError,
    KernelUnavailable,
    Source,
    cpp_kernel,
    observing,
    tensor_map,
)
from kagent_sandbox.runtime import store as places
from kagent_sandbox.runtime.arguments import ScalarArgument
from kagent_sandbox.runtime.cpp_kernels import CppKernel

SCALE = """
#include <cstdint>
extern "C" void scale(const float* x, float* y, int64_t n, float by, bool negate) {
  for (int64_t i = 0; i < n; ++i) y[i] = (negate ? -by : by) * x[i] + PLUS;
}
"""
RUNTIME = Path(kagent_sandbox.runtime.__file__).parent


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kagent-kernels"


def scale(plus=0):
    return cpp_kernel("scale", SCALE, defines={"PLUS": plus})


def fresh(plus=0):
    """Not what an earlier call in this process made."""
    return CppKernel(Source("cpp", "scale", SCALE, (), (("PLUS", plus),)))


def call(kernel, *more):
    x = torch.arange(6, dtype=torch.float32)
    y = torch.empty_like(x)
    kernel(x, y, x.numel(), 2.0, *(more or (False,)))
    return y.tolist()


@pytest.mark.usefixtures("home")
def test_a_kernel_computes_and_is_made_once():
    kernel = scale(plus=1)
    assert call(kernel) == [1, 3, 5, 7, 9, 11]
    assert call(kernel, True) == [1, -1, -3, -5, -7, -9]
    assert scale(plus=1) is kernel
    different = {id(scale(plus)) for plus in (1, 1.0, True, "1", 2)}
    assert len(different) == 5  # equal numbers, and different macros


@pytest.mark.usefixtures("home")
def test_numbers_of_other_kinds_are_taken_as_ever():
    x = torch.ones(3)
    y = torch.empty(3)
    for by in (2, 2.0, np.float32(2), True):
        expected = 1.0 if by is True else 2.0
        scale()(x, y, np.int64(3), by, 0)
        assert y.tolist() == [expected] * 3
    scale()(None, None, 0, float("inf"), np.bool_(True))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({2: 3.0}, r"argument 3 \(i64\): got 3.0, a float; pass int"),
        ({2: 2**63}, r"argument 3 \(i64\): 9223372036854775808 does not fit i64"),
        ({2: np.int32(3)}, "got numpy.int32, which has another size"),
        ({0: 4096}, r"argument 1 \(a pointer\): got the number 4096; pass the tensor itself"),
        ({0: torch.empty(3, device="meta")}, "got a tensor on meta; move it to cpu"),
        ({2: torch.tensor(3)}, "got a tensor; pass a number"),
        ({3: None}, "got None, which stands for a null pointer"),
        ({3: "2"}, r"got str; pass a tensor, a number, None, tensor_map\(...\) or struct\(...\)"),
        ({4: 2}, "does not fit i1"),
        ({0: tensor_map(torch.empty(8, 8), (8, 8))}, "got TensorMapArgument"),
    ],
)
def test_what_does_not_fit_is_said(change, says):
    args = [torch.ones(3), torch.empty(3), 3, 2.0, False]
    for index, value in change.items():
        args[index] = value
    with pytest.raises(TypeError, match=says):
        scale()(*args)
    with pytest.raises(TypeError, match="takes 5 arguments, got 4"):
        scale()(*args[:4])


def test_libraries_are_kept_privately_and_found_again(home, monkeypatch):
    call(fresh(plus=11))
    (kept,) = home.glob("*.so")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    monkeypatch.setattr("kagent_sandbox.runtime.cpp_kernels.compile_cpp", None)  # not needed
    assert call(fresh(plus=11))[0] == 11


@pytest.mark.parametrize("damage", [b"", b"\x7fELF and no more"])
def test_a_damaged_library_is_compiled_anew(damage, home):
    kernel = fresh(plus=20 + len(damage))
    kept = places.kept_library(kernel.source)
    kept.write_bytes(damage)
    assert call(kernel)[0] == 20 + len(damage)
    assert len(kept.read_bytes()) > 1000
    assert list(home.iterdir()) == [kept]


def test_a_folder_that_others_may_write_is_not_used(home):
    home.mkdir(parents=True)
    home.chmod(0o777)
    assert places.cache_folder() is None
    assert call(fresh(plus=13))[0] == 13
    assert not list(home.iterdir())


def test_another_processor_compiler_or_version_of_kagent_does_not_find_it(home, monkeypatch):
    source = fresh().source
    here = places.kept_library(source)
    monkeypatch.setattr(places, "processor", lambda: "another")
    there = places.kept_library(source)
    monkeypatch.setattr(places, "_compiler_version", lambda: "99.0")
    later = places.kept_library(source)
    monkeypatch.setattr(places, "RECIPE", (("-O2",), (), ""))
    otherwise = places.kept_library(source)
    assert len({here, there, later, otherwise}) == 4
    assert home in here.parents


@pytest.mark.usefixtures("home")
def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    places._compiler_version.cache_clear()
    with pytest.raises(KernelUnavailable, match=r"install it \(apt install g\+\+\)"):
        fresh(plus=14)()


@pytest.mark.usefixtures("home")
def test_a_refused_source_names_its_line():
    kernel = cpp_kernel("k", 'extern "C" void k(float* x) {\n  x[0] = nope;\n}')
    with pytest.raises(CompileError, match=r"line 2: .nope. was not declared") as caught:
        kernel(torch.ones(1))
    assert not caught.value.over_limit


@pytest.mark.usefixtures("home")
def test_every_launch_is_shown_before_it_is_done():
    x, y = torch.ones(4), torch.zeros(4)
    shown = []

    def observer(launch):
        shown.append((launch, y.sum().item()))

    with observing(observer):
        scale()(x, y, 4, 3, True)
        scale()(None, None, 0, 0.0, False)
    scale()(x, y, 4, 3, True)
    (first, before), (second, after) = shown
    assert (before, after) == (0, -12)
    assert first.arguments[0] is x
    assert first.arguments[2:] == (
        ScalarArgument("i64", 4),
        ScalarArgument("f32", 3.0),
        ScalarArgument("i1", True),
    )
    assert second.arguments[:2] == (None, None)
    assert (first.target, first.symbol, first.source.language) == ("cpu", "scale", "cpp")
    assert first.binary[:4] == b"\x7fELF"


@pytest.mark.usefixtures("home")
def test_threads_that_need_a_kernel_at_once():
    kernel, results = fresh(plus=15), []
    threads = [threading.Thread(target=lambda: results.append(call(kernel))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[15, 17, 19, 21, 23, 25]] * 8


AHEAD = """
import sys, types
sys.modules["torch"] = sys.modules["numpy"] = None  # as where pip builds
package = types.ModuleType("library")
package.__path__ = [sys.argv[1]]
sys.modules["library"] = package
from pathlib import Path
from library import _runtime
made = _runtime.compile_ahead(
    [_runtime.Source("cpp", "scale", sys.argv[2], (), (("PLUS", 16),))], Path(sys.argv[3])
)
print(len(made))
"""
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from library._runtime import cpp_kernel
x = torch.ones(3)
y = torch.empty(3)
cpp_kernel("scale", sys.argv[2], defines={"PLUS": 16})(x, y, 3, 1.0, False)
print(y.tolist(), any("kagent" in name for name in sys.modules))
"""


@pytest.mark.nightly
def test_a_copy_in_a_package_compiles_ahead_without_torch_and_runs_without_a_compiler(tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    (library / "__init__.py").write_text("")
    shutil.copytree(RUNTIME, library / "_runtime")
    command = [sys.executable, "-I", "-c", AHEAD, library, SCALE, library / "binaries"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"1\n"
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", USE, tmp_path, SCALE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.stdout == "[17.0, 17.0, 17.0] False\n", done.stderr
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").rglob("*.so"))


def test_sources_come_back_from_their_records():
    source = Source("cpp", "k", "text", ("-O2",), (("A", 1), ("B", "x"), ("C", True)))
    again = Source.of(source.record())
    assert again == source
    assert again.key("cpu") == source.key("cpu") != source.key("sm_90a")


def test_nothing_of_the_package_around_it_is_imported():
    for path in RUNTIME.glob("*.py"):
        assert "kagent" not in path.read_text().replace("kagent-kernels", "").replace(
            "kagent_signature", ""
        ).replace("KAGENT_CODE", "").replace("-frandom-seed=kagent", ""), path.name
