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
_DECLARED = re.compile(
    r"\.global\s+(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+\d+\s+)?(?:\.v[24]\s+)?\.[a-z]\w*\s+"
    r"([\w$%]+)(?:\[[^\]]*\])*\s*;"
)
_NAME = re.compile(r"[\w$%]+")
_LENGTH = re.compile(r"(?<![a-z])\d+")  # of a part of a mangled name, not the 2 of ILj2EE


def used_variables(ptx: str) -> list[str]:
    """Names of variables without contents that a module's code uses, as its source has them."""
    declared = dict.fromkeys(_DECLARED.findall(ptx))
    if not declared:
        return []
    uses = Counter(name for name in _NAME.findall(ptx) if name in declared)
    return [_in_source(name) for name in declared if uses[name] > 1]


def _in_source(name: str) -> str:
    """A mangled name's last part."""
    if not name.startswith("_Z"):
        return name
    at, last = 2, name
    while found := _LENGTH.search(name, at):
        at = found.end() + int(found[0])
        last = name[found.end() : at]
    return last
