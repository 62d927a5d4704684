"""CUTLASS's and CuTe's headers for CUDA sources that include them: from NVIDIA's wheel.

The wheel's newest release (4.2) is older than the libcu++ of CUDA 13.3, which refuses two of its
habits: declarations of `std::tuple_size` with any number of parameters, and a `get` of its own for
libcu++'s integer sequences, which has one by now. NVRTC gets the few headers that have them from
memory, mended; a release that needs no mending is taken as it is.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import HeadersMissing

PACKAGE = "nvidia-cutlass"
VERSION = "4.2.0.0"  # that the mends were tried with
_INCLUDED = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*[<\"]((?:cute|cutlass)/[^>\"\n]*)", re.MULTILINE
)
_VERSION = re.compile(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) +(\d+)")
_MENDS = (
    (
        re.compile(
            r"template <(?P<index>size_t _Ip, )?class\.\.\. _Tp>"
            r"(?P<rest>\s+struct tuple_(?:size|element);)"
        ),
        r"template <\g<index>class _Tp>\g<rest>",
    ),
    (
        re.compile(
            r"using CUTE_STL_NAMESPACE::integer_sequence;\s+"
            r"using CUTE_STL_NAMESPACE::make_integer_sequence;"
        ),
        """\
template <class T, T... Values>
struct integer_sequence {};

namespace detail {
template <class Sequence>
struct as_own_sequence;

template <class T, T... Values>
struct as_own_sequence<CUTE_STL_NAMESPACE::integer_sequence<T, Values...>> {
  using type = integer_sequence<T, Values...>;
};
}  // namespace detail

template <class T, T Size>
using make_integer_sequence =
    typename detail::as_own_sequence<CUTE_STL_NAMESPACE::make_integer_sequence<T, Size>>::type;
""",
    ),
)
"""Patterns in CUTLASS's sources and their replacements."""


@dataclass(frozen=True, slots=True)
class CutlassHeaders:
    """Folder of the headers."""

    folder: str  # for the compiler to search
    version: str  # "4.2.0"
    mended: Mapping[str, str]  # text by the name under which a source includes it


def included_in(source: str) -> str | None:
    """Return the first header of CUTLASS or CuTe that a source includes, or None."""
    found = _INCLUDED.search(source)
    return found[1] if found else None


@functools.cache
def headers() -> CutlassHeaders:
    """Headers of the installed wheel.

    Raises:
        HeadersMissing: It is not installed; the text says what to install.
    """
    folder = find_headers()
    if folder is None:
        raise HeadersMissing(
            "the headers of CUTLASS and CuTe are not installed", f"{PACKAGE}=={VERSION}"
        )
    version = ".".join(_VERSION.findall((folder / "cutlass" / "version.h").read_text("utf-8")))
    mended = {}
    for path in sorted(folder.glob("cute/*/*.hpp")):
        text = path.read_text("utf-8")
        changed = text
        for pattern, mended_text in _MENDS:
            changed = pattern.sub(mended_text, changed)
        if changed != text:
            mended[path.relative_to(folder).as_posix()] = changed
    return CutlassHeaders(str(folder), version, mended)


def find_headers() -> Path | None:
    """The wheel's folder of headers, or None; found without running the package's code."""
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "source" / "include"
        if (folder / "cutlass" / "version.h").is_file() and (folder / "cute").is_dir():
            return folder
    return None
