"""Blocks of elements that are all there, without masks: those load and store whole words."""

from __future__ import annotations

import ast
import re

_MASK = "xmask = xindex < xnumel"
_PLACES = ("tl.load", "tl.store")


def leave_masks_to_the_last(node: ast.FunctionDef) -> None:
    """Have a kernel that goes through elements in their order use masks in its last block alone.

    Where 4 does not divide the number of elements, a mask may begin within a word: each element of
    float32 was loaded by itself, at 63 % of the roofline instead of 101 % (H200, x / (1 + |x|)).
    """
    texts = [ast.unparse(s) for s in node.body]
    if _MASK not in texts or "tl.arange(0, XBLOCK)[:]" not in " ".join(texts):
        return
    at = texts.index(_MASK) + 1
    rest = node.body[at:]
    if not rest or any(not isinstance(s, ast.Assign | ast.Expr) for s in rest):
        return
    text = "\n".join(texts[at:])
    order = set(re.findall(r"^(\w+) = xindex$", text, re.MULTILINE))
    places = re.findall(r"tl\.(?:load|store)\(\w+ \+ (\w+)[,)]", text)
    if len(places) != len(re.findall(r"\btl\.(?:load|store)\(", text)):
        return  # places are computed: neighbours need not lie beside each other
    if not set(places) <= order | {"0"}:
        return
    unmasked = ast.parse("\n".join(texts[at:])).body
    masks = _Unmask()
    unmasked = [masks.visit(s) for s in unmasked]
    if any(isinstance(n, ast.Name) and n.id == "xmask" for s in unmasked for n in ast.walk(s)):
        return
    whole = ast.parse("XBLOCK <= xnumel - xoffset", mode="eval").body  # a sum could overflow
    node.body[at:] = [ast.If(whole, unmasked, rest)]


class _Unmask(ast.NodeTransformer):
    """Takes `xmask` out of loads and stores."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        place = 1 if name == "tl.load" else 2
        if name in _PLACES and len(node.args) > place:
            if ast.unparse(node.args[place]) == "xmask":
                del node.args[place]
                node.keywords = [k for k in node.keywords if k.arg != "other"]
            else:
                node.args[place] = _without(node.args[place])
        return node


def _without(mask: ast.expr) -> ast.expr:
    """A mask that is several together, without `xmask`."""
    if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        for one, other in ((mask.left, mask.right), (mask.right, mask.left)):
            if ast.unparse(one) == "xmask":
                return other
    return mask
