"""The judge's side of a GPU launcher: limits, malformed answers, deaths, with a scripted peer."""

import threading
import time

import pytest
from kagent_sandbox.data.plan import Alloc, Buffer, Fill, Plan, TensorRef
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cuda.driver import blame_of
from kagent_sandbox.device.cuda.launcher import Connection, GpuLauncher
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.errors import DeviceError, DeviceWedged
from kagent_sandbox.process.channel import Channel, ChannelError
from kagent_sandbox.process.forkserver import Exit

TENSOR = TensorRef(0, 0, (4,), (1,), "float32")
PLAN = Plan("sm_90a", (Buffer(0, "scratch", 16),), (Alloc(0), Fill(TENSOR, 1)), (TENSOR,), ())


class Peer:
    """Answers each request with what `script` says for its verb; a function is called first."""

    def __init__(self, script):
        ours, theirs = Channel.pair()
        self.channel = ours
        self.closed = False
        self.requests = []
        self._script = {"load": {"ok": None}, "prepare": {"ok": None}, **script}
        self._theirs = Channel(theirs)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        try:
            while True:
                message = self._theirs.recv(None)
                self.requests.append(message)
                answer = self._script[message.obj["do"]]
                if callable(answer):
                    answer = answer(message.obj)
                if answer is None:
                    self._theirs.close()
                    return
                answer, blobs = answer if isinstance(answer, tuple) else (answer, ())
                self._theirs.send(answer, blobs)
        except (ChannelError, OSError, ValueError):
            return

    def wait(self, timeout_s):
        return Exit(None, 11, False, None, 0.0, 0.0, "the driver said so")

    def close(self):
        self.closed = True
        self.channel.close()


class Judge:
    """What a backend provides."""

    def __init__(self, script, healthy=True):
        self.peer = Peer(script)
        self.settled = self.quieted = self.checked = 0
        self.healthy = healthy
        self.launcher = GpuLauncher(
            Connection(self.peer),
            settle=lambda: self.count("settled"),
            quiet=lambda: self.count("quieted"),
            after_loss=self.after_loss,
            end=lambda connection: connection.kill(),
            baselines={},
        )

    def count(self, what):
        setattr(self, what, getattr(self, what) + 1)

    def after_loss(self):
        self.checked += 1
        if not self.healthy:
            raise DeviceWedged("wedged")

    def loaded(self):
        self.launcher.load({"ab": b"binary"})
        return self.launcher


def test_requests_carry_binaries_and_plans():
    judge = Judge({"run": {"ok": None}})
    launcher = judge.loaded()
    launcher.prepare("k", PLAN, {0: 512})
    launcher.run("k", limit_s=5.0)
    load, prepare, run = judge.peer.requests
    assert (load.obj, load.blobs) == ({"do": "load", "hashes": ["ab"]}, (b"binary",))
    assert prepare.obj == {"do": "prepare", "key": "k", "offsets": {"0": 512}}
    assert run.obj == {"do": "run", "key": "k"}
    assert judge.settled == 1


def test_a_hang_is_killed_at_its_limit_and_the_device_checked():
    judge = Judge({"run": lambda _: time.sleep(30)})
    launcher = judge.loaded()
    start = time.monotonic()
    with pytest.raises(LaunchFailed) as caught:
        launcher.run("k", limit_s=0.2)
    assert caught.value.status is Status.TIMEOUT
    assert time.monotonic() - start < 25  # of the 30 s that it hangs
    assert judge.peer.closed
    assert judge.checked == 1


def test_a_fault_ends_the_process_and_the_device_is_checked():
    judge = Judge(
        {"run": {"failed": ["GPU_FAULT", "CUDA_ERROR_ILLEGAL_ADDRESS running k", "kernel"]}}
    )
    with pytest.raises(LaunchFailed, match="ILLEGAL_ADDRESS") as caught:
        judge.loaded().run("k", limit_s=5.0)
    assert caught.value.status is Status.GPU_FAULT
    assert judge.peer.closed
    assert judge.checked == 1


def test_a_device_that_no_longer_works_is_wedged():
    judge = Judge({"run": {"failed": ["GPU_FAULT", "x", "kernel"]}}, healthy=False)
    with pytest.raises(DeviceWedged):
        judge.loaded().run("k", limit_s=5.0)


def test_a_limit_leaves_the_process_alive():
    judge = Judge({"prepare": {"failed": ["RESOURCE_LIMIT", "too many threads", "kernel"]}})
    launcher = judge.loaded()
    for _ in range(2):
        with pytest.raises(LaunchFailed, match="threads") as caught:
            launcher.prepare("k", PLAN, {0: 0})
        assert caught.value.status is Status.RESOURCE_LIMIT
    assert not judge.peer.closed
    assert judge.checked == 0


def test_a_death_is_the_candidate_s_once_it_was_loaded():
    judge = Judge({"run": lambda _: None})
    with pytest.raises(LaunchFailed, match=r"SIGSEGV.*the driver said so") as caught:
        judge.loaded().run("k", limit_s=5.0)
    assert caught.value.status is Status.RUNTIME_ERROR
    assert caught.value.blame == "unclear"  # once more in a fresh process, before it counts
    assert judge.checked == 1


@pytest.mark.parametrize("blame", ["kernel", "unclear", "machine"])
def test_whose_failure_it_is_reaches_the_judge(blame):
    judge = Judge({"prepare": {"failed": ["RUNTIME_ERROR", "does not load", blame]}})
    with pytest.raises(LaunchFailed, match="does not load") as caught:
        judge.loaded().prepare("k", PLAN, {0: 0})
    assert caught.value.blame == blame


@pytest.mark.parametrize(
    ("text", "blame"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access) running k", "kernel"),
        ("CUDA_ERROR_OUT_OF_MEMORY (out of memory) loading", "unclear"),
        ("CUDAError: CUDA_ERROR_UNKNOWN: this indicates an unknown error", "unclear"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE (uncorrectable ECC error) running k", "machine"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", "machine"),
        ("kernel CUDA_ERROR_NO_SUCH_THING", "kernel"),
        ("no error of the driver's", "kernel"),
    ],
)
def test_whose_failure_an_error_of_the_driver_is(text, blame):
    assert blame_of(text) == blame


@pytest.mark.parametrize(
    "script",
    [
        {"load": {"error": "no context"}},
        {"load": {"failed": ["RUNTIME_ERROR", "no context", "kernel"]}},
        {"load": lambda _: None},
    ],
)
def test_before_anything_is_loaded_the_machine_is_to_blame(script):
    judge = Judge(script)
    with pytest.raises(DeviceError):
        judge.loaded()


@pytest.mark.parametrize(
    "answer",
    [
        [1.0, 2.0],
        {},
        {"ok": 1, "failed": 2},
        {"failed": ["NO_SUCH_STATUS", "x", "kernel"]},
        {"failed": ["GPU_FAULT", "x", "nobody"]},
        {"failed": ["GPU_FAULT", "x"]},
        {"failed": [["GPU_FAULT"], "x", "kernel"]},
        {"failed": ["GPU_FAULT", "x", {}]},
        {"failed": "x"},
        {"error": "the machine is broken"},
    ],
)
def test_malformed_answers_of_a_candidate_s_process_are_its_own_fault(answer):
    judge = Judge({"run": answer})
    with pytest.raises(LaunchFailed):
        judge.loaded().run("k", limit_s=5.0)
    assert judge.peer.closed


def test_times_are_passed_on():
    judge = Judge({"samples": lambda r: time.sleep(0.01) or {"ok": [1.5] * r["count"]}})
    assert judge.loaded().samples(["a", "b"], 3, limit_s=5.0) == [1.5] * 3
    assert judge.quieted == 1


@pytest.mark.parametrize(
    "times",
    [
        None,
        [],
        [1.0],
        [1.0, -1.0],
        [1.0, "2"],
        [1.0, True],
        [1.0, 1e12],  # longer than the judge waited
    ],
)
def test_forged_times_are_refused(times):
    judge = Judge({"samples": {"ok": times}})
    with pytest.raises(LaunchFailed) as caught:
        judge.loaded().samples(["a"], 2, limit_s=5.0)
    assert caught.value.status is Status.TAMPER


@pytest.mark.parametrize("slow_at", [None, 0, 1])
def test_the_judge_s_clock_is_never_below_what_was_executed(slow_at):
    """Whichever of the requests is slowed down, by a busy host or by a kernel that counts."""
    counts = []

    def repeat(request):
        late_s = 0.3 if slow_at == len(counts) else 0.0
        counts.append(request["count"])
        time.sleep(0.005 * request["count"] + late_s)
        return {"ok": 0.0}

    us = Judge({"repeat": repeat}).loaded().wall_us(["a"], 20, limit_s=5.0)
    assert us >= 5000
    assert counts == [3, 20]


def test_a_blob_is_taken_up_to_its_limit():
    connection = Connection(Peer({"compile": ({"ok": None}, [b"archive"])}))
    connection.send({"do": "compile"})
    assert connection.receive_blob("compile", 5.0, 1 << 10) == (None, b"archive")
    connection.send({"do": "compile"})
    with pytest.raises(DeviceError, match="limit is 12"):
        connection.receive_blob("compile", 5.0, 12)
    assert connection.dead


def test_a_compiler_that_fails_is_no_blob():
    connection = Connection(Peer({"compile": {"error": "RuntimeError: no"}}))
    connection.send({"do": "compile"})
    with pytest.raises(DeviceError, match="RuntimeError: no"):
        connection.receive_blob("compile", 5.0, 1 << 10)
