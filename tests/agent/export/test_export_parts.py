"""Regions, the files of kernels, merging, and then-and-now: from made-up measurements."""

import ast
import inspect
import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent.export.card import ratio
from kagent.export.certify import Certificate, Shapes, compared, confirmed, shapes_of
from kagent.export.dispatch_table import best_of, gain, mean_gain, used
from kagent.export.export import ExportedFiles
from kagent.export.import_rewrite import as_judged, as_shipped
from kagent.export.library import _portfolio
from kagent.export.merging import merge_library, merge_operator
from kagent.export.packaging import refuse_collisions
from kagent.export.record import (
    TORCH,
    DeviceRecord,
    KernelRecord,
    OperatorRecord,
    OriginRecord,
    PointRecord,
    RegionRecord,
    Timing,
    valid_name,
)
from kagent.export.references import shipped_reference
from kagent.export.regions import checked_padded, regions_of
from kagent.export.views import certificate_view, files_view
from kagent.resources import resource
from kagent.tasks import find_task, task_names
from kagent_sandbox import draws
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Comparison, SpeedVerdict, speed_verdict
from kagent_sandbox.errors import TaskError, UserError
from rich.console import Console

ORIGIN = OriginRecord(
    "run", "id", 3, (), "tune", (), 9, 1.5, 1.4, 1.6, "2026-11-21", "0.1.0", "d", ""
)


def kernel(name, source="x = 1\n"):
    region = RegionRecord("float32", {"M": 1}, {"M": 64}, {}, 64, 4)
    return KernelRecord(name, "toy", "cpp", source, "0", ("cpu",), ({},), (region,), False, ORIGIN)


def at(us):
    return Timing(us, us * 0.99, us * 1.01)


def point(case, **times):
    """Times of kernels by name, of `torch` (then eager is as fast), or of `eager` and `torch`."""
    named = {"eager": at(times["torch"]), **{k: at(us) for k, us in times.items()}}
    config = {n: 0 for n in named if n not in (TORCH, "eager")}
    eager = named.get("eager")
    beside = {n: speed_verdict(*ratio(eager, named[n])[1:]) for n in config} if eager else {}
    best = best_of(named, config, beside)
    return PointRecord(case, "float32", {"M": 8}, named, config, best)


def device(*points, name="cpu A"):
    return DeviceRecord(name, "cpu", "x86_64-v3", {}, "2026-11-21", points)


def operator(kernels, *devices):
    return OperatorRecord(
        "toy", "toy", "toy(x)", "A toy", ("M",), tuple(kernels), devices, "toml", "ref", "op"
    )


# -- regions ---------------------------------------------------------------------------------------


def case(dtype="float32", name="c", **dims):
    return Case(name=name, dtype=dtype, **dims)


def covers(region, dtype, dims):
    """As a library's dispatch decides."""
    values = {n: tuple(v) for n, v in region.flags.items()}
    known = _portfolio.CheckedRegion(region.dtype, region.low, region.high, values, region.volume)
    return known.covers(dtype, dims)


def test_a_region_holds_its_own_cases_and_little_else():
    cases = [case(M=m, N=n, D=64, causal=m > 3) for m, n in [(1, 7), (4, 4), (9, 100), (33, 2)]]
    (region,) = regions_of(cases)
    assert region.low == {"M": 1, "N": 2}
    assert region.high == {"M": 33, "N": 100}
    assert region.flags == {"D": (64,), "causal": (False, True)}
    assert region.volume == 900
    assert all(covers(region, "float32", c.dims) for c in cases)
    inside = {"M": 5, "N": 50, "D": 64, "causal": True}
    assert covers(region, "float32", inside)
    assert not covers(region, "float16", inside)
    assert not covers(region, "float32", {**inside, "D": 96})  # between 64 and nothing
    assert not covers(region, "float32", {**inside, "M": 34})
    assert not covers(region, "float32", {**inside, "M": 33, "N": 100})  # larger than any checked
    assert not covers(region, "float32", {"M": 5})


def test_few_sizes_are_those_sizes():
    cases = [case(S=s, D=d) for s, d in [(1, 64), (5, 64), (9, 128), (200, 128)]]
    (region,) = regions_of(cases)
    assert region.flags == {"D": (64, 128)}
    assert not covers(region, "float32", {"S": 9, "D": 96})


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12))
def test_every_checked_case_is_covered(sizes):
    cases = [case(dtype=("float32", "bfloat16")[m % 2], M=m, N=n) for m, n in sizes]
    by_dtype = {r.dtype: r for r in regions_of(cases)}
    for one in cases:
        assert covers(by_dtype[one.dtype], one.dtype, one.dims)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(resource("seeds").glob("*/*_*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_seeds_travel_there_and_back(path):
    source = path.read_text(encoding="utf-8")
    shipped = as_shipped(source)
    assert "kagent" not in {
        n.module.split(".")[0]
        for n in ast.walk(ast.parse(shipped))
        if isinstance(n, ast.ImportFrom) and n.module and not n.level
    }
    assert as_judged(shipped) == source


@pytest.mark.parametrize(
    ("line", "shipped"),
    [
        ("from kagent_sandbox.lang import (cuda_kernel as c,\n tensor_map)",
         "from .._runtime import cuda_kernel as c, tensor_map"),
        ("from kagent_sandbox import lang", "from .. import _runtime as lang"),
        ("import kagent_sandbox.lang as k", "from .. import _runtime as k"),
        ("import torch, math", "import torch, math"),
    ],
)  # fmt: skip
def test_forms_of_the_import(line, shipped):
    assert as_shipped(f'"""é"""\n{line}\nx = 1\n') == f'"""é"""\n{shipped}\nx = 1\n'


@pytest.mark.parametrize(
    "line",
    ["import kagent_sandbox.lang", "from kagent_sandbox.data.plan import Plan", "import kagent"],
)
def test_what_a_library_does_not_have(line):
    with pytest.raises(UserError, match="line 1"):
        as_shipped(f"{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "try:\n    from .. import _library\nexcept ImportError:\n    pass",
        'HERE = "/site-packages/" in __file__',
        'HERE = __name__ != "candidate"',
        "HERE = softmax.__module__",
        "HERE = bool(__package__)",
    ],
)
def test_a_file_that_asks_where_it_is_is_not_exported(line):
    with pytest.raises(UserError, match=r"line \d asks where it is"):
        as_shipped(f"import torch\n{line}\n")


def test_a_file_may_be_a_program_too():
    source = 'import torch\nif __name__ == "__main__":\n    print(1)\n'
    assert as_shipped(source) == source


def test_a_file_is_the_same_but_for_its_import():
    """Some characters end a line for `str.splitlines`, and none for Python."""
    with pytest.raises(UserError, match="would be another one"):
        as_shipped('A = "\x0c"\nfrom kagent_sandbox.lang import cpp_kernel\nB = 1\n')


def test_padded_rows_count_as_checked_where_tensors_are_as_large_as_those_served():
    """A library handed a kernel padded tensors of sizes at which none was ever checked."""
    task = find_task("softmax")
    timed = task.cpu.bench
    small = Case(name="c", dtype="float32", noncontiguous=True, M=37, N=1023)
    large = small.model_copy(update={"M": 4096, "N": 1024})
    assert not checked_padded(task, [small, *timed], timed)
    assert checked_padded(task, [small, large, *timed], timed)
    hidden = draw_hidden(task, "cpu", "bench", 3)
    checked = [*task.cpu.check, *draw_hidden(task, "cpu", "check", 3)]
    assert checked_padded(task, checked, [*timed, *hidden])
    assert not checked_padded(task, [small], [])


def with_what_they_call(names):
    tree = ast.parse(inspect.getsource(draws))
    calls = {
        f.name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)}
        for f in tree.body
        if isinstance(f, ast.FunctionDef)
    }
    found = set(names)
    while more := {c for n in found for c in calls[n] & calls.keys()} - found:
        found |= more
    return found


@pytest.mark.parametrize("name", task_names())
def test_a_shipped_reference_has_the_draws_that_it_uses_and_no_others(name):
    task = find_task(name)
    text = shipped_reference(task)
    defined = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    own = ast.parse((task.folder / "reference.py").read_text())
    added = defined - {n.name for n in own.body if isinstance(n, ast.FunctionDef)}
    named = {
        alias.name
        for node in own.body
        if isinstance(node, ast.ImportFrom) and node.module == "kagent_sandbox.draws"
        for alias in node.names
    }
    assert added == with_what_they_call(named)
    imported = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert len({ast.unparse(n).split(" import ")[0] for n in imported}) == len(imported)
    names = {}
    exec(text, names)
    case, cpu = task.cases("cpu").check[0], torch.device("cpu")
    drawn = names["inputs"](case, torch.Generator().manual_seed(1), cpu)
    expected = task.reference().inputs(case, torch.Generator().manual_seed(1), cpu)
    flat, as_expected = (torch.utils._pytree.tree_leaves(x) for x in (drawn, expected))
    for one, other in zip(flat, as_expected, strict=True):
        assert type(one) is type(other)
        assert str(one) == str(other)


def test_a_draw_comes_with_what_it_needs(tmp_path):
    text = "from kagent_sandbox.draws import draw_index\nCOUNT = 8\n"
    (tmp_path / "reference.py").write_text(text)
    shipped = shipped_reference(SimpleNamespace(folder=tmp_path))
    assert shipped.endswith(
        'return many.sort(-1).values if kind == "sorted" else many\n\nCOUNT = 8\n'
    )
    tree = ast.parse(shipped)
    assert [ast.unparse(n) for n in tree.body[:4]] == [
        "import math",
        "from collections.abc import Sequence",
        "import torch",
        "INDEX_KINDS = ('uniform', 'zipf', 'sorted', 'distinct', 'same')",
    ]
    names = {}
    exec(shipped, names)
    generator = torch.Generator().manual_seed(0)
    assert (
        names["draw_index"]("same", (3,), 9, generator, torch.device("cpu")).unique().numel() == 1
    )


@pytest.mark.parametrize(
    "line", ["from kagent_sandbox.draws import plant as p", "from kagent_sandbox.draws import *"]
)
def test_draws_are_imported_by_name(line, tmp_path):
    (tmp_path / "reference.py").write_text(line + "\n")
    with pytest.raises(TaskError, match=r"from kagent_sandbox\.draws import name"):
        shipped_reference(SimpleNamespace(folder=tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "def inputs():\n    from kagent_sandbox.draws import plant\n    plant()\n",
        "import kagent_sandbox.draws\n",
    ],
)
def test_draws_are_imported_at_the_top(text, tmp_path):
    (tmp_path / "reference.py").write_text(text)
    with pytest.raises(TaskError, match="at its top"):
        shipped_reference(SimpleNamespace(folder=tmp_path))


def test_a_comment_may_name_the_draws(tmp_path):
    text = "# not kagent_sandbox.draws\nimport torch\n"
    (tmp_path / "reference.py").write_text(text)
    assert shipped_reference(SimpleNamespace(folder=tmp_path)) == text


def test_names_of_libraries():
    assert valid_name("my_kernels2")
    assert not any(map(valid_name, ["", "a", "ab_", "2x", "My", "a-b", "a" * 51, "a.b", "é1"]))


def offering(task, public="run", layers="Run"):
    text = f'__all__ = ["{public}"]\nLAYERS = {{"{layers}": None}}\n'
    return replace(operator([]), task=task, operator_py=text)


def test_operators_that_share_a_name_need_two_libraries():
    refuse_collisions([offering("a"), offering("b", "other", "Other")])
    for twin in (offering("b", layers="Other"), offering("b", "other")):
        with pytest.raises(UserError, match="both a and b"):
            refuse_collisions([offering("a"), twin])
    with pytest.raises(UserError, match="every library"):
        refuse_collisions([offering("a", "layers")])
    with pytest.raises(UserError, match="must have __all__"):
        refuse_collisions([replace(offering("a"), operator_py="x = 1\n")])


# -- merging ---------------------------------------------------------------------------------------


def test_a_slower_kernel_is_replaced_and_history_grows():
    first, words = merge_operator(None, operator([kernel("a")], device(point("p", a=5, torch=9))))
    library = merge_library(None, "lib", "0.1.0", [(first, words)])
    assert library.version == "1.0.0"
    assert "added a" in library.history[0].lines[0]
    second, words = merge_operator(
        first, operator([kernel("b"), kernel("a")], device(point("p", a=5, b=4, torch=9)))
    )
    assert [k.id for k in second.kernels] == ["b"]
    assert set(second.devices[0].points[0].times) == {"b", "eager", TORCH}
    library = merge_library(library, "lib", "0.1.0", [(second, words)])
    assert library.version == "1.1.0"
    assert [c.version for c in library.history] == ["1.1.0", "1.0.0"]
    raced = "replaced a, slower than others on every measured shape"
    assert any(raced in line for line in library.history[0].lines)
    _, words = merge_operator(first, operator([kernel("b")], device(point("p", b=6, torch=9))))
    assert any("replaced a, which was not measured again" in w for w in words)


def test_a_kernel_that_another_device_or_shape_uses_stays():
    old = operator([kernel("a")], device(point("p", a=5, torch=9), name="cpu B"))
    new = operator(
        [kernel("b"), kernel("a")],
        device(point("p", a=5, b=4, torch=9), point("q", a=3, b=4, torch=9)),
    )
    both, _ = merge_operator(operator([kernel("a")], *new.devices), new)
    assert {k.id for k in both.kernels} == {"a", "b"}
    merged, _ = merge_operator(old, replace(new, devices=(device(point("p", a=5, b=4, torch=9)),)))
    assert {k.id for k in merged.kernels} == {"a", "b"}
    assert [d.name for d in merged.devices] == ["cpu B", "cpu A"]


def test_a_new_kernel_that_is_never_the_best_is_left_out():
    old = operator([kernel("a")], device(point("p", a=5, torch=9)))
    new = operator([kernel("b"), kernel("a")], device(point("p", a=5, b=7, torch=9)))
    merged, words = merge_operator(old, new)
    assert [k.id for k in merged.kernels] == ["a"]
    assert any("left out b" in w for w in words)
    library = merge_library(None, "lib", "0.1.0", [(old, [])])
    assert merge_library(library, "lib", "0.1.0", [(merged, words)]).version == "1.0.1"


def test_a_kernel_has_to_beat_what_the_operator_would_call_instead():
    compiled_wins = point("p", a=5, torch=4, eager=9)
    assert compiled_wins.best == "a"
    assert gain(compiled_wins, "a") == 0.8
    eager_wins = point("p", a=5, b=6, torch=4, eager=4.5)
    assert eager_wins.best == TORCH
    assert used(eager_wins) == "eager"
    assert gain(eager_wins, used(eager_wins)) == pytest.approx(4 / 4.5)
    assert best_of(eager_wins.times, eager_wins.config, None) == "a"
    out_of_memory = {"a": at(5), TORCH: at(4)}
    assert best_of(out_of_memory, ["a"], {}) == "a"


def test_gains():
    here = device(point("p", a=5, torch=10), point("q", a=20, torch=10))
    assert [gain(p, used(p)) for p in here.points] == [2, 1]
    assert mean_gain(here) == pytest.approx(2**0.5)
    assert mean_gain(device()) is None


# -- then and now ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "change"),
    [
        ({"a": 5.0, "torch": 9.0}, "as then"),
        ({"a": 7.0, "torch": 9.0}, "slower"),
        ({"a": 7.0, "torch": 12.6}, "as then"),  # the machine is slower, not the kernel
        ({"a": 5.0, "torch": 3.0}, "torch is faster now"),
        ({"a": 3.0, "torch": 9.0}, "faster"),
    ],
)
def test_what_counts_as_a_regression(now, change):
    then = operator([kernel("a")], device(point("p", a=5, torch=9)))
    (line,) = compared(then, device(point("p", **now)))
    assert line.change == change


def test_a_regression_must_show_twice():
    then = operator([kernel("a")], device(point("p", a=5, torch=9), point("q", a=5, torch=9)))
    first = list(compared(then, device(point("p", a=7, torch=9), point("q", a=7, torch=9))))
    second = list(compared(then, device(point("p", a=5, torch=9), point("q", a=8, torch=9))))
    assert [line.change for line in first] == ["slower", "slower"]
    assert [line.change for line in confirmed(first, second)] == ["as then", "slower"]


def test_another_device_has_nothing_to_compare_with():
    then = operator([kernel("a")], device(point("p", a=5, torch=9)))
    (line,) = compared(then, device(point("p", a=5, torch=9), name="cpu B"))
    assert line.change == "not comparable"
    assert line.then_us is None


def test_hidden_cases_and_torchs_own_are_not_compared():
    then = operator(
        [kernel("a")], device(point("hidden_bench_0", a=5, torch=9), point("q", a=9, torch=5))
    )
    now = device(point("hidden_bench_0", a=50, torch=90), point("q", a=9, torch=5))
    lines = list(compared(then, now))
    assert [(line.case, line.change) for line in lines] == [("hidden_bench_0", "not comparable")]


@pytest.mark.parametrize(
    ("kernels", "said"),
    [(("a",), "1 correct kernel here; no regressions"), (("a", "b"), "2 correct kernels here;")],
)
def test_a_certificate_counts_in_plain_words(kernels, said, tmp_path):
    assert said in certificate_text(Certificate("a CPU", kernels, {}, (), (), {}), tmp_path)


def certificate_text(found, folder):
    return printed(certificate_view(found, folder))


def printed(view):
    console = Console(width=150, file=io.StringIO())
    console.print(view)
    return console.file.getvalue()


def test_tables_are_like_those_of_other_commands(tmp_path):
    """Ratios of three digits with ×, a dash for none, a rule below the heads; no "gain" below 1."""
    slower = point("p", a=5, torch=0.85, eager=9)
    shown = device(slower, replace(slower, case="q", times={"a": at(5)}))
    made = operator([kernel("a")], shown)
    export = printed(files_view(ExportedFiles(tmp_path, ("a.py",), (made,))))
    certificate = certificate_text(
        Certificate("a CPU", ("a",), {}, tuple(compared(made, shown)), (), {}), tmp_path
    )
    for text in (export, certificate):
        assert "× torch" in text
        assert "gain" not in text
        assert " 0.170×" in text
        assert "–" in text
        assert "───" in text
        assert "0.17x" not in text


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [("FASTER", "SLOWER", "was FASTER"), ("FASTER", "FASTER", "as then"), (None, "TIE", "as then")],
)
def test_nothing_is_as_then_beside_a_verdict_that_changed(then, now, said, tmp_path):
    def measured(verdict):
        verdicts = {} if verdict is None else {"a": SpeedVerdict(verdict)}
        return device(replace(point("p", a=5, torch=5, eager=9), verdicts=verdicts))

    lines = tuple(compared(operator([kernel("a")], measured(then)), measured(now)))
    text = certificate_text(Certificate("a CPU", ("a",), {}, lines, (), {}), tmp_path)
    assert re.search(rf"{now}\s+{said}\s", text)
    assert ("as then" in text) == (said == "as then")


def test_a_certificate_says_which_shapes_it_compares(tmp_path):
    hidden = (point("hidden_bench_0", a=5, torch=9), point("hidden_bench_1", a=9, torch=5))
    visible = (point("p", a=5, torch=9), point("q", a=9, torch=5), point("r", a=9, torch=5))
    then, now = operator([kernel("a")], device(*visible, *hidden)), device(*visible, *hidden)
    shapes = shapes_of(then, now)
    assert shapes == Shapes(visible=3, compared=1, torch=2)
    versus = {"a": Comparison(TORCH, 1.2, 1.1, 1.3, 1.0)}
    lines = tuple(compared(then, now))
    said = certificate_text(
        Certificate("a CPU", ("a",), {}, lines, (), {}, "", shapes, versus), tmp_path
    )
    assert (
        "1 of 3 visible shapes compared with then; torch is used at 2, where no kernel is "
        "compared; hidden shapes are others each time, and not compared"
    ) in said
    assert "a on hidden shapes drawn now: FASTER beside the best of torch, 1.200× (95 %" in said
    assert "1 correct kernel here; no regressions in 1 compared shape\n" in said
    elsewhere = shapes_of(then, device(*visible, *hidden, name="cpu B"))
    assert elsewhere == Shapes(visible=3, compared=0, torch=2)
