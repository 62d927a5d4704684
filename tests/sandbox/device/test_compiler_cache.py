import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_python
from kagent_sandbox.data.race import COMPILE_MODES
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.device.baseline_calls import BaselineCall, ReadyBaseline
from kagent_sandbox.device.compile_only import GO_ON, TIME, WAITS
from kagent_sandbox.device.cuda import race_processes as gpu_race
from kagent_sandbox.device.cuda.race_baselines import GpuRaceBaselines
from kagent_sandbox.device.cuda.race_processes import RaceProcesses
from kagent_sandbox.device.cuda.traits import TRAITS
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.judge.timing.race_baselines import RaceBaselines
from kagent_sandbox.process.cores import usable_cores

pytestmark = pytest.mark.usefixtures("warm_processes", "few_compiled")


def carried(source, target):
    """Everything that goes from one folder to another, which is all that is left."""
    archive = compiler_cache.pack(source)
    shutil.rmtree(source)
    compiler_cache.unpack(archive, target)
    return sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())


def test_a_kernel_is_found_by_triton_in_the_folder_that_it_was_carried_to(tmp_path, monkeypatch):
    cache = pytest.importorskip("triton.runtime.cache")
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # to be restored
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    compiler_cache.use(here)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(here)
    made = cache.FileCacheManager("abc")
    binary = made.put(b"\x7fELF", "k.cubin")
    text = made.put(b"// a text of megabytes", "k.ptx")
    made.put_group("k.json", {"k.cubin": binary, "k.ptx": text})
    assert carried(here, there) == ["triton/abc/__grp__k.json", "triton/abc/k.cubin"]
    compiler_cache.use(there)
    group = cache.FileCacheManager("abc").get_group("k.json")
    assert group == {"k.cubin": str(there / "triton/abc/k.cubin")}


def test_what_was_found_to_be_the_fastest_stays_behind(tmp_path):
    folder = tmp_path / "a"
    (folder / "xy").mkdir(parents=True)
    (folder / "xy/k.py").write_text("code")
    (folder / "xy/k.best_config").write_text(json.dumps({"XBLOCK": 4}))
    assert carried(folder, tmp_path / "b") == ["xy/k.py"]


def test_more_than_may_be_carried_is_nothing(tmp_path, monkeypatch):
    (tmp_path / "k.py").write_bytes(bytes(100))
    monkeypatch.setattr(compiler_cache, "_MOST_PACKED_BYTES", 99)
    assert compiler_cache.pack(tmp_path) == b""
    compiler_cache.unpack(b"", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_nothing_is_written_outside_of_the_folder(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("../out", "/tmp/kagent-out", "in"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    compiler_cache.unpack(stream.getvalue(), tmp_path / "b")
    assert [p.name for p in tmp_path.rglob("*")] == ["b", "in"]
    assert not os.path.exists("/tmp/kagent-out")


def test_a_folder_that_is_not_there_is_no_loss(tmp_path):
    compiler_cache.copy(tmp_path / "nothing", tmp_path / "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/k.best_config").write_text("{}")
    compiler_cache.copy(tmp_path / "a", tmp_path / "b")  # was found alone: it may stay
    assert (tmp_path / "b/k.best_config").exists()


def test_no_choice_is_kept_that_would_be_written_where_it_was_made(tmp_path, monkeypatch):
    """Inductor asks what it stored with a kernel, in the process and folder that load it."""
    from torch._inductor import config
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    before = {"autotune_local_cache": True, "bundle_triton_into_fx_graph_cache": True}
    with config.patch(before):  # monkeypatch would take the settings away
        compiler_cache.use(tmp_path)
        kept = config.autotune_local_cache
        assert not config.bundle_triton_into_fx_graph_cache
    stored = {"autotune_local_cache": kept, "backend_hash": "0"}
    assert AutotuneCache.create(stored, "/of/another/user/kernel.py", "0") is None


COMPILE = f"""{warm_python.PROGRAM}
import gc
gc.disable()  # imports would collect often, and find next to nothing
import importlib.util, pathlib, sys
from kagent_sandbox.device import compiler_cache
mode, reference, folder, archive = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
compiler_cache.use(folder)
if mode == "load":
    compiler_cache.unpack(archive.read_bytes(), folder)
import torch
from torch._dynamo.utils import counters
spec = importlib.util.spec_from_file_location("reference", reference)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.randn(31, 17)
y = torch.compile(module.eager, dynamic=False, mode="max-autotune-no-cudagraphs")(x=x)
assert torch.allclose(y, x * 2 + 1)
assert counters["inductor"]["fxgraph_cache_hit"] == (mode == "load"), counters["inductor"]
if mode == "make":
    archive.write_bytes(compiler_cache.pack(folder))
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)  # two processes that compile, on a machine that may be busy
def test_torch_loads_what_another_process_compiled_elsewhere(tmp_path):
    """A folder, a reference.py and a process of its own each, as two launchers have."""
    for mode in ("make", "load"):
        folder = tmp_path / mode
        folder.mkdir()
        reference = folder / "reference.py"
        reference.write_text("def eager(*, x):\n    return x * 2 + 1\n")
        command = [sys.executable, "-c", COMPILE, mode, reference, folder / "cache"]
        done = subprocess.run(
            [*command, tmp_path / "archive"],
            capture_output=True,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        shutil.rmtree(folder)


def finished(steps):
    """The result of a generator's steps, and what they yielded."""
    turns = []
    while True:
        try:
            turns.append(next(steps))
        except StopIteration as end:
            return end.value, turns


class Process:
    """Compiles a call, unless it is to fail."""

    def __init__(self, machine):
        self.machine = machine
        self.pid = None
        self.did = []

    def receive(self, doing, limit_s):
        if self.machine.broken:
            raise DeviceError("no context")
        return 1

    def send(self, request):
        self.did.append(request["do"])
        if request["do"] == GO_ON:
            return
        (self.name,) = request["calls"]
        assert request["references"][REFERENCE] == Path(REFERENCE).read_text()

    def receive_blob(self, doing, limit_s, max_bytes):
        with self.machine.lock:
            self.machine.running += 1
            self.machine.most = max(self.machine.most, self.machine.running)
            if self.machine.running >= self.machine.expected:
                self.machine.all_here.set()
        self.machine.all_here.wait(10)  # for as many as are to be there, however late they come
        time.sleep(0.02)  # for one too many
        with self.machine.lock:
            self.machine.running -= 1
        if self.name == "fails":
            raise DeviceError("out of memory")
        times = self.did.count(TIME)
        if times < len(self.name) - len(self.name.rstrip("!")):
            return WAITS, b""
        return None, self.name.encode()

    def ask(self, request, *, limit_s):
        assert request == {"do": TIME}
        self.did.append(TIME)
        self.machine.timed.append(self.name)
        if self.name == "lacks memory!":
            raise DeviceError("out of memory")

    def kill(self):
        self.machine.ended += 1


class Machine:
    def __init__(self, *, broken=False, expected=1):
        self.broken = broken
        self.expected = expected
        self.all_here = threading.Event()
        self.lock = threading.Lock()
        self.running = self.most = self.ended = self.servers = self.quiet = 0
        self.timed = []

    def wait_until_quiet(self):
        self.quiet += 1

    def start(self):
        self.servers += 1

    def close(self):
        self.servers -= 1


GIB = 1 << 30
REFERENCE = str(Path(__file__).parents[3] / "seeds/softmax/reference.py")


def processes(machine, free_gib):
    return RaceProcesses(
        lambda: machine,
        lambda _: Process(machine),
        lambda: free_gib * GIB,
        machine.wait_until_quiet,
    )


def calls(*names):
    return [BaselineCall(n, REFERENCE, {"name": "c"}, {}, {}, 0) for n in names]


@pytest.mark.parametrize(("free_gib", "most"), [(7, 0), (26, 3), (1000, 4)])
def test_as_many_are_compiled_at_once_as_the_device_has_room_for(monkeypatch, free_gib, most):
    monkeypatch.setattr(gpu_race, "usable_cores", lambda: 4)
    machine = Machine(expected=most)
    race = processes(machine, free_gib)
    names = [f"n{i}" for i in range(12)]
    made, turns = finished(race.compile_ahead(calls(*names), 2 * GIB))
    race.close()
    assert turns == []
    assert machine.most == most
    assert machine.ended == (12 if most else 0)
    assert made == ([n.encode() for n in names] if most else [b""] * 12)
    assert machine.servers == 0


def test_a_call_that_fails_is_left_to_the_launcher(monkeypatch):
    monkeypatch.setattr(gpu_race, "usable_cores", lambda: 2)
    machine = Machine()
    race = processes(machine, 99)
    made, _ = finished(race.compile_ahead(calls("a", "fails", "b"), 0))
    assert made == [b"a", b"", b"b"]
    assert machine.ended == 3
    broken = Machine(broken=True)
    assert finished(processes(broken, 99).compile_ahead(calls("a", "b"), 0)) == ([b"", b""], [])
    assert broken.ended == 2


def test_others_keep_half_of_what_is_free():
    machine = Machine()
    assert finished(processes(machine, 99).compile_ahead(calls("a"), 48 * GIB))[0] == [b""]
    assert machine.servers == 0
    assert finished(processes(machine, 99).compile_ahead(calls("a"), 47 * GIB))[0] == [b"a"]


def test_variants_are_timed_one_process_after_the_other_when_all_others_wait_or_have_ended(
    monkeypatch,
):
    monkeypatch.setattr(gpu_race, "usable_cores", lambda: 2)
    machine = Machine()
    names = ["once!", "twice!!", "lacks memory!", "never", "again!"]
    steps = processes(machine, 99).compile_ahead(calls(*names), 0)
    made, turns = finished(steps)
    assert made == [b"once!", b"twice!!", b"", b"never", b"again!"]
    assert turns[::2] == ["timing"] * (len(turns) // 2)
    assert turns[1::2] == ["work"] * (len(turns) // 2)
    assert sorted(machine.timed) == ["again!", "lacks memory!", "once!", "twice!!", "twice!!"]
    assert set(machine.timed[:2]) == {"once!", "twice!!"}  # as many as there is room for
    assert machine.ended == len(names)
    assert machine.quiet >= len(machine.timed)


def test_processes_that_nobody_waits_for_are_ended(monkeypatch):
    monkeypatch.setattr(gpu_race, "usable_cores", lambda: 2)
    machine = Machine()
    steps = processes(machine, 99).compile_ahead(calls("a!", "b!", "c!"), 0)
    assert next(steps) == "timing"
    assert machine.ended == 0
    steps.close()
    assert machine.ended == 2
    assert machine.timed == []


class Device:
    """What a GPU's backend is asked for."""

    def __init__(self, failing=()):
        self.asked = []
        self.given = []
        self.failing = failing

    def compile_ahead(self, calls, need_bytes):
        self.asked = [(c.case["name"], c.name) for c in calls]
        self.need_bytes = need_bytes
        yield "timing"
        return [b"" if c.name in self.failing else f"{c.name}".encode() for c in calls]

    def launcher(self, arena, baselines, compiled):
        self.given.append((len(baselines), list(compiled)))
        outcome = dict.fromkeys(baselines, ReadyBaseline(captured=True))
        return SimpleNamespace(baselines=outcome, close=lambda: None)


@pytest.fixture(scope="module")
def softmax():
    from kagent.tasks import find_task

    return find_task("softmax")


def test_all_hidden_cases_are_compiled_before_the_first_is_opened(softmax):
    cases = draw_hidden(softmax, "gpu", "bench", 1)
    device = Device(failing=["compile"])
    race_baselines = RaceBaselines(softmax, GpuRaceBaselines(device), TRAITS.compile_modes)
    compiled, turns = finished(race_baselines.compile_ahead(cases, ()))
    assert compiled == {c.name for c in cases}
    assert turns == ["timing"]
    assert device.asked == [(c.name, mode) for c in cases for mode in COMPILE_MODES]
    assert device.need_bytes >= max(softmax.min_bytes(c) for c in cases)
    race_baselines.open(cases[1], None)
    assert device.given[0][1] == [b"compile max-autotune"]
    race_baselines.open(softmax.gpu.bench[0], None)  # a visible case was not asked for
    assert device.given[1][1] == []
    assert device.given[1][0] >= 3


def test_what_is_compiled_for_visible_cases_is_shared(monkeypatch, tmp_path):
    from kagent.tasks import find_task

    task = find_task("attention")
    device = Device()
    race_baselines = RaceBaselines(task, GpuRaceBaselines(device), TRAITS.compile_modes)
    monkeypatch.setattr(compiler_cache, "shared_folder", lambda: tmp_path)
    monkeypatch.setattr(compiler_cache, "unpack", lambda archive, folder: shared.append(archive))
    shared = []
    visible, hidden = task.gpu.bench[:1], draw_hidden(task, "gpu", "bench", 1)[:1]
    finished(race_baselines.compile_ahead(hidden, visible))
    assert device.asked == [(c.name, mode) for c in (*visible, *hidden) for mode in COMPILE_MODES]
    assert shared == [name.encode() for name in COMPILE_MODES]
    race_baselines.open(task.gpu.bench[0], None)
    race_baselines.open(hidden[0], None)
    assert [codes for _, codes in device.given] == [[], shared]


HEADERS = f"""{warm_python.PROGRAM}
import os, sys, tempfile
from kagent_sandbox.data.race import COMPILE_MODES
from kagent_sandbox.device.baseline_calls import _function
from types import SimpleNamespace
_function(next(iter(COMPILE_MODES)), SimpleNamespace(eager=lambda x: x))
from torch._inductor import codecache
from pathlib import Path
source = codecache.write("#include <cstdint>", "h", specified_dir=codecache._HEADER_DIR)[1]
print(Path(source).relative_to(sys.argv[1]), os.listdir(tempfile.gettempdir()))
"""


@pytest.mark.nightly
def test_precompiled_headers_are_not_left_among_temporary_files(tmp_path):
    """torch itself puts them there, whatever folder its cache has."""
    (tmp_path / "temporary").mkdir()
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "inductor"),
        "TMPDIR": str(tmp_path / "temporary"),
    }
    done = subprocess.run(
        [sys.executable, "-c", HEADERS, str(tmp_path / "cache")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, left = done.stdout.split(maxsplit=1)
    assert where.startswith("precompiled_headers/")
    assert left.strip() == "[]"


PRODUCT = """
import torch

def inputs(case, generator, device):
    return {n: torch.ones(2, 64, 64, device=device) for n in "xy"}

def eager(*, x, y):
    return torch.bmm(x, y)
"""
COMPILE_ONLY = f"""{warm_python.PROGRAM}
PRODUCT = {PRODUCT!r}
import contextlib, os, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.process.cores import usable_cores
folder = Path(sys.argv[1])
compiler_cache.use(folder)
import torch
from torch._dynamo.utils import counters
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.baseline_calls import BaselineCall, make_call
from kagent_sandbox.device.compile_only import _compiling, _Turn, compile_only
from kagent_sandbox.device.device_memory import lacks_memory
from kagent_sandbox.judge.timing.baselines import baseline_call
from torch._inductor import select_algorithm
from torch._inductor.select_algorithm import AlgorithmSelectorCache
task = load_task(Path(sys.argv[2]))
call = baseline_call(task, task.cpu.bench[0], "compile", 1)
reference = folder / "reference.py"
folder.mkdir(exist_ok=True)
reference.write_text(PRODUCT)
case = dict(name="c", dtype="float32")
product = BaselineCall("compile max-autotune", str(reference), case, dict(), dict(), 1)
did = []
one = AlgorithmSelectorCache.benchmark_choice
def benchmark_choice(*arguments, **named):
    did.append("variant")
    return one(*arguments, **named)
AlgorithmSelectorCache.benchmark_choice = staticmethod(benchmark_choice)
@contextlib.contextmanager
def alone():
    did.append("alone")
    yield
    did.append("others")
if sys.argv[3] == "only":
    compile_only(call, torch.device("cpu"), alone)
    assert did == [], did
    compile_only(product, torch.device("cpu"), alone)
    assert did[0] == "alone" and did[-1] == "others" and did.count("alone") == did.count("others")
    assert did.count("variant") >= 2, did
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # as in launchers
    with _compiling(_Turn(alone, ())):
        print("variants at once:", select_algorithm.get_num_workers(), "of", usable_cores())
        sys.version_info = SimpleNamespace(major=3, minor=12, micro=0)  # torch skips it in 3.11.8
        variant = mock.Mock(**{{"kernel_hash_key.return_value": "a variant"}})
        AlgorithmSelectorCache().make_precompile_fn([variant], "mm", "inputs")()
        print("compiled before one is chosen:", variant.precompile.call_count)
elif sys.argv[3] == "lacks":
    def lack(*_, **__):
        raise torch.OutOfMemoryError("of this test")
    AlgorithmSelectorCache.benchmark_choice = staticmethod(lack)
    try:
        compile_only(product, torch.device("cpu"), alone)
    except Exception as e:
        print("lacks:", "of this test" in str(e), lacks_memory(e), type(e).__name__)
else:
    for each in (call, product):
        make_call(each, torch.device("cpu"))()
    assert did == [], did
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_what_is_only_compiled_is_found_when_it_runs_with_the_choice_that_was_timed(tmp_path):
    """Of a product, variants are timed with the device alone, and of anything else nothing."""
    folder, found = str(Path(REFERENCE).parent), []
    for how, where in (("only", "cache"), ("run", "cache"), ("lacks", "another")):
        words = [sys.executable, "-c", COMPILE_ONLY, str(tmp_path / where), folder, how]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    cores = usable_cores()
    variants = [f"variants at once: {cores} of {cores}", "compiled before one is chosen: 1"]
    assert found == [[*variants, "0 2"], ["2 0"], ["lacks: True True InductorError", "0 1"]]
