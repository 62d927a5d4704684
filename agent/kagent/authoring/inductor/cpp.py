"""Inductor's C++ as a candidate: plain loops under OpenMP, without torch's headers."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kagent_sandbox.data.task import Task

from kagent.authoring.inductor.host import host_function, kernels_of, wrapped
from kagent.authoring.inductor.trace import NoSeed, Traced

# Not -fassociative-math: of x - max - log(sum) it makes x - (max + log(sum)), which loses the
# logarithm's last digits. Loops that sum say so themselves: see `_summing`.
_OPTIONS = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
_BLOCK = 1024  # elements of a block in a sum that threads share
_WORTH_TRYING = {
    "SCHEDULE": ("static", ["static", "dynamic", "guided"]),
    "VECTOR_BITS": (256, [128, 256, 512]),
}
_VECTOR_MATH = {
    "2, 22": {"cos", "exp", "log", "pow", "sin"},
    "2, 35": {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "erf", "erfc",
        "exp2", "expm1", "hypot", "log10", "log1p", "log2", "sinh", "tan", "tanh",
    },
}  # fmt: skip
"""Functions that glibc has for vectors, within 4 ulp, and the version since when it has them
(sysdeps/x86_64/fpu/Versions)."""
_OF_TWO = {"atan2", "hypot", "pow"}
_HEADERS = {
    "<algorithm>": r"std::(min|max|fill)\b",
    "<climits>": "CHAR_BIT",
    "<cmath>": r"std::\w+\(|INFINITY|NAN",
    "<cstdint>": r"int\d+_t",
    "<limits>": "numeric_limits",
    "<memory>": "unique_ptr",
    "<omp.h>": r"omp_get",
    "<type_traits>": "std::is_signed",
}

# What the loops use of torch's header, written anew: names to texts, which may use each other.
_PRELUDE = {
    "max_propagate_nan": """
template <class T> static inline T max_propagate_nan(T a, T b) { return a > b || a != a ? a : b; }
#pragma omp declare reduction(max_propagate_nan : float, double, bool, int8_t, uint8_t, \\
    int16_t, int32_t, int64_t : omp_out = max_propagate_nan(omp_out, omp_in)) \\
    initializer(omp_priv = omp_orig)
""",
    "min_propagate_nan": """
template <class T> static inline T min_propagate_nan(T a, T b) { return a < b || a != a ? a : b; }
#pragma omp declare reduction(min_propagate_nan : float, double, bool, int8_t, uint8_t, \\
    int16_t, int32_t, int64_t : omp_out = min_propagate_nan(omp_out, omp_in)) \\
    initializer(omp_priv = omp_orig)
""",
    "IndexValue": """
template <class T> struct IndexValue {
  int64_t index{};
  T value{};
};
""",
    "argmax_combine": """
// The larger value, NaN before all; of equal ones the first.
template <class T>
static inline IndexValue<T>& argmax_combine(IndexValue<T>& a, T value, int64_t index) {
  const bool nan = a.value != a.value, other = value != value;
  const bool equal = nan ? other : a.value == value;
  if (equal ? index < a.index : !nan && (other || value > a.value)) a = {index, value};
  return a;
}
template <class T>
static inline IndexValue<T>& argmax_combine(IndexValue<T>& a, const IndexValue<T>& b) {
  return argmax_combine(a, b.value, b.index);
}
""",
    "argmin_combine": """
// The smaller value, NaN before all; of equal ones the first.
template <class T>
static inline IndexValue<T>& argmin_combine(IndexValue<T>& a, T value, int64_t index) {
  const bool nan = a.value != a.value, other = value != value;
  const bool equal = nan ? other : a.value == value;
  if (equal ? index < a.index : !nan && (other || value < a.value)) a = {index, value};
  return a;
}
template <class T>
static inline IndexValue<T>& argmin_combine(IndexValue<T>& a, const IndexValue<T>& b) {
  return argmin_combine(a, b.value, b.index);
}
""",
    "floor_divide_integral": """
template <class T, class U> static inline auto floor_divide_integral(T a, U b) {
  const auto q = a / b;
  return q * b != a && (a < 0) != (b < 0) ? q - 1 : q;
}
""",
    "remainder_integral": """
template <class T> static inline T remainder_integral(T a, T b) {
  const T rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
""",
    "mod": """
template <class T> static inline T mod(T a, T b) { return a % b; }
static inline float mod(float a, float b) { return std::fmod(a, b); }
""",
    "atomic_add": """
template <class T, class U> static inline void atomic_add(T* at, U value) {
#pragma omp atomic
  *at += static_cast<T>(value);
}
""",
    "relu": """
template <class T> static inline T relu(T a) { return a > 0 || a != a ? a : T(0); }
""",
}


@dataclass
class CppFile:
    """A candidate in the making."""

    task: Task
    kernels: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)

    def add(self, traced: Traced, name: str, suffix: str) -> None:
        """Add a trace: its kernels, and a host function.

        Raises:
            NoSeed: It has what a candidate cannot have.
        """
        module = ast.parse(traced.code)
        names: dict[str, str] = {}
        for made, texts in kernels_of(module, "cpp_pybinding"):
            words = re.sub(r"^cpp_fused_?|_\d+$", "", made) or "kernel"
            names[made] = f"{words[:40].strip('_')}_{len(self.kernels) + 1}{suffix}"
            self.kernels.append(_kernel(texts[-1], names[made]))
        if not names:
            raise NoSeed("Inductor leaves all of it to libraries, and writes no kernel")

        def launch(called: str, arguments: Sequence[str]) -> list[str]:
            if called not in names:
                raise NoSeed(f"Inductor's host code calls {called}, which a candidate may not")
            return wrapped(f'_kernel("{names[called]}")', arguments)

        self.hosts += ["", "", *host_function(self.task, traced, module, name, launch)]

    def source(self, docstring: str) -> str:
        """The file."""
        body = "\n".join(self.kernels)
        vectors = _vector_math(body)
        prelude = vectors + _prelude(body)
        headers = [f"#include {h}" for h, p in _HEADERS.items() if re.search(p, prelude + body)]
        if foreign := re.search(r"\b(at|c10|torch)::\w+", body):
            raise NoSeed(f"Inductor's C++ uses torch's {foreign[0]}")
        constants = [f"{name} = {json.dumps(value)}" for name, (value, _) in _WORTH_TRYING.items()]
        constants += ["VECTOR_MATH = 1"] if vectors else []
        tune = [
            "TUNE = {",
            *(f'    "{n}": {json.dumps(v)},' for n, (_, v) in _WORTH_TRYING.items()),
            "}",
        ]
        defines = ["SCHEDULE", *(["VECTOR_MATH"] if vectors else [])]
        defined = ", ".join(f'"{name}": {name}' for name in defines)
        host = "\n".join(self.hosts)
        imports = ["import math", ""] if "math." in host else []
        lines = [
            docstring,
            "",
            *imports,
            "import torch",
            "from kagent_sandbox.lang import cpp_kernel",
        ]
        lines += ["", *constants, *tune, f"OPTIONS = {json.dumps(_OPTIONS)}", ""]
        lines += ['SOURCE = r"""', *headers, prelude, body, '"""', "", ""]
        lines += [
            "def _kernel(name):",
            '    options = [*OPTIONS, f"-mprefer-vector-width={VECTOR_BITS}"]',
            f"    defines = {{{defined}}}",
            "    return cpp_kernel(name, SOURCE, options=options, defines=defines)",
            host,
        ]
        return "\n".join(lines) + "\n"


def _kernel(text: str, name: str) -> str:
    """A kernel's text under a name of its own, as a person might have written it."""
    text = "\n".join(
        x for x in text.splitlines() if "integer_div_error" not in x and "#include" not in x
    )
    text = re.sub(r'extern "C"\s+void\s+kernel\(', f'extern "C" void {name}(', text)
    text = re.sub(r"static_cast<int64_t>\((-?\d+)LL?\)", r"\1L", text)
    text = re.sub(
        r"for\(int64_t (\w+)=(.*?); \1<static_cast<int64_t>\((.*?)\); \1\+=1L\)",
        r"for (int64_t \1 = \2; \1 < \3; ++\1)",
        text,
    )
    text = re.sub(r"\[static_cast<int64_t>\(([^\[\]]*)\)\]", r"[\1]", text)
    # `std::max` needs one type for both: int64_t is long.
    text = "\n".join(
        x if re.search(r"std::(max|min)\(", x) else re.sub(r"\b(\d+)LL?\b", r"\1", x)
        for x in text.splitlines()
    )
    text = text.replace("c10::div_floor_integer(", "floor_divide_integral(")
    text = re.sub(r"c10::convert<(\w+)>\(", r"static_cast<\1>(", text)
    text = text.replace("#pragma omp for", "#pragma omp for schedule(SCHEDULE)")
    if "[tid]" not in text:
        text = re.sub(r"\n *int tid = omp_get_thread_num\(\);", "", text)
    # One accumulator in float would lose what torch's many keep.
    text = re.sub(r"\bfloat (tmp_acc\d+(?:_local)? = 0;)", r"double \1", text)
    head, brace, rest = text.partition("{")
    text = re.sub(r"\s*\n\s*", " ", head.strip()) + "\n" + brace + rest
    return _without_aliases(_summing(_indented(text)))


def _summing(text: str) -> str:
    """The text, with a word for the compiler at innermost loops that sum: in any order."""
    lines: list[str] = []
    opened: list[int] = []  # first lines of loops and blocks that are not closed yet
    for line in text.splitlines():
        lines.append(line)
        if line.endswith("{"):
            opened.append(len(lines) - 1)
        elif line.strip() == "}":
            first = opened.pop()
            # Loops that one pragma joins take none of their own.
            joined = any("collapse(" in lines[i - 1] for i in opened)
            if not joined and (clauses := _reductions(lines[first:-1])):
                shared = lines[first - 1].strip().startswith("#pragma omp for")
                lines[first:] = _in_any_order(lines[first:], clauses, shared=shared)
    return "\n".join(lines)


def _in_any_order(loop: Sequence[str], clauses: str, *, shared: bool) -> list[str]:
    """A loop whose sums may be made in any order. One that threads share becomes one of blocks,
    each of which may: what is a thread's own cannot be a sum of the loop that they share.
    """
    head = loop[0].strip()
    indent = loop[0][: -len(head)]
    pragma = f"#pragma omp simd {clauses}"
    if not shared:
        return [indent + pragma, *loop]
    found = re.fullmatch(r"for \(int64_t (\w+) = 0; \1 < (.*); \+\+\1\) \{", head)
    if found is None:
        return list(loop)
    index, end = found.groups()
    of, to = f"{index}_block", f"{index}_end"
    return [
        f"{indent}for (int64_t {of} = 0; {of} < {end}; {of} += {_BLOCK}) {{",
        f"{indent}  const int64_t {to} = {of} + {_BLOCK} < {end} ? {of} + {_BLOCK} : {end};",
        f"{indent}  {pragma}",
        f"{indent}  for (int64_t {index} = {of}; {index} < {to}; ++{index}) {{",
        *(f"  {line}" for line in loop[1:]),
        f"{indent}}}",
    ]


def _reductions(loop: Sequence[str]) -> str:
    """Clauses of an innermost loop in which nothing but sums, products and extremes goes from one
    turn to the next; empty for any other.
    """
    head, body = loop[0].strip(), [x.strip() for x in loop[1:]]
    if not head.startswith("for (") or any(x.endswith("{") or x.startswith("#") for x in body):
        return ""
    found: dict[str, str] = {}
    for line in body:
        joined = re.fullmatch(
            r"(tmp_acc\w+) = (?:\1 ([+*]) tmp\d+|(m\w+_propagate_nan)\(\1, tmp\d+\));", line
        )
        own = re.match(r"auto tmp\d+ = |\w+\[[^\[\]]*\] = ", line)
        scattered = re.match(r"\w+\[[^\[\]]*tmp[^\[\]]*\] = ", line)
        if joined:
            how = joined[2] or joined[3]
            if found.setdefault(joined[1], how) == how:
                continue
        if own is None or scattered or "tmp_acc" in line:
            return ""
    return " ".join(f"reduction({how}:{name})" for name, how in found.items())


def _without_aliases(text: str) -> str:
    """The text, with a word for the compiler: no two of a kernel's pointers lead to the same place,
    as Inductor has it. What a row's elements share then need not be computed anew after each store.

    A parallel region that stores becomes a lambda: g++ makes a function of a region, and forgets
    what `__restrict__` said outside of it.
    """
    while alias := re.search(r"\n *auto (\w+) = (\w*_ptr\d+);", text):
        text = re.sub(rf"\b{alias[1]}\b", alias[2], text.replace(alias[0], "", 1))
    head = text.partition("\n")[0]
    declared = head[head.index("(") + 1 : head.rindex(")")].split(", ")
    parameters = {x.split()[-1]: x for x in declared}
    regions = re.compile(r"( *)(#pragma omp parallel.*)\n\1\{\n((?:\1  .*\n)*)\1\}")
    names = map("part{}".format, itertools.count(1))

    def function(region: re.Match[str]) -> str:
        indent, pragma, body = region.groups()
        if not re.search(r"_ptr\d+\[.*\] = ", body):
            return region[0]
        part = next(names)
        used = {name: x for name, x in parameters.items() if re.search(rf"\b{name}\b", body)}
        typed = ", ".join(used.values()).replace("*", "* __restrict__")
        lines = f"{indent}const auto {part} = [&]({typed}) {{\n{body}{indent}}};\n"
        return f"{lines}{indent}{pragma}\n{indent}{part}({', '.join(used)});"

    if "#pragma omp parallel" in text:
        return regions.sub(function, text)
    return text.replace(head, head.replace("*", "* __restrict__"), 1)


def _indented(text: str) -> str:
    """Blocks that hold nothing but a block become one; two spaces a level."""
    stack: list[list[object]] = [[]]
    for line in (x.strip() for x in text.splitlines()):
        if line == "{":
            stack.append([])
        elif line == "}":
            block = stack.pop()
            while len(block) == 1 and isinstance(block[0], list):
                block = block[0]
            stack[-1].append(block)
        elif line:
            stack[-1].append(line)
    lines: list[str] = []

    def write(block: Sequence[object], depth: int) -> None:
        for item in block:
            if isinstance(item, list):
                if lines and re.match(r"(for|if|else|extern)\b.*[^;{]$", lines[-1].strip()):
                    lines[-1] += " {"
                else:
                    lines.append("  " * depth + "{")
                write(item, depth + 1)
                lines.append("  " * depth + "}")
            else:
                lines.append("  " * depth + str(item))

    write(stack[0], 0)
    return "\n".join(lines)


def _vector_math(body: str) -> str:
    """Declarations of the functions for vectors that kernels may use: glibc tells g++ of them only
    where all of -ffast-math is allowed.
    """
    used = set(re.findall(r"std::(\w+)\(", body))
    types = [(t, end) for t, end in (("float", "f"), ("double", "")) if f"{t}*" in body]
    lines: list[str] = []
    for version, names in _VECTOR_MATH.items():
        declared = [
            f"#pragma omp declare simd notinbranch\n"
            f'extern "C" {t} {name}{end}({f"{t}, {t}" if name in _OF_TWO else t}) noexcept;'
            for name in sorted(names & used)
            for t, end in types
        ]
        lines += [f"#if __GLIBC_PREREQ({version})", *declared, "#endif"] if declared else []
    if not lines:
        return ""
    condition = "#if VECTOR_MATH && defined(__x86_64__) && defined(__GLIBC__)"
    return "\n".join(["", condition, *lines, "#endif", ""])


def _prelude(body: str) -> str:
    """The functions that kernels use, in order."""
    used: set[str] = set()
    text = body
    while True:
        more = {n for n in _PRELUDE if n not in used and re.search(rf"(?<![:\w]){n}\b", text)}
        if not more:
            return "".join(_PRELUDE[n] for n in _PRELUDE if n in used)
        used |= more
        text = "".join(_PRELUDE[n] for n in more)
