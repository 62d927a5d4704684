"""Reading task folders: every bad one ends in one line that names the file and the key."""

import itertools
import math
import random
import re

import pytest
from handmade_candidates import TASK, write_task
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.data import formula
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.generator import Generator, draw_fields
from kagent_sandbox.data.ranges import Range
from kagent_sandbox.data.task import draw_hidden, load_task
from kagent_sandbox.errors import TaskError

TOKENS = re.compile(r'"[^"\n]*"|-?\d+(?:\.\d+)?|\w+|\n|[^\w\s]')
VALUES = (
    *('"M"', '"3"', '""', '"M / 3"', '"2 ** M ** N"', '"M < N"', '"$dtype"', '"float23"', "nan"),
    *("0", "-1", "3.5", "1e400", "99999999999999999999", "true", "[]", "{}", "[1, 2]", "inf"),
    *("name", "shape", "value", "dtype", "dims", "min", "max", "folder", "\n", "=", ","),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def load(folder, text):
    (folder / "task.toml").write_text(text)
    return load_task(folder)


def refused(folder, text):
    """The line with which a task is refused, without its folder."""
    with pytest.raises(TaskError) as e:
        load(folder, text)
    message = str(e.value)
    assert message.startswith(f"{folder / 'task.toml'}: ")
    assert "\n" not in message
    assert "Value error" not in message
    return message.removeprefix(f"{folder / 'task.toml'}: ")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("min = 1, max = 9", "min = 9, max = 1", "cpu.hidden_check.0.dims.M.*min is 9, and max 1"),
        ("M = [128], N = [1024]", "M = [128]", r"cpu.hidden_bench, generator 1.*missing \['N'\]"),
        ("N = [1024]", "N = [1024], K = [1]", r"unknown \['K'\]"),
        ('name = "x", shape = ["M", "N"]', 'name = "x"', "arguments.0: x has neither shape nor"),
        ('"x", shape', '"x", value = 1, shape', "arguments.0: x has both shape and value"),
        ('"x", shape', '"x y", shape', "arguments.0.name: 'x y' is no name"),
        ('shape = ["M", "N"], k', 'shape = ["M", "N / 3"], k', "results.y in .* expected a whole"),
        ('shape = ["M", "N"], k', 'dtype = "flaot32", shape = ["M", "N"], k', "no dtype 'flaot32'"),
        ("k = 2.0", "k = inf", "results.0.k: .*finite"),
        ('results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]', "results = []", "results: "),
        ("M = 7\n", "M = 3.5\n", "arguments.x in cpu.check, case odd: size 'M' is 3.5, expected"),
        ("M = 7\n", 'M = "3"\n', "cpu.check, case odd: M = '3', expected a number"),
        ("M = 7\n", "", r"cpu.check, case odd: dimensions missing \['M'\]"),
        ('dtype = ["float32"]', 'dtype = ["fp32"]', "cpu.hidden_check.0.dtype.*no dtype 'fp32'"),
        ('flops = "M * N"', 'flops = "-M"', "flops in gpu.check, case gpu_check: '-M' is -3"),
        ('flops = "M * N"', 'flops = "2 ** N ** M"', "flops in .*too large"),
        ('"M * N"', '"min(1)"', "flops in .*'min"),
        ('entry = "scale"', 'entry = "scale it"', "entry: "),
        ('name = "scale"', 'name = "scale"\nfolder = "x"', "folder: no key of a task"),
        ('entry = "scale"', 'entry = "lambda"', "entry: 'lambda' is no name that Python takes"),
        ('"scale(x', '"grow(x', "signature: .* expected .*scale"),
        ('"y", shape', '"", shape', "results.0.name: '' is no name"),
        ('name = "odd"', 'name = ""', "cpu.check.0.name: "),
        ('name = "odd"', r'name = "odd\nor even"', "cpu.check.0.name: "),
        ("k = 2.0", "k = 2.0, row_dims = 3", "results.0: y: row_dims is 3, .* has 2 dimensions"),
        ("M = 7\n", "M = 7.0\n", "arguments.x in cpu.check, case odd: size 'M' is 7.0, expected"),
        ("M = [128]", "M = [true]", "arguments.x in cpu.hidden_bench.*size 'M' is True, expected"),
        ("min = 1, max = 9", "min = 0, max = 9", "cpu.hidden_check.0.dims.M.min: .*or equal to 1"),
        ("min = 1, max = 9", "mim = 1, max = 9", "cpu.hidden_check.0.dims.M.min: Field required"),
        ('dims = { M = "', 'constraints = ["M =! N"]\ndims = { M = "', "constraints in gpu.check"),
        ('dims = { M = "rows",', 'dims = { M = "rows", scale = "x",', "scale has a meaning"),
    ],
)
def test_a_bad_task_is_refused_by_its_key(folder, before, after, expected):
    assert before in TASK
    text = TASK.replace(before, after, 1)
    assert re.search(expected, refused(folder, text))


@given(st.data())
def test_any_mutation_is_loaded_or_refused_in_one_line(folder, data):
    tokens = list(TOKENS.finditer(TASK))
    text = TASK
    chosen = data.draw(st.sets(st.sampled_from(range(len(tokens))), min_size=1, max_size=3))
    for i in sorted(chosen, reverse=True):
        start, end = tokens[i].span()
        kind = data.draw(st.sampled_from(["drop", "double", "replace"]))
        new = {"drop": "", "double": tokens[i][0] * 2}.get(kind)
        if new is None:
            new = data.draw(st.sampled_from(VALUES))
        text = text[:start] + new + text[end:]
    message = ""
    try:
        task = load(folder, text)
        for which in ("check", "bench"):
            for case in draw_hidden(task, "cpu", which, 5):
                build_case(task, case)
    except TaskError as e:
        message = str(e)
    assert message.startswith(str(folder) if message else "")
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "2 * M * N + 4 * M",
        "cdiv(M, 16) * max(N, 3) - min(2, M)",
        "-M + 0.0",
        "M ** N",
        "M ** -0.5",
        "M % N // 3",
        "M if N > 3 else N / 0",
        "M and N",
        "M == 3 or not N",
        "(M < N) * 5",
        "sum(M)",
        "cdiv(M)",
        "M * 'a'",
        "Q + 1 if M else 2",
        "M + min",
        "len(sum * 2) - sum(sum)",
    ],
)
def test_formulas_are_the_same_compiled_and_read(text, monkeypatch):
    def values():
        formula._read.cache_clear()
        for m, n in itertools.product(
            (0, 3, 2.5, -1, True, (1, 2), "x", 1 << 70, math.inf), repeat=2
        ):
            try:
                found = evaluate(text, {"M": m, "N": n, "sum": n})
                yield type(found), found
            except ValueError as e:
                yield str(e)

    compiled = list(values())
    monkeypatch.setattr(formula, "_on_numbers", lambda _: None)
    assert list(values()) == compiled
    formula._read.cache_clear()


def test_formulas_compare():
    assert evaluate("1 if M > 2 else 0", {"M": 3}) == 1
    assert evaluate("M <= 2", {"M": 3}) == 0
    for bad in ("1 < M < 3", "M < 'a'", "(0 - 8) ** 0.5", "1e308 * 10", "9 ** 9 ** 9", "cdiv(1)"):
        with pytest.raises(ValueError, match="formula"):
            evaluate(bad, {"M": 3})


def test_any_dimension_may_be_small_where_the_cost_is_large():
    names = "ABCDE"
    ranges = {n: Range(min=1, max=64) for n in names}
    cost = " * ".join(names)
    generator = Generator(
        count=2, dtype=("float32",), dims=ranges, cost=cost, least=2**10, most=2**30
    )
    drawn = []
    for seed in range(400):
        drawn += draw_fields(generator, random.Random(seed), lambda dims, dtype: iter(()))
    sizes = [[d[n] for n in names] for d in drawn]
    assert all(2**10 <= math.prod(s) <= 2**30 for s in sizes)
    for position in range(len(names)):
        assert any(s[position] <= 4 and math.prod(s) >= 2**22 for s in sizes)


def test_what_is_drawn_again_for_a_constraint_keeps_to_the_cost():
    ranges = {n: Range(min=1, max=100_000) for n in "AB"}
    generator = Generator(count=8, dtype=("float32",), dims=ranges, cost="A * B", most=10**6)

    def unmet(dims, dtype):
        return iter([] if dims["B"] >= 100 * dims["A"] else ["B >= 100 * A"])

    for seed in range(5):
        for found in draw_fields(generator, random.Random(seed), unmet):
            assert found["A"] * found["B"] <= 10**6
            assert found["B"] >= 100 * found["A"]
