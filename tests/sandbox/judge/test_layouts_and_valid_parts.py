"""Inputs in other layouts and from declared distributions; results of which a part is valid."""

import pytest
import torch
from custom_tasks import candidate, judged, write
from kagent.export.generic import refuse_unsuited
from kagent.export.references import shipped_reference
from kagent.prompting.task_text import about_task
from kagent_sandbox.data.build_case import build_case, strides_of
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.draws import INDEX_KINDS, draw_as_counted, draw_index, offsets, segments
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.task_checker import check

CPU = torch.device("cpu")
KEEP = """
dims = { M = "rows", N = "columns", T = "rows of the table" }
arguments = [
  { name = "x", shape = ["M", "N"], layout = "transposed" },
  { name = "scale", shape = ["M"], dtype = "float8_e8m0fnu" },
  { name = "index", shape = ["M"], dtype = "int64", layout = "strided" },
  { name = "table", shape = ["T", "N"] },
]
results = [
  { name = "kept", shape = ["M", "N"], k = 2.0, valid = "count" },
  { name = "count", shape = [], dtype = "int64", k = 1.0 },
]

[[cpu.check]]
name = "odd"
dtype = "float32"
inputs = "zipf"
M = 19
N = 5
T = 40

[[cpu.check]]
name = "sorted"
dtype = "float32"
inputs = "sorted"
M = 6
N = 4
T = 9

[[cpu.bench]]
name = "long"
dtype = "float32"
inputs = "uniform"
M = 256
N = 64
T = 1000
"""
REFERENCE = """
from kagent_sandbox.draws import draw_index

def inputs(case, generator, device):
    M, N, T = (case.dims[n] for n in "MNT")
    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype))
    index = draw_index(case.inputs, (M,), T, generator, device)
    scale = torch.exp2(torch.randint(-3, 4, (M,), generator=generator, device=device).float())
    scale = scale.to(torch.float8_e8m0fnu)
    return {"x": draw(M, N), "scale": scale, "index": index, "table": draw(T, N)}

def _kept(y):
    chosen = y[y[:, 0] > 0]
    full = torch.full_like(y, torch.nan)
    full[: len(chosen)] = chosen
    return full, torch.tensor(len(chosen), device=y.device)

def reference(*, x, scale, index, table):
    return _kept(x.double() * scale.double()[:, None] + table.double()[index])

def eager(*, x, scale, index, table):
    return _kept(x * scale.float()[:, None] + table[index])
"""
CODE = """
#include <cstring>
extern "C" void keep(const float* x, const uint8_t* scale, const int64_t* index, const float* table,
                     float* kept, int64_t* count, int64_t m, int64_t n, int64_t row, int64_t column,
                     int64_t step) {
  int64_t found = 0;
  for (int64_t i = 0; i < m; ++i) {
    const uint32_t bits = (uint32_t)scale[i] << 23;
    float s;
    memcpy(&s, &bits, 4);
    const float* t = table + index[i * step] * n;
    if (!(x[i * row] * s + t[0] > 0)) continue;
    for (int64_t j = 0; j < n; ++j) kept[found * n + j] = x[i * row + j * column] * s + t[j];
    ++found;
  }
  *count = found;
  LAST
}
"""
HOST = """
def run(x, scale, index, table):
    m, n = x.shape
    kept, count = torch.empty(m, n), torch.empty((), dtype=torch.int64)
    cpp_kernel("keep", SOURCE)(
        x, scale, index, table, kept, count, m, n, x.stride(0), x.stride(1), index.stride(0)
    )
    return kept, count
"""
WRONG = {
    "kept": ("kept[(found - 1) * n] = 0;", "result kept"),
    "count": ("*count = found > 1 ? 1 : 0;", "result count"),
}


@pytest.fixture(scope="module")
def keep(tmp_path_factory):
    return write(tmp_path_factory.mktemp("keep"), KEEP, REFERENCE)


def test_what_is_beyond_the_valid_rows_is_nobodys(builder, keep):
    errors = judged(builder, keep, candidate(CODE.replace("LAST", ""), HOST))
    assert not isinstance(errors, Rejected), errors
    assert {e.output for e in errors} == {"kept", "count"}


@pytest.mark.parametrize("name", WRONG)
def test_the_valid_rows_and_their_number_are_compared(builder, keep, name):
    last, text = WRONG[name]
    found = judged(builder, keep, candidate(CODE.replace("LAST", last), HOST))
    assert isinstance(found, Rejected)
    assert found.status is Status.INCORRECT_NUMERICAL, found.message
    assert text in found.message


def test_places_are_among_the_valid_rows(keep):
    sampler = InputSampler(keep, CPU, InputPolicy())
    for _ in range(8):
        input_set = sampler.fresh(keep.cpu.check[0])
        count = int(sampler.expected(input_set)[1])
        places, _ = sampler.spot_checks(input_set)
        assert (places.index < count * 5).all()
        assert not places.expected.isnan().any()


def test_the_task_is_sound_and_told(keep):
    assert check(keep, "cpu", CPU).holes == ()
    about = about_task(keep, "cpu")
    assert "swapped in memory" in about.arguments[0]
    assert "only the first count are compared" in about.results[0]
    x, _, index, _ = build_case(keep, keep.cpu.check[0]).tensors
    assert (x.strides, index.strides) == ((1, 19), (2,))
    with pytest.raises(TaskError, match="only count rows are valid"):
        refuse_unsuited(keep)


def test_an_export_has_the_draws_in_its_reference(keep):
    text = shipped_reference(keep)
    assert "kagent_sandbox" not in text
    names: dict[str, object] = {}
    exec(text, names)
    case = keep.cpu.check[0]
    drawn = names["inputs"](case, torch.Generator().manual_seed(1), CPU)
    own = keep.reference().inputs(case, torch.Generator().manual_seed(1), CPU)
    assert torch.equal(drawn["index"], own["index"])


def test_layouts_are_torchs():
    x = torch.empty(2, 3, 4, 5)
    assert strides_of(x.shape) == x.stride()
    assert strides_of(x.shape, "channels_last") == x.to(memory_format=torch.channels_last).stride()
    assert strides_of(x.shape, "transposed") == x.mT.contiguous().mT.stride()
    assert strides_of((3, 4), "strided") == torch.empty(3, 8)[:, ::2].stride()
    assert strides_of((3, 4), pad=True) == (12, 1)
    assert strides_of((4,), pad=True) == (1,)


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_indices_are_of_their_kind(kind):
    generator = torch.Generator().manual_seed(0)
    drawn = draw_index(kind, (400,), 500, generator, CPU)
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0
    assert drawn.max() < 500
    most = int(drawn.bincount().max())
    expected = {"uniform": (2, 9), "sorted": (2, 9), "zipf": (25, 80), "distinct": (1, 1)}
    low, high = expected.get(kind, (400, 400))
    assert low <= most <= high
    assert bool((drawn.diff() >= 0).all()) == (kind in ("sorted", "same"))
    with pytest.raises(ValueError, match="expected one of"):
        draw_index("any", (1,), 2, generator, CPU)


def test_indices_are_drawn_as_often_as_they_were_counted():
    generator = torch.Generator().manual_seed(0)
    drawn = draw_as_counted([0, 300, 0, 100, 0], (20, 200), generator, CPU)
    counts = drawn.flatten().bincount(minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert 2800 < counts[1] < 3200
    with pytest.raises(ValueError, match="one above 0"):
        draw_as_counted([0, 0], (1,), generator, CPU)


def test_joined_sequences():
    assert offsets([3, 0, 2], CPU, torch.int32).tolist() == [0, 3, 3, 5]
    assert segments([3, 0, 2], CPU).tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ('valid = "count"', 'valid = "kept"', "expected a result of one int32 or int64"),
        ('layout = "strided"', 'layout = "transposed"', "2 dimensions or more"),
        ("shape = [], dtype", 'shape = ["M"], dtype', "which is not one number"),
        ("k = 2.0, valid", 'dtype = "float8_e8m0fnu", k = 2.0, valid', "declare uint8"),
    ],
)
def test_a_bad_declaration_is_refused(tmp_path, before, after, expected):
    assert before in KEEP
    with pytest.raises(TaskError, match=expected):
        write(tmp_path, KEEP.replace(before, after, 1), REFERENCE)
