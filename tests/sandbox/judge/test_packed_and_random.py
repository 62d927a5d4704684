"""Packed numbers of 4 bits with their scales, operations that draw by a seed, and sums over indices
that repeat: what task.toml says of them, and what the judge then sees.
"""

import pytest
import torch
from custom_tasks import candidate, judged, write
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.judge.check.task_checker import check

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("shared")

WIDEN = """
dims = { B = "images", H = "height", W = "width" }
arguments = [
  { name = "x", shape = ["B", "H", "8 * W"], dtype = "float4_e2m1fn_x2" },
  { name = "x_scale", shape = ["B", "H", "W"], dtype = "float8_e4m3fn" },
  { name = "w", shape = ["H", "2 * W"], dtype = "int32" },
  { name = "w_scale", shape = ["H"], dtype = "float8_e8m0fnu" },
  { name = "image", shape = ["B", "16", "H", "W"], layout = "channels_last" },
]
results = [{ name = "y", shape = ["B", "H", "16 * W"], k = 2.0 }]

[[cpu.check]]
name = "odd"
dtype = "float32"
B = 2
H = 3
W = 5

[[cpu.bench]]
name = "wide"
dtype = "float32"
B = 4
H = 16
W = 16
"""
WIDEN_REFERENCE = """
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

def inputs(case, generator, device):
    B, H, W = (case.dims[n] for n in "BHW")
    def bits(*shape):
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device)
    return {
        "x": bits(B, H, 8 * W).view(torch.float4_e2m1fn_x2),
        "x_scale": draw(B, H, W).abs().to(torch.float8_e4m3fn),
        "w": bits(H, 8 * W).view(torch.int32),
        "w_scale": torch.exp2(bits(H).float() % 7 - 3).to(torch.float8_e8m0fnu),
        "image": draw(B, 16, H, W),
    }

def _nibbles(packed):
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()

def _widened(x, x_scale, w, w_scale, image, dtype):
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=dtype, device=image.device)
    wide = values[_nibbles(x.view(torch.uint8))].unflatten(-1, (-1, 16))
    wide = wide * x_scale.to(dtype).unsqueeze(-1)
    whole = (_nibbles(w.view(torch.uint8)) - 8) * w_scale.to(dtype).unsqueeze(-1)
    return wide.flatten(-2) * whole + image.permute(0, 2, 3, 1).flatten(-2)

def reference(**given):
    return _widened(**{**given, "image": given["image"].double()}, dtype=torch.float64)

def eager(**given):
    return _widened(**given, dtype=torch.float32)
"""
WIDEN_CODE = """
#include <cmath>
#include <cstring>
static float e4m3(uint8_t v) {
  const int e = v >> 3 & 15;
  return e ? std::ldexp(1.0f + (v & 7) / 8.0f, e - 7) : std::ldexp((v & 7) / 8.0f, -6);
}
extern "C" void widen(const uint8_t* x, const uint8_t* xs, const uint32_t* w, const uint8_t* ws,
                      const float* image, float* y, int64_t b, int64_t h, int64_t n) {
  const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int64_t r = 0; r < b * h; ++r)
    for (int64_t j = 0; j < n; ++j) {
      const uint8_t four = x[(r * n + j) / 2] >> (j % 2 * 4) & 15;
      const float v = (four & 8 ? -1 : 1) * values[four & 7] * e4m3(xs[(r * n + j) / 16]);
      const int whole = int(w[(r % h * n + j) / 8] >> (j % 8 * 4) & 15) - ZERO;
      const uint32_t bits = uint32_t(ws[r % h]) << 23;
      float s;
      memcpy(&s, &bits, 4);
      y[r * n + j] = v * (whole * s) + image[r * n + j];
    }
}
"""
WIDEN_HOST = """
def run(x, x_scale, w, w_scale, image):
    b, h, half = x.shape
    y = torch.empty(b, h, 2 * half, device=x.device)
    cpp_kernel("widen", SOURCE)(x, x_scale, w, w_scale, image, y, b, h, 2 * half)
    return y
"""


def test_packed_numbers_and_their_scales(builder, tmp_path):
    task = write(tmp_path, WIDEN, WIDEN_REFERENCE, moved="137 * B * H * W + 8 * H * W + H")
    assert check(task, "cpu", CPU).holes == ()
    errors = judged(builder, task, candidate(WIDEN_CODE.replace("ZERO", "8"), WIDEN_HOST))
    assert not isinstance(errors, Rejected), errors
    found = judged(builder, task, candidate(WIDEN_CODE.replace("ZERO", "7"), WIDEN_HOST))
    assert isinstance(found, Rejected)
    assert found.status is Status.INCORRECT_NUMERICAL


DROP = """
accept = true
dims = { N = "elements", SEED = "what the numbers are drawn by" }
arguments = [
  { name = "x", shape = ["N"] },
  { name = "grad", shape = ["N"] },
  { name = "seed", value = "SEED" },
]
results = [
  { name = "y", shape = ["N"], k = 2.0 },
  { name = "dx", shape = ["N"], k = 2.0 },
]

[[cpu.check]]
name = "odd"
dtype = "float32"
N = 4999
SEED = 3

[[cpu.bench]]
name = "long"
dtype = "float32"
N = 65536
SEED = 5
"""
DROP_REFERENCE = """
P = 0.25

def inputs(case, generator, device):
    def draw():
        return torch.randn(case.dims["N"], generator=generator, device=device)
    return {"x": draw(), "grad": draw()}

def _dropped(x, grad, seed):
    generator = torch.Generator(x.device).manual_seed(seed)
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= P
    return torch.where(keep, x / (1 - P), 0), torch.where(keep, grad / (1 - P), 0)

def reference(*, x, grad, seed):
    return _dropped(x.double(), grad.double(), seed)

def eager(*, x, grad, seed):
    return _dropped(x, grad, seed)

def accept(results, expected, *, x, grad, seed):
    keep = results[0] != 0
    share = keep.double().mean()
    rate = bool((share - (1 - P)).abs() < 6 * (P * (1 - P) / len(x)) ** 0.5)
    halves = [part.double().mean() for part in keep.tensor_split(4)]
    rate = rate and bool(max(halves) - min(halves) < 0.1)
    right = [
        torch.isclose(r, torch.where(keep, v / (1 - P), 0), rtol=1e-6, atol=0)
        for r, v in zip(results, (x, grad))
    ]
    both = right[0] & right[1] & rate
    return both, both
"""
DROP_CODE = """
static bool kept(uint64_t i, uint64_t seed) {
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return (z ^ z >> 31) % 100 >= RATE;
}
extern "C" void drop(const float* x, const float* grad, float* y, float* dx, int64_t n,
                     int64_t seed) {
  for (int64_t i = 0; i < n; ++i) {
    y[i] = kept(i, seed) ? x[i] / 0.75f : 0;
    dx[i] = kept(i, seed + OTHER) ? grad[i] / 0.75f : 0;
  }
}
"""
DROP_HOST = """
def run(x, grad, seed):
    y, dx = torch.empty_like(x), torch.empty_like(grad)
    cpp_kernel("drop", SOURCE)(x, grad, y, dx, x.shape[0], seed)
    return y, dx
"""


@pytest.fixture(scope="module")
def drop(tmp_path_factory):
    return write(tmp_path_factory.mktemp("drop"), DROP, DROP_REFERENCE, moved="16 * N")


@pytest.mark.parametrize(
    ("rate", "other", "right"),
    [("25", "0", True), ("25", "1", False), ("30", "0", False)],
    ids=["own numbers", "another mask backward", "another rate"],
)
def test_what_is_drawn_by_a_seed_is_held_against_its_properties(builder, drop, rate, other, right):
    code = DROP_CODE.replace("RATE", rate).replace("OTHER", other)
    found = judged(builder, drop, candidate(code, DROP_HOST))
    if right:
        assert not isinstance(found, Rejected), found
    else:
        assert isinstance(found, Rejected)
        assert found.status is Status.INCORRECT_NUMERICAL, found.message


def test_the_task_of_properties_is_sound(drop):
    assert check(drop, "cpu", CPU).holes == ()


EMBED = """
dims = { T = "tokens", V = "words" }
arguments = [
  { name = "grad", shape = ["T", 8] },
  { name = "index", shape = ["T"], dtype = "int64" },
  { name = "words", value = "V" },
]
results = [{ name = "table", shape = ["V", 8], dtype = "bfloat16", k = 2.0 }]

[[cpu.check]]
name = "first"
dtype = "bfloat16"
inputs = "uniform"
T = 512
V = 4096

CASE
[[cpu.bench]]
name = "long"
dtype = "bfloat16"
inputs = "uniform"
T = 1024
V = 8192
"""
ZIPF = """
[[cpu.check]]
name = "words"
dtype = "bfloat16"
inputs = "zipf"
T = 16384
V = 512
"""
"""The most frequent word comes some 2400 times: its sum in bfloat16 stays at 256."""
EMBED_REFERENCE = """
from kagent_sandbox.draws import draw_index

def inputs(case, generator, device):
    T, V = case.dims["T"], case.dims["V"]
    grad = torch.rand(T, 8, generator=generator, device=device).to(torch.bfloat16)
    return {"grad": grad, "index": draw_index(case.inputs, (T,), V, generator, device)}

def reference(*, grad, index, words):
    table = torch.zeros(words, 8, dtype=torch.float64, device=grad.device)
    return table.index_add_(0, index, grad.double())

def eager(*, grad, index, words):
    table = torch.zeros(words, 8, device=grad.device)
    return table.index_add_(0, index, grad.float()).to(torch.bfloat16)
"""
EMBED_CODE = """
#include <cstring>
static float wide(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
extern "C" void embed(const uint16_t* grad, const int64_t* index, uint16_t* table, int64_t t,
                      int64_t v) {
  for (int64_t i = 0; i < v * 8; ++i) table[i] = 0;
  for (int64_t i = 0; i < t; ++i)
    for (int64_t j = 0; j < 8; ++j) {
      uint16_t& sum = table[index[i] * 8 + j];
      sum = narrow(wide(sum) + wide(grad[i * 8 + j]));  // rounds every time
    }
}
"""
EMBED_HOST = """
def run(grad, index, words):
    table = torch.empty(words, 8, dtype=torch.bfloat16, device=grad.device)
    cpp_kernel("embed", SOURCE)(grad, index, table, grad.shape[0], words)
    return table
"""


@pytest.mark.parametrize(("case", "right"), [("", True), (ZIPF, False)], ids=["uniform", "zipf"])
def test_a_sum_in_bfloat16_passes_where_indices_hardly_repeat(builder, tmp_path, case, right):
    task = write(tmp_path, EMBED.replace("CASE", case), EMBED_REFERENCE)
    found = judged(builder, task, candidate(EMBED_CODE, EMBED_HOST))
    assert isinstance(found, Rejected) is not right, found
    if not right:
        assert found.status is Status.INCORRECT_NUMERICAL
        assert "words" in found.case
