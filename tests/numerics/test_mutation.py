"""The mutator: what it makes, what it leaves alone; and a few mutants that the judge must catch."""

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.device.cpu.backend import CpuBackend
from mutation import cxx, generate, python
from mutation.conditions import of_values
from mutation.edits import Edit, apply
from mutation.engines import Fate, Interpreting, Real
from mutation.equivalent import LIST, Equivalents
from mutation.generate import kernel_sources, mutants_of_source
from sampling import examples

mutants_of = functools.cache(generate.mutants_of)
SEEDS = [s.path for name in task_names() for s in seeds_of(find_task(name))]

CPP = '''
SOURCE = r"""
#include <cstdint>  // a + b in a comment
#define TWICE(x) (2 * x)
/* n - 1 */
extern "C" void f(const float* x, float* y, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * 0.5f;
  y[0] = n > 3 ? std::max(sum, -INFINITY) : sum - 1.0f;
  const char* text = "a + b";
}
"""
'''


def made(source, kind=None):
    found = mutants_of_source("task/file.py", source)
    return {m.now for m in found if kind in (None, m.kind)}


def test_cpp_mutants_are_those_that_a_reader_expects():
    now = made(CPP)
    loop = "for (int64_t i = 0; i < n; ++i) sum += x[i] * 0.5f;"
    result = "y[0] = n > 3 ? std::max(sum, -INFINITY) : sum - 1.0f;"
    for line, was, changed in [
        (loop, "i < n", "i <= n"),
        (loop, "i < n", "i < n - 1"),
        (loop, "+=", "-="),
        (loop, "+=", "="),
        (loop, "x[i]", "x[(i) + 1]"),
        (loop, " * 0.5f", " / 0.5f"),
        (loop, " * 0.5f", " "),
        (loop, "0.5f", "0.5005f"),
        (loop, "i = 0", "i = 1"),
        (result, "n > 3 ?", "n > 3 || true ?"),
        (result, "n > 3 ?", "n > 3 && false ?"),
        (result, "std::max", "std::min"),
        (result, "-INFINITY", "INFINITY"),
        (result, "-INFINITY", "-0.0f"),
        (result, " - 1.0f", " + 1.0f"),
        ("float sum = 0.0f;", "float", "Rounded"),
    ]:
        assert line.replace(was, changed) in now


def test_comments_directives_and_text_are_left_alone():
    for mutant in mutants_of_source("task/file.py", CPP):
        assert "comment" not in mutant.was
        assert "TWICE" not in mutant.was
        assert mutant.source.count('"a + b"') == 1
        assert "/* n - 1 */" in mutant.source


def test_a_rounded_accumulator_brings_its_type_along():
    (mutant,) = [m for m in mutants_of_source("task/file.py", CPP) if m.kind == "accumulator"]
    assert mutant.source.index("struct Rounded") < mutant.source.index("Rounded sum")
    assert mutant.source.index("#define TWICE") < mutant.source.index("struct Rounded")


TRITON = '''
import triton.language as tl

TUNE = {"BLOCK": [64, 128]}
BLOCK = 128

@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, y_ptr, n: tl.constexpr, BLOCK: tl.constexpr):
    """Adds 1 + 1."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # § 2 + 2
    x = tl.load(x_ptr + at, mask=at < n, other=-float("inf")).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.where(x > 0.5, tl.exp2(x), 0.0)
    tl.store(y_ptr + at, tl.sum(total, 0), mask=at < n, eviction_policy="evict_first")
'''


def test_triton_mutants_are_those_that_a_reader_expects():
    now = made(TRITON)
    load = 'x = tl.load(x_ptr + at, mask=at < n, other=-float("inf")).to(tl.float32)'
    add = "total += tl.where(x > 0.5, tl.exp2(x), 0.0)"
    store = 'tl.store(y_ptr + at, tl.sum(total, 0), mask=at < n, eviction_policy="evict_first")'
    for line, was, changed in [
        (load, "at < n", "at <= n"),
        (load, ', mask=at < n, other=-float("inf")', ""),
        (load, '-float("inf")', "0.0"),
        (load, "x_ptr + at", "(x_ptr + at) - 1"),
        (load, ".to(tl.float32)", ""),
        (load, "tl.float32", "tl.bfloat16"),
        (add, "+=", "="),
        (add, "x > 0.5", "x < 0.5"),
        (add, "tl.where(x > 0.5, tl.exp2(x), 0.0)", "(tl.exp2(x)) + 0 * (x > 0.5)"),
        (add, "tl.exp2", "tl.exp"),
        (store, "tl.sum", "tl.max"),
        (store, ", mask=at < n", ""),
        (store, store, "pass"),
        ("for start in range(0, n, BLOCK):", "n,", "(n) - 1,"),
    ]:
        assert line.replace(was, changed) in now


def test_tunables_hints_docstrings_and_wide_casts_are_left_alone():
    for mutant in mutants_of_source("task/file.py", TRITON):
        tree = ast.parse(mutant.source)
        assert ast.unparse(tree.body[1]) == "TUNE = {'BLOCK': [64, 128]}"
        assert ast.unparse(tree.body[2]) == "BLOCK = 128"
        assert '"""Adds 1 + 1."""' in mutant.source
        assert ".to(tl.int64)" in mutant.source
        assert 'do_not_specialize=["n"]' in mutant.source


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("path", SEEDS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_mutant_of_a_seed_is_one_small_change(path):
    mutants = mutants_of(path)
    assert len(mutants) >= 30
    assert len({m.source for m in mutants}) == len(mutants)
    source = path.read_text()
    bounds = bounds_of_statements(source)
    for mutant in mutants:
        statements = changed_statements(source, bounds, mutant.source)
        compile(statements, mutant.file, "exec", dont_inherit=True)  # half of ast.parse's time
        assert mutant.was != mutant.now


def bounds_of_statements(source):
    """Offsets between which whole statements of the module lie, in order."""
    lines = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    return [0, *(lines[s.end_lineno] for s in ast.parse(source).body), len(source)]


def changed_statements(source, bounds, changed):
    """Statements of a changed module that are not the source's own. The others compile with it."""
    start = max(b for b in bounds if changed.startswith(source[:b]))
    longer = len(changed) - len(source)
    stop = min(b for b in bounds if b + longer >= start <= b and changed.endswith(source[b:]))
    return changed[start : stop + longer]


def test_changed_statements_are_whole_and_no_others():
    source = "a = 1\n\n@f\ndef g():\n    return 2\n\n\nb = 3  # c\n"
    bounds = bounds_of_statements(source)
    for was, now, expected in [
        ("1", "4", "a = 4\n"),
        ("2", "2 +", "\n@f\ndef g():\n    return 2 +\n"),
        ("f\n", "h\n", "\n@h\ndef g():\n    return 2\n"),
        ("3", "3)", "\n\nb = 3)  # c\n"),
        ("b", "a = 1\nb", "\n\na = 1\nb = 3  # c\n"),
    ]:
        assert changed_statements(source, bounds, source.replace(was, now)) == expected


@given(
    source=st.text("abx01.+-*/<>=!?:;,(){}[]&|^%\"'\n #", max_size=80),
)
@settings(max_examples=examples(200), deadline=None)
def test_the_tokenizer_takes_any_text(source):
    found = cxx.tokens_of(source)
    for token in found:
        assert source[token.start : token.stop] == token.text
    assert all(a.stop <= b.start for a, b in itertools.pairwise(found))
    for edit in cxx.edits_of(source):
        assert 0 <= edit.start <= edit.stop <= len(source)
        assert source[: edit.start] + edit.text + source[edit.stop :] != source


def test_the_tokenizer_reads_all_of_every_seed():
    for path in SEEDS:
        for start, text in kernel_sources(path.read_text()):
            assert path.read_text()[start : start + len(text)] == text
            assert all(t.kind != "other" for t in cxx.tokens_of(text))


@given(st.sampled_from(["a", "é", "字"]), st.sampled_from(["+", "-", "*"]))
def test_columns_are_counted_in_characters(letter, operator):
    source = f'def f(x):\n    return "{letter}", x {operator} y\n'
    edits = [e for e in python.edits_of(source) if e.kind == "operator"]
    assert edits
    for edit in edits:
        assert source[edit.start : edit.stop] == operator


def test_an_edit_outside_of_the_file_is_refused():
    with pytest.raises(ValueError, match="outside"):
        apply("task/file.py", "abc", Edit(2, 9, "", "constant"))


# -- the list of equivalent mutants ----------------------------------------------------------------


@pytest.mark.nightly
def test_each_listed_change_is_one_that_the_mutator_makes():
    made_by = {p: {(m.was, m.now) for m in (*mutants_of(p), *of_values(p))} for p in SEEDS}
    keys = {f"{p.parent.name}/{p.name}": changes for p, changes in made_by.items()}
    by_change = {}
    for (file, was, now), why in Equivalents().reasons.items():
        known = keys[file]
        hit = any(w == was for w, _ in known) if now == "*" else (was, now) in known
        by_change.setdefault((was, now, why), []).append(hit)
    dead = [change for change, hits in by_change.items() if not any(hits)]
    assert dead == []


def test_a_change_that_is_listed_twice_is_refused(tmp_path):
    entry = '[[equivalent]]\nfiles = ["a/b.py"]\nwhy = "x"\nchanges = [["1", "2"]]\n'
    (tmp_path / "list.toml").write_text(2 * entry)
    with pytest.raises(ValueError, match="twice"):
        Equivalents(tmp_path / "list.toml")
    assert LIST.exists()


# -- the judge on a few mutants --------------------------------------------------------------------

CAUGHT_CPP = {
    "gelu/cpp_simd.py": [("x * x)))", "constant dropped"), ("0.1029432397f", "constant scaled")],
    "softmax/cpp_rows.py": [("const Floats v = ", "operator"), ("out[i] = buffer[i]", "offset")],
}


def picked(path, text, kind, count=2):
    found = [m for m in mutants_of(path) if text in m.was and m.kind == kind]
    assert found, (path, text, kind)
    return found[:count]


@pytest.mark.nightly
@pytest.mark.parametrize("file", CAUGHT_CPP)
def test_mutants_of_cpp_seeds_are_caught(file, builder, untimed):
    name = Path(file)
    task = find_task(str(name.parent))
    path = task.folder / name.name
    mutants = [m for text, kind in CAUGHT_CPP[file] for m in picked(path, text, kind)]
    files = {m.file: (task.folder.parent / m.file).read_text() for m in mutants}
    with Real(task, CpuBackend(), builder, 2) as engine:
        fates = [j.fate for j in engine.judge(files, mutants)]
    assert set(fates) <= {Fate.CAUGHT, Fate.SAME}
    assert fates.count(Fate.CAUGHT) >= 2


def test_a_mutant_that_is_the_seed_is_recognised_and_one_that_does_not_build_counts_apart(
    builder, untimed
):
    task = find_task("gelu")
    source = (task.folder / "cpp_simd.py").read_text()
    at = source.index("constexpr int64_t STEP")
    comment = apply("gelu/cpp_simd.py", source, Edit(at, at, "// a comment\n", "operator"))
    broken = apply("gelu/cpp_simd.py", source, Edit(at, at, "broken ", "operator"))
    with Real(task, CpuBackend(), builder, 2) as engine:
        judged = list(engine.judge({"gelu/cpp_simd.py": source}, [comment, broken]))
    assert [j.fate for j in judged] == [Fate.SAME, Fate.NOT_BUILT]
    assert re.search("COMPILE_ERROR", judged[1].says)


def test_mutants_of_triton_seeds_are_caught_in_the_interpreter(builder):
    task = find_task("gelu")
    path = task.folder / "triton_flat.py"
    mutants = [
        *picked(path, "y = x / (1.0", "constant scaled", 1),
        *picked(path, "y = x / (1.0", "call", 1),
    ]
    with Interpreting(task, builder, 1) as engine:
        judged = list(engine.judge({"gelu/triton_flat.py": path.read_text()}, mutants))
    assert [j.fate for j in judged] == [Fate.CAUGHT, Fate.CAUGHT]
