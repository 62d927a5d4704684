"""Products of matrices in Inductor's Triton, as fast and as exact as a library has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kagent.authoring.inductor.host import INDENT

CHAIN = 512
"""Products that are summed in one accumulator; a multiple of all blocks' lengths."""
PRECISION = "DOT_PRECISION"
"""Parameter of a kernel with a product in float32: how Triton multiplies."""
PADDED_ROWS = """
# Loads of 16 bytes need rows that begin at multiples of them: others are copied to where they do,
# but for short rows, which would become much longer, and where indices need more than 32 bits.
def _row(x, columns):
    each = 16 // x.element_size()
    row = -(-columns // each) * each
    return row if 4 * row <= 5 * columns and x.numel() // columns * row < 2**31 else columns


def _rows(x, columns):
    row = _row(x, columns)
    if row == columns:
        return x
    rows = x.numel() // columns
    wide = torch.empty((rows, row), dtype=x.dtype, device=x.device)
    wide[:, :columns].copy_(torch.as_strided(x, (rows, columns), (columns, 1)))
    wide[:, columns:].zero_()
    return wide
"""
"""Host code for operands whose rows may begin anywhere."""
SPLIT_K = "SPLIT_K"
"""Parameter of a kernel whose sums may be made in parts (split-K): their number, a power of two."""
SPLITS_OF = f"""
# A product of few tiles leaves most of an H100's 132 multiprocessors idle. So many programs share
# the sums of a tile (split-K), each with thousands of products.
def _splits_of(result, tiles, length):
    most = min(64, 264 // max(1, tiles), length // {8 * CHAIN}) if result.is_contiguous() else 1
    return 1 << (most.bit_length() - 1) if most > 1 else 1
"""
"""Host code for the number of parts."""
SUM_SPLITS = """
@triton.jit
def _sum_splits(in_ptr, out_ptr, numel, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    split = tl.arange(0, SPLIT_K)[:, None].to(tl.int64)
    sums = tl.load(in_ptr + split * numel + index[None, :], mask[None, :], other=0.0)
    tl.store(out_ptr + index, tl.sum(sums, 0), mask)
"""
"""Kernel that adds the parts up, always in the same order."""
_OPERANDS = re.compile(
    r"(\w+) = (?:tl\.reshape\((\w+), \[YBLOCK, R0_BLOCK\]\)"
    r"|tl\.trans\(tl\.reshape\((\w+), \[XBLOCK, R0_BLOCK\]\)\))"
)
_INDEX = re.compile(
    r"tl\.load\((\w+) \+ \((?:(\w+) \+ (ks\d+) \* (\w+)|(ks\d+) \* (\w+) \+ (\w+))\),"
)
_X_OFFSET = re.compile(r"xoffset = tl\.program_id\(0\)(?:\.to\(tl\.int64\))? \* XBLOCK")
_UNCHANGED = re.compile(r"\w+ = \w+(?:\[:, :, None\]|\.to\(tl\.float32\))?")
_STORE = re.compile(r"tl\.store\((out_ptr\d+) \+ (.+), (\w+, \w+(?: & \w+)*)\)")
_SUBSCRIPTS = {
    "y": ("[None, :, None, None]", "[:, None, None]"),
    "x": ("[None, None, :, None]", "[None, :, None]"),
    "r0": ("[None, None, None, :]", "[None, None, :]"),
}
_BLOCKS = {"y": "YBLOCK", "x": "XBLOCK", "r0": "R0_BLOCK"}
_AXES = {"xindex": "xnumel", "yindex": "ynumel", "r0_index": "r0_numel"}


@dataclass(frozen=True)
class PaddedOperand:
    """An operand whose rows may begin anywhere; the host copies it to where they do not.

    Attributes:
        pointer: Parameter of its address.
        size: Parameter of its rows' length.
        parameter: Parameter of the length that rows have as they are given.
    """

    pointer: str
    size: str
    parameter: str


def improve_products(node: ast.FunctionDef, given: Mapping[str, str]) -> list[PaddedOperand]:
    """Have a kernel load what it multiplies as matrices, and sum in short chains.

    Args:
        node: The kernel.
        given: Host code's expressions by parameter.

    Returns:
        Operands that are to be given with whole rows (`PADDED_ROWS`). The lengths of these are
        parameters after the others.
    """
    rows = _load_matrices(node, given)
    at = sum(not a.arg.endswith("BLOCK") for a in node.args.args)
    node.args.args[at:at] = [ast.arg(r.parameter) for r in rows]
    _shorten_chains(node)
    return rows


def choose_precision(node: ast.FunctionDef) -> bool:
    """Make the precision of products in float32 a parameter, if there are any."""
    found = False
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.dot":
            for keyword in call.keywords:
                if keyword.arg == "input_precision":
                    keyword.value = ast.Name(PRECISION, ast.Load())
                    found = True
    if found:
        constant = ast.parse("tl.constexpr", mode="eval").body
        node.args.args.append(ast.arg(PRECISION, constant))
    return found


def split_k(node: ast.FunctionDef) -> str:
    """Have `SPLIT_K` programs share a tile's sums, if a kernel does nothing but store sums of
    chains (`improve_products`): they take chains in turn, and each stores what its own come to in a
    matrix of its own, one behind the other.

    Four programs had all of a product of 256 × 256 with sums of 524288: 0.044 times as fast as
    torch's (H200).

    Args:
        node: The kernel. Its first axis of programs is x's.

    Returns:
        Parameter of the address of the matrix or matrices; "" where the kernel stays as it is.
    """
    texts = [ast.unparse(s) for s in node.body]
    loops = [i for i, t in enumerate(texts) if t.startswith("for r0_chain in ")]
    offsets = [i for i, t in enumerate(texts) if _X_OFFSET.fullmatch(t)]
    if len(loops) != 1 or len(offsets) != 1:
        return ""
    (loop,), (offset,) = loops, offsets
    *between, last = texts[loop + 1 :]
    store = _STORE.fullmatch(last)
    span = re.match(rf"for r0_chain in tl\.range\(0, (\w+), {CHAIN}\):", texts[loop])
    whole = ast.unparse(node)
    if store is None or span is None or not all(map(_UNCHANGED.fullmatch, between)):
        return ""
    pointer, index, rest = store.groups()
    if len(re.findall(rf"\b{pointer}\b", whole)) != 2:  # it is declared, and written once
        return ""
    mine = "tl.cast(split, tl.int64) * ynumel * xnumel"
    texts[-1] = f"tl.store({pointer} + {mine} + ({index}), {rest})"
    chains = f"tl.range(split * {CHAIN}, {span[1]}, {SPLIT_K} * {CHAIN})"
    texts[loop] = texts[loop].replace(span[0], f"for r0_chain in {chains}:", 1)
    text = texts[offset].replace(" * XBLOCK", f" // {SPLIT_K} * XBLOCK")
    texts[offset] = f"split = tl.program_id(0) % {SPLIT_K}\n{text}"
    node.body = ast.parse("\n".join(texts)).body
    node.args.args.append(ast.arg(SPLIT_K, ast.parse("tl.constexpr", mode="eval").body))
    return pointer


# -- operands --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    """An operand: a block that is loaded with three axes, y, x and r0, of which it has two."""

    target: str
    block: str
    suffix: str  # of the names of its own
    axes: tuple[str, str]  # in the order of the matrix

    @property
    def shape(self) -> tuple[str, str]:
        """Blocks of both axes."""
        first, second = (_BLOCKS[a] for a in self.axes)
        return first, second

    @property
    def subscripts(self) -> dict[str, str]:
        """Places of an axis's elements, by the subscripts that they had: without and with a z axis,
        whose block is one.
        """
        first, second = (_SUBSCRIPTS[a] for a in self.axes)
        return dict.fromkeys(first, "[:, None]") | dict.fromkeys(second, "[None, :]")


def _load_matrices(node: ast.FunctionDef, given: Mapping[str, str]) -> list[PaddedOperand]:
    """Have the operands of a product loaded with the axes that they have as matrices.

    Inductor loads [YBLOCK, 1, R0_BLOCK] and [1, XBLOCK, R0_BLOCK], and reshapes and transposes
    these. The compiler's pipeline ends before that: everything goes through shared memory twice,
    with conflicts where rows are not aligned. In float32 with rows of odd lengths that took 4.5
    times as long (H200, 6.2 TFLOP/s against 28).
    """
    body = list(_assignments(node))
    operands = [
        _Matrix(m[1], m[2], "_a", ("y", "r0")) if m[2] else _Matrix(m[1], m[3], "_b", ("r0", "x"))
        for s in body
        if (m := _OPERANDS.fullmatch(ast.unparse(s)))
    ]
    if len(operands) != 2 or {o.suffix for o in operands} != {"_a", "_b"}:
        return []
    blocks = {o.target for o in operands}
    found: dict[int, list[ast.stmt]] = {}
    rows: list[PaddedOperand] = []
    for operand in operands:
        made = _copies(body, operand)
        if made is None:
            return []
        rows += _whole_rows(made, operand, ast.unparse(node), given)
        for at, statement in made.items():
            kept = [] if _name(body[at]) in blocks else [body[at]]
            found.setdefault(at, list(kept)).append(statement)
    _Replace({id(body[at]): made for at, made in found.items()}).visit(node)
    return rows


def _copies(body: list[ast.Assign], operand: _Matrix) -> dict[int, ast.stmt] | None:
    """Statements for an operand alone, by the statement that each goes behind; None where it has
    parts that are not known here.
    """
    needed, own = {operand.block}, set[str]()
    chosen: list[int] = []
    for at in reversed(range(len(body))):
        if _name(body[at]) in needed:
            chosen.append(at)
            needed |= _read(body[at])
    copies: dict[int, ast.stmt] = {}
    for at in reversed(chosen):
        text = ast.unparse(body[at])
        for old, new in operand.subscripts.items():
            text = text.replace(old, new)
        text = re.sub(r"\[1(, 1){2,3}\]", "[1, 1]", text)
        text = re.sub(r"\[(\w+, ){2,3}R0_BLOCK\]", f"[{', '.join(operand.shape)}]", text)
        if re.search(r"None, None|None, :, None|tl\.(?:reshape|trans)", text):
            return None
        axes = "tl.arange(" in text or "tl.full([1, 1]," in text
        if not axes and not own & _read(body[at]):
            continue  # it has no axes: both operands use it
        own.add(_name(body[at]))
        for name in own:
            text = re.sub(rf"\b{name}\b", name + operand.suffix, text)
        (copies[at],) = ast.parse(text).body
    if operand.block not in own:
        return None
    last = next(at for at, s in enumerate(body) if _name(s) == operand.target)
    (copies[last],) = ast.parse(f"{operand.target} = {operand.block}{operand.suffix}").body
    return copies


def _whole_rows(
    copies: dict[int, ast.stmt],
    operand: _Matrix,
    kernel: str,
    given: Mapping[str, str],
) -> list[PaddedOperand]:
    """Have an operand's rows be as long as the host says, if they are those of a whole tensor.

    Four bytes at a time, as where rows are of odd lengths, loads take longer than the product: 22
    TFLOP/s instead of 54 (H200, the second matrix transposed). Of a whole tensor means: one load
    reads it, with the rows' length as the stride, and nothing is computed on the way.
    """
    texts = {at: ast.unparse(s) for at, s in copies.items()}
    values = dict(t.split(" = ", 1) for t in texts.values())
    found = [(at, m) for at, t in texts.items() if (m := _INDEX.search(t))]
    if len(found) != 1 or sum("tl.load(" in t for t in texts.values()) != 1:
        return []
    ((load, match),) = found
    pointer, size = match[1], match[3] or match[5]
    index = values.get(match[2] or match[7], "")
    length = _AXES.get(index.removesuffix(operand.suffix), "")
    bound = f"{index} < {length}"
    masks = [at for at, t in texts.items() if t.endswith(f" = {bound}")]
    if len(masks) != 1 or length not in given or given[size] != given[length]:
        return []
    if not given[pointer].isidentifier():  # a view, whose rows may lie apart
        return []
    if len(re.findall(rf"\b{pointer}\b", kernel)) != 2:  # it is declared, and read once
        return []
    row = f"row{operand.suffix}"
    for at, old in ((load, size), (masks[0], length)):
        (copies[at],) = ast.parse(re.sub(rf"\b{old}\b", row, texts[at])).body
    return [PaddedOperand(pointer, size, row)]


def _assignments(node: ast.AST) -> Iterator[ast.Assign]:
    """Assignments to a name, in the order of the text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            yield child
        yield from _assignments(child)


def _name(statement: ast.Assign) -> str:
    return ast.unparse(statement.targets[0])


def names_in(node: ast.AST) -> set[str]:
    """All names in a piece of code."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _read(statement: ast.Assign) -> set[str]:
    return names_in(statement.value)


class _Replace(ast.NodeTransformer):
    def __init__(self, made: dict[int, list[ast.stmt]]) -> None:
        self._made = made

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        return self._made.get(id(node), node)


# -- sums ------------------------------------------------------------------------------------------


def _shorten_chains(node: ast.FunctionDef) -> None:
    """Have sums of products in a loop end after `CHAIN` products, and add what they come to with
    compensation (Kahan's).

    A GPU adds each product to the accumulator: over 524288 positive ones in float32 the error was
    7.4e-5 (H100), 280 times that of torch.
    """
    for at, loop in enumerate(node.body):
        if not (isinstance(loop, ast.For) and "tl.dot(" in ast.unparse(loop)):
            continue
        span = re.fullmatch(r"tl\.range\(0, (\w+), (\w+)\)", ast.unparse(loop.iter))
        zeros = {
            name: shape
            for s in node.body[:at]
            if (found := re.fullmatch(r"(\w+) = (tl\.full\(.*, 0, tl\.float32\))", ast.unparse(s)))
            for name, shape in [found.groups()]
        }
        added = [n for n in zeros if re.search(rf"= {n} \+ \w+$", ast.unparse(loop), re.MULTILINE)]
        if span is None or not added:
            continue
        size, block = span.groups()
        lines = [f"{n}_lost = {zeros[n]}" for n in added]
        lines.append(f"for r0_chain in tl.range(0, {size}, {CHAIN}):")
        lines += [f"{INDENT}{n}_part = {zeros[n]}" for n in added]
        end = f"tl.minimum(r0_chain + {CHAIN}, {size})"
        loop.iter = ast.parse(f"tl.range(r0_chain, {end}, {block})", mode="eval").body
        inner = ast.unparse(loop)
        for n in added:
            inner = re.sub(rf"\b{n}\b", f"{n}_part", inner)
        lines += [INDENT + line for line in inner.splitlines()]
        for n in added:
            lines += [
                f"{INDENT}{n}_part = {n}_part - {n}_lost",
                f"{INDENT}{n}_sum = {n} + {n}_part",
                f"{INDENT}{n}_lost = {n}_sum - {n} - {n}_part",
                f"{INDENT}{n}_lost = tl.where({n}_lost == {n}_lost, {n}_lost, 0.0)",  # of infinity
                f"{INDENT}{n} = {n}_sum",
            ]
        node.body[at : at + 1] = ast.parse("\n".join(lines)).body
        return
