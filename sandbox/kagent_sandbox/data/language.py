"""Languages that kernels are written in."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias


def language_of(name: str) -> Language:
    """Language of a seed by its file's name: triton_*, cuda_* or cpp_*.

    Raises:
        ValueError: It begins with none of them.
    """
    for language in ("triton", "cuda", "cpp"):
        if name.startswith(f"{language}_"):
            return language
    raise ValueError(f"{name}: a seed's name begins with triton_, cuda_ or cpp_")


def language_of_source(source: str) -> Language:
    """C++ if it makes a C++ kernel, CUDA if it makes a CUDA kernel and no Triton one."""
    if re.search(r"\bcpp_kernel\s*\(", source):
        return "cpp"
    uses_triton = re.search(r"@(triton\.)?jit\b|@gluon\.jit\b", source)
    if re.search(r"\bcuda_kernel\s*\(", source) and not uses_triton:
        return "cuda"
    return "triton"


Language: TypeAlias = Literal["triton", "cuda", "cpp"]
