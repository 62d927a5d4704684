"""Device time of work that can be enqueued again and again: the one clock of candidates,
baselines and ceilings.

Before each sample the L2 cache is flushed by *reading* a clean buffer: a fill would leave dirty
lines, whose write-back costs the next kernel 5 to 6 µs (measured on an H100). All samples of a call
are enqueued in one go and waited for once; the flush takes longer than enqueuing, so the device
never waits for Python between the two events of a sample. `enqueue_us` tells whether that holds.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cuda.bindings.driver as driver
import torch

from kagent_sandbox.device.cuda.driver import GpuError, call

FLUSH_BYTES = 256 << 20
Work = Callable[[], None]
"""Enqueues one execution on the current stream."""


class Clock:
    """Times work on one stream of one device. Make it before the process is locked."""

    def __init__(self, device: torch.device) -> None:
        forbid_persisting_l2()
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        count = max(FLUSH_BYTES, 4 * l2_bytes) // 8
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self._buffer = torch.zeros(count, dtype=torch.int64, device=device)
            self._sink = torch.zeros((), dtype=torch.int64, device=device)
            self.flush()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._pool: Any = None  # torch versions differ in its type
        self._sharing: weakref.WeakSet[Graph] = weakref.WeakSet()
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

    def graph_pool(self, graph: Graph) -> Any:
        """Memory pool of graphs that share memory, `graph` among them from now on.

        Torch drops a pool with its last graph and fails to capture into it again.
        """
        if self._pool is None or not self._sharing:
            self._pool = torch.cuda.graph_pool_handle()
        self._sharing.add(graph)
        return self._pool

    def leave_graph_pool(self, graph: Graph) -> None:
        """Tell that a graph's memory is gone."""
        self._sharing.discard(graph)

    def forget_graph_pool(self) -> None:
        """Use another pool from now on: torch takes no further capture into one that failed."""
        self._pool = None

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

    def __init__(self, clock: Clock, work: Work, *, share_memory: bool = False) -> None:
        """Capture `work`, which must have run on the clock's stream before (lazy loading).

        It is kept until `close`: replays read the memory of whatever it refers to.

        With `share_memory` what the work allocates may be reused by other such graphs' work, so
        that results do not outlive the next replay of any of them.

        Raises:
            GpuError, RuntimeError: It cannot be captured.
        """
        self._clock = clock
        self._work: Work | None = work
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        # cuBLAS has one workspace for a stream, which torch frees with any of the graphs that were
        # captured there (pytorch/pytorch#193402). Without one, the capture makes one in the memory
        # that lives as long as this graph.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - as Inductor does it
        with torch.cuda.stream(clock.stream):
            self._graph.capture_begin(
                pool=clock.graph_pool(self) if share_memory else None,
                capture_error_mode="thread_local",
            )
            try:
                work()
                self._graph.capture_end()
            except BaseException:
                _abandon(self._graph)
                clock.leave_graph_pool(self)
                clock.forget_graph_pool()
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
        self._clock.leave_graph_pool(self)


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed, whatever state it is in."""
    try:
        graph.capture_end()
    except RuntimeError:
        return
