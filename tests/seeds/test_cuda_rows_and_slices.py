"""CUDA seeds of rows (softmax, cross_entropy, RMS norm) and of 8-bit weights, run on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, LaunchFailed
from kagent_sandbox.data.task import load_task
from seed_cases import SEEDS, arguments, import_seed, worst_share

SOFTMAX = SEEDS / "softmax" / "cuda_packed.py"
CROSS_ENTROPY = SEEDS / "cross_entropy" / "cuda_packed.py"
RMS_NORM = SEEDS / "rms_norm_backward" / "cuda_tickets.py"
INT8 = SEEDS / "int8_linear" / "cuda_slices.py"
FP8 = SEEDS / "fp8_linear" / "cuda_slices.py"
# Whether copies happen as late as they may, and whether threads run in reverse.
ORDERS = [(False, False), (True, True), (False, True), (True, False)]


class OnCpu:
    """A seed whose kernels run on the CPU, as if on a Hopper of few multiprocessors."""

    def __init__(self, file, folder, monkeypatch, processors, tunables):
        self.task, self.seed = load_task(file.parent), import_seed(file)
        self.machine = CudaOnCpu(folder)
        self.instances = []
        properties = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(self.seed, "cuda_kernel", self._cuda_kernel)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        for name, value in tunables.items():
            assert hasattr(self.seed, name)
            monkeypatch.setattr(self.seed, name, value)

    def _cuda_kernel(self, name, source):
        self.instances.append(name)
        return self.machine.cuda_kernel(name, source)

    def given(self, **case):
        named = self.task.gpu.check[0].model_copy(update={"name": "small", **case})
        return arguments(self.task, self.task.reference(), named, seed=7)

    def shares(self, given, orders=ORDERS[:2]):
        """Of what is allowed, the largest error in each order."""
        for self.machine.late_copies, self.machine.reversed_threads in orders:
            results = getattr(self.seed, self.task.entry)(**given)
            yield worst_share(self.task, self.task.reference(), given, results)

    def leave_out(self, lines, monkeypatch):
        """Take a statement out of the source; what follows it says which."""
        assert self.seed.SOURCE.count(lines) == 1
        kept = self.seed.SOURCE.replace(lines, lines.partition(";")[2])
        monkeypatch.setattr(self.seed, "SOURCE", kept)

    def fails(self, given):
        """Whether results are wrong, or a launch fails, in any order."""
        try:
            return max(self.shares(given, ORDERS)) > 1
        except LaunchFailed:
            return True


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    """Memory that nothing was written to is NaN: rows' gaps, and what a kernel leaves out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield lambda file, processors, **tunables: OnCpu(
        file, tmp_path, monkeypatch, processors, tunables
    )
    torch.use_deterministic_algorithms(before)


# -- rows -----------------------------------------------------------------------------------------

# 2 words of 16 bytes of each of 64 threads are in registers, up to 3 in shared memory.
# Rows that start up to 32 KiB later are fetched ahead.
FETCHED = {"AHEAD": 1 / 32}
SHORT_HELD = {
    "WORDS": 2,
    "THREADS": 32,
    "HELD_THREADS": 64,
    "HELD_WORDS": 3,
    "AHEAD_FROM": 0,
} | FETCHED


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("dtype", "words", "tunables", "blocks"),
    [
        ("float32", 100, {}, 1),  # none in shared memory
        ("bfloat16", 300, {}, 1),
        ("bfloat16", 601, {"STREAM": 1}, 2),
        ("float32", 1277, {}, 4),
        ("bfloat16", 1200, {"WORDS": 1, "HELD_THREADS": 32, "HELD_WORDS": 40}, 1),  # two copies
    ],
)
def test_softmax_holds_rows_in_registers_and_shared_memory(dtype, words, tunables, blocks, on_cpu):
    s = on_cpu(SOFTMAX, 1, **SHORT_HELD | tunables)
    columns = words * (4 if dtype == "float32" else 8)
    given = s.given(dtype=dtype, inputs="nonfinite", noncontiguous=True, M=19, N=columns)
    assert max(s.shares(given)) <= 1
    assert f", {s.seed.HELD_THREADS}, {blocks}, " in s.instances[0]
    assert all(n.startswith("softmax_held") for n in s.instances)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("dtype", "columns", "tunables", "instance"),
    [
        ("bfloat16", 240, {}, "1, 32, 4, 1, false"),  # 4 rows, each of one warp
        ("bfloat16", 1021, {}, "2, 64, 2, 1, true"),  # rows that begin and end anywhere
        ("float32", 777, {"THREADS": 32}, "2, 32, 4, 4, true"),
        ("bfloat16", 3000, {"LONG": 300}, "16, 32, 4, 1, false"),
        ("bfloat16", 4104, {"LONG": 300, "THREADS": 32}, "16, 32, 4, 4, false"),
    ],
)
def test_softmax_has_rows_in_registers_alone(dtype, columns, tunables, instance, on_cpu):
    s = on_cpu(SOFTMAX, 1, **{"WORDS": 2, "AHEAD_FROM": 0} | FETCHED | tunables)
    given = s.given(dtype=dtype, inputs="nonfinite", noncontiguous=True, M=19, N=columns)
    assert max(s.shares(given)) <= 1
    assert s.instances[0].startswith(f"softmax_words<{s.seed.TYPES[given['x'].dtype]}, {instance},")


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "line",
    [
        "barrier_wait(&arrived, 0);",
        "barrier_wait(gathered, 0);",
        "cluster_wait();\n  } else {",  # before the other block is sent anything
    ],
)
def test_softmax_needs_its_waits(line, on_cpu, monkeypatch):
    """What the emulation is worth: without any one of its waits the kernel fails in it."""
    s = on_cpu(SOFTMAX, 1, **SHORT_HELD)
    given = s.given(dtype="bfloat16", inputs="normal", M=2, N=601 * 8)
    s.leave_out(line, monkeypatch)
    assert s.fails(given)
    assert "softmax_held" in s.instances[0]


# 2 words of 16 bytes of each of 64 threads are in registers, up to 3 in shared memory.
PACKED = {"WORDS": 2, "HELD": 3, "THREADS": 64, "LONG_WORDS": 60} | FETCHED
WIDE = {"WORDS": 1, "HELD": 40, "THREADS": 32}  # two bulk copies


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("dtype", "words", "inputs", "tunables", "instance"),
    [
        ("float32", 100, "nonfinite", {}, "2, false, 64, 1, 0"),
        ("bfloat16", 300, "nonfinite", {}, "2, true, 64, 1, 0"),
        ("bfloat16", 601, "nonfinite", {"STORE": 1}, "2, true, 64, 2, 1"),
        ("float32", 251, "mixed", {"HELD": 0}, "2, false, 64, 2, 0"),
        ("float32", 1277, "nonfinite", {}, "2, true, 64, 4, 0"),
        ("float32", 1277, "ignored", {}, "2, true, 64, 4, 0"),
        ("bfloat16", 1200, "mixed", WIDE, "1, true, 32, 1, 0"),
    ],
)
def test_cross_entropy_holds_rows(dtype, words, inputs, tunables, instance, on_cpu):
    s = on_cpu(CROSS_ENTROPY, 1, **PACKED | tunables)
    columns = words * (4 if dtype == "float32" else 8)
    given = s.given(dtype=dtype, inputs=inputs, noncontiguous=True, M=21, N=columns)
    assert max(s.shares(given)) <= 1
    assert s.instances[:3] == [
        "count_targets<1024>",
        f"rows_packed<{s.seed.TYPES[given['logits'].dtype]}, {instance}>",
        "mean_loss<512>",
    ]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("words", [320, 602])
def test_cross_entropys_label_may_be_anywhere(words, on_cpu):
    s = on_cpu(CROSS_ENTROPY, 1, **PACKED)
    given = s.given(dtype="bfloat16", inputs="normal", M=15, N=words * 8)
    # The first and last elements in registers, in shared memory, and in the other block.
    places = [0, 63, 64, 127, 128, 191, 192, 300, 301, 428, 429, words - 1]
    labels = [8 * min(w, words - 1) + i % 8 for i, w in enumerate(places)]
    labels += [0, -100, words * 8 - 1]
    given["target"] = torch.tensor(labels)
    assert max(s.shares(given)) <= 1
    assert "rows_packed" in s.instances[1]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("barrier_wait(&arrived, 0);", 300),
        ("cluster_barrier_wait(&gathered);", 601),
        ("if constexpr (CLUSTER > 1) cluster_wait();", 601),
    ],
)
def test_cross_entropy_needs_its_waits(line, words, on_cpu, monkeypatch):
    s = on_cpu(CROSS_ENTROPY, 1, **PACKED)
    given = s.given(dtype="bfloat16", inputs="normal", M=2, N=words * 8)
    s.leave_out(line, monkeypatch)
    assert s.fails(given)


# Rows of 64 threads or more; of shorter ones, a tile has several. Rings of 8 KiB, or of two tiles.
TICKETS = {"THREADS": 64, "RING_KIB": 8}


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("processors", "dtype", "sizes", "case", "tunables", "instance"),
    [
        (1, "bfloat16", (37, 1024), {}, {}, "8, 4, 1, 32, 2, 2"),
        (3, "bfloat16", (31, 1128), {"noncontiguous": True}, {"RING_KIB": 24}, "8, 3, 1, 64, 1, 5"),
        (2, "float32", (9, 2052), {"offset": 4}, {}, "4, 4, 1, 160, 1, 2"),
        (2, "float32", (41, 132), {"noncontiguous": True}, {}, "4, 2, 2, 32, 2, 2"),
        (3, "bfloat16", (300, 24), {}, {"WORDS": 2, "RING_KIB": 12}, "8, 1, 2, 4, 16, 4"),
        (3, "bfloat16", (130, 64), {"noncontiguous": True}, {}, "8, 1, 4, 8, 8, 2"),
        (2, "float32", (1, 16), {}, {}, "4, 1, 4, 4, 16, 2"),
        (1, "float32", (5, 5000), {"inputs": "mixed"}, {"WORDS": 2}, "4, 3, 1, 448, 1, 2"),
        # An element at a time.
        (3, "bfloat16", (19, 1021), {}, {}, "1, 16, 1, 64, 1, 2"),
        (2, "bfloat16", (19, 1021), {"noncontiguous": True, "offset": 3}, {}, "1, 16, 1, 64, 1, 2"),
        (2, "float32", (23, 512), {"offset": 1}, {"RING_KIB": 24}, "1, 16, 1, 32, 2, 2"),
        (1, "float32", (130, 33), {}, {"WORDS": 1}, "1, 2, 2, 32, 2, 6"),
        (2, "float32", (130, 33), {"noncontiguous": True}, {}, "1, 2, 8, 32, 2, 2"),
        (3, "bfloat16", (300, 17), {"offset": 1}, {"WORDS": 1}, "1, 1, 4, 32, 2, 8"),
        (2, "bfloat16", (1, 17), {"offset": 3}, {}, "1, 1, 16, 32, 2, 2"),
        (1, "bfloat16", (1, 16), {"offset": 1}, {}, "1, 1, 16, 16, 4, 2"),
        (1, "float32", (3, 7329), {"inputs": "mixed"}, {}, "1, 16, 1, 480, 1, 2"),
        (2, "float32", (3, 8192), {"offset": 1}, {}, "1, 16, 1, 512, 1, 2"),
    ],
)
def test_tickets_give_rows_to_blocks(processors, dtype, sizes, case, tunables, instance, on_cpu):
    s = on_cpu(RMS_NORM, processors, **TICKETS | tunables)
    given = s.given(dtype=dtype, M=sizes[0], N=sizes[1], **{"inputs": "nonfinite", **case})
    assert max(s.shares(given)) <= 1
    name = s.seed.TYPES[given["x"].dtype]
    assert s.instances[:3] == [
        "zero_counter",
        f"rows_by_tickets<{name}, {instance}>",
        f"sum_of_shares<{name}, {1 if sizes[1] % 4 else 4}>",
    ]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("dtype", "sizes", "case", "width"),
    [
        ("bfloat16", (3, 8193), {"noncontiguous": True}, 1),
        ("float32", (3, 8196), {}, 4),  # more than 32 KiB
    ],
)
def test_what_tickets_do_not_take_is_read_twice(dtype, sizes, case, width, on_cpu):
    s = on_cpu(RMS_NORM, 2, **TICKETS)
    given = s.given(dtype=dtype, inputs="nonfinite", M=sizes[0], N=sizes[1], **case)
    assert max(s.shares(given)) <= 1
    name = s.seed.TYPES[given["x"].dtype]
    assert s.instances[:2] == [f"rows_read_twice<{name}, 256>", f"sum_of_shares<{name}, {width}>"]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("line", "columns"),
    [
        ("barrier_wait(&full[place], parity);", 1128),
        ("__syncthreads();                                  // sums are there", 1128),
        ("__syncthreads();                                  // all teams' shares", 512),
        # Nothing is copied from before or behind a tensor.
        ("if (ends & 1 && lead > 0) begin = min(QUAD - lead, count);", 1021),
        ("if (ends & 2 && end > count) end = max(end - QUAD, begin);", 1021),
    ],
)
def test_tickets_need_their_waits_and_ends(line, columns, on_cpu, monkeypatch):
    s = on_cpu(RMS_NORM, 2, **TICKETS)
    offset = 3 if columns == 1021 else 0
    given = s.given(dtype="bfloat16", inputs="normal", offset=offset, M=13, N=columns)
    s.leave_out(line, monkeypatch)
    assert s.fails(given)
    assert "rows_by_tickets" in s.instances[1]


# -- slices ---------------------------------------------------------------------------------------

# Rings of 2 pieces a warp, or one, and 1 or 2 tiles between two sums over all warps.
FEW = {"WARPS": 8, "RING_KIB": 32, "SHARED_KIB": 40}


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize(
    ("processors", "sizes", "case", "tunables", "instance"),
    [
        (3, (1, 40, 1024), {}, {}, "1, 8, 1, 2, 16, 128"),
        # Two rounds of a tile, three slices.
        (8, (12, 255, 5008), {"noncontiguous": True}, {"FETCH": 256}, "2, 8, 1, 2, 8, 256"),
        (1, (20, 50, 516), {}, {"FETCH": 64}, "2, 8, 1, 2, 4, 64"),
        (2, (10, 33, 521), {"offset": 1}, {}, "1, 8, 1, 2, 1, 128"),
        (4, (5, 31, 4112), {"inputs": "extreme"}, {}, "1, 8, 2, 2, 16, 128"),
        (8, (16, 16, 4099), {}, {}, "1, 8, 4, 2, 1, 128"),  # two groups of tokens
        (24, (12, 35, 5008), {"noncontiguous": True}, {}, "2, 8, 4, 2, 8, 128"),
        (1, (4, 48, 272), {"inputs": "nonfinite"}, {"WARPS": 16}, "1, 16, 1, 1, 16, 128"),
        (2, (2, 64, 16), {"noncontiguous": True}, {}, "1, 8, 1, 2, 8, 128"),
    ],
)
@pytest.mark.parametrize("file", [INT8, FP8], ids=["int8", "fp8"])
def test_weights_of_8_bits_are_added_up_by_slices(
    file, processors, sizes, case, tunables, instance, on_cpu
):
    s = on_cpu(file, processors, **FEW | tunables)
    dims = dict(zip("MNK", sizes, strict=True))
    given = s.given(dtype="bfloat16", **{"inputs": "normal", **case}, **dims)
    assert max(s.shares(given)) <= 1
    kernel = "product_by_slices<" + ("__nv_bfloat16, " if file == INT8 else "")
    assert all(n.startswith(f"{kernel}{instance}, ") for n in s.instances)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("line", "blocks"),
    [
        ("copy_wait<DEPTH - 1>();", 1),
        ("meet<CLUSTER>();\n    const int count", 1),  # before all warps' sums are added up
        ("meet<CLUSTER>();\n    const int count", 2),
        ("if (CLUSTER > 1 || round_end < end) meet<CLUSTER>();", 1),
        ("if (CLUSTER > 1 || round_end < end) meet<CLUSTER>();", 2),
    ],
)
@pytest.mark.parametrize("file", [INT8, FP8], ids=["int8", "fp8"])
def test_slices_need_their_waits(file, line, blocks, on_cpu, monkeypatch):
    s = on_cpu(file, 2, **FEW)
    sizes = {"M": 1, "N": 48 if blocks > 1 else 95, "K": 2048}  # 3 tiles, or 6
    given = s.given(dtype="bfloat16", inputs="normal", **sizes)
    s.leave_out(line, monkeypatch)
    assert s.fails(given)
    assert f"1, 8, {blocks}, 2, 16," in s.instances[0]
