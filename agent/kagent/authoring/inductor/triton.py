"""Inductor's Triton as a candidate: its kernels, without its run-time library, and host code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kagent_sandbox.data.task import Task
from torch._inductor.runtime import triton_helpers

from kagent.authoring.inductor.host import INDENT, case_dtypes, host_function, kernels_of, wrapped
from kagent.authoring.inductor.products import (
    PADDED_ROWS,
    PRECISION,
    SPLIT_K,
    SPLITS_OF,
    SUM_SPLITS,
    PaddedOperand,
    choose_precision,
    improve_products,
    names_in,
    split_k,
)
from kagent.authoring.inductor.row_loops import MOST_SHARED, STAGES, WHOLE, improve_row_loops
from kagent.authoring.inductor.trace import NoSeed, Traced
from kagent.authoring.inductor.whole_blocks import leave_masks_to_the_last

_MOST_Y_PROGRAMS = 65535
_DOT_SIDES = [32, 64, 128]
_DOT_BLOCKS: Mapping[bool, Mapping[str, tuple[int, list[int]]]] = {
    False: {"YBLOCK": (64, _DOT_SIDES), "XBLOCK": (64, _DOT_SIDES), "R0_BLOCK": (32, [32, 64])},
    True: {"YBLOCK": (128, [64, 128]), "XBLOCK": (64, [64, 128]), "R0_BLOCK": (16, [16, 32])},
}
"""Blocks of products, and of those in float32, and which others are tried. Those in float32 did
best on the whole of 24 (H200; rows of any length, the second matrix transposed or not).
"""
_INNER_STAGES = "INNER_" + STAGES, 3, [1, 3, 4]
_OUTER_STAGES = "OUTER_" + STAGES, 1, [1, 2, 3]
"""Blocks of a row that are on their way at once. Three were slower where lanes are not along the
row: a mean and an argmin at 0.75 and 0.71 times torch's best, where they had 0.87 and 0.84 (H200).
"""
_SIZE = re.compile(r"ks\d+|[xyz]numel|r\d_numel|row_[ab]")
_WORD = """
# The compiler knows of a number only whether 16 divides it. Sizes go as a number of words and their
# length: it sees that the length divides their product, and loads and stores whole words.
def _word(size):
    return math.gcd(size, 16) if size < 2**31 else 1  # the product is of the words' type
"""
_IN_LANGUAGE = (
    *("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt"),
)
"""Functions that Triton's language has itself, and its interpreter with it."""
_OWN = {
    "isnan": "return x != x",
    "mul_rn": "return x * y",  # whether a sum follows in one rounding or two, both are right
    "isinf": "return tl.abs(x) == float('inf')",
    "trunc": "return tl.where(x < 0, tl.ceil(x), tl.floor(x))",
    "nearbyint": """
        low = tl.floor(x)
        rest = x - low
        odd = low - 2 * tl.floor(low / 2)
        return low + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1)), 1.0, 0.0)
        """,
    "expm1": """
        y = tl.exp(x)
        near = tl.where(y == 1, x, (y - 1) * x / tl.where(y == 1, 1.0, tl.log(y)))
        return tl.where(tl.abs(x) < 1, near, y - 1)
        """,
    "log1p": """
        y = 1 + x
        near = tl.log(y) * x / tl.where(y == 1, 1.0, y - 1)
        return tl.where((y == 1) | (y == float('inf')), x, near)
        """,
    "tanh": """
        s = x * x
        near = (-0.00627639101 * s + 0.0211162167) * s - 0.0538751389
        near = (near * s + 0.13332924) * s - 0.333333304
        e = tl.exp(-2 * tl.abs(x))
        far = 1 - 2 * e / (1 + e)
        return tl.where(tl.abs(x) < 0.6, x + x * (s * near), tl.where(x < 0, -far, far))
        """,
    "pow": "return tl.exp2(y * tl.log2(x))",
}
"""Functions of CUDA's library, which the interpreter lacks, written out, as exact as float32.
Near 0, tanh is x times a polynomial that was fitted to tanh(x) / x.
"""


_INSTEAD = {
    "div_floor_integer": """
@triton.jit
def div_floor_integer(a, b):
    quotient = a // b
    product = quotient * b
    return tl.where((product != a) & ((product > a) == (b > 0)), quotient - 1, quotient)
""",
    "remainder_integer": """
@triton.jit
def remainder_integer(a, b):
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
""",
    "welford_reduce": """
@triton.jit
def welford_reduce(value, mean, m2, weight, count):
    delta = value - mean
    mean += delta * (1 / tl.cast(count, value.dtype))
    return (mean, m2 + delta * (value - mean), weight + 1)
""",
    "welford": """
@triton.jit
def welford(mean, m2, weight, dim):
    count = tl.sum(weight, dim)
    whole = tl.sum(mean * weight, dim) / tl.maximum(count, 1)
    rest = mean - tl.expand_dims(whole, dim)
    return (whole, tl.sum(m2 + rest * rest * weight, dim), count)
""",
}
"""Functions of Inductor's run-time library that are others here. A quotient of constants is rounded
down, and one of a kernel's numbers towards 0: these are right for both. Welford's sums of squares
divide by the number of a lane's values once for all, where Inductor's do in each lane, and put
all lanes together at the end, not pair by pair.
"""


@dataclass
class _Kernel:
    """A kernel, and how Inductor meant it to be launched."""

    name: str
    lines: list[str]
    parameters: list[str]
    blocks: list[str]  # XBLOCK, ...: tunables
    words: list[str]  # parameters that come in words, with their length: see `_WORD`
    constants: list[str]  # parameters that a kernel is compiled for
    grid: str
    inner: bool  # it sums along the dimension that is contiguous
    dot: bool
    precise: bool  # a parameter says how it multiplies
    split: str  # the parameter that sums go to, if they may be made in parts
    padded: Sequence[PaddedOperand]
    unread: Sequence[str]  # parameters that the kernel has no more
    hints: Mapping[str, int]
    reduces: bool
    row_loads: int  # of a loop over its rows, which has the parameters of `row_loops`; 0: no loop
    element_bytes: int  # of its largest


@dataclass(frozen=True)
class _Splits:
    """Host code about the parts that a launch makes its sums in."""

    count: str = "1"
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass
class TritonFile:
    """A candidate in the making."""

    task: Task
    tunables: dict[str, tuple[int | str, Sequence[int | str]]] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)
    host_helpers: dict[str, str] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    _count: int = 0

    def add(self, traced: Traced, name: str, suffix: str) -> None:
        """Add a trace: its kernels, and a host function.

        Raises:
            NoSeed: It has what a candidate cannot have.
        """
        module = ast.parse(traced.code)
        kernels = {
            made: self._kernel(texts[1], made, traced, suffix, _given(module, made))
            for made, texts in kernels_of(module, "triton")
        }
        if not kernels:
            raise NoSeed("Inductor leaves all of it to libraries, and writes no kernel")

        def launch(called: str, arguments: Sequence[str]) -> list[str]:
            if called not in kernels:
                raise NoSeed(f"Inductor's host code calls {called}, which a candidate may not")
            return self._launch(kernels[called], list(arguments))

        self.hosts += ["", "", *host_function(self.task, traced, module, name, launch)]
        for kernel in kernels.values():
            self.kernels += ["", "", *kernel.lines]

    def source(self, docstring: str) -> str:
        """The file."""
        constants = [f"{name} = {value!r}" for name, (value, _) in self.tunables.items()]
        tune = ["TUNE = {", *(f'    "{n}": {v},' for n, (_, v) in self.tunables.items()), "}"]
        helpers = [line for text in self.helpers.values() for line in ("", "", *text.splitlines())]
        host = [
            line for text in self.host_helpers.values() for line in ("", "", *text.splitlines())
        ]
        body = "\n".join([*helpers, *self.kernels, *host, *self.hosts])
        imports = ["import math", ""] if "math." in body else []
        imports += ["import torch", "import triton", "import triton.language as tl", ""]
        return "\n".join([docstring, "", *imports, *constants, *tune]) + "\n" + body + "\n"

    # -- kernels ---------------------------------------------------------------------------------

    def _kernel(
        self, text: str, made: str, traced: Traced, suffix: str, given: Sequence[str]
    ) -> _Kernel:
        tree = ast.parse(text)
        found: _Kernel | None = None
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            heuristics = [d for d in node.decorator_list if "triton_heuristics" in ast.unparse(d)]
            if not heuristics:  # how a scan combines two values
                if node.name not in self.helpers:
                    self.helpers[node.name] = self._text(node, traced, {})
                continue
            node.decorator_list = [d for d in node.decorator_list if d not in heuristics]
            found = self._described(node, heuristics[0], traced, made, suffix, given)
        if found is None:
            raise NoSeed(f"{made} is no kernel of a kind that is known here")
        return found

    def _described(
        self,
        node: ast.FunctionDef,
        decorator: ast.expr,
        traced: Traced,
        made: str,
        suffix: str,
        given: Sequence[str],
    ) -> _Kernel:
        assert isinstance(decorator, ast.Call)
        meant = {k.arg: k.value for k in decorator.keywords}
        hints = ast.literal_eval(meant["size_hints"])
        signature = ast.literal_eval(_entry(meant["triton_meta"], "signature"))
        grid = ast.literal_eval(_entry(meant["inductor_meta"], "grid_type"))
        words = re.sub(r"^triton_\w+?_fused_?|_\d+$", "", made) or "kernel"
        self._count += 1
        node.name = f"_{words[:40].strip('_')}_{self._count}{suffix}"
        names = [a.arg for a in node.args.args]
        blocks = [n for n in names if n.endswith("BLOCK")]
        parameters = [n for n in names if n not in blocks]
        padded = improve_products(node, dict(zip(parameters, given, strict=False)))
        _count_values(node)
        _drop_unused(node)
        unread = _drop_sizes(node, {o.size for o in padded})
        leave_masks_to_the_last(node)
        numbers = [n for n in parameters if signature.get(n) in ("i32", "i64")]
        constants = _as_constants(node, numbers)
        sizes = _in_words(node, [*numbers, *(o.parameter for o in padded)])
        if grid == "BatchMatmulGrid3D" and _is_one_for_all_samples(ast.unparse(node)):
            _swap_axes(node)
            grid = "Grid3D"
        if traced.dtype == "float32" and choose_precision(node):
            # Torch's own convolutions are in TF32, and its products are not.
            values = ["tf32", "tf32x3"] if "window_products" in made else ["tf32x3", "ieee"]
            self._tunable(PRECISION, values[0], values)
        row_loads = improve_row_loops(node)
        split = split_k(node) if grid in ("Grid2D", "Grid2DWithYZOverflow") else ""
        text = self._text(node, traced, signature)
        reduction = meant.get("reduction_hint")
        return _Kernel(
            name=node.name,
            lines=text.splitlines(),
            parameters=parameters,
            padded=padded,
            unread=unread,
            precise=any(a.arg == PRECISION for a in node.args.args),
            split=split,
            blocks=blocks,
            words=sizes,
            constants=constants,
            grid=grid,
            inner=reduction is not None and ast.unparse(reduction).endswith("INNER"),
            dot="tl.dot(" in text,
            hints=hints,
            reduces=reduction is not None,
            row_loads=row_loads,
            element_bytes=8 if {"*fp64", "*i64"} & set(signature.values()) else 4,
        )

    def _text(self, node: ast.FunctionDef, traced: Traced, signature: Mapping[str, str]) -> str:
        """A kernel's text, without Inductor's modules in it; what it needs of them is kept."""
        whole = {name for name, kind in signature.items() if kind in ("i32", "i64")}
        floats = {name for name, kind in signature.items() if kind in ("fp32", "fp64")}
        _Casts(whole | floats, whole).visit(node)
        _drop_unused(node)
        text = ast.unparse(ast.fix_missing_locations(node))
        short = {"bfloat16": "bf16", "float16": "fp16"}.get(traced.dtype)
        pointers = [n for n, kind in signature.items() if kind == f"*{short}"]
        if pointers and len(case_dtypes(self.task)) > 1:
            text = text.replace(f"tl.{traced.dtype}", f"{pointers[0]}.dtype.element_ty")
        return self._without_modules(text)

    def _without_modules(self, text: str) -> str:
        def own(match: re.Match[str]) -> str:
            name = match[1]
            if name in _IN_LANGUAGE:
                return f"tl.{name}("
            if name not in _OWN:
                raise NoSeed(f"Inductor calls libdevice.{name}, which is not written out here")
            self._add_own(name)
            return f"_{name}("

        text = re.sub(r"\b(?:libdevice|tl_math)\.(\w+)\(", own, text)
        for name in re.findall(r"\btriton_helpers\.(\w+)\(", text):
            self._add_helper(name)
        return text.replace("triton_helpers.", "")

    def _add_own(self, name: str) -> None:
        body = _OWN[name]
        parameters = "x, y" if name in ("pow", "mul_rn") else "x"
        self.helpers.setdefault(
            f"_{name}",
            f"@triton.jit\ndef _{name}({parameters}):\n"
            + "\n".join(INDENT + line.strip() for line in body.strip().splitlines()),
        )

    def _add_helper(self, name: str) -> None:
        """A function of Inductor's run-time library, and those that it calls."""
        if name in self.helpers:
            return
        if name in _INSTEAD:
            self.helpers[name] = _INSTEAD[name].strip()
            return
        function = getattr(triton_helpers, name)
        source = inspect.getsource(getattr(function, "fn", function))
        (node,) = ast.parse(inspect.cleandoc(source)).body
        assert isinstance(node, ast.FunctionDef)
        node.body = [s for s in node.body if not _is_text(s)] or node.body
        names = names_in(node)
        text = re.sub(r"\bmath\.(\w+)\(", r"tl_math.\1(", ast.unparse(node))
        for other in sorted(names - {name}):
            if hasattr(getattr(triton_helpers, other, None), "fn"):
                self._add_helper(other)
            elif other == "_LOG_2_E":
                text = text.replace(other, repr(triton_helpers._LOG_2_E.value))  # noqa: SLF001
        text = self._without_modules(text)
        self.helpers[name] = text

    # -- launches --------------------------------------------------------------------------------

    def _launch(self, kernel: _Kernel, arguments: list[str]) -> list[str]:
        sizes = dict(zip(kernel.parameters, arguments, strict=True))
        values: dict[str, str] = {}
        for block in kernel.blocks:
            values[block] = self._block(kernel, block, sizes)

        def programs(axis: str) -> str:
            return f"triton.cdiv({sizes[axis.lower() + 'numel']}, {values[axis + 'BLOCK']})"

        match kernel.grid:
            case "Grid1D":
                grid = [programs("X")]
            case "Grid2D":
                grid = [programs("X"), programs("Y")]
            case "Grid2DWithYZOverflow":
                y = programs("Y")
                most = _MOST_Y_PROGRAMS
                grid = [programs("X"), f"min({y}, {most})", f"triton.cdiv({y}, {most})"]
            case "Grid3D":
                grid = [programs("X"), programs("Y"), programs("Z")]
            case "BatchMatmulGrid3D":
                grid = [programs("Z"), programs("Y"), programs("X")]
            case "SplitScanGrid":
                raise NoSeed("Inductor scans in one pass over programs that wait for each other")
            case _:
                raise NoSeed(f"Inductor launches {kernel.name} on a {kernel.grid}")
        warps = self._warps(kernel, values)
        splits = _Splits()
        if kernel.split:
            splits = self._splits(kernel.split, sizes, f"{programs('X')} * {programs('Y')}")
        if splits.before:
            grid[0] += f" * {splits.count}"
        for operand in kernel.padded:
            self.host_helpers.setdefault("_rows", PADDED_ROWS.strip())
            tensor, columns = sizes[operand.pointer], sizes[operand.size]
            sizes[operand.pointer] = f"_rows({tensor}, {columns})"
            sizes[operand.parameter] = f"_row({tensor}, {columns})"
        lengths = {w: f"_word({sizes[w]})" for w in kernel.words}
        if lengths:
            self.host_helpers.setdefault("_word", _WORD.strip())
        given = [
            f"{_factor(size)} // {lengths[name]}" if name in lengths else size
            for name, size in sizes.items()
            if name not in (*kernel.unread, *kernel.constants)
        ]
        keywords = [f"{name}={sizes[name]}" for name in kernel.constants]
        keywords += [f"{w.upper()}_WORD={length}" for w, length in lengths.items()]
        keywords += [f"{b}={v}" for b, v in values.items()]
        keywords += [f"{PRECISION}={PRECISION}"] if kernel.precise else []
        keywords += [f"{SPLIT_K}={splits.count}"] if kernel.split else []
        if kernel.row_loads:
            keywords.append(f"{WHOLE}={sizes['r0_numel']} <= {values['R0_BLOCK']}")
            keywords.append(f"{STAGES}={self._stages(kernel, values['XBLOCK'])}")
        keywords += [f"num_warps={warps}"]
        grid_text = f"({', '.join(grid)}{',' if len(grid) == 1 else ''})"
        call = wrapped(f"{kernel.name}[{grid_text}]", [*given, *keywords])
        return [*splits.before, *call, *splits.after]

    def _splits(self, split: str, sizes: dict[str, str], tiles: str) -> _Splits:
        """Have a launch write its sums in parts, if there are several, and add these up."""
        result = sizes[split]
        if not result.isidentifier():  # a view, whose rows may lie apart
            return _Splits()
        self.helpers.setdefault("_sum_splits", SUM_SPLITS.strip())
        self.host_helpers.setdefault("_splits_of", SPLITS_OF.strip())
        sizes[split] = "_sums"
        numel = f"{result}.numel()"
        where = f"dtype=torch.float32, device={result}.device"
        add = wrapped(
            f"_sum_splits[(triton.cdiv({numel}, 128),)]",
            ["_sums", result, numel, f"{SPLIT_K}=_splits", "BLOCK=128"],
        )
        return _Splits(
            "_splits",
            [
                *wrapped("_splits = _splits_of", [result, tiles, sizes["r0_numel"]]),
                f"_sums = {result}",
                "if _splits > 1:",
                f"{INDENT}_sums = torch.empty((_splits, {numel}), {where})",
            ],
            ["if _splits > 1:", *(INDENT + line for line in add)],
        )

    def _stages(self, kernel: _Kernel, columns: str) -> str:
        """Blocks of a row that are on their way at once, as many as there is shared memory for."""
        stages = self._tunable(*(_INNER_STAGES if kernel.inner else _OUTER_STAGES))
        most = MOST_SHARED // (kernel.row_loads * kernel.element_bytes)
        block = ("INNER_" if kernel.inner else "OUTER_") + "R0_BLOCK"
        return f"min({stages}, 1 + {most} // ({columns} * {block}))"

    def _warps(self, kernel: _Kernel, values: Mapping[str, str]) -> str:
        """Warps of a program: of a row that is summed one for 128 elements, as Inductor has it."""
        if not kernel.inner or kernel.dot or "R0_BLOCK" not in values:
            if kernel.precise:
                return self._tunable("DOT_NUM_WARPS", 4, [4, 8])
            return self._tunable("NUM_WARPS", 4, [2, 4, 8])
        most = self._tunable("INNER_NUM_WARPS", 16, [4, 8, 16])
        return f"max(min({most}, {values['R0_BLOCK']} // 128), 1)"

    def _block(self, kernel: _Kernel, block: str, sizes: Mapping[str, str]) -> str:
        axes = sum(b != "R0_BLOCK" for b in kernel.blocks)
        if kernel.dot:
            if block == "ZBLOCK":
                return "1"
            value, values = _DOT_BLOCKS[kernel.precise][block]
            prefix = "DOT_"
        elif block == "R0_BLOCK":
            prefix, value = ("INNER_", 2048) if kernel.inner else ("OUTER_", 64)
            values = [1024, 2048, 4096] if kernel.inner else [16, 64, 256]
        elif kernel.reduces:
            prefix, value = ("INNER_", 1) if kernel.inner else ("OUTER_", 32)
            values = [1, 2, 4] if kernel.inner else [16, 32, 64]
        elif axes > 1:
            prefix, value, values = "TILE_", 32, [16, 32, 64]
        else:
            prefix, value, values = "", 1024, [256, 512, 1024, 2048]
        constant = self._tunable(prefix + block, value, values)
        if block == "R0_BLOCK" and not kernel.dot:
            return f"min({constant}, triton.next_power_of_2({sizes['r0_numel']}))"
        return constant

    def _tunable(self, name: str, value: int | str, values: Sequence[int | str]) -> str:
        self.tunables.setdefault(name, (value, values))
        return name


def _count_values(node: ast.FunctionDef) -> None:
    """Tell `welford_reduce` how many values each lane has with this one, not whether it is the
    first.

    Raises:
        NoSeed: Inductor tells it otherwise.
    """
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".welford_reduce"):
            first = ast.unparse(call.args[-1])
            if first != "roffset == 0":
                raise NoSeed(f"Inductor's Welford sums begin where {first}")
            call.args[-1] = ast.parse("r0_offset // R0_BLOCK + 1", mode="eval").body


def _is_one_for_all_samples(kernel: str) -> bool:
    """Whether a product's first matrix is the same for all samples, as a convolution's weight."""
    first = re.findall(r"^ *\w+_a = .*$", kernel, re.MULTILINE)
    return bool(first) and not any(re.search(r"\bz(?:index|\d)", line) for line in first)


def _swap_axes(node: ast.FunctionDef) -> None:
    """Have a convolution's places along the grid's first axis, and samples along the last one: that
    has 65535 programs at most.
    """
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.program_id":
            (axis,) = call.args
            if isinstance(axis, ast.Constant) and axis.value in (0, 2):
                axis.value = 2 - axis.value


def _drop_sizes(node: ast.FunctionDef, sizes: Collection[str]) -> list[str]:
    """Drop those of some parameters that nothing reads; their names."""
    read = names_in(node)
    unread = [n for n in sizes if n not in read]
    node.args.args = [a for a in node.args.args if a.arg not in unread]
    return unread


def _given(module: ast.Module, kernel: str) -> list[str]:
    """Arguments that Inductor's host code launches a kernel with, if it does so once."""
    numels: dict[str, str] = {}
    found: list[list[str]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("numel"):
            numels[ast.unparse(node.targets[0])] = ast.unparse(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{kernel}.run":
            found.append([ast.unparse(a) for a in node.args])
    return [numels.get(a, a) for a in found[0]] if len(found) == 1 else []


def _as_constants(node: ast.FunctionDef, numbers: Sequence[str]) -> list[str]:
    """Compile a kernel that divides its indices by sizes for each of these; the sizes' names. What
    is divided by a constant is multiplied, and most bounds are decided then. The number of rows or
    elements stays a number that any launch may choose.
    """
    sizes = {n for n in numbers if re.fullmatch(r"ks\d+", n)}
    divides = any(
        isinstance(n, ast.BinOp)
        and isinstance(n.op, ast.FloorDiv | ast.Mod)
        and names_in(n.right) & sizes
        and not names_in(n.left) <= set(numbers)
        for n in ast.walk(node)
    )
    constant = [a for a in node.args.args if divides and a.arg in sizes]
    for argument in constant:
        argument.annotation = ast.parse("tl.constexpr", mode="eval").body
    rest = [a for a in node.args.args if a not in constant]
    at = sum(not a.arg.endswith("BLOCK") for a in rest)
    node.args.args = [*rest[:at], *constant, *rest[at:]]
    return [a.arg for a in constant]


def _in_words(node: ast.FunctionDef, numbers: Sequence[str]) -> list[str]:
    """Have a kernel take its sizes as a number of words and their length; the sizes' names."""
    assigned = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    constant = {a.arg for a in node.args.args if a.annotation is not None}
    sizes = [n for n in numbers if _SIZE.fullmatch(n) and n in read - assigned - constant]
    if not sizes:
        return []
    for argument in (a for a in node.args.args if a.arg in sizes):
        argument.arg += "_words"
    constants = ", ".join(f"{n.upper()}_WORD: tl.constexpr" for n in sizes)
    lines = [f"{n} = {n}_words * {n.upper()}_WORD" for n in sizes]
    unknown = ", ".join(f"'{n}_words'" for n in sizes)
    (added,) = ast.parse(
        f"@triton.jit(do_not_specialize=[{unknown}])\ndef f({constants}):\n"
        + "\n".join(INDENT + line for line in lines)
    ).body
    assert isinstance(added, ast.FunctionDef)
    at = sum(not a.arg.endswith("BLOCK") for a in node.args.args)
    node.args.args[at:at] = added.args.args
    node.body[:0] = added.body
    node.decorator_list = added.decorator_list
    return sizes


def _factor(text: str) -> str:
    """An expression as a factor: in parentheses, unless it is a name, a number or a call."""
    return text if re.fullmatch(r"\w+(\([\w, ]*\))?", text) else f"({text})"


def _entry(node: ast.expr, key: str) -> ast.expr:
    assert isinstance(node, ast.Dict)
    for k, value in zip(node.keys, node.values, strict=True):
        if isinstance(k, ast.Constant) and k.value == key:
            return value
    raise KeyError(key)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Casts(ast.NodeTransformer):
    """`(ks0 + 1).to(t)` as `tl.cast(ks0 + 1, t)`, and `tl.broadcast_to(ks0, blocks)` with a cast of
    `ks0`: Triton makes a constant of a 1, without `to` and without a type.
    """

    def __init__(self, numbers: set[str], whole: set[str]) -> None:
        self._numbers, self._whole = numbers, whole

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute):
            return node
        if function.attr == "to" and names_in(function.value) <= self._numbers:
            return _cast(function.value, *node.args)
        names = names_in(node.args[0]) if function.attr == "broadcast_to" else set()
        if names and names <= self._whole:
            node.args[0] = _cast(node.args[0], _expression("tl.int64"))
        return node


def _cast(*arguments: ast.expr) -> ast.Call:
    return ast.Call(_expression("tl.cast"), list(arguments), [])


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _drop_unused(node: ast.FunctionDef) -> None:
    """Drop assignments whose names nobody reads."""
    while True:
        read = {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        dropped = _Unread(read)
        dropped.visit(node)
        if not dropped.any:
            return


class _Unread(ast.NodeTransformer):
    def __init__(self, read: set[str]) -> None:
        self._read = read
        self.any = False

    def _visit(self, node: Any, target: ast.expr) -> ast.AST | None:
        if isinstance(target, ast.Name) and target.id not in self._read:
            self.any = True
            return None
        return node  # type: ignore[no-any-return]

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return self._visit(node, node.targets[0])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return self._visit(node, node.target)
