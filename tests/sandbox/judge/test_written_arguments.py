"""Arguments that a function must write are compared like results."""

import pytest
import torch
from custom_tasks import candidate, judged, write
from kagent_sandbox.data.build import TensorSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.task_checker import check

CPU = torch.device("cpu")
APPEND = """
dims = { S = "slots of the cache", T = "new rows", N = "columns" }
arguments = [
  { name = "rows", shape = ["T", "N"] },
  { name = "slots", shape = ["T"], dtype = "int64" },
  { name = "cache", shape = ["S", "N"], writes = { k = 2.0 } },
]

[[cpu.check]]
name = "odd"
dtype = "float32"
S = 40
T = 3
N = 7

[[cpu.check]]
name = "padded"
dtype = "float32"
noncontiguous = true
S = 9
T = 2
N = 5

[[cpu.bench]]
name = "long"
dtype = "float32"
S = 4096
T = 8
N = 64
"""
APPEND_REFERENCE = """
def inputs(case, generator, device):
    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype))
    S, T, N = (case.dims[n] for n in "STN")
    slots = torch.randperm(S - 1, generator=generator, device=device)[:T]  # never the last
    return {"rows": draw(T, N), "slots": slots, "cache": draw(S, N)}

def reference(*, rows, slots, cache):
    cache = cache.double()
    cache[slots] = rows.double()
    return cache

def eager(*, rows, slots, cache):
    cache[slots] = rows
"""
APPEND_CODE = """
extern "C" void append(const float* rows, const int64_t* slots, float* cache, int64_t count,
                       int64_t n, int64_t rows_step, int64_t cache_step) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < LAST; ++j)
      cache[slots[i] * cache_step + j] = rows[i * rows_step + j];
}
"""
APPEND_HOST = """
def run(rows, slots, cache):
    count, n = rows.shape
    cpp_kernel("append", SOURCE)(
        rows, slots, cache, count, n, rows.stride(0), cache.stride(0)
    )
"""
GOOD = candidate(APPEND_CODE.replace("LAST", "n"), APPEND_HOST)
WRONG = {
    "nothing": (
        candidate(APPEND_CODE.replace("LAST", "0"), APPEND_HOST),
        Status.INCORRECT_NUMERICAL,
        "result cache",
    ),
    "memory between rows": (
        candidate(APPEND_CODE.replace("LAST", "cache_step"), APPEND_HOST),
        Status.TAMPER,
        "between the rows of argument cache",
    ),
    "a copy": (
        "def run(rows, slots, cache):\n    return cache.clone()",
        Status.INCORRECT_SHAPE,
        "return nothing",
    ),
    "another argument": (
        candidate(APPEND_CODE.replace("LAST", "n"), APPEND_HOST) + "    rows.fill_(0)",
        Status.POLICY,
        "writes the input 'rows'",
    ),
}


@pytest.fixture(scope="module")
def append(tmp_path_factory):
    return write(tmp_path_factory.mktemp("append"), APPEND, APPEND_REFERENCE)


def test_what_is_written_is_compared(builder, append):
    errors = judged(builder, append, GOOD)
    assert not isinstance(errors, Rejected), errors
    assert {(e.case, e.output) for e in errors} == {("odd", "cache"), ("padded", "cache")}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_written_is_wrong(builder, append, name):
    source, status, text = WRONG[name]
    found = judged(builder, append, source)
    assert isinstance(found, Rejected)
    assert found.status is status, found.message
    assert text in found.message


def test_places_are_mostly_where_something_is_written(append):
    sampler = InputSampler(append, CPU, InputPolicy())
    input_set = sampler.fresh(append.cpu.bench[0])
    (places,) = sampler.spot_checks(input_set)
    rows = places.index // 64
    written = torch.isin(rows, input_set.tensors["slots"])
    assert written.float().mean() >= 0.75
    values = places.expected[written].float()
    assert torch.equal(
        values, sampler.expected(input_set)[0].flatten()[places.index[written]].float()
    )


def test_the_task_itself_is_checked(append, tmp_path):
    assert check(append, "cpu", CPU).holes == ()
    lazy = APPEND_REFERENCE.replace("cache[slots] = rows\n", "pass\n")
    with pytest.raises(TaskError, match=r"eager: .*differs from the reference"):
        check(write(tmp_path / "lazy", APPEND, lazy), "cpu", CPU)
    nothing = lazy.replace("cache[slots] = rows.double()", "pass")
    with pytest.raises(TaskError, match=r"arguments.cache: the argument as it was passes every"):
        check(write(tmp_path / "nothing", APPEND, nothing), "cpu", CPU)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (", writes = { k = 2.0 }", "", "nothing could be compared"),
        (", writes = {", ", mutates = true, writes = {", "writes or mutates, not both"),
        ("writes = { k = 2.0 }", "writes = { floor = 2.0 }", "k: Field required"),
        (
            "arguments = [",
            'results = [{ name = "cache", shape = [], k = 1 }]\narguments = [',
            "twice",
        ),
    ],
)
def test_a_bad_declaration_is_refused(tmp_path, before, after, expected):
    assert before in APPEND
    with pytest.raises(TaskError, match=expected):
        write(tmp_path, APPEND.replace(before, after, 1), APPEND_REFERENCE)


def test_a_result_may_not_lie_in_a_written_argument(builder, tmp_path):
    toml = APPEND.replace(
        "[[cpu.check]]", '[[results]]\nname = "old"\nshape = ["S", "N"]\nk = 1\n\n[[cpu.check]]', 1
    )
    reference = APPEND_REFERENCE.replace("return cache", "return cache, cache")
    task = write(tmp_path, toml, reference)
    found = judged(builder, task, GOOD + "    return cache")
    assert found.status is Status.INCORRECT_SHAPE
    assert "lies in the memory of the argument cache" in found.message
    case = build_case(task, task.cpu.check[0])
    assert [t.name for t in case.compared] == ["old", "cache"]
    assert all(isinstance(t, TensorSpec) for t in case.compared)
