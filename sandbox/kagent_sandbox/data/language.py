"""Languages that kernels are written in: one record each. docs/add-a-language.md adds one."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kagent_sandbox.errors import UserError

ANY = "any"
"""Stands in an option for all languages of a device."""
VARIABLE = "KAGENT_LANGUAGES"
"""Names modules, with commas between them, that register further languages."""


@dataclass(frozen=True, slots=True)
class Language:
    """One language. `kind` says what its binaries are, too: a CPU's kernels are shared objects,
    which report no resources, and a GPU's are cubins.
    """

    name: str  # in plans, records and --lang: "cpp"; its seeds are NAME_*.py
    title: str  # for people, and as a heading of cards: "C++"
    kind: Literal["cpu", "gpu"]
    pattern: str  # a regular expression that a candidate's file has where it makes such a kernel
    written: str  # how host code makes a kernel, for messages: "cpp_kernel(name, source)"
    compiler: str = ""
    """Module of a `builder.compile.kernels.Compiler`. What Triton compiles has none."""
    tracer: str = ""
    """Module whose `install(target, folder)` prepares the child that traces such a candidate,
    before the file is imported: for a language with a launcher of its own."""
    tracer_s: float = 0.0  # most seconds that its packages take to import, beside host code's limit
    fences: tuple[str, ...] = ()  # of a reply's block that holds a whole file, beside python
    kernel_fences: tuple[str, ...] = ()  # of a block that holds a kernel without its host code
    interpreter: str = ""  # what checks values without the device, for messages; empty: nothing
    unseen: str = ""  # what that cannot show
    requires: tuple[str, ...] = ()  # packages without which a library of its kernels cannot run
    rules: str = ""  # Markdown for the model, of a language that prompts/ does not explain

    @property
    def interpreted(self) -> bool:
        """Whether values can be checked without the device."""
        return bool(self.interpreter)

    @property
    def seed_prefix(self) -> str:
        """Prefix of the names of its seeds."""
        return f"{self.name}_"

    def is_in(self, source: str) -> bool:
        """Whether a candidate's file makes a kernel in it."""
        return re.search(self.pattern, source) is not None


class UnknownLanguage(UserError, ValueError):  # noqa: N818
    """No language of that name: misspelt, or the module that registers it is not named here."""


LANGUAGES: dict[str, Language] = {}
"""Languages by name, in the order in which they are shown."""


def register(added: Language) -> Language:
    """Make a language known.

    Raises:
        ValueError: Its name is another's, or is none.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*", added.name) or added.name == ANY:
        raise ValueError(f"a language's name is of small letters and digits, not {added.name!r}")
    if LANGUAGES.setdefault(added.name, added) != added:
        raise ValueError(f"there is a language {added.name} already")
    return added


def language(name: str) -> Language:
    """A language by its name.

    Raises:
        UnknownLanguage: There is none of that name.
    """
    found = LANGUAGES.get(name)
    if found is None:
        known = ", ".join(LANGUAGES)
        raise UnknownLanguage(f"no language {name!r:.80}: there are {known} ({VARIABLE} adds some)")
    return found


def languages_of(kind: str) -> tuple[Language, ...]:
    """Languages of a kind of device."""
    return tuple(each for each in LANGUAGES.values() if each.kind == kind)


def reports_resources(name: object) -> bool:
    """Whether compilers say what kernels of a language use: those for GPUs do. The name may be of
    an earlier run, and not known today.
    """
    found = LANGUAGES.get(str(name))
    return found is None or found.kind == "gpu"


def compiled_by_triton(name: str) -> bool:
    """Whether kernels of a language are made and launched as Triton makes and launches its own."""
    found = LANGUAGES.get(name)
    return found is not None and not found.compiler


def how_to_write(kind: str = ANY) -> str:
    """Explain how host code makes kernels of a kind of device, or of any."""
    return _either([each.written for each in LANGUAGES.values() if kind in (ANY, each.kind)])


def _either(texts: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def language_of(name: str) -> Language:
    """Language of a seed by its file's name: triton_*, cuda_*, cpp_*.

    Raises:
        UnknownLanguage: It begins as no seed does.
    """
    for each in LANGUAGES.values():
        if name.startswith(each.seed_prefix):
            return each
    prefixes = _either([each.seed_prefix for each in LANGUAGES.values()])
    raise UnknownLanguage(f"{name}: a seed's name begins with {prefixes}")


def languages_in(source: str) -> tuple[Language, ...]:
    """Return the languages of a candidate's kernels."""
    return tuple(each for each in LANGUAGES.values() if each.is_in(source))


def language_of_source(source: str) -> Language:
    """Return the language that a candidate counts as: a CPU's language before a GPU's, and the
    first of several; Triton where it shows none.
    """
    found = sorted(languages_in(source), key=lambda each: each.kind != "cpu")
    return found[0] if found else TRITON


_CUTE_RULES = """\
- CuTe DSL 4.8: `import cutlass`, `import cutlass.cute as cute`, `@cute.kernel` for kernels and \
`@cute.jit` for the function that launches them: `.launch(grid=, block=, cluster=, smem=)`. The \
entry calls it with `from_dlpack(x, assumed_align=16).mark_layout_dynamic()` of \
`cutlass.cute.runtime`, on the current stream. Other layouts are compiled for each shape.
- It is compiled while host code is traced, for 1 to 4 s: few variants. Errors name the line.
"""

_CUTILE_RULES = """\
- cuTile 1.7: `import cuda.tile as ct`, `@ct.kernel` for kernels, and in host code `ct.launch(\
torch.cuda.current_stream(), grid, kernel, (x, y, 4))`; parameters that are known at compile time \
are annotated `ct.Constant[int]`. Kernels see tensors and numbers; no lists, tuples or flags that \
are not constant.
- A kernel works on tiles, whose sizes are powers of two: `ct.bid(0)`, `ct.load(x, index=(i, 0), \
shape=(1, 1024), padding_mode=ct.PaddingMode.ZERO)`, `ct.store(y, index=(i, 0), tile=t)`. An index \
counts tiles. What lies outside of the tensor is not written.
- It is compiled for each combination of sizes' divisors, for 1 to 3 s.
"""

TRITON = register(
    Language(
        name="triton",
        title="Triton",
        kind="gpu",
        pattern=r"@(triton\.)?jit\b",
        written="@triton.jit",
        fences=("triton",),
        interpreter="Triton's interpreter",
        unseen="races, memory accesses and the compiled code's rounding",
        requires=("triton>=3.6",),
    )
)
GLUON = register(
    Language(
        name="gluon",
        title="Gluon",
        kind="gpu",
        pattern=r"@gluon\.jit\b",
        written="@gluon.jit",
        fences=("gluon",),
        interpreter="the simulation of Gluon",
        unseen="layouts, proxy fences, clusters and the compiled code's rounding",
        requires=("triton>=3.6",),
    )
)
CUDA = register(
    Language(
        name="cuda",
        title="CUDA",
        kind="gpu",
        pattern=r"\bcuda_kernel\s*\(",
        written="cuda_kernel(name, source)",
        compiler="kagent_sandbox.builder.compile.cuda",
        kernel_fences=("cu", "cuh", "cuda", "hip", "ptx"),
    )
)
CUTE = register(
    Language(
        name="cute",
        title="CuTe DSL",
        kind="gpu",
        pattern=r"@cute\.(jit|kernel)\b|\bcute\.compile\b|\b(from|import)\s+(quack|flash_attn\.cute)\b",
        written="@cute.jit",
        tracer="kagent_sandbox.builder.trace.cute_dsl",
        tracer_s=30.0,
        fences=("cute",),
        requires=("nvidia-cutlass-dsl>=4.8",),
        rules=_CUTE_RULES,
    )
)
CUTILE = register(
    Language(
        name="cutile",
        title="cuTile",
        kind="gpu",
        pattern=r"\b(import|from)\s+cuda\.tile\b|\bfrom\s+cuda\s+import\s+tile\b",
        written="@ct.kernel",
        tracer="kagent_sandbox.builder.trace.cutile",
        tracer_s=10.0,
        fences=("cutile",),
        requires=("cuda-tile>=1.7",),
        rules=_CUTILE_RULES,
    )
)
CPP = register(
    Language(
        name="cpp",
        title="C++",
        kind="cpu",
        pattern=r"\bcpp_kernel\s*\(",
        written="cpp_kernel(name, source)",
        compiler="kagent_sandbox.builder.compile.cpp",
        kernel_fences=("c", "cc", "c++", "cpp", "h", "hpp"),
    )
)

PLUGINS = tuple(name for name in os.environ.get(VARIABLE, "").replace(" ", "").split(",") if name)
"""Modules that register further languages. Child processes import them first (`ForkServer`)."""
for _name in PLUGINS:
    try:
        importlib.import_module(_name)
    except ImportError as e:
        raise UserError(f"{VARIABLE} names {_name}, which cannot be imported: {e}") from e
