"""Loops over the elements of a row: a row that one block holds is read once, and longer ones are
loaded ahead.
"""

from __future__ import annotations

import ast

WHOLE = "R0_WHOLE"
"""Parameter of a kernel: whether each row fits in one block."""
STAGES = "R0_STAGES"
"""Parameter of a kernel: blocks of a row that are on their way at once."""
_LOOP = "tl.range(0, r0_numel, R0_BLOCK)"


def improve_row_loops(node: ast.FunctionDef) -> bool:
    """Have a kernel's loops over its rows take `WHOLE` and `STAGES`, if it has such loops.

    With one block the number of turns is known: the compiler leaves loops out, and sees that the
    second one loads what the first one has loaded. How long a loaded word is to stay in the cache
    must then be the same for both. Inductor writes one loop for each time that it needs the row,
    unless it knows the row's length.
    """
    loops = [n for n in ast.walk(node) if isinstance(n, ast.For) and ast.unparse(n.iter) == _LOOP]
    if not loops or any(ast.unparse(n).startswith("tl.dot(") for n in ast.walk(node)):
        return False
    until = f"R0_BLOCK if {WHOLE} else r0_numel"
    for loop in loops:
        loop.iter = _parsed(f"tl.range(0, {until}, R0_BLOCK, num_stages={STAGES})")
        for call in ast.walk(loop):
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                if keyword.arg == "eviction_policy":
                    keyword.value = _parsed(f"'' if {WHOLE} else {ast.unparse(keyword.value)}")
    node.args.args += [ast.arg(name, _parsed("tl.constexpr")) for name in (WHOLE, STAGES)]
    return True


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
