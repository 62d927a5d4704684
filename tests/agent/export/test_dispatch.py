"""Which kernel an exported operator uses, and what happens where it has none."""

import importlib
import json
import linecache
import math
import re
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.export.library import _cpus, _devices, _kernels
from kagent.export.library._portfolio import (
    TORCH,
    CheckedRegion,
    Chosen,
    DeviceEntry,
    Kernel,
    MeasuredPoint,
    Portfolio,
    ReferenceCall,
    read_portfolio,
)
from library_package import CPU, GELU, KERNELS, SEEDS, SOFTMAX, assemble, calls
from sampling import examples
from torch.utils._python_dispatch import TorchDispatchMode

HERE = DeviceEntry("this CPU", "cpu", "x86_64-v4", ())
ALIKE = DeviceEntry("another CPU", "cpu", "x86_64-v4", ())
OLDER = DeviceEntry("an old CPU", "cpu", "x86_64-v3", ())


def kernel(name, *regions, capabilities=("x86_64-v4",)):
    return Kernel(
        name, "cpp", capabilities, pitched=False, repeats=True, configs=({},), regions=regions
    )


def region(dtype="float32", low=1, high=1 << 20, volume=math.inf, **values):
    bounds = {"low": {"M": low, "N": low}, "high": {"M": high, "N": high}}
    return CheckedRegion(
        dtype, **bounds, values={n: tuple(v) for n, v in values.items()}, volume=volume
    )


def point(m, n, best, dtype="float32", config=0, **flags):
    return MeasuredPoint(dtype, {"M": m, "N": n, **flags}, best, {best: config})


def portfolio(kernels, *points, device=HERE):
    table = DeviceEntry(device.name, device.kind, device.capability, points)
    return Portfolio("task", "task", ("M", "N"), {k.id: k for k in kernels}, {device.name: table})


# -- the choice ------------------------------------------------------------------------------------


def test_the_nearest_shape_in_powers_of_two():
    table = portfolio(
        [kernel("wide", region()), kernel("tall", region())],
        point(16, 65536, "wide", config=3),
        point(65536, 16, "tall"),
    )
    assert table.choose(HERE, "float32", {"M": 100, "N": 50000}) == Chosen(table.kernels["wide"], 3)
    assert table.choose(HERE, "float32", {"M": 50000, "N": 100}).kernel.id == "tall"


def test_where_the_nearest_was_not_checked_the_next_one_is_taken():
    table = portfolio(
        [kernel("few", region(high=1000)), kernel("many", region(high=10**6))],
        point(1000, 1000, "few"),
        point(10**6, 1000, "many"),
    )
    assert table.choose(HERE, "float32", {"M": 1000, "N": 1000}).kernel.id == "few"
    assert table.choose(HERE, "float32", {"M": 1001, "N": 1000}).kernel.id == "many"
    assert table.choose(HERE, "float32", {"M": 10**6 + 1, "N": 1}) == ReferenceCall()


def test_the_product_of_sizes_is_bounded_too():
    table = portfolio([kernel("k", region(volume=10**6))], point(1000, 1000, "k"))
    assert isinstance(table.choose(HERE, "float32", {"M": 1, "N": 10**6}), Chosen)
    assert table.choose(HERE, "float32", {"M": 10**4, "N": 10**4}) == ReferenceCall()


def test_where_torch_was_the_fastest_it_is_used_without_a_word():
    table = portfolio([kernel("k", region())], point(8, 8, "k"), point(4096, 4096, TORCH))
    assert table.choose(HERE, "float32", {"M": 4000, "N": 4000}) == ReferenceCall()
    assert isinstance(table.choose(HERE, "float32", {"M": 10, "N": 8}), Chosen)


def test_below_the_smallest_measured_shape_torch_is_called():
    table = portfolio(
        [kernel("k", region(flag=(True,))), kernel("half", region("bfloat16", flag=(True,)))],
        point(64, 1024, "k", flag=True),
        point(4096, 4096, "k", flag=True),
        point(2, 8, "half", dtype="bfloat16", flag=True),
        point(4, 4, "k", flag=False),
    )
    for dtype, m, n, found in [
        ("float32", 1024, 64, Chosen),
        ("float32", 1023, 64, ReferenceCall),
        ("float32", 1, 1, ReferenceCall),
        ("bfloat16", 4, 4, Chosen),
        ("bfloat16", 3, 5, ReferenceCall),
    ]:
        call = {"M": m, "N": n, "flag": True}
        assert isinstance(table.choose(HERE, dtype, call), found), (dtype, m, n)


def test_sizes_of_which_there_are_few_must_be_among_those_that_were_checked():
    table = portfolio(
        [kernel("k", region(D=(64, 128), causal=(True,)))],
        point(8, 8, "k", D=64, causal=True),
    )
    for size, causal, found in [
        (64, True, Chosen),
        (96, True, ReferenceCall),
        (64, False, ReferenceCall),
    ]:
        dims = {"M": 8, "N": 8, "D": size, "causal": causal}
        assert isinstance(table.choose(HERE, "float32", dims), found)
    assert table.choose(HERE, "float32", {"M": 8, "N": 8, "D": 64, "causal": 1}) == ReferenceCall()


def test_numbers_without_a_logarithm_are_compared():
    table = portfolio(
        [kernel("a", region(i=(-100, 2))), kernel("b", region(i=(-100, 2)))],
        point(8, 8, "a", i=-100),
        point(8, 8, "b", i=2),
    )
    assert table.choose(HERE, "float32", {"M": 9, "N": 9, "i": -100}).kernel.id == "a"
    assert table.choose(HERE, "float32", {"M": 9, "N": 9, "i": 2}).kernel.id == "b"
    assert table.choose(HERE, "float32", {"M": 9, "N": 9, "i": 0}) == ReferenceCall()


def test_a_dtype_takes_the_figures_of_one_as_wide_if_it_was_checked():
    both = kernel("k", region("bfloat16"), region("float16"))
    table = portfolio([both], point(8, 8, "k", dtype="bfloat16"))
    assert isinstance(table.choose(HERE, "float16", {"M": 8, "N": 8}), Chosen)
    own = portfolio([both], point(8, 8, "k", "bfloat16"), point(8, 8, TORCH, "float16"))
    assert own.choose(HERE, "float16", {"M": 8, "N": 8}) == ReferenceCall()
    one = portfolio([kernel("k", region("bfloat16"))], point(8, 8, "k", dtype="bfloat16"))
    assert "not float16" in one.choose(HERE, "float16", {"M": 8, "N": 8}).reason


def test_a_device_alike_stands_in_and_others_do_not():
    table = portfolio([kernel("k", region())], point(8, 8, "k"), device=ALIKE)
    assert isinstance(table.choose(HERE, "float32", {"M": 8, "N": 8}), Chosen)
    reason = table.choose(OLDER, "float32", {"M": 8, "N": 8}).reason
    assert "an old CPU (x86_64-v3)" in reason
    assert "another CPU (x86_64-v4)" in reason
    gpu = DeviceEntry("H100", "gpu", "sm_90", ())
    assert "nothing was measured on H100" in table.choose(gpu, "float32", {"M": 8, "N": 8}).reason


def test_a_kernel_for_another_capability_is_not_used_under_the_same_name():
    table = portfolio([kernel("k", region(), capabilities=("x86_64-v3",))], point(8, 8, "k"))
    assert table.choose(HERE, "float32", {"M": 8, "N": 8}).reason is not None


def test_a_kernel_that_failed_is_left_to_torch():
    table = portfolio([kernel("k", region())], point(8, 8, "k"))
    assert table.choose(HERE, "float32", {"M": 8, "N": 8}, {"k"}) == ReferenceCall()


sizes = st.integers(1, 1 << 17)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
regions = st.builds(
    lambda dtype, a, b, volume, flags: CheckedRegion(
        dtype,
        {n: min(x, y) for n, x, y in zip("MN", a, b, strict=True)},
        {n: max(x, y) for n, x, y in zip("MN", a, b, strict=True)},
        {"flag": tuple(flags)},
        volume,
    ),
    dtypes,
    st.tuples(sizes, sizes),
    st.tuples(sizes, sizes),
    st.integers(1, 1 << 34),
    st.lists(st.booleans(), min_size=1, max_size=2, unique=True),
)
names = st.sampled_from(["a", "b", "c"])
kernels = st.lists(regions, min_size=1, max_size=4).flatmap(
    lambda r: st.builds(
        lambda name, able: kernel(name, *r, capabilities=able),
        names,
        st.sampled_from([("x86_64-v4",), ("x86_64-v3",), ("x86_64-v3", "x86_64-v4")]),
    )
)
points = st.builds(
    lambda m, n, best, dtype, flag: point(m, n, best, dtype, flag=flag),
    sizes, sizes, st.sampled_from(["a", "b", "c", TORCH]), dtypes, st.booleans(),
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(kernels, min_size=1, max_size=3),
    st.lists(points, max_size=8),
    st.tuples(sizes, sizes, dtypes, st.booleans()),
    st.sets(names, max_size=1),
    st.sampled_from([HERE, ALIKE, OLDER]),
)
def test_a_choice_was_checked_for_the_call_and_nothing_usable_is_nearer(
    found, measured, call, failed, device
):
    table = portfolio(found, *measured)
    m, n, dtype, flag = call
    dims = {"M": m, "N": n, "flag": flag}
    choice = table.choose(device, dtype, dims, failed)
    if isinstance(choice, ReferenceCall):
        return
    assert choice.kernel.id not in failed
    assert device.capability in choice.kernel.capabilities
    assert any(r.covers(dtype, dims) for r in choice.kernel.regions)

    def distance(p):
        return math.log2(p.dims["M"] / m) ** 2 + math.log2(p.dims["N"] / n) ** 2

    alike = [p for p in measured if p.dims["flag"] == flag]
    near = [p for p in alike if p.dtype == dtype] or alike
    chosen_at = min(distance(p) for p in near if p.best == choice.kernel.id)
    assert all(distance(p) >= chosen_at for p in near if p.best in (TORCH, *failed))


def test_a_table_is_read_as_the_exporter_writes_it(tmp_path):
    path = tmp_path / "task.json"
    kernels_of = {
        "language": "cpp", "capabilities": ["x86_64-v4"], "pitched": True, "configs": [{"A": 1}],
        "regions": [{"dtype": "float32", "low": {"M": 1, "N": 2}, "high": {"M": 3, "N": 4},
                     "flags": {"D": [64, 128]}, "volume": 12}],
    }  # fmt: skip
    measured = {
        "dtype": "float32", "dims": {"M": 2, "N": 3, "D": 64}, "best": "k",
        "config": {"k": 0}, "us": {"k": 1.0, "torch": 2.0},
    }  # fmt: skip
    device = {"kind": "cpu", "capability": "x86_64-v4", "points": [measured]}
    data = {
        "format": 1, "task": "task", "entry": "run", "dims": ["M", "N", "D"],
        "kernels": {"k": kernels_of}, "devices": {"this CPU": device},
    }  # fmt: skip
    path.write_text(json.dumps(data))
    table = read_portfolio(path)
    choice = table.choose(HERE, "float32", {"M": 2, "N": 4, "D": 128})
    assert isinstance(choice, Chosen)
    assert choice.kernel.pitched
    assert table.entry == "run"
    path.write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        read_portfolio(path)


# -- devices ---------------------------------------------------------------------------------------


V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "sse2", "x86_64"),
        ("x86_64", V2, "x86_64-v2"),
        ("x86_64", V3, "x86_64-v3"),
        ("x86_64", V3.replace("movbe", ""), "x86_64-v2"),
        ("x86_64", V4, "x86_64-v4"),
        ("AMD64", V4 + " more", "x86_64-v4"),
        ("x86_64", V4.replace("ssse3", ""), "x86_64"),  # levels build on each other
        ("aarch64", "asimd sve", "aarch64"),
        ("arm64", "", "aarch64"),
        ("riscv64", "", "riscv64"),
    ],
)
def test_levels_of_processors(machine, flags, expected):
    assert _cpus.cpu_capability(machine, flags) == expected


def test_this_machine_has_a_name_and_a_capability():
    assert _devices.device_name(CPU)
    assert _devices.capability(CPU)
    assert _devices.kind(CPU) == "cpu"
    assert _devices.kind(torch.device("cuda", 1)) == "gpu"
    assert _devices.capability(torch.device("mps")) == _devices.kind(torch.device("mps")) == "mps"


# -- a library -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


@pytest.fixture
def package(tmp_path, request):
    return assemble(tmp_path / "lib", re.sub(r"\W", "_", request.node.name), ())


_made = iter(range(1000))


def imported(package, *tasks):
    for task in tasks:
        package.add_operator(task)
    (package.folder / "__init__.py").write_text(
        "".join(f"from .operators import {t}\n" for t in tasks)
    )
    return package.imported(f"dispatch_library_{next(_made)}")


def told(record):
    return [str(w.message) for w in record if "torch's own implementation" in str(w.message)]


def count_warnings(function, times=3):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(times):
            function()
    return told(record)


def test_one_warning_for_each_reason(package):
    package.add_kernel("gelu", GELU)
    lib = imported(package, "gelu")
    for dtype in (torch.float64, torch.float64, torch.float32):
        x = torch.randn(3, 4, dtype=dtype)
        found = count_warnings(lambda x=x: lib.gelu.gelu(x))
        torch.testing.assert_close(lib.gelu.gelu(x), F.gelu(x, approximate="tanh"))
        if dtype == torch.float64 and found:
            (text,) = found
            assert text.startswith(f"{lib.__name__}.gelu: ")  # the package's name, as users know it
            assert "checked with bfloat16, float16, float32, not float64" in text
            assert "Convert the tensors" in text
    assert count_warnings(lambda: lib.gelu.gelu(torch.randn(5, 6, dtype=torch.float64))) == []
    assert calls(lib, "gelu")


def test_a_warning_names_the_line_of_the_caller(package):
    package.add_kernel("gelu", GELU)
    lib = imported(package, "gelu")
    module = torch.nn.Sequential(lib.gelu.GELU())
    for n, call in enumerate([lib.gelu.gelu, lib.gelu._gelu.op, module]):
        lib.gelu._gelu._dispatch._warned.clear()
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            call(torch.randn(3 + n, 4, dtype=torch.float64))
        (warning,) = [w for w in record if "torch's own implementation" in str(w.message)]
        assert warning.filename == __file__
        assert "call(torch.randn" in linecache.getline(__file__, warning.lineno)


def test_an_unknown_device_is_told_once(package):
    package.add_kernel("gelu", GELU)
    table = package.tables["gelu"]["devices"]
    (name,) = table
    table["NVIDIA H100"] = {**table.pop(name), "kind": "gpu", "capability": "sm_90"}
    lib = imported(package, "gelu")
    (text,) = count_warnings(lambda: lib.gelu.gelu(torch.randn(3, 4)))
    assert f"nothing was measured on {name}" in text
    assert "NVIDIA H100 (sm_90)" in text
    assert count_warnings(lambda: lib.gelu.gelu(torch.randn(5, 6))) == []
    category = sys.modules[f"{lib.__name__}._library"].FallbackWarning
    assert issubclass(category, UserWarning)


def test_unmeasured_and_empty_shapes_are_torchs_without_a_word(package):
    package.add_kernel("gelu", GELU)
    lib = imported(package, "gelu")
    for x in (torch.randn(1, (1 << 16) + 1), torch.empty(0, 4), torch.empty(4, 0)):
        assert count_warnings(lambda x=x: lib.gelu.gelu(x)) == []
    assert calls(lib, "gelu") == []


FAILING = {
    "does not launch": ("def gelu(x): raise RuntimeError('no\\nroom')", "RuntimeError: no room"),
    "cannot be imported": ("import nothing_of_this_name", "ModuleNotFoundError"),
    "does not parse": ("def gelu(x:", "SyntaxError"),
    "has no entry": ("def other(x): return x", "no attribute 'gelu'"),
}


@pytest.mark.parametrize(("source", "reason"), FAILING.values(), ids=FAILING)
def test_a_kernel_that_fails_is_told_once_and_not_tried_again(package, source, reason):
    package.add_kernel("gelu", f"import torch\nTRIED = []\n{source}\n")
    lib = imported(package, "gelu")
    x = torch.randn(3, 4)
    results = []
    (text,) = count_warnings(lambda: results.append(lib.gelu.gelu(x)))
    assert reason in text
    assert "its kernel gelu_00000000 does not run here" in text
    assert count_warnings(lambda: results.append(lib.gelu.gelu(torch.randn(7, 8)))) == []
    torch.testing.assert_close(results[0], F.gelu(x, approximate="tanh"))
    assert lib.gelu._gelu._dispatch.failed == {"gelu_00000000"}
    assert all(call is None for call in lib.gelu._gelu._calls.values())


def test_memory_that_runs_out_is_the_callers_affair(package):
    package.add_kernel("gelu", "import torch\ndef gelu(x): raise torch.OutOfMemoryError('full')\n")
    lib = imported(package, "gelu")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            lib.gelu.gelu(torch.randn(3, 4))


@pytest.fixture
def half_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_under_another_default_dtype_torch_is_called(package, request):
    """The workspace of such a kernel would have half as many bytes."""
    package.add_kernel("gelu", "import torch\ndef gelu(x): return torch.empty(x.shape).fill_(7)\n")
    lib = imported(package, "gelu")
    x = torch.randn(3, 4)
    assert lib.gelu.gelu(x).eq(7).all()
    request.getfixturevalue("half_by_default")
    results = []
    (text,) = count_warnings(lambda: results.append(lib.gelu.gelu(x)))
    assert "torch's default dtype is torch.bfloat16, and kernels were checked with" in text
    assert count_warnings(lambda: results.append(lib.gelu._gelu.op(x))) == []
    for result in results:
        torch.testing.assert_close(result, F.gelu(x, approximate="tanh"))


HALF = """
import torch
from .._about import NAMESPACE
from .._library import LibraryOperator
__all__ = []
def _reference(x):
    x.mul_(0.5)
_halved = LibraryOperator(
    "gelu", "(Tensor(a!) x) -> ()", namespace=NAMESPACE, reference=_reference, fake=lambda x: None,
    dims=lambda x: {"M": x.shape[0], "N": x.shape[1]},
)
"""
STEPS = """
import torch
CALLS = []
def gelu(x):
    CALLS.append(1)
    x[: len(x) // 2].mul_(0.5)
    if len(CALLS) in FAILS:
        raise RuntimeError("no launch")
    x[len(x) // 2 :].mul_(0.5)
"""


@pytest.mark.parametrize("fails", [{1}, {2}, set()])
def test_a_kernel_that_fails_between_two_launches_leaves_no_half_step(package, fails):
    package.add_operator("halved", HALF)
    package.add_kernel("gelu", f"FAILS = {fails}\n{STEPS}")
    lib = imported(package)
    halved = importlib.import_module(f"{lib.__name__}.operators.halved")._halved
    x, expected = torch.ones(4, 8), torch.ones(4, 8)
    for call in (1, 2, 3):
        if call in fails and call > 1:  # it ran before: nobody expects copies any more
            with (
                pytest.raises(RuntimeError, match="may have written part of its arguments"),
                pytest.warns(UserWarning, match="torch's own implementation is used"),
            ):
                halved(x)
            x.copy_(expected.mul_(0.5))
        elif call in fails:
            assert len(count_warnings(lambda: halved(x), 1)) == 1
            expected.mul_(0.5)
        else:
            halved(x)
            expected.mul_(0.5)
        torch.testing.assert_close(x, expected)


def test_a_failing_kernel_does_not_take_others_with_it(package):
    package.add_kernel("gelu", "def gelu(x): raise RuntimeError('broken')\n")
    package.add_kernel("gelu", GELU)
    points = package.tables["gelu"]["devices"][_devices.device_name(CPU)]["points"]
    points.clear()
    package.add_point("gelu", "float32", {"M": 8, "N": 8}, "gelu_00000000")
    package.add_point("gelu", "float32", {"M": 4096, "N": 8}, "gelu_00000001")
    lib = imported(package, "gelu")
    small, large = torch.randn(8, 8), torch.randn(4096, 8)
    assert len(count_warnings(lambda: lib.gelu.gelu(small))) == 1
    assert count_warnings(lambda: lib.gelu.gelu(large)) == []
    torch.testing.assert_close(lib.gelu.gelu(large), F.gelu(large, approximate="tanh"))
    assert [c.kernel for c in lib.gelu._gelu._calls.values() if c] == ["gelu_00000001"]


def test_a_table_that_cannot_be_read_is_told(package):
    package.add_kernel("gelu", GELU)
    lib = imported(package, "gelu")
    (package.folder / "portfolio" / "gelu.json").write_text("{")
    (text,) = count_warnings(lambda: lib.gelu.gelu(torch.randn(3, 4)))
    assert "its table cannot be read" in text


def test_choices_are_remembered_but_not_without_end(package, monkeypatch):
    package.add_kernel("gelu", GELU)
    lib = imported(package, "gelu")
    operator = lib.gelu._gelu
    monkeypatch.setattr(sys.modules[f"{lib.__name__}._dispatch"], "_MOST_CALLS", 8)
    for n in range(1, 30):
        lib.gelu.gelu(torch.randn(2, n))
    assert len(operator._calls) <= 8


def test_attention_that_is_torchs_is_called_as_torchs_in_eager_mode(package):
    """Its result is transposed in memory on a GPU, and an operator's would be a copy."""
    package.add_kernel("attention", KERNELS["attention"])
    dims = {"B": 2, "H": 4, "Hkv": 4, "S": 9, "D": 16, "causal": True}
    package.add_point("attention", "float32", dims, TORCH)
    lib = imported(package, "attention")
    q = torch.randn(2, 4, 9, 16)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Watch():
        assert torch.equal(lib.attention.attention(q, q, q, is_causal=True), expected)
    assert set(seen) == {"aten"}
    assert lib.attention._attention.op(q, q, q, True).is_contiguous()
    compiled = torch.compile(lib.attention.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, q, q, is_causal=True), expected)
    assert calls(lib, "attention") == []


def test_parameters_are_tensors_like_others(package):
    package.add_kernel("linear_cross_entropy", KERNELS["linear_cross_entropy"])
    lib = imported(package, "linear_cross_entropy")
    layer = torch.nn.Linear(4, 7, bias=False)
    loss_of = lib.linear_cross_entropy.linear_cross_entropy
    for _ in range(3):
        loss_of(torch.randn(5, 4), layer.weight, torch.randint(7, (5,)))
    assert len(lib.linear_cross_entropy._linear_cross_entropy._calls) == 1


# -- configurations --------------------------------------------------------------------------------

TUNED = """
import torch
SCALE = 1
NAME = "default"
CALLS = []
def gelu(x):
    CALLS.append((SCALE, NAME))
    return torch.nn.functional.gelu(x, approximate="tanh")
"""


def test_each_point_has_its_configuration_in_a_module_of_its_own(package):
    configs = [{"SCALE": 2, "NAME": "small"}, {"SCALE": 3, "NAME": "large"}]
    name = package.add_kernel("gelu", TUNED, configs=configs)
    package.tables["gelu"]["devices"][_devices.device_name(CPU)]["points"].clear()
    package.add_point("gelu", "float32", {"M": 8, "N": 8}, name, config=0)
    package.add_point("gelu", "float32", {"M": 4096, "N": 8}, name, config=1)
    lib = imported(package, "gelu")
    for rows in (8, 4096, 10, 2000, 8):
        lib.gelu.gelu(torch.randn(rows, 8))
    assert sorted(set(calls(lib, "gelu"))) == [(2, "small"), (3, "large")]
    assert len(calls(lib, "gelu")) == 5
    assert len(lib.gelu._gelu._dispatch.loaded) == 2


TRITON = """
import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(64)


@triton.autotune(
    configs=[triton.Config({"WIDTH": w}, num_warps=n) for w in (128, 256) for n in (4, 8)],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def _inner(x, n, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    pass


@triton.heuristics({"EVEN": lambda args: True})
@triton.autotune(configs=[triton.Config({}, num_warps=w, num_stages=2) for w in (1, 2)], key=[])
@triton.jit
def _outer(x, EVEN: tl.constexpr):
    pass


def gelu(x):
    return x
"""


def test_configurations_of_triton_kernels(tmp_path):
    path = tmp_path / "kernels" / "gelu_1.py"
    path.parent.mkdir()
    path.write_text(TRITON)
    config = {
        "BLOCK": 32,
        "_inner": {"WIDTH": 256, "num_warps": 4, "num_stages": 3},
        "_outer": {"num_warps": 2, "num_stages": 2},
    }
    function = _kernels.load("triton_lib", path, "gelu", config, "x_0")
    module = sys.modules[function.__module__]
    assert module.BLOCK.value == 32
    assert type(module.BLOCK).__name__ == "constexpr"
    (inner,) = module._inner.configs
    assert (inner.kwargs, inner.num_warps) == ({"WIDTH": 256}, 4)
    (outer,) = module._outer.fn.configs
    assert (outer.num_warps, outer.num_stages) == (2, 2)
    wrong = {"_inner": {"WIDTH": 512, "num_warps": 4, "num_stages": 3}}
    with pytest.raises(ValueError, match="_inner: none of its configurations"):
        _kernels.load("triton_lib", path, "gelu", wrong, "x_1")
    assert "triton_lib.kernels.gelu_1_x_1" not in sys.modules


# -- tensors as kernels were checked to take them --------------------------------------------------


def padded(*shape, by=8, dtype=torch.float32):
    return torch.randn(*shape[:-1], shape[-1] + by, dtype=dtype)[..., : shape[-1]]


@pytest.mark.parametrize("pitched", [False, True])
def test_rows_apart_are_passed_as_they_are_where_that_was_checked(package, pitched):
    package.add_kernel("softmax", SOFTMAX, pitched=pitched)
    lib = imported(package, "softmax")
    for x in (padded(6, 10), padded(6, 10, by=16)):
        torch.testing.assert_close(lib.softmax.softmax(x), torch.softmax(x, -1))
    copied = [(10, 1), (10, 1)]
    assert [c[1] for c in calls(lib, "softmax")] == ([(18, 1), (26, 1)] if pitched else copied)


@pytest.mark.parametrize(
    "x",
    [
        padded(6, 10, by=3),  # a row's start is aligned in another way than any that was checked
        torch.randn(6, 11)[:, 1:],
        torch.randn(10, 6).T,
        torch.randn(1, 10).expand(6, 10),
        torch.randn(6, 20)[:, ::2],
        padded(12, 10)[::2],
    ],
)
def test_other_strides_are_copied(package, x):
    package.add_kernel("softmax", SOFTMAX, pitched=True)
    lib = imported(package, "softmax")
    torch.testing.assert_close(lib.softmax._softmax.op(x), torch.softmax(x, -1))
    ((_, strides),) = calls(lib, "softmax")
    if x.stride() != (36, 1):  # every second of rows that are 18 apart: as good as 26 more
        assert strides == (10, 1)


def test_a_tensor_that_begins_anywhere_is_copied_to_where_kernels_may_load_vectors():
    buffer = torch.randn(65)
    for offset in range(4):
        x = buffer[offset : offset + 60].view(6, 10)
        (passed,) = _kernels.as_checked([x], [0], pitched=True)
        assert passed.data_ptr() % _kernels.ALIGNMENT == 0
        assert (passed is x) == (x.data_ptr() % _kernels.ALIGNMENT == 0)
        assert torch.equal(passed, x)


def test_tensors_are_padded_alike_or_copied():
    q, k = padded(2, 3, 5, 8), padded(2, 3, 5, 8, by=16)
    same = padded(2, 3, 5, 8)
    plain = torch.randn(4)
    assert _kernels.as_checked([q, same, plain, 3], [0, 1, 2], pitched=True)[0] is q
    for other in (k, q.contiguous(), q.transpose(0, 1)):
        found = _kernels.as_checked([q, other, plain, 3], [0, 1, 2], pitched=True)
        assert all(t.is_contiguous() for t in found[:3])
        assert torch.equal(found[0], q)
        assert found[3] == 3


# -- a real kernel ---------------------------------------------------------------------------------


def test_a_seed_in_cpp_runs_with_the_configuration_of_its_point(package):
    configs = [{"LANES": 8, "CHUNK": 4096}, {"LANES": 16, "CHUNK": 65536}]
    source = (SEEDS / "softmax" / "cpp_rows.py").read_text()
    name = package.add_kernel("softmax", source, configs=configs, pitched=True)
    regions_of = package.tables["softmax"]["kernels"][name]["regions"]
    regions_of[:] = [r for r in regions_of if r["dtype"] == "float32"]
    package.add_point("softmax", "float32", {"M": 64, "N": 64}, name, config=0)
    package.add_point("softmax", "float32", {"M": 512, "N": 64}, name, config=1)
    lib = imported(package, "softmax")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (torch.randn(33, 1000), torch.randn(600, 64), padded(20, 100), torch.randn(0, 5)):
            y = x.clone().requires_grad_()
            torch.testing.assert_close(lib.softmax.softmax(y), torch.softmax(x, -1))
    assert lib.softmax._softmax._dispatch.failed == set()
    loaded = [sys.modules[f.__module__] for f in lib.softmax._softmax._dispatch.loaded.values()]
    assert {(m.LANES, m.CHUNK) for m in loaded} == {(8, 4096), (16, 65536)}
