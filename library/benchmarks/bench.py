"""Device time of the operators at their measured shapes, beside torch; and what a call costs.

    python benchmarks/bench.py [--operator NAME] [--points N] [--seconds S] [--no-compile] [--json]

GPU: CUDA graphs between events, on rotating buffers, the L2 cache flushed by reading before each;
what cannot be captured is called, with what its launches cost the host.
CPU: single calls on rotating buffers that the caches do not hold together. Contenders take turns.
A ratio is torch's time over the operator's, with a 95 % bootstrap interval that resamples turns.

A call's cost is the host's: µs a call in a loop on the smallest shape for which there is a kernel,
with one thread; on the CPU with the kernel's work in it, the same in every line.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]
try:
    importlib.import_module("kagent_kernels")
except ImportError:
    sys.path[:0] = [str(ROOT / "build/torch-universal")]

from harness import DEVICES, Case, Task, chosen, function_of, operator_of, table_for  # noqa: E402

from kagent_kernels import _kernels, _runtime  # noqa: E402
from kagent_kernels._portfolio import Chosen  # noqa: E402

NAME = "kagent_kernels"
TASKS = sorted(p.parent.name for p in ROOT.glob("tests/tasks/*/task.toml"))
CACHES_HOLD = 96 << 20  # bytes that buffers of a CPU's contender take together
MOST_SETS = 16
HOST, OPERATOR = "the kernel's host function", "the operator"
TURNS, LEAST_TURNS, CALLS = 60, 6, 40  # of loops over calls; the least where calls take long


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operator", choices=TASKS, action="append", help="only this one")
    parser.add_argument("--points", type=int, help="only the first N shapes of each operator")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape, and for calls")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = {"shapes": [], "calls": []}
    for name in options.operator or TASKS:
        task = Task(name)
        for kind in DEVICES:
            for case in [*shapes(task, kind)[: options.points], tiny(task, kind)]:
                found["shapes"].append(measure(task, case, options))
                if not options.json:
                    print_shape(found["shapes"][-1])
            costs = call_costs(task, kind, options)
            if costs is not None:
                found["calls"].append(costs)
                if not options.json:
                    print_costs(costs)
    if options.json:
        print(json.dumps(found, indent=1))


def shapes(task: Task, kind: str) -> list[Case]:
    """Those of this device's table; without one the task's own."""
    table = table_for(task.name, torch.device(DEVICES[kind]))
    if table is None:
        return [c for c in task.cases("bench") if c.kind == kind]
    return [Case(f"point{i}", p.dtype, p.dims, kind=kind) for i, p in enumerate(table.points)]


def tiny(task: Task, kind: str) -> Case:
    """The smallest ordinary check case: below the measured shapes, where calls go to torch."""
    return replace(task.smallest(kind), name="tiny")


# -- device time ----------------------------------------------------------------------------------


def measure(task: Task, case: Case, options: argparse.Namespace) -> dict[str, object]:
    """Times of everyone at one shape, in turns."""
    operator, eager = operator_of(task.name), task.reference.eager
    function = function_of(task.name)
    whole = case.name == "tiny" and len(task.compared) == len(task.data.get("results", ())) == 1

    def ours(arguments: dict[str, object]) -> object:
        if whole:  # a tiny call's time is that of its way into the library, as users go it
            return task.call(function, arguments)
        return operator.op(*arguments.values())

    contenders = {
        "operator": ours,
        "eager": lambda a: eager(**a),
    }
    if not options.no_compile:
        torch.compiler.reset()
        compiled = torch.compile(eager, dynamic=False)
        contenders["compile"] = lambda a: compiled(**a)
    sets = buffers(task, case)
    clock = Graphs(contenders, sets) if case.kind == "gpu" else Calls(contenders, sets)
    samples = {name: [] for name in contenders}
    end, turn = time.perf_counter() + options.seconds, 0
    while turn < 20 or (time.perf_counter() < end and turn < 2000):
        names = list(contenders) if turn % 2 else list(contenders)[::-1]
        for name in names:
            samples[name].append(clock.sample(name, turn % len(sets)))
        turn += 1
    torch_s = min((n for n in samples if n != "operator"), key=lambda n: np.median(samples[n]))
    choice = chosen(operator, sets[0])
    return {
        "operator": task.name,
        "device": DEVICES[case.kind],
        "dtype": case.dtype,
        "dims": dict(case.dims),
        "kernel": choice.kernel.id if isinstance(choice, Chosen) else "torch",
        "us": {n: float(np.median(v)) for n, v in samples.items()},
        "not_captured": clock.called,
        "fastest_of_torch": torch_s,
        "ratio": ratio(samples[torch_s], samples["operator"]),
        "samples": turn,
    }


def buffers(task: Task, case: Case) -> list[dict[str, object]]:
    """Sets of arguments: three, and on a CPU as many as its caches cannot hold."""
    first = task.arguments(case)
    size = sum(v.nbytes for v in first.values() if isinstance(v, torch.Tensor))
    count = 3 if case.kind == "gpu" else min(MOST_SETS, max(3, -(-CACHES_HOLD // max(1, size))))
    return [first, *(task.arguments(case, seed) for seed in range(1, count))]


class Calls:
    """The CPU's clock: one call."""

    called = ()  # all are, and nothing else was asked for

    def __init__(self, contenders, sets):
        self._contenders, self._sets = contenders, sets
        for call in contenders.values():
            for arguments in sets:
                call(arguments)

    def sample(self, name, index):
        """µs of a call."""
        call, arguments = self._contenders[name], self._sets[index]
        start = time.perf_counter_ns()
        call(arguments)
        return (time.perf_counter_ns() - start) / 1000


class Graphs:
    """The GPU's clock: one replay of a graph, from a cold L2."""

    def __init__(self, contenders, sets):
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._clean = torch.zeros(max(1, 2 * l2_bytes // 4), dtype=torch.float32, device="cuda")
        # One pool: no result is read, so that what one graph leaves behind another may overwrite.
        pool, self.called = torch.cuda.graph_pool_handle(), []
        self._turns = {}
        for name, call in contenders.items():
            try:
                self._turns[name] = [captured(call, s, pool)[0].replay for s in sets]
            except RuntimeError:  # it waits for the device, or no memory is left for graphs
                torch.cuda.synchronize()
                pool = torch.cuda.graph_pool_handle()  # none is captured where one has failed
                self.called.append(name)
                self._turns[name] = [partial(call, s) for s in sets]
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def sample(self, name, index):
        """µs of a turn. Reading leaves no dirty lines, whose write-back would be timed."""
        self._clean.amax()
        self._start.record()
        self._turns[name][index]()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) * 1000


def captured(call, arguments, pool=None):
    """A CUDA graph of one call, warmed up on another stream as capturing wants it; its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(arguments)
    torch.cuda.current_stream().wait_stream(stream)
    # cuBLAS has one workspace for a stream, which torch frees with any of the graphs that were
    # captured there, and whenever torch.compile captures. The graph is to have its own.
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its stream the current one.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
        result = call(arguments)
    return graph, result


def ratio(theirs: list[float], ours: list[float]) -> list[float]:
    """Ratio of the medians and its 95 % interval, resampling turns."""
    rng = np.random.default_rng(0)
    a, b = np.array(theirs), np.array(ours)
    turns = rng.integers(0, len(a), (1000, len(a)))
    drawn = np.median(a[turns], axis=1) / np.median(b[turns], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [float(np.median(a) / np.median(b)), float(low), float(high)]


# -- what a call costs ----------------------------------------------------------------------------


def call_costs(task: Task, kind: str, options: argparse.Namespace) -> dict[str, object] | None:
    """µs of the host for a call on the smallest shape that a kernel takes; None if none does."""
    operator = operator_of(task.name)
    cases = shapes(task, kind)
    drawn = [(c, task.arguments(c)) for c in cases]
    able = [(c, a) for c, a in drawn if isinstance(chosen(operator, a), Chosen)]
    if not able:
        return None
    case, arguments = min(able, key=lambda p: sum(v.numel() for v in tensors(p[1])))
    values = tuple(arguments.values())
    host, bare = launches(operator, arguments)
    calls = {HOST: lambda: host(*values)}
    if bare is not None:
        calls["its bare launch"] = bare
    calls[OPERATOR] = lambda: operator(*values)
    calls["the operator, through torch's dispatcher"] = lambda: operator.op(*values)
    calls["eager"] = lambda: task.reference.eager(**arguments)
    if kind == "gpu":
        graph, result = captured(lambda a: host(*a.values()), arguments)
        calls["a graph of the host function, replayed"] = lambda: (graph.replay(), result)
        if not options.no_compile:
            # Beside torch's own, compiled likewise: guards and inputs cost both the same.
            whole = torch.compile(lambda *a: operator.op(*a), mode="reduce-overhead")
            calls["the operator, compiled with reduce-overhead"] = lambda: whole(*values)
            own = torch.compile(task.reference.eager, mode="reduce-overhead")
            calls["eager, compiled with reduce-overhead"] = lambda: own(**arguments)
    us = loops(calls, kind, options.seconds)
    return {
        "operator": task.name,
        "device": DEVICES[kind],
        "dtype": case.dtype,
        "dims": dict(case.dims),
        "us": us,
        "overhead_us": us[OPERATOR] - us[HOST],
    }


def tensors(arguments: dict[str, object]) -> list[torch.Tensor]:
    """Those among arguments."""
    return [v for v in arguments.values() if isinstance(v, torch.Tensor)]


def launches(operator, arguments):
    """A kernel's host function, and if it launches one kernel of the runtime's, that alone."""
    choice = chosen(operator, arguments)
    kernel, path = choice.kernel, Path(_kernels.__file__).parent / "kernels"
    entry = json.loads((path.parent / "portfolio" / f"{operator.name}.json").read_text())["entry"]
    config = kernel.configs[choice.config]
    host = _kernels.load(NAME, path / f"{kernel.id}.py", entry, config, "bench")
    seen = []
    with _runtime.observing(seen.append):
        kept = host(*arguments.values())
    if len(seen) != 1:
        return host, None
    (launch,) = seen
    values = [getattr(v, "value", v) for v in launch.arguments]
    how = launch.launching
    if launch.target == "cpu":
        call = _runtime.CppKernel(launch.source)
        return host, lambda: (call(*values), kept)
    call = _runtime.CudaKernel(launch.source).launch
    named = {n: getattr(how, n) for n in ("shared", "cluster", "cooperative", "pdl")}
    return host, lambda: (call(how.grid, how.block, *values, **named), kept)


def loops(calls, kind, seconds: float) -> dict[str, float]:
    """Median over many short turns of µs a call, most of which nothing interrupts.

    On a GPU a loop does not wait for the device.
    """
    found = {name: [] for name in calls}
    with one_thread():
        for call in calls.values():
            for _ in range(20):
                call()
        end, turn = time.perf_counter() + seconds, 0
        while turn < LEAST_TURNS or (turn < TURNS and time.perf_counter() < end):
            turn += 1
            for name, call in calls.items():
                if kind == "gpu":
                    torch.cuda.synchronize()
                start = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                found[name].append((time.perf_counter_ns() - start) / CALLS / 1000)
        if kind == "gpu":
            torch.cuda.synchronize()
    return {name: float(np.median(values)) for name, values in found.items()}


@contextlib.contextmanager
def one_thread():
    """Of torch and of the C++ kernels' OpenMP: to wake others costs more than a call."""
    mine, threads = contextlib.nullcontext(), torch.get_num_threads()
    with contextlib.suppress(OSError):
        openmp = ctypes.CDLL("libgomp.so.1")
        mine = contextlib.ExitStack()
        mine.callback(openmp.omp_set_num_threads, openmp.omp_get_max_threads())
        openmp.omp_set_num_threads(1)
    torch.set_num_threads(1)
    with mine:
        try:
            yield
        finally:
            torch.set_num_threads(threads)


# -- printing -------------------------------------------------------------------------------------


def print_shape(row: dict[str, object]) -> None:
    """One shape."""
    dims = " ".join(f"{n}={v}" for n, v in row["dims"].items())
    middle, low, high = row["ratio"]
    print(f"{row['operator']} {row['device']} {row['dtype']} {dims}: {row['kernel']}")
    for name, us in sorted(row["us"].items(), key=lambda pair: pair[1]):
        print(f"    {us:10.2f} µs  {name}{', not captured' * (name in row['not_captured'])}")
    print(f"    {middle:.3f} x {row['fastest_of_torch']} (95 %: {low:.3f}-{high:.3f})")


def print_costs(row: dict[str, object]) -> None:
    """What a call costs."""
    dims = " ".join(f"{n}={v}" for n, v in row["dims"].items())
    print(f"{row['operator']} {row['device']} {row['dtype']} {dims}: a call from Python")
    for name, us in row["us"].items():
        print(f"    {us:10.2f} µs  {name}")
    print(f"    {row['overhead_us']:+10.2f} µs  the operator, over its kernel's host function")


if __name__ == "__main__":
    main()
