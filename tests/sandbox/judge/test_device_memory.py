"""A device whose memory is not enough: asked again alone, nobody's fault while others have it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from doubling_task import REFERENCE, TASK
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.device.cuda.executor import Executor
from kagent_sandbox.device.device_memory import MemoryUse, explain, lacks_memory
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import ChildDied, DeviceFull, TaskError
from kagent_sandbox.judge import judge_process, task_check
from kagent_sandbox.judge.arena.session import Arenas, CandidateRejected
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.judge import Judge, _tried
from kagent_sandbox.judge.judge_process import JudgeProcess
from kagent_sandbox.process.ask_once import Ended

GIB = 1 << 30
TORCH = (
    "reference.py: reference: case large: OutOfMemoryError: CUDA out of memory. Tried to allocate "
    "12.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 6.37 GiB is free. Process 2508 has"
)


class Locked:
    """Turns that are taken at once, and written down."""

    def __init__(self, *, awaited=False):
        self.taken = []
        self._awaited = awaited

    def turn(self, mode):
        self.taken.append(mode)
        return contextlib.nullcontext()

    def awaited(self):
        return self._awaited

    def close(self):
        pass


@pytest.fixture
def asking(monkeypatch):
    """A judge's process whose answers are made up: errors are raised."""
    began = []

    def begin(*answers, awaited=False):
        monkeypatch.setattr(
            judge_process.subprocess, "Popen", lambda *_, **__: _Process(), raising=True
        )
        process = JudgeProcess("cpu")
        process._lock = Locked(awaited=awaited)
        left, asked = list(answers), []

        def exchange(verb, request, *_):
            asked.append((verb, request.get("alone")))
            answer = {} if verb == "rest" else left.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(process, "_exchange", exchange)
        began.append(process)
        return process, asked

    yield begin
    monkeypatch.undo()
    for each in began:
        each.close()


class _Process:
    pid = 0

    def poll(self):
        return None

    def wait(self, _=None):
        return 0


def test_what_lacks_memory_beside_others_is_asked_again_alone(asking):
    process, asked = asking(DeviceFull("no room"), {"passed": 1}, awaited=True)
    assert process.ask("check", {}) == {"passed": 1}
    assert process._lock.taken == ["work", "timing"]
    assert asked == [("check", False), ("rest", None), ("check", True), ("rest", None)]


def test_what_lacks_memory_alone_fails(asking):
    process, asked = asking(DeviceFull("no room"), DeviceFull("still none"))
    with pytest.raises(DeviceFull, match="still none"):
        process.ask("examine", {})
    process, asked = asking(DeviceFull("no room"))
    with pytest.raises(DeviceFull):
        process.ask("measure", {})
    assert asked == [("measure", True)]


@pytest.mark.parametrize("end", [ChildDied("gone"), KeyboardInterrupt()])
def test_a_judge_that_has_not_answered_is_asked_for_nothing_more(asking, end):
    """It died; or it still works, and its answer would be taken for that to the next request."""
    process, asked = asking(end, awaited=True)
    with pytest.raises(type(end)):
        process.ask("check", {})
    assert process._lock.taken == ["work"]
    assert asked == [("check", False)]


def test_the_error_says_who_has_the_memory():
    use = MemoryUse(total=79 * GIB, free=6 * GIB, kept=20 * GIB, peak=30 * GIB)
    error = explain(DeviceFull(TORCH), use, alone=False)
    assert type(error) is DeviceFull
    assert str(error).startswith("reference.py: reference: case large: OutOfMemoryError")
    assert "Process" not in str(error)
    assert "Needed at once 42.0 GiB; 6.0 GiB of 79.0 GiB are free, 53.0 GiB are held" in str(error)
    assert type(explain(DeviceFull(TORCH), use, alone=True)) is DeviceFull  # 42 GiB would fit


def test_only_what_is_more_than_the_device_is_the_tasks_fault():
    use = MemoryUse(total=79 * GIB, free=6 * GIB, kept=20 * GIB, peak=70 * GIB)
    assert type(explain(torch.OutOfMemoryError(TORCH), use, alone=False)) is DeviceFull
    error = explain(torch.OutOfMemoryError(TORCH), use, alone=True)
    assert type(error) is TaskError
    assert "needs 82.0 GiB at once, and the device has 79.0 GiB in all" in str(error)
    assert type(explain(torch.OutOfMemoryError("none"), None, alone=True)) is DeviceFull


def test_a_candidates_scratch_memory_is_no_need_of_the_task():
    use = MemoryUse(total=79 * GIB, free=6 * GIB, kept=60 * GIB, peak=20 * GIB, arena=50 * GIB)
    error = explain(torch.OutOfMemoryError(TORCH), use, alone=True)
    assert type(error) is DeviceFull
    assert "Needed at once 82.0 GiB; 6.0 GiB of 79.0 GiB are free" in str(error)


def test_a_candidate_without_memory_is_not_judged_while_others_have_it():
    calls = []

    def evaluate():
        calls.append(1)
        verdict = Rejected(Stage.CHECK, Status.RESOURCE_LIMIT, "CUDA_ERROR_OUT_OF_MEMORY", "c")
        cause = LaunchFailed(Status.RESOURCE_LIMIT, "CUDA_ERROR_OUT_OF_MEMORY", blame="unclear")
        raise CandidateRejected(verdict) from cause

    with pytest.raises(DeviceFull, match="CUDA_ERROR_OUT_OF_MEMORY"):
        _tried(evaluate, alone=False)
    assert len(calls) == 1
    assert _tried(evaluate, alone=True).status is Status.RESOURCE_LIMIT
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), Status.RESOURCE_LIMIT),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Status.RESOURCE_LIMIT),
        (
            RuntimeError(
                "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
                '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1135, please report a bug to PyTorch.'
            ),
            Status.RESOURCE_LIMIT,
        ),
        (RuntimeError("size mismatch"), Status.RUNTIME_ERROR),
    ],
)
def test_a_plans_operation_of_torch_without_memory_is_told_from_one_that_fails(error, status):
    """Where it may not ask NVML who has it, torch's allocator raises an assertion of its own."""
    executor = SimpleNamespace(clock=SimpleNamespace(sync=lambda _doing: None))
    found = Executor.explain(executor, error)
    assert found.status is status
    assert ("out of memory" in str(found)) == (status is Status.RESOURCE_LIMIT)


def test_a_judge_gives_all_back_where_others_work():
    done = []
    judge = SimpleNamespace(
        _arenas=SimpleNamespace(close=lambda: done.append("arena")),
        _let_go=lambda: done.append("launchers"),
        _checker=SimpleNamespace(sampler=SimpleNamespace(make_room=lambda: done.append("stale"))),
        backend=SimpleNamespace(free_unused=lambda *, shared: done.append(shared)),
    )
    Judge.give_back(judge)
    assert done == ["launchers", "arena", "stale", True]


def test_an_arena_is_little_larger_than_it_must_be():
    asked = []

    def arena(nbytes):
        asked.append(nbytes)
        return SimpleNamespace(nbytes=nbytes, close=lambda: None)

    facts = SimpleNamespace(memory_bytes=80 * GIB)
    arenas = Arenas(SimpleNamespace(facts=facts, arena=arena))
    arenas.at_least(30 * GIB)
    arenas.at_least(31 * GIB + (1 << 29))
    assert asked == [30 * GIB + 80 * GIB // 64, 31 * GIB + (1 << 29) + 80 * GIB // 64]


@pytest.mark.parametrize(
    ("ended", "error", "why"),
    [
        (Ended(b'{"full": "no room"}', 0, ""), DeviceFull, "no room"),
        (Ended(b'{"failed": "RuntimeError: no engine"}', 0, ""), TaskError, "no engine"),
        (Ended(b"", 1, "Traceback\n  File x\nKeyError: 'y'\n"), TaskError, "1: KeyError: 'y'$"),
        (Ended(b"", -9, ""), TaskError, "died of SIGKILL$"),
    ],
)
def test_a_check_that_fails_beside_others_is_made_again_alone(
    monkeypatch, task_folder, ended, error, why
):
    """cuDNN without memory says that it has no engine, a process without it may just end."""
    taken, locked = [], Locked()
    monkeypatch.setattr(task_check, "own_unit", lambda kind: f"{kind}-0")
    monkeypatch.setattr(task_check, "DeviceLock", lambda *_: locked)

    def ask_once(_, request, **__):
        taken.append(request["alone"])
        return ended

    monkeypatch.setattr(task_check, "ask_once", ask_once)
    with pytest.raises(error, match=why):
        task_check._check_on_gpu(load_task(task_folder), {"gpu": None}, print)
    assert taken == [False, True]
    assert locked.taken == ["work", "timing"]


def test_what_torch_raises_outside_of_a_task_ends_no_check_with_a_traceback(task_folder):
    """A GPU's error comes when a result is looked at, in the judge's own code."""
    reference = task_folder / "reference.py"
    lazy = """
class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.reshape:
            raise RuntimeError("GET was unable to find an engine")
        return super().__torch_function__(func, types, args, kwargs or {})
"""
    reference.write_text(
        "import torch\n"
        + lazy
        + reference.read_text().replace(
            "def reference(",
            "def reference(*a, **k):\n    return _old(*a, **k).as_subclass(Late)\n\n\ndef _old(",
        )
    )
    with pytest.raises(TaskError, match="RuntimeError: GET was unable to find an engine") as e:
        task_check._run(load_task(task_folder), {"cpu": None}, "cpu", alone=True)
    assert "Traceback" not in str(e.value)


@pytest.fixture
def task_folder(tmp_path):
    (tmp_path / "task.toml").write_text(TASK)
    (tmp_path / "reference.py").write_text(REFERENCE)
    return tmp_path


def test_a_kernel_that_needs_too_much_shared_memory_lacks_none_of_the_device():
    """Inductor's error where Triton refuses all of its configurations: no turn alone helps."""
    text = "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 393216"
    assert not lacks_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError('full')",
        "RuntimeError('CUDA error: out of memory')",
        "RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`')",
        "RuntimeError('cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED')",
        "RuntimeError('Triton Error [CUDA]: out of memory')",
        "RuntimeError('LoweringException: OutOfMemoryError: CUDA out of memory. Tried to')",
    ],
)
def test_a_reference_without_memory_is_no_fault_of_the_task(task_folder, error):
    reference = task_folder / "reference.py"
    reference.write_text(
        "import torch\n"
        + reference.read_text().replace(
            "def reference(",
            f"def reference(*_, **__):\n    raise {error}\n\n\ndef _old(",
        )
    )
    task = load_task(task_folder)
    sampler = InputSampler(task, torch.device("cpu"), InputPolicy())
    case = task.cases("cpu").check[0]
    with pytest.raises(DeviceFull, match=r"reference: case .*Error: .+"):
        sampler.call("reference", sampler.fresh(case, 1))
