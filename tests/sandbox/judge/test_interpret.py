import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.tasks import find_task
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import MachineError
from kagent_sandbox.judge import interpreter as interpret
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.interpreter import MOST_PROGRAMS, Interpreted, Interpreter
from kagent_sandbox.judge.interpreter_worker import round_to_bf16, widen_bf16
from kagent_sandbox.process import process_tree

TASK = """
name = "matmul"
summary = "A product and its row sums"
entry = "matmul"
signature = "matmul(a, b) -> Tensor[M, N]"
bytes = "(M * K + K * N + M * N) * itemsize"
flops = "2 * M * N * K"
matrix = true
dims = { M = "rows", N = "columns", K = "inner" }
arguments = [{ name = "a", shape = ["M", "K"] }, { name = "b", shape = ["K", "N"] }]
results = [{ name = "c", shape = ["M", "N"], k = 2.0 }]

[[gpu.check]]
name = "bf16"
dtype = "bfloat16"
M = 40
N = 24
K = 50

[[gpu.check]]
name = "large"
dtype = "bfloat16"
M = 4096
N = 4096
K = 64

[[gpu.bench]]
name = "bench"
dtype = "bfloat16"
M = 64
N = 64
K = 64

[[cpu.check]]
name = "cpu"
dtype = "float32"
M = 2
N = 2
K = 2

[[cpu.bench]]
name = "cpu_bench"
dtype = "float32"
M = 2
N = 2
K = 2
"""
REFERENCE = """
import torch

def inputs(case, generator, device):
    d, dtype = case.dims, getattr(torch, case.dtype)
    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)
    return {"a": normal(d["M"], d["K"]), "b": normal(d["K"], d["N"])}

def reference(*, a, b):
    return a.double() @ b.double()

def eager(*, a, b):
    return a @ b

def experts():
    return {}
"""
SOURCE = """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["K"])
@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, tl.cdiv(K, BLOCK)):
        k = start * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + i[:, None] * K + k, mask=(i[:, None] < M) & (k < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + j, mask=(k[:, None] < K) & (j < N), other=0.0)
        total += tl.dot(a, b)
    at = c_ptr + i[:, None] * N + j + OFFSET
    tl.store(at, total.to(c_ptr.dtype.element_ty), mask=(i[:, None] < M) & (j < N))


OFFSET: tl.constexpr = tl.constexpr(0)


def matmul(a, b):
    assert a.is_cuda
    units = torch.cuda.get_device_properties(a.device).multi_processor_count
    assert units > 0
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device="cuda")
    grid = lambda meta: tuple(triton.cdiv(n, meta["BLOCK"]) for n in c.shape)
    _matmul[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1])
    return c
"""

MATMUL = (
    "    _matmul[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], launch_pdl=True, maxnreg=64)\n"
)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory, shared):
    folder = tmp_path_factory.mktemp("matmul")
    (folder / "task.toml").write_text(TASK)
    (folder / "reference.py").write_text(REFERENCE)
    with Interpreter(load_task(folder), 0) as interpreter:
        yield interpreter


def test_a_bfloat16_product_passes(interpreter):
    found = interpreter.interpret(SOURCE)
    assert isinstance(found, Interpreted), found
    assert found.skipped == ("large",)
    assert [e.case for e in found.errors] == ["bf16"]


@pytest.mark.parametrize("where", ["tl.extra.cuda.", "gdc.", ""])
def test_dependent_launches_run_in_their_order(interpreter, where):
    source = SOURCE.replace("    return c", "    c.fill_(1.0)\n" + MATMUL + MATMUL + "    return c")
    names = "gdc, gdc_wait, gdc_launch_dependents"
    source = f"from triton.language.extra.cuda import {names}\n{source}"
    before, after = f"    {where}gdc_wait()\n", f"    {where}gdc_launch_dependents()\n"
    head, tail = source.split("    for start in range")
    found = interpreter.interpret(head + before + after + "    for start in range" + tail)
    assert isinstance(found, Interpreted), found
    assert [e.case for e in found.errors] == ["bf16"]


def test_a_case_of_many_programs_is_skipped(interpreter):
    found = interpreter.interpret(SOURCE, programs={"bf16": MOST_PROGRAMS + 1})
    assert found == Interpreted((), ("bf16", "large"))


@pytest.mark.parametrize(
    ("old", "new", "status", "text"),
    [
        ("tl.dot(a, b)", "tl.dot(a, b) * 1.5", Status.INCORRECT_NUMERICAL, "expected"),
        ("dtype=a.dtype", "dtype=torch.float32", Status.INCORRECT_DTYPE, "float32"),
        ("    return c", "    return c[:1]", Status.INCORRECT_SHAPE, "[1, 24]"),
        ("    return c", "    return None", Status.RUNTIME_ERROR, "NoneType"),
        ("    return c", "    return undefined_name", Status.RUNTIME_ERROR, "line"),
        ("def matmul", "def other", Status.RUNTIME_ERROR, "matmul"),
        ("import torch", "import torch (", Status.COMPILE_ERROR, "SyntaxError"),
        ("import torch", "import torch  # \u2066", Status.COMPILE_ERROR, "U+2066 (LEFT-TO-RIGHT"),
        ("tl.constexpr(0)", "tl.constexpr(1 << 40)", Status.RUNTIME_ERROR, "outside"),
    ],
)
def test_wrong_candidates_are_rejected(interpreter, old, new, status, text):
    assert old in SOURCE
    verdict = interpreter.interpret(SOURCE.replace(old, new))
    assert isinstance(verdict, Rejected), verdict
    assert verdict.status is status, verdict
    assert text in verdict.message
    assert verdict.stage in {Stage.PARSE, Stage.BUILD, Stage.CHECK}


class Killer(threading.Thread):
    """Kills the interpreter's fork-server, or the child itself, up to `times` times."""

    def __init__(self, interpreter, whom, times):
        super().__init__(daemon=True)
        self._server, self._whom, self._times = interpreter._server, whom, times
        self._stopped = threading.Event()

    def run(self):
        last = None
        for _ in range(self._times):
            below = []
            while not below and not self._stopped.wait(0.001):
                process = self._server._process
                if process is None or (self._whom == "server" and process.pid == last):
                    continue
                for supervisor in process_tree.children(process.pid):
                    below += process_tree.children(supervisor)
            if below:
                last = process.pid
                process_tree.send(last if self._whom == "server" else below[0], signal.SIGKILL)

    def stop(self):
        self._stopped.set()
        self.join()


@pytest.mark.parametrize("whom", ["server", "child"])
def test_what_somebody_kills_is_interpreted_once_more(interpreter, whom):
    killer = Killer(interpreter, whom, 1)
    killer.start()
    found = interpreter.interpret(SOURCE)
    killer.stop()
    assert isinstance(found, Interpreted), found


def test_what_is_killed_once_more_is_the_machines_fault_unless_a_candidate_could_do_it(interpreter):
    killer = Killer(interpreter, "server", 2)
    killer.start()
    with pytest.raises(MachineError, match="ended by something else"):
        interpreter.interpret(SOURCE)
    killer.stop()
    found = interpreter.interpret(f"import os; os.kill(os.getpid(), 9)\n{SOURCE}")
    assert isinstance(found, Rejected)
    assert found.status is Status.RUNTIME_ERROR
    assert isinstance(interpreter.interpret(SOURCE), Interpreted)


FORGE = """
    import os, socket, stat
    from kagent_sandbox.process.channel import Channel
    for fd in range(3, 32):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                Channel(socket.socket(fileno=fd)).send(ANSWER, [b""] * BLOBS)
        except OSError:
            continue
    return c
"""


@pytest.mark.parametrize(
    ("answer", "blobs"),
    [
        ({"failed": 5}, 0),
        ({"failed": ["DUPLICATE", "not for a candidate to say"]}, 0),
        ({"ok": [5]}, 1),
        ({"ok": [{"shape": [40, 24], "dtype": []}]}, 1),
        ({"ok": [{"shape": [40, 24], "dtype": "bfloat16"}]}, 1),
        ({"ok": []}, 3),
    ],
)
def test_forged_answers_are_tampering(interpreter, answer, blobs):
    forge = FORGE.replace("ANSWER", repr(answer)).replace("BLOBS", str(blobs))
    verdict = interpreter.interpret(SOURCE.replace("    return c\n", forge))
    assert isinstance(verdict, Rejected), verdict
    assert verdict.status is Status.TAMPER, verdict


def test_what_candidates_say_is_printable_and_short(interpreter):
    loud = "    raise RuntimeError('\\x1b[2J\\x9b1m owned ' + 'x' * 100_000)\n"
    verdict = interpreter.interpret(SOURCE.replace("    return c\n", loud))
    assert verdict.status is Status.RUNTIME_ERROR
    assert "owned" in verdict.message
    assert len(verdict.message) <= 4000
    assert all(c.isprintable() or c == "\n" for c in verdict.message)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
@settings(deadline=None)
def test_rounding_to_bfloat16_is_torchs(values):
    data = np.array(values, dtype=np.float32)
    ours = torch.from_numpy(widen_bf16(round_to_bf16(data)))
    theirs = torch.from_numpy(data).bfloat16().float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


HANG = """
    n = tl.program_id(0) * 0
    while n == tl.program_id(0) * 0:
        n = tl.program_id(0) * 0
"""


def hanging(condition):
    """The product, by a kernel that never ends where the host's condition holds."""
    grid = "    grid = lambda meta"
    loop = f"    if {condition}:\n        _hang[(1,)]()\n{grid}"
    kernel = f"@triton.jit\ndef _hang():{HANG}\n\nOFFSET: tl.constexpr"
    return SOURCE.replace(grid, loop).replace("OFFSET: tl.constexpr", kernel, 1)


def test_a_kernel_that_hangs_is_a_timeout_and_no_pass(interpreter, monkeypatch):
    monkeypatch.setattr(interpret, "CASE_LIMIT_S", 2.0)
    verdict = interpreter.interpret(hanging("True"))
    assert isinstance(verdict, Rejected), verdict
    assert (verdict.stage, verdict.status, verdict.case) == (Stage.CHECK, Status.TIMEOUT, "bf16")
    assert "endless loop" in verdict.message


def test_time_that_a_busy_machine_takes_does_not_count(interpreter, monkeypatch):
    """Sleeping stands for it: the process gets no core."""
    monkeypatch.setattr(interpret, "CASE_LIMIT_S", 2.0)
    waits = SOURCE.replace("    assert a.is_cuda\n", "    time.sleep(3.0)\n").replace(
        "import torch\n", "import time\nimport torch\n", 1
    )
    found = interpreter.interpret(waits)
    assert isinstance(found, Interpreted), found
    assert not found.failed


def test_what_waits_for_ever_is_a_timeout(interpreter, monkeypatch):
    monkeypatch.setattr(interpret, "_WAITS_S", 0.5)
    verdict = interpreter.interpret("import time\ntime.sleep(1000)\n" + SOURCE)
    assert isinstance(verdict, Rejected), verdict
    assert (verdict.stage, verdict.status) == (Stage.BUILD, Status.TIMEOUT)
    assert "waited for 0.5 s" in verdict.message


@pytest.mark.parametrize(
    ("took", "hangs"),
    [
        ([], True),
        ([(10, 0.01)], False),  # 40² of it may well be this much work
        ([(1000, 0.01), (2000, 0.02)], True),
        ([(1000, 0.01), (2000, 30.0)], False),
    ],
)
def test_a_case_that_others_let_expect_to_be_slow_is_skipped(interpreter, took, hangs):
    case = interpreter._cases[0]
    assert interpreter._elements(case) == 4160
    if hangs:
        with pytest.raises(CandidateRejected, match="endless loop"):
            interpreter._refuse_hanging(case, took)
    else:
        interpreter._refuse_hanging(case, took)


def test_only_what_was_built_of_a_source_is_checked(interpreter):
    other = Built("a hash", "", "sm_90a", ({},), {}, {}, 0.0)
    with pytest.raises(ValueError, match="another source"):
        interpreter.check(SOURCE, other)


HERE = Path(__file__).parent
SHARED = HERE.parent


@pytest.mark.nightly
def test_the_repaired_interpreter_computes_as_torch_does():
    """Conversions and arithmetic of bfloat16; reductions and scans, as precise as in a tree."""
    ended = subprocess.run(
        [sys.executable, SHARED / "interpreted_arithmetic.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 21


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["triton_two_kernels", "triton_persistent"])
def test_honest_kernels_are_not_called_wrong(name):
    """float64 scratch between kernels; a reduction with a function of the kernel's own."""
    with Interpreter(find_task("softmax"), 0) as interpreter:
        found = interpreter.interpret((HERE / "honest" / f"{name}.py").read_text())
    assert isinstance(found, Interpreted), found
    assert {e.case for e in found.errors} >= {"bf16_24x1500_far_from_0", "fp32_2x16384_spread"}
