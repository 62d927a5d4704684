"""Options of g++ that a kernel may ask for: those that change its own code, and nothing else.

What names files, programs or plugins is the builder's business. What makes g++ link more into a
library may change the process that loads it: up to g++ 12, `-ffast-math`, `-Ofast` and
`-funsafe-math-optimizations` add a constructor that turns subnormal numbers to zero in the loading
thread, and in all that it starts. From g++ 13 on they do so for programs only, but `-mdaz-ftz`
does for libraries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .compiling import check_options
from .errors import CompileError

FAST = (
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
    *("-freciprocal-math", "-ffinite-math-only"),
)
"""The part of `-ffast-math` that concerns the kernel's own code."""
_EXAMPLES = "-O2, -fno-math-errno, -mprefer-vector-width=512, -DNAME=VALUE"
_FOR_THE_PROCESS = r"-ffast-math|-Ofast|-funsafe-math-optimizations|-mdaz-ftz|-mpc(32|64|80)"

_MATH = (
    "associative-math", "cx-fortran-rules", "cx-limited-range", "finite-math-only", "float-store",
    "fp-int-builtin-inexact", "math-errno", "reciprocal-math", "rounding-math", "signaling-nans",
    "signed-zeros", "single-precision-constant", "trapping-math",
)  # fmt: skip
_LANGUAGE = (
    "builtin", "char8_t", "common", "concepts", "coroutines", "delete-null-pointer-checks",
    "exceptions", "non-call-exceptions", "openmp", "openmp-simd", "permissive", "plt", "rtti",
    "semantic-interposition", "signed-char", "strict-aliasing", "strict-enums", "strict-overflow",
    "threadsafe-statics", "trapv", "unsigned-char", "wrapv",
)  # fmt: skip
_PASSES = (
    "aggressive-loop-optimizations", "align-functions", "align-jumps", "align-labels",
    "align-loops", "branch-count-reg", "code-hoisting", "combine-stack-adjustments",
    "crossjumping", "cse-follow-jumps", "defer-pop", "early-inlining", "expensive-optimizations",
    "forward-propagate", "gcse", "gcse-after-reload", "gcse-las", "gcse-lm", "gcse-sm",
    "graphite-identity", "hoist-adjacent-loads", "if-conversion", "if-conversion2",
    "indirect-inlining", "inline", "inline-functions", "inline-functions-called-once",
    "inline-small-functions", "ipa-bit-cp", "ipa-cp", "ipa-cp-clone", "ipa-icf", "ipa-modref",
    "ipa-pta", "ipa-ra", "ipa-sra", "ipa-vrp", "ira-hoist-pressure", "ira-loop-pressure",
    "isolate-erroneous-paths-dereference", "ivopts", "jump-tables", "keep-inline-functions",
    "live-range-shrinkage", "loop-block", "loop-interchange", "loop-nest-optimize",
    "loop-parallelize-all", "loop-strip-mine", "loop-unroll-and-jam", "merge-constants",
    "modulo-sched", "modulo-sched-allow-regmoves", "move-loop-invariants", "move-loop-stores",
    "omit-frame-pointer", "optimize-sibling-calls", "optimize-strlen", "partial-inlining",
    "peel-loops", "peephole", "peephole2", "predictive-commoning", "prefetch-loop-arrays",
    "ree", "rename-registers", "reorder-blocks", "reorder-functions", "rerun-cse-after-loop",
    "reschedule-modulo-scheduled-loops", "sched-interblock", "sched-pressure", "sched-spec",
    "sched2-use-superblocks", "schedule-fusion", "schedule-insns", "schedule-insns2",
    "sel-sched-pipelining", "selective-scheduling", "selective-scheduling2", "shrink-wrap",
    "split-ivs-in-unroller", "split-loops", "split-paths", "split-wide-types", "ssa-phiopt",
    "stdarg-opt", "store-merging", "thread-jumps", "toplevel-reorder", "unroll-all-loops",
    "unroll-loops", "unswitch-loops", "variable-expansion-in-unroller", "version-loops-for-strides",
    "web",
)  # fmt: skip
_SWITCHES = "|".join(map(re.escape, (*_MATH, *_LANGUAGE, *_PASSES)))
_INSTRUCTIONS = (
    r"(sse|avx|amx|3dnow)[\w.-]*|ssse3|abm|adx|aes|bmi2?|cldemote|clflushopt|clwb|cx16|f16c|fma4?"
    r"|fsgsbase|gfni|lzcnt|mmx|movbe|movdir64b|movdiri|pclmul|popcnt|prefetchwt1|prfchw|rdrnd"
    r"|rdseed|sahf|serialize|sha|tbm|vaes|vpclmulqdq|xop|vzeroupper|fp-ret-in-387|stackrealign"
    r"|inline-all-stringops|inline-stringops-dynamically|align-stringops|ieee-fp|red-zone"
    r"|low-precision-(recip-sqrt|div|sqrt)|strict-align|outline-atomics|general-regs-only|recip"
)
_OPTIONS = (
    r"-[DU]\w+(=.*)?",
    r"-O[0-3s]?",
    r"-std=(c|gnu)\+\+(17|20|2a|23|2b)",
    rf"-f(no-)?({_SWITCHES})",
    r"-f(no-)?tree-(?!parallelize)[a-z-]+",
    r"-fno-(fast-math|unsafe-math-optimizations)",
    r"-falign-(functions|jumps|labels|loops)=[\d:]+",
    r"-f(excess-precision|fp-contract)=\w+",
    r"-f(vect|simd)-cost-model=[\w-]+",
    r"-f(inline-limit|template-depth|constexpr-(depth|loop-limit|ops-limit))=\d+",
    r"-m(arch|tune|cpu)=[\w.+-]+",
    rf"-m(no-)?({_INSTRUCTIONS})",
    r"-mfpmath=(sse|387|both|sse[+,]387)",
    r"-m(prefer-vector-width|move-max|store-max|sve-vector-bits)=\w+",
    r"-m(recip|memcpy-strategy|memset-strategy|tune-ctrl)=[\w!,:^-]+",
    r"-mbranch-cost=\d+",
)


def check_cpp_options(kernel: str, options: Sequence[str]) -> None:
    """Refuse options that do more than change the kernel's own code.

    Raises:
        CompileError: One does; the text says what to write instead.
    """
    for option in options:
        if isinstance(option, str) and re.fullmatch(_FOR_THE_PROCESS, option):
            raise CompileError(
                kernel,
                f"compiler option {option!r} is not allowed: g++ links code with it that changes "
                "floating point in the whole process that loads the library (turns subnormal "
                f"numbers to zero, for example). For the kernel alone: {' '.join(FAST)}",
            )
    check_options(kernel, options, _OPTIONS, _EXAMPLES)
