"""Loops over the elements of a row: a row that one block holds is read once, and longer ones are
loaded ahead.
"""

from __future__ import annotations

import ast

WHOLE = "R0_WHOLE"
"""Parameter of a kernel: whether each row fits in one block."""
STAGES = "R0_STAGES"
"""Parameter of a kernel: blocks of a row that are on their way at once."""
MOST_SHARED = 96 << 10
"""Bytes of shared memory that these may take: a GPU has 99 KiB or more for a block."""
_LOOP = "tl.range(0, r0_numel, R0_BLOCK)"


def improve_row_loops(node: ast.FunctionDef) -> int:
    """Have a kernel's loops over its rows take `WHOLE` and `STAGES`, if it has such loops.

    With one block the number of turns is known: the compiler leaves loops out, and sees that the
    second one loads what the first one has loaded. How long what is loaded is to stay in the cache
    must then be the same for both. Inductor writes one loop for each time that it needs the row,
    unless it knows the row's length.

    Returns:
        Loads of the loop that has most of them; 0 where there is no such loop. Each has a buffer
        for each block that is on its way, but for one.
    """
    loops = [n for n in ast.walk(node) if isinstance(n, ast.For) and ast.unparse(n.iter) == _LOOP]
    if not loops or any(ast.unparse(n).startswith("tl.dot(") for n in ast.walk(node)):
        return 0
    until = f"R0_BLOCK if {WHOLE} else r0_numel"
    for loop in loops:
        loop.iter = _parsed(f"tl.range(0, {until}, R0_BLOCK, num_stages={STAGES})")
        for call in ast.walk(loop):
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                if keyword.arg == "eviction_policy":
                    keyword.value = _parsed(f"'' if {WHOLE} else {ast.unparse(keyword.value)}")
    node.args.args += [ast.arg(name, _parsed("tl.constexpr")) for name in (WHOLE, STAGES)]
    return max(1, *(ast.unparse(loop).count("tl.load(") for loop in loops))


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
