"""A library outside of kagent: installed with pip into an environment that has torch and no kagent,
imported, tested by its own tests, timed by its own benchmark, loaded by Hugging Face `kernels`.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import setuptools
from bare_python import BarePython
from kagent.export.writing import files_of, write_library
from synthetic_library import cpu_library, gpu_library

NAME = "made_kernels"
pytestmark = pytest.mark.usefixtures("few_compiled")
FLASHINFER = os.environ.get("KAGENT_TEST_FLASHINFER")


def run(python, *arguments, cwd, **environment):
    """Without a GPU, if there is one: the library's kernels are for the CPU."""
    ours = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env |= {"XDG_CACHE_HOME": str(Path(cwd) / "cache"), "CUDA_VISIBLE_DEVICES": "", **environment}
    if isinstance(python, BarePython):
        done = python.run(*arguments, cwd=cwd, env=env)
    else:
        command = [str(python), *map(str, arguments)]
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip_install(python, *arguments, cwd, **environment):
    options = ("--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
    command = ("-m", "pip", "--python", python, "install", *options, *arguments)
    return run(sys.executable, *command, cwd=cwd, **environment)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / NAME
    made = cpu_library(NAME)
    write_library(made, files_of(made, cubins={}), folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment that sees the packages here, but for those that a .pth file adds: kagent."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    sites = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (own,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (own / "shared.pth").write_text("\n".join(sites))
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def python(bare, library):
    """The same with the library installed."""
    before = listed(library)
    pip_install(bare, library, cwd=library.parent)
    assert listed(library) == before, "installing leaves nothing beside the sources"
    return bare


@pytest.fixture(scope="module")
def warm(python):
    with BarePython(python) as started:
        yield started


def listed(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


@pytest.mark.nightly
def test_it_is_imported_without_kagent_and_runs_what_pip_compiled(python, tmp_path):
    out = run(
        python,
        "-W",
        "error",
        "-c",
        f"""
import importlib.util, pathlib, torch
for name in ("kagent_sandbox", "kagent.config.settings"):
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    assert found is None, found
import {NAME} as library
print(len(list((pathlib.Path(library.__file__).parent / "binaries").glob("*.so"))))
x = torch.randn(300, 1000)
torch.testing.assert_close(library.softmax(x), torch.softmax(x, -1))
logits, target = torch.randn(50, 700, requires_grad=True), torch.randint(700, (50,))
library.cross_entropy(logits, target).backward()
expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), logits)[0]
torch.testing.assert_close(logits.grad, expected)
print(library.__version__)
""",
        cwd=tmp_path,
        PATH="/nonexistent",  # and so nothing can be compiled now
    )
    assert out.split() == ["2", "0.1.0"]


def test_a_source_distribution_has_all_that_the_folder_has(library, tmp_path):
    """Its own tests and benchmark among them."""
    folder = shutil.copytree(library, tmp_path / NAME)
    code = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=folder)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {n.partition("/")[2] for n in found.getnames()}
    kept = {n for n in listed(library) if n.endswith((".py", ".md", ".json", ".toml", ".typed"))}
    assert {"tests/harness.py", "CARD.md", "benchmarks/bench.py"} <= kept <= names


@pytest.mark.nightly
def test_it_is_built_and_compiled_where_there_is_no_torch(library, tmp_path):
    """As pip does it by default: in an environment with the build requirements alone."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    site = Path(setuptools.__file__).parents[1]
    names = ("setuptools", "setuptools-*.dist-info", "_distutils_hack")
    for path in (p for name in names for p in site.glob(name)):
        (own / path.name).symlink_to(path)
    python, target = tmp_path / "venv" / "bin" / "python", tmp_path / "elsewhere"
    pip_install(python, "--no-deps", "--target", target, library, cwd=tmp_path)
    assert len(list((target / NAME).glob("binaries/*.so"))) == 2


@pytest.mark.nightly
def test_without_a_compiler_it_is_installed_all_the_same(bare, library, tmp_path):
    target = tmp_path / "elsewhere"
    pip_install(bare, "--no-deps", "--target", target, library, cwd=tmp_path, PATH="/nonexistent")
    assert (target / NAME / "__init__.py").is_file()
    assert not list((target / NAME).glob("binaries/*.so"))


@pytest.mark.nightly
def test_its_own_tests_pass(warm, library):
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_softmax.py")
    # pytest's plugins that are installed here are none of the library's.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    out = run(warm, *arguments, cwd=library, **alone)
    assert " passed" in out
    assert "failed" not in out
    assert "skipped" not in out, "a kernel was measured here, and it has a gradient"


@pytest.mark.nightly
def test_its_benchmark_times_shapes_and_calls(warm, library):
    options = ("--operator", "cross_entropy", "--points", "1", "--seconds", "0.05", "--no-compile")
    found = json.loads(run(warm, "benchmarks/bench.py", *options, "--json", cwd=library))
    shape, tiny = found["shapes"]
    assert tiny["kernel"] == "torch"
    assert shape["kernel"].startswith("cross_entropy_")
    assert shape["dims"] == {"M": 1024, "N": 1024}
    assert set(shape["us"]) == {"operator", "eager"}
    middle, low, high = shape["ratio"]
    assert 0 < low <= high
    assert middle > 0
    (costs,) = found["calls"]
    us = costs["us"]
    assert {"the operator", "its bare launch", "the kernel's host function"} <= set(us)
    assert costs["overhead_us"] == us["the operator"] - us["the kernel's host function"]


@pytest.mark.nightly
def test_a_solution_for_flashinfer_bench_runs_where_it_is_installed(warm, library, tmp_path):
    (path,) = (library / "flashinfer_bench/solutions/softmax").glob("*.json")
    (tmp_path / "solution").mkdir()
    for source in json.loads(path.read_text())["sources"]:
        (tmp_path / "solution" / source["path"]).write_text(source["content"])
    code = """
import torch
from solution.main import run
x = torch.randn(40, 700)
torch.testing.assert_close(run(x), torch.softmax(x, -1))
"""
    run(warm, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))


@pytest.mark.skipif(
    not FLASHINFER, reason="KAGENT_TEST_FLASHINFER names no Python with flashinfer-bench"
)
def test_flashinfer_bench_itself_builds_solutions_and_runs_them(bare, library, tmp_path):
    """Beside the definitions' references, which it builds, too; on the CPU."""
    pip_install(bare, "--no-deps", "--target", tmp_path / "site", library, cwd=tmp_path)
    code = """
import sys, torch
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import TraceSet
traces, registry = TraceSet.from_path(sys.argv[1]), BuilderRegistry.get_instance()
x, target = torch.randn(40, 700), torch.randint(700, (40,))
given = {"softmax_float32": (x,), "cross_entropy_float32": (x, target, -100)}
for name, inputs in given.items():
    definition = traces.definitions[name]
    expected = registry.build_reference(definition)(*inputs)
    for solution in traces.solutions[name]:
        torch.testing.assert_close(registry.build(definition, solution)(*inputs), expected)
        print(solution.name)
"""
    environment = {"PYTHONPATH": str(tmp_path / "site"), "FIB_CACHE_PATH": str(tmp_path / "built")}
    found = run(FLASHINFER, "-c", code, library / "flashinfer_bench", cwd=tmp_path, **environment)
    assert len(found.split()) >= 2


@pytest.mark.nightly
def test_hugging_face_kernels_loads_it(warm, library, tmp_path):
    pytest.importorskip("kernels")
    run(
        warm,
        "-c",
        f"""
import importlib.util
from pathlib import Path
import torch
from kernels import (LocalLayerRepository, Mode, get_local_kernel, kernelize,
                     use_kernel_forward_from_hub, use_kernel_mapping)
import {NAME} as installed

folder = Path({str(library)!r})
hub = get_local_kernel(folder)
assert hub is not installed
x = torch.randn(64, 500)
torch.testing.assert_close(hub.softmax(x), torch.softmax(x, -1))
torch.testing.assert_close(installed.softmax(x), torch.softmax(x, -1))

Softmax = use_kernel_forward_from_hub("Softmax")(type("Softmax", (torch.nn.Softmax,), {{}}))
layer = LocalLayerRepository(repo_path=folder, layer_name="Softmax")
own = Softmax(-1)
with use_kernel_mapping({{"Softmax": {{"cpu": layer}}}}):
    mode = Mode.TRAINING | Mode.TORCH_COMPILE
    model = kernelize(torch.nn.Sequential(own), mode=mode, device="cpu", use_fallback=False)
assert model[0].forward.__func__ is hub.layers.Softmax.forward
torch.testing.assert_close(model(x), torch.softmax(x, -1))
for name in hub.layers.__all__:  # stateless, as `kernels` wants them
    assert getattr(hub.layers, name).__init__ is torch.nn.Module.__init__, name
""",
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
    )


@pytest.mark.nightly
def test_hugging_face_kernels_reads_its_metadata(tmp_path):
    rust = pytest.importorskip("kernels._rust")
    for made in (cpu_library("made_kernels"), gpu_library("made_gpu_kernels")):
        folder = tmp_path / made.name
        write_library(made, files_of(made, cubins={}), folder)
        metadata = rust.Metadata.read_from_file(
            folder / "build" / "torch-universal" / "metadata.json"
        )
        assert metadata.name.python_name == made.name
        assert metadata.license == "apache-2.0"
        assert metadata.python_depends == []
