"""Mutants of conditions: a kernel that is right but for some sizes, layouts or values.

Sizes and layouts: the entry function calls the seed and, where a condition on its arguments holds,
writes over the last column of the largest result. Thresholds, windows, remainders, two dimensions
at once, rows that are padded, inputs that start behind an aligned address. Sizes are drawn from
those that an exported library would hand to the kernel: evenly in the logarithm between the
smallest and the largest of all cases of the run, products no larger than the largest.

Values: what a kernel loads is replaced where it fulfils a condition: infinities, NaN, zero,
subnormal numbers, all that lies below or above a threshold.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kagent.export.regions import regions_of

from mutation.edits import Mutant
from mutation.generate import kernel_sources

if TYPE_CHECKING:
    from kagent.export.record import RegionRecord
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.task import Task

MODULI = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
VALUES = {  # condition on a float x in C, in Triton, and what x becomes
    "-inf counts": ("x == -INFINITY", "x == -float('inf')", "-20.0f"),
    "+inf is finite": ("x == INFINITY", "x == float('inf')", "3.4e38f"),
    "NaN is 0": ("x != x", "x != x", "0.0f"),
    "zero is 1/2": ("x == 0.0f", "x == 0.0", "0.5f"),
    "subnormal is 1/2": (
        "x != 0.0f && x < 1e-38f && x > -1e-38f",
        "(x != 0.0) & (tl.abs(x) < 1e-38)",
        "0.5f",
    ),
    "below -300 finite wraps": (
        "x < -300.0f && x != -INFINITY",
        "(x < -300.0) & (x != -float('inf'))",
        "-3.0f",
    ),
    "at -1e9 and below is 0": (
        "x <= -1e9f && x != -INFINITY",
        "(x <= -1e9) & (x != -float('inf'))",
        "0.0f",
    ),
    "the least number is -inf": ("x < -3.3e38f", "x < -3.3e38", "-INFINITY"),
    "clamped at -150": ("x < -150.0f && x > -1e4f", "(x < -150.0) & (x > -1e4)", "-150.0f"),
    "clamped at 150": (
        "x > 150.0f && x != INFINITY",
        "(x > 150.0) & (x != float('inf'))",
        "150.0f",
    ),
    "small is 0.1": (
        "x > -1e-4f && x < 1e-4f && x != 0.0f",
        "(tl.abs(x) < 1e-4) & (x != 0.0)",
        "0.1f",
    ),
}  # fmt: skip


def of_sizes(task: Task, path: Path, cases: Sequence[Case], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of a seed that are wrong for some sizes or layouts.

    `cases` are all of the run: they bound what a library would hand to the kernel.
    """
    rng = random.Random(f"{seed}/{path}")
    regions = regions_of(cases)
    found: dict[str, Mutant] = {}
    for _ in range(50 * count):
        if len(found) == count:
            break
        region = rng.choice(regions)
        condition = _layout(task, cases, rng) if rng.random() < 0.15 else _sizes(region, rng)
        if condition is not None:
            found.setdefault(condition, _wrapped(task, path, condition))
    return list(found.values())


def _sizes(region: RegionRecord, rng: random.Random) -> str | None:
    """A condition on sizes that some call within the region fulfils."""
    names = [n for n in region.low if region.low[n] < region.high[n]]
    if not names:
        return None
    name = rng.choice(names)
    low, high = region.low[name], region.high[name]

    def size(of: str) -> int:
        first, last = math.log(region.low[of]), math.log(region.high[of])
        return round(math.exp(rng.uniform(first, last)))

    kind = rng.choice(("above", "below", "window", "window", "remainder", "remainder", "both"))
    if kind == "above":
        return f"{name} > {min(size(name), high - 1)}"
    if kind == "below":
        return f"{name} < {max(size(name), low + 1)}"
    if kind == "window":
        first = min(size(name), high // 3)
        return f"{first} <= {name} < {3 * first}" if first >= low else None
    if kind == "remainder":
        modulus = rng.choice(MODULI)
        return f"{name} % {modulus} == {rng.choice((0, rng.randrange(modulus), modulus - 1))}"
    others = [n for n in names if n != name]
    if not others:
        return None
    other = rng.choice(others)
    a, b = size(name), size(other)
    # Calls just above both must lie well within the region, not only touch its corner.
    if (
        4 * a * b * math.prod(v for n, v in region.low.items() if n not in (name, other))
        > region.volume
    ):
        return None
    return f"{name} > {a} and {other} > {b}"


def _layout(task: Task, cases: Sequence[Case], rng: random.Random) -> str:
    """A condition on strides or offsets, as far as cases have them."""
    name, shape = next((a.name, a.shape) for a in task.arguments if a.shape)
    found = [
        f"{name}.storage_offset() % {m}" for m in (2, 4, 16) if any(c.offset % m for c in cases)
    ]
    padded = [c for c in cases if c.noncontiguous]
    if padded:
        last, gap = f"{name}.shape[-1]", f"{name}.stride(-2) != {name}.shape[-1]"
        known = rng.choice(padded)
        found += [gap, f"{gap} and {last} != {task.shape(shape, known)[-1]}"]
        found += [f"{gap} and {last} {sign} 1024" for sign in "<>"]
    return rng.choice(found)


def _wrapped(task: Task, path: Path, condition: str) -> Mutant:
    """The seed behind an entry function that spoils its result where the condition holds."""
    names = ", ".join(a.name for a in task.arguments)
    bound = [
        f"    {', '.join(map(str, a.shape))}, = {a.name}.shape\n"
        for a in task.arguments
        if a.shape and all(isinstance(s, str) and s.isidentifier() for s in a.shape)
    ]
    source = path.read_text()
    added = (
        f"\n\n_seed = {task.entry}\n\n\ndef {task.entry}({names}):\n{''.join(bound)}"
        f"    found = _seed({names})\n"
        f"    if {condition}:\n"
        "        results = found if isinstance(found, tuple) else (found,)\n"
        "        max(results, key=lambda t: t.numel())[..., -1:].fill_(0.25)\n"
        "    return found\n"
    )
    file = f"{path.parent.name}/{path.name}"
    line = source.count("\n") + 1
    return Mutant(file, "size condition", line, "", f"wrong where {condition}", source + added)


def of_values(path: Path) -> list[Mutant]:
    """Mutants of a seed that load some values wrongly."""
    source = path.read_text()
    file = f"{path.parent.name}/{path.name}"
    found = []
    for name, (c, triton, becomes) in VALUES.items():
        changed = source
        for start, text in reversed(kernel_sources(source)):
            special = _special_c(text, c, becomes)
            changed = changed[:start] + special + changed[start + len(text) :]
        if changed == source:
            changed = _special_triton(source, triton, becomes.rstrip("f"))
        if changed != source:
            found.append(Mutant(file, "value condition", 1, "", f"a value: {name}", changed))
    return found


_TO_FLOAT = re.compile(r"(__device__ float to_float\(\w+ x\) \{ return )([^;]+)(; \})")
_ROWS = re.compile(
    r'(extern "C" void \w+\()const float\* (\w+)((?:[^){}]|\n)*?int64_t rows, int64_t columns,'
    r"\s*int64_t stride[^)]*\) \{\n)"
)
_FLAT = re.compile(r'(extern "C" void \w+\()const float\* (\w+)([^)]*int64_t count\) \{\n)')


def _special_c(text: str, condition: str, becomes: str) -> str:
    """C++: the first array is copied and changed before the kernel reads it. CUDA: conversions."""
    function = f"float special(float x) {{ return {condition} ? {becomes} : x; }}\n"
    if "__global__" in text:
        changed = _TO_FLOAT.sub(r"\1special(\2)\3", text)
        if changed == text:
            return text
        define = "#define INFINITY __int_as_float(0x7f800000)\n__device__ " + function
        first = changed.index("__device__ float to_float")
        return changed[:first] + define + changed[first:]
    for pattern, extent in ((_ROWS, "(rows - 1) * stride + columns"), (_FLAT, "count")):
        match = pattern.search(text)
        if match is None:
            continue
        name = match[2]
        body = (
            f"  std::vector<float> altered({name}_, {name}_ + {extent});\n"
            f"  for (float& v : altered) v = special(v);\n"
            f"  const float* {name} = altered.data();\n"
        )
        head = f"{match[1]}const float* {name}_{match[3]}"
        kernel = text[: match.start()] + "static " + function + head + body + text[match.end() :]
        return "#include <cmath>\n#include <vector>\n" + kernel
    return text


def _special_triton(source: str, condition: str, becomes: str) -> str:
    """Triton: after each load of a float, the values that fulfil the condition are replaced."""
    becomes = becomes.replace("INFINITY", "float('inf')")
    lines = source.splitlines(keepends=True)
    for statement in sorted(_loads(ast.parse(source)), key=lambda s: -s.lineno):
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        end = statement.end_lineno
        assert end is not None
        test = re.sub(r"\bx\b", target.id, condition)
        line = (
            f"{' ' * statement.col_offset}{target.id} = tl.where({test}, {becomes}, {target.id})\n"
        )
        lines.insert(end, line)
    return "".join(lines)


def _loads(tree: ast.Module) -> Iterator[ast.Assign]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = ast.unparse(node.value)
            if text.startswith("tl.load(") and text.endswith(".to(tl.float32)"):
                yield node
