"""Compiles the C++ kernels for the machine that installs, and leaves no files beside the sources.

Needs g++ and nothing else: no torch, so that it works where pip builds in isolation. Without g++,
or on its error, the package is installed without binaries, and compiles at first use.
"""

import ast
import atexit
import functools
import importlib
import json
import os
import shutil
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.dont_write_bytecode = True  # of the runtime, below, among the sources

NAME = "kagent_kernels"
PACKAGE = Path(__file__).resolve().parent / "build/torch-universal" / NAME


def _sources():
    """Records of all C++ sources that the kernels compiled when they were exported."""
    for path in sorted(PACKAGE.glob("kernels/*.sources.json")):
        kernel = path.with_name(path.name.replace(".sources.json", ".py"))
        texts = dict(_constants(ast.parse(kernel.read_text(encoding="utf-8"))))
        for record in json.loads(path.read_text(encoding="utf-8"))["sources"]:
            if record["language"] == "cpp":
                constant = record.pop("constant", None)
                yield record if constant is None else {**record, "text": texts[constant]}


def _constants(tree):
    """Strings that a file assigns to names, with these."""
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(text))):
                yield name, text


@functools.cache
def _runtime():
    """The package's runtime, without the package around it, which needs torch."""
    package = types.ModuleType(NAME)
    package.__path__ = [str(PACKAGE)]
    sys.modules[NAME] = package
    return importlib.import_module(f"{NAME}._runtime")


class BuildWithKernels(build_py):
    """As always, and then NAME/binaries."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(self._compile, _sources()))

    def _compile(self, record):
        defines = tuple(map(tuple, record["defines"]))
        texts = record["language"], record["name"], record["text"], tuple(record["options"])
        try:
            runtime = _runtime()
            source = runtime.Source(*texts, defines)
            runtime.compile_ahead([source], Path(self.build_lib, NAME, "binaries"))
        except Exception as error:  # whatever it is: the kernel is compiled at first use
            self.warn(f"{record['name']} is not compiled now, but at first use: {error}")


class PlatformWheel(bdist_wheel):
    """Any Python of this platform: the binaries are called through ctypes."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class WithBinaries(Distribution):
    """A package that depends on the platform."""

    def has_ext_modules(self):
        return True


CPP = any(_sources())
SCRATCH = tempfile.mkdtemp(prefix="kernels_")  # not ./build: `kernels` loads what is in there
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
setup(
    options={"build": {"build_base": SCRATCH}, "egg_info": {"egg_base": SCRATCH}},
    cmdclass={"build_py": BuildWithKernels, **({"bdist_wheel": PlatformWheel} if CPP else {})},
    distclass=WithBinaries if CPP else Distribution,
)
