"""Device time of work that can be enqueued again and again: the one clock of candidates,
baselines and ceilings.

Before each sample the L2 cache is flushed by *reading* a clean buffer: a fill would leave dirty
lines, whose write-back costs the next kernel 5 to 6 µs (measured on an H100). All samples of a call
are enqueued in one go and waited for once; the flush takes longer than enqueuing, so the device
never waits for Python between the two events of a sample. `enqueue_us` tells whether that holds.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cuda.bindings.driver as driver
import torch

from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cuda.driver import GpuError, call
from kagent_sandbox.device.cuda.memory import make_current

FLUSH_BYTES = 256 << 20
Work = Callable[[], None]
"""Enqueues one execution on the current stream."""


class GraphPool:
    """Memory of graphs that share it: what a replay leaves there, that of another may overwrite."""

    def __init__(self) -> None:
        self._handle: Any = None  # torch versions differ in its type
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def enter(self, graph: Graph) -> Any:
        """Its handle for one more graph.

        Torch drops a pool with its last graph and fails to capture into it again.
        """
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._handle

    def leave(self, graph: Graph) -> None:
        """Tell that a graph's memory is gone."""
        self._graphs.discard(graph)

    def forget(self) -> None:
        """Use other memory from now on: torch takes no further capture where one failed."""
        self._graphs = weakref.WeakSet()


class Clock:
    """Times work on one stream of one device, which it makes the process's own. Make it before the
    process is locked.
    """

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        make_current(index)
        forbid_persisting_l2()
        device = torch.device("cuda", index)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        count = max(FLUSH_BYTES, 4 * l2_bytes) // 8
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self._buffer = torch.zeros(count, dtype=torch.int64, device=device)
            self._sink = torch.zeros((), dtype=torch.int64, device=device)
            self.flush()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.pool = GraphPool()
        """Memory of baselines' graphs."""
        self.sync("starting the clock")

    def flush(self) -> None:
        """Enqueue a read of more bytes than L2 holds."""
        torch.sum(self._buffer, dim=0, out=self._sink)

    def sync(self, doing: str) -> None:
        """Wait for the stream.

        Raises:
            GpuError: A kernel faulted.
        """
        stream = driver.CUstream(self.stream.cuda_stream)
        call(driver.cuStreamSynchronize, stream, doing=doing)

    def fault(self) -> GpuError | None:
        """The error of a kernel after which nothing runs in this process; None if there is none."""
        try:
            self.sync("after a failure")
        except GpuError as e:
            return e if e.status is Status.GPU_FAULT else None
        return None

    def samples(self, work: Sequence[Work], count: int) -> list[float]:
        """`count` device times in µs, rotating over `work`, each from a cold L2.

        Raises:
            GpuError: A kernel faulted.
        """
        while len(self._events) < count:
            self._events.append((_event(), _event()))
        reset_persisting_l2()
        with torch.cuda.stream(self.stream):
            self.flush()  # from idle, a second flush's worth of lead
            for i in range(count):
                start, stop = self._events[i]
                self.flush()
                start.record()
                work[i % len(work)]()
                stop.record()
        self.sync("while it was timed")
        return [1e3 * start.elapsed_time(stop) for start, stop in self._events[:count]]

    def repeat(self, work: Sequence[Work], count: int) -> float:
        """Execute `count` times back to back, rotating, without a flush; host time in µs of all.

        Raises:
            GpuError: A kernel faulted.
        """
        start = time.perf_counter()
        with torch.cuda.stream(self.stream):
            for i in range(count):
                work[i % len(work)]()
        self.sync("while it was timed")
        return 1e6 * (time.perf_counter() - start)

    def enqueue_us(self, work: Work, count: int) -> list[float]:
        """`count` host times in µs of enqueuing `work` while the device is busy with a flush.

        Raises:
            GpuError: A kernel faulted.
        """
        times = []
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self.flush()
                start = time.perf_counter()
                work()
                times.append(1e6 * (time.perf_counter() - start))
                self.sync("while its enqueuing was timed")
        return times

    def median_us(self, work: Sequence[Work], count: int = 20) -> float:
        """Median of `count` samples after a warm-up of every item of `work`."""
        self.samples(work, len(work))
        return statistics.median(self.samples(work, count))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def forbid_persisting_l2() -> None:
    """Set nothing of L2 aside for lines that a kernel wants to keep: later lines replace them.

    Plans cannot set access windows; what is left are hints of single loads and stores.

    Raises:
        GpuError: The driver refuses.
    """
    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    try:
        call(driver.cuCtxSetLimit, limit, 0, doing="setting nothing of L2 aside")
    except GpuError as e:
        if e.name != "CUDA_ERROR_UNSUPPORTED_LIMIT":  # GPUs that cannot set any aside
            raise


def reset_persisting_l2() -> None:
    """Give up lines that an earlier kernel pinned in L2: the flush's reads do not evict them.

    Raises:
        GpuError: The driver refuses.
    """
    call(driver.cuCtxResetPersistingL2Cache, doing="resetting persisting L2 lines")


class Graph:
    """Work captured as a CUDA graph, replayed without torch's own prologue.

    `CUDAGraph.replay` may launch kernels for random number generators before the graph, which would
    be timed with it; the graph is therefore instantiated and launched by the driver.
    """

    def __init__(self, clock: Clock, work: Work, pool: GraphPool) -> None:
        """Capture `work`, which must have run on the clock's stream before (lazy loading).

        It is kept until `close`: replays read the memory of whatever it refers to.

        What the work allocates does not outlive the next replay of another graph of the pool.

        Raises:
            GpuError, RuntimeError: It cannot be captured.
        """
        self._work: Work | None = work
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        # cuBLAS has one workspace for a stream, which torch frees with any of the graphs that were
        # captured there (pytorch/pytorch#193402). Without one, the capture makes one in the pool,
        # which lives as long as this graph.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - as Inductor does it
        with torch.cuda.stream(clock.stream):
            handle = pool.enter(self)
            try:
                self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                work()
                self._graph.capture_end()
            except BaseException:
                pool.forget()
                _abandon(self._graph, clock.device, handle)
                raise
        self._stream = driver.CUstream(clock.stream.cuda_stream)
        graph = driver.CUgraph(self._graph.raw_cuda_graph())
        self._exec = call(driver.cuGraphInstantiate, graph, 0, doing="instantiating the graph")
        call(driver.cuGraphUpload, self._exec, self._stream, doing="uploading the graph")
        clock.sync("uploading the graph")

    def replay(self) -> None:
        """Enqueue one execution on the clock's stream.

        Raises:
            GpuError: The driver refuses, perhaps because an earlier kernel faulted.
        """
        call(driver.cuGraphLaunch, self._exec, self._stream, doing="replaying the graph")

    def close(self) -> None:
        """Free the graph and its private memory. The stream must be idle."""
        call(driver.cuGraphExecDestroy, self._exec, doing="destroying the graph")
        self._graph.reset()
        self._work = None
        self._pool.leave(self)


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a capture that failed, whatever state it is in.

    Where the driver gives no graph, as after a wait for the device, torch 2.11 goes on as if it
    captured: it frees no memory outside of the pool, and refuses to draw random numbers.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # later versions have done it
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)  # noqa: SLF001
        with contextlib.suppress(RuntimeError):  # the device may be lost
            _end_capture_of_random_numbers(device)


def _end_capture_of_random_numbers(device: torch.device) -> None:
    """Have torch's generator draw again: it does at the end of a capture that succeeds."""
    number, graph = torch.zeros((), device=device), torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    graph.capture_end()
    graph.reset()
