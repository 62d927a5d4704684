import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.builder.identity import source_hash, tree_hash

CANDIDATE = '''
import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>
__global__ void k(const float *x, float *y, int n) { int i = threadIdx.x; y[i] = x[i] - -1.0f; }
"""


def f(x, scale=2):
    """Doc."""
    rows = x.shape[0]
    y = torch.empty_like(x)
    for part in range(rows):
        y[part] = part

    def inner(z):
        total = rows + z
        return total * scale

    return inner(3), y
'''

names = st.text(string.ascii_lowercase, min_size=1, max_size=6).map(lambda s: f"v_{s}")
blanks = st.text(" \t", max_size=3)


@given(st.lists(names, min_size=4, max_size=4, unique=True))
def test_names_of_locals_do_not_count(new):
    renamed = CANDIDATE
    for old, name in zip(("rows", "total", "part", "y"), new, strict=True):
        body = renamed.index("def f")
        pieces = renamed[body:]
        renamed = renamed[:body] + re.sub(rf"\b{old}\b", name, pieces)
    assert tree_hash(renamed) == tree_hash(CANDIDATE)
    assert source_hash(renamed) != source_hash(CANDIDATE)


@given(st.integers(0, len(CANDIDATE.splitlines())), st.text(string.printable, max_size=20))
def test_comments_and_blank_lines_do_not_count(line, text):
    lines = CANDIDATE.splitlines()
    source = [i for i, x in enumerate(lines) if '"""' in x]
    if source[0] < line <= source[1]:
        comment = "// " + " ".join(text.split()).replace('"', "").rstrip("\\")
    else:
        comment = "# " + " ".join(text.split())
    if source[2] < line <= source[2]:
        return
    changed = "\n".join([*lines[:line], "", comment, *lines[line:]])
    assert tree_hash(changed) == tree_hash(CANDIDATE)


@given(blanks, blanks)
def test_layout_of_kernel_sources_does_not_count(before, after):
    changed = CANDIDATE.replace("y[i] = x[i]", f"y[i]{before}={after}x[i]")
    assert tree_hash(changed) == tree_hash(CANDIDATE)


def test_what_counts():
    base = tree_hash(CANDIDATE)
    for old, new in (
        ("scale=2", "scale=3"),
        ("rows + z", "z + rows"),
        ("rows + z", "part + z"),
        ("x[i] - -1.0f", "x[i] - -1.5f"),
        ("x[i] - -1.0f", "x[i]--1.0f"),
        ("const float *x", "float *x"),
        ("def f(x", "def g(x"),
        ("x.shape[0]", "x.shape[1]"),
        ("#include <cuda_bf16.h>", "#include <cuda_fp16.h>"),
    ):
        assert old in CANDIDATE
        assert tree_hash(CANDIDATE.replace(old, new)) != base, (old, new)


def test_two_locals_never_become_one():
    inner = "    def g(b):\n        c = 2\n        return a + b + c\n"
    a = f"def f(x):\n    a = 1\n{inner}    return g\n"
    assert tree_hash(a) != tree_hash(a.replace("a + b + c", "c + b + c"))
    assert tree_hash(a) != tree_hash(a.replace("a + b + c", "a + b + a"))
    assert tree_hash(a) == tree_hash(a.replace("c = 2", "q = 2").replace("+ c", "+ q"))


def test_code_that_reads_its_own_names_is_left_alone():
    a = "def f(x):\n    a = 1\n    return locals()\n"
    assert tree_hash(a) != tree_hash(a.replace("a = 1", "b = 1"))


def kernel(body):
    """A candidate around C++ source."""
    return f"S = r'''#include <cmath>\n{body}'''\ndef f(x):\n    return k(S)(x)\n"


LOOK_ALIKES = {
    "docstring as source": (
        'def s():\n    """#include <a>"""\ndef f(x):\n    return k(s.__doc__)(x)\n',
        'def s():\n    """#include <b>"""\ndef f(x):\n    return k(s.__doc__)(x)\n',
    ),
    "comment as source": (
        "# 1\ndef f(x):\n    return k(open(__file__).read())\n",
        "# 2\ndef f(x):\n    return k(open(__file__).read())\n",
    ),
    "line numbers": (
        "import sys\ndef f(x):\n    return k(sys._getframe().f_lineno)\n",
        "import sys\n\ndef f(x):\n    return k(sys._getframe().f_lineno)\n",
    ),
    "by getattr": (
        'def f(x):\n    "1"\n    return getattr(f, "__doc__")\n',
        'def f(x):\n    "2"\n    return getattr(f, "__doc__")\n',
    ),
    "names of locals": (
        "import sys\ndef f(x):\n    a = 1\n    return list(sys._getframe().f_locals)\n",
        "import sys\ndef f(x):\n    b = 1\n    return list(sys._getframe().f_locals)\n",
    ),
    "comment signs in a macro": (
        kernel('#define S "a//1"\nchar c = S[3];'),
        kernel('#define S "a//2"\nchar c = S[3];'),
    ),
    "blanks in a macro's text": (
        kernel('#define S "a  b"\nint n = sizeof(S);'),
        kernel('#define S "a b"\nint n = sizeof(S);'),
    ),
    "a macro with or without parameters": (
        kernel("#define A(x) (x)\nint n = A(1);"),
        kernel("#define A (x) (x)\nint n = A(1);"),
    ),
    "a macro that ends, or goes on over a comment": (
        kernel("#define A /*\n*/ 1\nint n A;"),
        kernel("#define A\n1\nint n A;"),
    ),
    "digit separators": (
        kernel("int a = 1'0; const char* s = \"'//1\";\n"),
        kernel("int a = 1'0; const char* s = \"'//2\";\n"),
    ),
    "raw text with a prefix": (
        kernel('const auto* s = u8R"(" // 1\n)";'),
        kernel('const auto* s = u8R"(" // 2\n)";'),
    ),
    "raw text with odd delimiters": (
        kernel('const char* s = R"--(" // 1\n)--";'),
        kernel('const char* s = R"--(" // 2\n)--";'),
    ),
    "lines that count": (
        kernel("int n = __LINE__;"),
        kernel("// one more\nint n = __LINE__;"),
    ),
    "tokens as text": (
        kernel("#define S(x) #x\nint n = sizeof(S(a+b));"),
        kernel("#define S(x) #x\nint n = sizeof(S(a + b));"),
    ),
    "tokens as text, on the next line": (
        kernel("#define S(x) \\\n  #x\nint n = sizeof(S(a+b));"),
        kernel("#define S(x) \\\n  #x\nint n = sizeof(S(a + b));"),
    ),
    "names of tokens": (
        kernel("#define S(x) __LI##x\nint n = S(NE__);"),
        kernel("#define S(x) __LI##x\n\nint n = S(NE__);"),
    ),
    "a text and a name": (
        kernel('#define _x "1"\nauto s = "a" _x;'),
        kernel('#define _x "1"\nauto s = "a"_x;'),
    ),
    "one name on two lines": (kernel("int\\\nx = 1;"), kernel("int x = 1;")),
    "pieces of a text": (
        "def f(x, r):\n    return k(f'#include <a>\\nasm(\"mov {r}; // 1\");')(x)\n",
        "def f(x, r):\n    return k(f'#include <a>\\nasm(\"mov {r}; // 2\");')(x)\n",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_different_candidates_do_not_look_alike(name):
    one, two = LOOK_ALIKES[name]
    assert one != two
    assert tree_hash(one) != tree_hash(two)


def test_comments_and_layout_of_macros_do_not_count():
    a = kernel("#define A(x)  (x) // one\n#  define B 1\nint n = A(1);\n")
    b = kernel("#define A(x) (x)   /* two */\n\n# define B 1\nint n=A(1); // end\n")
    assert tree_hash(a) == tree_hash(b)
