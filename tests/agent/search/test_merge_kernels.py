import ast
import builtins
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.resources import resource
from kagent.search.merge_kernels import BranchCondition, Part, labels, merge
from kagent.search.rename import RenameError, module_names, rename
from kagent.search.text_edits import EditableText
from kagent.search.tunables import read_tunables
from sampling import examples

SPLIT = BranchCondition("{0} <= {constant}", "small ones", "N_SPLIT", 10, (5, 10, 20))


def renamed(source, names):
    tree = ast.parse(source)
    text = EditableText(source)
    return text.apply(rename(text, tree, names))


def run(source):
    namespace = {}
    exec(compile(source, "merged.py", "exec"), namespace)
    return namespace


def module(text):
    return textwrap.dedent(text).lstrip()


A = module('''
    """The first."""
    import math
    from math import floor, sqrt

    SCALE = 2  # times
    TUNE = {"SCALE": [1, 2, 3]}

    def helper(v):
        return v * SCALE

    def entry(n: int, extra=0) -> int:
        return helper(n) + extra + floor(math.pi)

    if __name__ == "__main__":
        print(entry(1))
''')
B = module('''
    """The second."""
    import math
    from math import floor, ceil

    SCALE = 100
    TUNE = {"SCALE": [10, 100], "OTHER": [1]}
    OTHER = 1
    __all__ = ["entry"]

    class helper:
        """It has the other's name."""
        SCALE = 5
        def scaled(self, v, *, SCALE=SCALE):
            return v * SCALE

    counter = [helper().scaled(k) for k in range(3)]

    def entry(m, extra=0):
        def inner(SCALE):
            return SCALE
        local = {"SCALE": SCALE}
        total = sum(SCALE for SCALE in [1, 2])
        return local["SCALE"] * m + inner(SCALE=1) + total + extra + ceil(0.5)
''')


def test_merged_file_does_what_both_do():
    merged = merge(Part(A, "one", "first"), Part(B, "two", "second"), "entry", SPLIT)
    alone_a, alone_b, both = run(A)["entry"], run(B)["entry"], run(merged)["entry"]
    for n in (0, 10):
        assert both(n, 7) == alone_a(n, 7)
    for n in (11, 50):
        assert both(n, extra=7) == alone_b(n, extra=7)


def test_merged_file_reads_well():
    merged = merge(Part(A, "one", "first"), Part(B, "two", "second"), "entry", SPLIT)
    tunables = read_tunables(merged)
    assert {t.name: t.values for t in tunables.items} == {
        "N_SPLIT": (5, 10, 20),
        "SCALE": (1, 2, 3),
        "SCALE_TWO": (10, 100),
        "OTHER": (1,),
    }
    assert merged.count("import math\n") == 1
    assert "from math import ceil, floor, sqrt" in merged
    assert "__main__" not in merged
    assert "SCALE = 2  # times" in merged
    assert merged.endswith(
        module("""
        def entry(n: int, extra=0) -> int:
            if n <= N_SPLIT:
                return _entry_one(n, extra)
            return _entry_two(n, extra)
        """)
    )


def test_merging_again_gives_new_names():
    once = merge(Part(A, "one", "first"), Part(B, "two", "second"), "entry", SPLIT)
    other = module("""
        def entry(n, extra=0):
            return -n
    """)
    twice = merge(
        Part(once, "one_two", "both"),
        Part(other, "three", "third"),
        "entry",
        BranchCondition("{0} <= {constant}", "more", "N_SPLIT", 30, (30,)),
    )
    entry = run(twice)["entry"]
    assert entry(10) == run(A)["entry"](10)
    assert entry(20) == run(B)["entry"](20)
    assert entry(31) == -31
    assert {"N_SPLIT", "N_SPLIT_2"} <= {t.name for t in read_tunables(twice).items}


@pytest.mark.parametrize(
    "source",
    [
        "from math import *\ndef entry(n, extra=0): return n",
        "def entry(*n): return n",
        "entry = lambda n, extra=0: n",
        "def entry(n): return n",
        "def entry(n, extra=0): return globals()",
        "x = 1; TUNE = {}\ndef entry(n, extra=0): return n",
        "def entry(n, extra=0",
    ],
)
def test_what_cannot_be_merged_safely_is_not(source):
    assert merge(Part(A, "one", "a"), Part(source, "two", "b"), "entry", SPLIT) is None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("G = 1\ndef f(): return G", "H = 1\ndef f(): return H"),
        ("G = 1\ndef f(G): return G", "H = 1\ndef f(G): return G"),
        ("G = 1\ndef f(a=G, *, G=2): return G", "H = 1\ndef f(a=H, *, G=2): return G"),
        ("G = 1\ndef f():\n  G = 2\n  return G", "H = 1\ndef f():\n  G = 2\n  return G"),
        ("def f():\n  global G\n  G = 2", "def f():\n  global H\n  H = 2"),
        ("G = 1\nf(G=G).G", "H = 1\nf(G=H).G"),
        ("G = [G for G in G]", "H = [G for G in H]"),
        ("class C:\n  G = 1\n  def f(s): return G", "class C:\n  G = 1\n  def f(s): return H"),
        ("G = lambda G: G", "H = lambda G: G"),
        ("@G\ndef G(): G()", "@H\ndef H(): H()"),
        ("async  def G(): pass", "async  def H(): pass"),
        ("import a.b as G", "import a.b as H"),
        ("from a import G", "from a import G as H"),
        ("é = 'é'; G = é + G", "é = 'é'; H = é + H"),
        ("def f():\n  def g(): return G\n  G = 1", "def f():\n  def g(): return G\n  G = 1"),
        (
            "def f():\n  (lambda: (G := 1))\n  return G",
            "def f():\n  (lambda: (G := 1))\n  return H",
        ),
        (
            "def f():\n  [(G := 1) for _ in y]\n  return G",
            "def f():\n  [(G := 1) for _ in y]\n  return G",
        ),
    ],
)
def test_renaming_follows_scopes(source, expected):
    assert renamed(source, {"G": "H"}) == expected


@pytest.mark.parametrize(
    "source", ["try: f()\nexcept E as G: pass", "import G.b", "match x:\n  case G: pass"]
)
def test_names_that_have_no_position_are_refused(source):
    with pytest.raises(RenameError):
        renamed(source, {"G": "H"})


def test_module_names():
    source = "import a.b, c as d\nfor i in j: k = 1\nclass L: m = 1\ndef n():\n  global o; p = 1"
    assert module_names(ast.parse(source)) == {"a", "d", "i", "k", "L", "n", "o"}


def test_labels():
    assert labels(["triton_rows", "cuda_cluster"]) == ["rows", "cluster"]
    assert labels(["triton_online", "cpp_online"]) == ["triton_online", "cpp_online"]
    assert labels(["triton_a+cuda_b", "triton_c"]) == ["a_b", "c"]
    assert labels(["x", "x"]) == ["x_1", "x_2"]


SEEDS = sorted(resource("seeds").glob("*/*_*.py"))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("path", SEEDS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_shipped_seeds_merge_with_their_neighbours(path):
    entry = path.parent.name
    for other in SEEDS:
        if other.parent == path.parent and other != path:
            first, second = (Part(p.read_text(), p.stem, p.stem) for p in (path, other))
            merged = merge(first, second, entry, SPLIT)
            assert merged is not None
            _assert_no_unknown_names(merged)
            tuned = read_tunables(merged).items
            counts = [len(read_tunables(p.source).items) for p in (first, second)]
            assert len(tuned) == sum(counts) + 1


def _assert_no_unknown_names(source):
    """Every name that is read is bound somewhere, or a builtin."""
    tree = ast.parse(source)
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if not isinstance(n.ctx, ast.Load)} | module_names(tree)
    bound |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    bound |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert {n.id for n in names} - bound - set(dir(builtins)) == set()


NAMES = st.sampled_from(["a", "b", "c"])
EXPRESSIONS = st.recursive(
    NAMES | st.integers(0, 9).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("({0[0]} + {0[1]})".format),
        st.tuples(NAMES, inner).map("(lambda {0[0]}: {0[1]})(1)".format),
        st.tuples(inner, NAMES, inner).map("sum([{0[0]} for {0[1]} in [{0[2]}, 1]])".format),
    ),
    max_leaves=8,
)


@given(st.lists(st.tuples(NAMES, EXPRESSIONS), min_size=1, max_size=4), EXPRESSIONS)
@settings(max_examples=examples(150), deadline=None)
def test_renaming_never_changes_what_a_module_computes(assignments, result):
    body = "\n".join(f"    {n} = {e}" for n, e in assignments)
    source = f"a, b, c = 1, 2, 3\ndef f(a):\n{body}\n    return {result}\ng = {result}\n"
    other = renamed(source, {"a": "alpha", "b": "beta"})

    def value(text):
        namespace = run(text)
        try:
            return namespace["g"], namespace["f"](5)
        except NameError:
            return "unbound"

    assert value(other) == value(source)
