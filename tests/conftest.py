"""What all tests share: markers that skip or keep apart, and a Ctrl-C that works."""

import collections
import functools
import gc
import importlib
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import shared_servers
import warm_python
from bare_python import BarePython
from caches import with_ceilings
from sampling import left_out
from worker_lock import turn

# The same examples every time, but for constants that hypothesis finds in modules that happen to be
# imported. `--hypothesis-profile=default` draws others. How long an example takes, and drawing it,
# is the machine's doing: nothing is asserted of it.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# Of the 100 examples that a property has as a rule, `make test` draws some: see `--whole`.
hypothesis.settings.register_profile(
    "some", parent=hypothesis.settings.get_profile("same"), max_examples=30
)
hypothesis.settings.load_profile("some")


# Rewritten tests are kept for the next run, also where Python is told to keep no bytecode: for each
# worker they are 4 s of CPU time. What tests themselves import is as the user has it.
WRITES_NONE = sys.dont_write_bytecode
sys.dont_write_bytecode = False

# Importing torch would collect garbage often, and find next to nothing.
gc.disable()

FEW_COLLECTIONS = (20_000, 20, 20)
"""Objects made between collections, and the older generations' part in them."""

# Read when libgomp is loaded, with torch. Tests run side by side: a thread that spins until its
# neighbour is done, several ms by default, keeps the core from just that neighbour.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# torch's compiler would build a small library for each set of vector instructions of the processor,
# in every new cache, to see whether g++ knows it: 7 s of CPU time.
VEC_ISA_OK = "TORCHINDUCTOR_VEC_ISA_OK"
os.environ.setdefault(VEC_ISA_OK, "1")

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"
"""Seconds that each file's tests took on a calm machine: `pytest --keep-durations` writes it."""
UNKNOWN_S = 5.0
FAST_S = 4.0
"""Most seconds of a file that `--fast` runs."""


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="leave out files that take long")
    parser.addoption("--whole", action="store_true", help="also what a sample leaves out")
    parser.addoption(
        "--keep-durations", action="store_true", help=f"write tests/{DURATIONS.name} anew"
    )


@functools.cache
def durations_s():
    """Seconds by file."""
    return json.loads(DURATIONS.read_text())["seconds"] if DURATIONS.exists() else {}


class KeepDurations:
    """Adds up what the tests of each file take, and writes it at the end."""

    def __init__(self):
        self._seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        if not report.skipped:
            self._seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self):
        record = {
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "date": time.strftime("%Y-%m-%d"),
            "seconds": {f: round(s, 1) for f, s in self._seconds.most_common() if s >= 0.1},
        }
        DURATIONS.write_text(json.dumps(record, indent=1) + "\n")


def pytest_configure(config):
    """Ctrl-C works in what tests start, also where a shell runs the tests in the background.

    There it is ignored, which every process below inherits.
    """
    if config.getoption("--whole"):  # before any test's own settings are made from these
        hypothesis.settings.load_profile("same")
    config.option.loadscopereorder = False  # workers get files in the order given below
    if config.getoption("--keep-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(KeepDurations())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timeout: waiting is not the test's time
def pytest_runtest_protocol(item, nextitem):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with turn(alone=_alone(item), again=nextitem is not None and _alone(nextitem)):
        return (yield)


def _alone(item):
    """Whether nothing else may run meanwhile. What is only skipped disturbs, and needs, nobody."""
    marker = item.get_closest_marker
    return marker("alone") is not None and not marker("skip")


@functools.cache
def _gpu_missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    # A look at the driver that creates no context: a parent with a CUDA context cannot fork
    # launchers.
    return None if torch.cuda.is_available() else "no NVIDIA GPU here"


def _long_files_first(items):
    """Sort: else one worker would be at a long file when the others have nothing left to do. In
    each file, tests that are alone come first, one after the other.
    """
    known = durations_s()
    items.sort(key=lambda i: (-known.get(_file(i), UNKNOWN_S), i.path, not _alone(i)))


def _file(item):
    return item.path.relative_to(HERE.parent).as_posix()


def _leave_out(some, items, config):
    config.hook.pytest_deselected(items=some)
    out = set(some)
    items[:] = [i for i in items if i not in out]


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _gpu_missing()):
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--fast"):
        known = durations_s()
        _leave_out([i for i in items if known.get(_file(i), 0.0) > FAST_S], items, config)
    if not config.getoption("--whole"):
        _leave_out(left_out(items), items, config)
    _long_files_first(items)
    if torch := sys.modules.get("torch"):  # every worker has a core
        torch.set_num_threads(1)


def pytest_collectstart():
    """Examples that a module draws are the same whatever other modules were collected."""
    _seed_torch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """What a test draws is the same whatever its worker ran before."""
    _seed_torch()


def _seed_torch():
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collection_finish():
    """Judges of this process empty no caches.

    What was imported stays: a collection need not look at it. Others are rare: tests import torch's
    compilers, and make graphs of which each collection would look at every node.
    """
    sys.dont_write_bytecode = WRITES_NONE
    if "kagent_sandbox.device.cpu.flush" in sys.modules:
        importlib.import_module("brief_timing").keep_caches()
    gc.freeze()
    gc.set_threshold(*FEW_COLLECTIONS)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def measured_once(tmp_path_factory):
    """A cache that all tests of this run share, and no earlier run: what one measures of the
    machine (ceilings, baselines) is there for the next.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared))
        patch.setenv("XDG_DATA_HOME", str(base / "data"))  # nothing of the user's own runs
        # Workers run side by side: what they time is not compared.
        patch.setenv("KAGENT_LOCKS", str(base / "locks"))
        patch.setenv("KAGENT_PASS", VEC_ISA_OK)
        yield shared


@pytest.fixture(scope="module")
def uncompiled():
    """torch.compile gives functions back as they are in processes that a module's tests start:
    compiling takes longer than most tests, and test_session and test_baselines are about it.
    """
    with pytest.MonkeyPatch.context() as patch:
        _pass_on(patch, "TORCHDYNAMO_DISABLE")
        yield


@pytest.fixture(scope="module")
def few_compiled():
    """torch.compile precompiles no headers in processes that a module's tests start: in each new
    cache that takes 8 s of CPU time, and saves 2 s of each kernel. For those that compile few.
    """
    with pytest.MonkeyPatch.context() as patch:
        _pass_on(patch, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        yield


@pytest.fixture(scope="module")
def brief_timing():
    """Judges that a module's tests start time briefly: their figures are not the point. For those
    of `warm_judges` and `warm_processes`.
    """
    with pytest.MonkeyPatch.context() as patch:
        _pass_on(patch, warm_python.BRIEF)
        yield


def _pass_on(patch, name, value="1"):
    """Set a variable, also for processes that get named variables alone."""
    patch.setenv(name, value)
    patch.setenv("KAGENT_PASS", f"{os.environ['KAGENT_PASS']},{name}")


@pytest.fixture
def own_cache(measured_once, tmp_path, monkeypatch):
    """A cache without baselines and records of others; the machine's ceilings are in it."""
    folder = with_ceilings(measured_once, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def bare_python():
    """Starts programs that need torch, and nothing of kagent that is imported already."""
    with BarePython(sys.executable) as python:
        yield python


@pytest.fixture(scope="session")
def _servers_end():
    yield
    shared_servers.close_all()


REAL = (
    "tests/agent/cli/test_ending.py",
    "tests/agent/fleet/test_ray_cluster.py",
    "tests/agent/selftest/",
    "tests/corpus/",
    "tests/gpu/",
    "tests/sandbox/confine/",
    "tests/sandbox/device/test_health.py",
    "tests/sandbox/process/",
    "tests/test_",
)
"""These are about processes, or look for what is left of them: theirs start as users start them."""


@pytest.fixture(scope="module", autouse=True)
def late_templates(request, _servers_end):
    """Where a worker starts many processes of kagent, later ones are forked from a template."""
    with pytest.MonkeyPatch.context() as patch:
        if not _file(request.node).startswith(REAL):
            patch.setattr("subprocess.Popen", warm_python.LatePopen)
        yield


@pytest.fixture(scope="module")
def warm_judges(_servers_end):
    """Judges that one file's tests start in this process are forked from one that has imported
    torch, and so are the fork-servers of their launchers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kagent_sandbox.judge.judge_process.subprocess", warm_python.subprocess_module()
        )
        yield


@pytest.fixture(scope="module")
def warm_processes(_servers_end):
    """Processes of kagent that one file's tests start, and all that these start, are forked from
    one that has imported what they need: `kagent` itself, judges, fork-servers, workers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", warm_python.Popen)
        yield


OF_BUILDS = "tests/sandbox/builder/"


@pytest.fixture(scope="module")
def shared(request, _servers_end, warm_judges):
    """Builders, interpreters and backends of the CPU that one file's tests start in this process
    have the fork-servers of earlier ones. Judges: see `warm_judges`.

    Builds have one fork for all cases, as where as many run at once as there are cores: each other
    is 30 ms of CPU time, and finds no idle core here. Those of `OF_BUILDS` have several.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in shared_servers.USERS:
            patch.setattr(f"{name}.ForkServer", shared_servers.SharedServer)
        if not _file(request.node).startswith(OF_BUILDS):
            patch.setattr("kagent_sandbox.builder.client._MAX_FORKS", 1)
        yield


@pytest.fixture(scope="module")
def untimed(shared):
    """Launchers of the CPU that one file's tests start in this process time nothing: their threads
    sleep while they wait, as workers share the cores. What they compute is the point: whether calls
    keep memory is seen after few of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kagent_sandbox.device.cpu.backend.WAITING", {"GOMP_SPINCOUNT": "0"})
        patch.setattr("kagent_sandbox.judge.check.guests._FEW_RUNS", 4)
        patch.setattr("kagent_sandbox.judge.check.guests.REPEAT_S", 0.0)
        yield


@pytest.fixture(scope="module")
def builder(shared):
    """A warm builder that may build two candidates at once, for one file's tests."""
    from kagent_sandbox.builder.client import Builder

    with Builder(2) as made:
        yield made
