"""Variables of a CUDA module, from its PTX: memory without contents that its code uses.

All launches share it. A counter of blocks there, or a workspace, is silently wrong where two
streams run the kernel at once: nothing that the judge times or checks does, but programs do. Honest
kernels are told so while they are built. Who wants to hide a variable can give it contents: of such
memory there is little (`binary.static_memory`), and a library's own tests call it from two streams.

Constants that are zero have no contents either: tags of cuda/ptx, a trait's `value`. Only their
declaration names them, since the compiler knows what they are.
"""

from __future__ import annotations

import re
from collections import Counter

# https://docs.nvidia.com/cuda/parallel-thread-execution/: variable declarations
_DECLARATION = re.compile(
    r"\.global\s+(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+\d+\s+)?(?:\.v[24]\s+)?\.[a-z]\w*\s+"
    r"([\w$%][^;]*);"
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_CONTENTS = re.compile(r"\{[^{}]*\}")
_NAME = re.compile(r"[\w$%]+")
_LENGTH = re.compile(r"(?<![a-z])\d+")  # of a part of a mangled name, not the 2 of ILj2EE


def used_variables(ptx: str) -> list[str]:
    """Names of variables without contents that a module's code uses, as its source has them."""
    text = _COMMENT.sub(" ", ptx)
    declared = dict.fromkeys(name for d in _DECLARATION.findall(text) for name in _empty(d))
    if not declared:
        return []
    uses = Counter(name for name in _NAME.findall(text) if name in declared)
    return [_in_source(name) for name in declared if uses[name] > 1]


def _empty(declarators: str) -> list[str]:
    """Names of those that are given no contents."""
    while (shorter := _CONTENTS.sub("", declarators)) != declarators:
        declarators = shorter  # braces in braces
    found = [_NAME.match(d.strip()) for d in declarators.split(",") if "=" not in d]
    return [name[0] for name in found if name]


def _in_source(name: str) -> str:
    """A mangled name's last part."""
    if not name.startswith("_Z"):
        return name
    at, last = 2, name
    while found := _LENGTH.search(name, at):
        at = found.end() + int(found[0])
        last = name[found.end() : at]
    return last
