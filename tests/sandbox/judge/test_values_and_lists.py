"""Optional tensors, texts, lists of whole numbers, and dimensions that are lists."""

import pytest
from custom_tasks import candidate, judged, write
from hypothesis import given
from hypothesis import strategies as st
from kagent.export.generic import refuse_unsuited
from kagent.prompting.cases import shape_text
from kagent.prompting.hidden_cases import generator_line
from kagent_sandbox.data.build import ScalarSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.ranges import ListRange
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.device.baseline_calls import BaselineCall
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.timing.baselines import baseline_call

SUMS = """
dims = { lengths = "rows of each", N = "columns", has_bias = "whether there is one", mode = "how" }
arguments = [
  { name = "x", shape = ["sum(lengths)", "N"] },
  { name = "starts", shape = ["len(lengths) + 1"], dtype = "int32" },
  { name = "bias", shape = ["N"], optional = "has_bias" },
  { name = "mode", value = "mode" },
  { name = "kind", value = "'plain'" },
  { name = "axes", value = [0, 2] },
  { name = "lengths", value = "lengths" },
]
results = [{ name = "y", shape = ["len(lengths)", "N"], k = 4.0, floor = 4.0 }]

[[cpu.check]]
name = "three"
dtype = "float32"
lengths = [3, 1, 5]
N = 7
has_bias = true
mode = "sum"

[[cpu.check]]
name = "one_without_bias"
dtype = "float32"
lengths = [4, 2]
N = 3
has_bias = false
mode = "mean"

[[cpu.bench]]
name = "long"
dtype = "float32"
lengths = [100, 28, 64]
N = 64
has_bias = true
mode = "sum"

[[cpu.hidden_check]]
count = 2
dtype = ["float32"]
[cpu.hidden_check.dims]
lengths = { count = 5, min = 1, max = 40, total = 60 }
N = [5]
has_bias = [true, false]
mode = ["sum", "mean"]
"""
REFERENCE = """
def inputs(case, generator, device):
    lengths = case.dims["lengths"]
    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype))
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    found = {"x": draw(sum(lengths), case.dims["N"]), "starts": starts}
    return found | ({"bias": draw(case.dims["N"])} if case.dims["has_bias"] else {})

def _sums(x, starts, bias, mode, lengths):
    parts = x.split(lengths)
    y = torch.stack([p.sum(0) if mode == "sum" else p.mean(0) for p in parts])
    return y if bias is None else y + bias

def reference(*, x, starts, bias, mode, kind, axes, lengths):
    assert (kind, axes, type(lengths)) == ("plain", [0, 2], list)
    return _sums(x.double(), starts, None if bias is None else bias.double(), mode, lengths)

def eager(*, x, starts, bias, mode, kind, axes, lengths):
    return _sums(x, starts, bias, mode, lengths)
"""
CODE = """
extern "C" void sums(const float* x, const int32_t* starts, const float* bias, float* y,
                     int64_t count, int64_t n, int64_t mean) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int32_t r = starts[i]; r < starts[i + 1]; ++r) sum += x[r * n + j];
      if (mean) sum /= starts[i + 1] - starts[i];
      y[i * n + j] = sum + (bias ? bias[j] : 0);
    }
}
"""
HOST = """
def run(x, starts, bias, mode, kind, axes, lengths):
    assert kind == "plain" and axes == [0, 2] and sum(lengths) == x.shape[0]
    y = torch.empty(len(lengths), x.shape[1], dtype=x.dtype, device=x.device)
    cpp_kernel("sums", SOURCE)(x, starts, BIAS, y, len(lengths), x.shape[1], int(mode == "mean"))
    return y
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sums"), SUMS, REFERENCE)


def test_host_code_sees_none_texts_and_lists(builder, sums):
    errors = judged(builder, sums, candidate(CODE, HOST.replace("BIAS", "bias")))
    assert not isinstance(errors, Rejected), errors
    assert len(errors) == 4
    found = judged(builder, sums, candidate(CODE, HOST.replace("BIAS", "None")))
    assert isinstance(found, Rejected)
    assert (found.status, found.case) == (Status.INCORRECT_NUMERICAL, "three")


def test_a_case_says_what_a_call_is_given(sums):
    with_bias, without = sums.cpu.check
    assert build_case(sums, with_bias).results[0].shape == (3, 7)
    given_ = {a.name: a for a in build_case(sums, without).arguments}
    assert given_["bias"] == ScalarSpec("bias", None)
    assert given_["lengths"].given == [4, 2]
    assert shape_text(with_bias) == "fp32 lengths=[3,1,5] N=7 has_bias=True mode=sum"
    assert "5 numbers from 1 to 40, in all 60" in generator_line(sums.cpu.hidden_check[0])
    call = baseline_call(sums, without, "eager", 1)
    assert from_json(BaselineCall, to_json(call)) == call
    with pytest.raises(TaskError, match="bias is optional"):
        refuse_unsuited(sums)


def test_hidden_cases_have_lists_of_their_own(sums):
    drawn = [c.dims for c in draw_hidden(sums, "cpu", "check", 3)]
    assert all(sum(d["lengths"]) == 60 and len(d["lengths"]) == 5 for d in drawn)
    assert len({d["lengths"] for d in drawn}) > 1
    assert {d["mode"] for d in drawn} == {"sum", "mean"}


@given(st.data())
def test_numbers_of_a_list_keep_to_their_bounds(data):
    low, high = sorted((data.draw(st.integers(0, 99)), data.draw(st.integers(1, 99))))
    count = data.draw(st.integers(1, 9))
    total = data.draw(st.none() | st.integers(max(1, count * low), count * high))
    numbers = ListRange(count=count, min=low, max=high, total=total).draw(data.draw(st.randoms()))
    assert len(numbers) == count
    assert all(low <= n <= high for n in numbers)
    assert total in (None, sum(numbers))


def test_formulas_over_lists():
    names = {"a": (3, 1, 5), "b": (1, 1, 2), "n": 4, "mode": "sum"}
    assert evaluate("sum(cdiv(a, n)) + len(b)", names) == 7
    assert evaluate("sum(a ** 2 * b)", names) == 9 + 1 + 50
    assert evaluate("max(a) - min(b) + max(2, n)", names) == 8
    assert evaluate("1 if mode == 'sum' else 2", names) == 1
    for wrong in ("a", "mode", "a + mode", "a + (1 if n else 2) * mode", "sum(n)", "sum(a + sum)"):
        with pytest.raises(ValueError, match="formula"):
            evaluate(wrong, names)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("lengths = [3, 1, 5]", "lengths = [3, 1.5]", "a list of at most 65536 whole numbers"),
        ('optional = "has_bias"', 'optional = "has_it"', "arguments.bias .*cannot read 'has_it'"),
        ("total = 60", "total = 300", "have sums from 5 to 200"),
        ("value = \"'plain'\"", 'value = "plain"', "arguments.kind .*cannot read 'plain'"),
    ],
)
def test_a_bad_declaration_is_refused(tmp_path, before, after, expected):
    assert before in SUMS
    with pytest.raises(TaskError, match=expected):
        write(tmp_path, SUMS.replace(before, after, 1), REFERENCE)
