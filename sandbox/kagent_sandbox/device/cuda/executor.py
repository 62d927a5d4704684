"""Executes plans on a GPU, inside the launcher process.

Trusted code next to untrusted device code: it makes its context, maps the arena, prepares what must
exist before the lock, locks itself, and only then loads the first binary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kagent_sandbox.data.plan import Alloc, Free, Launch, Plan, PlanError, TensorRef
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cuda.driver import GpuError
from kagent_sandbox.device.cuda.kernels import Kernels, failed
from kagent_sandbox.device.cuda.memory import Transport, bytes_tensor, open_shared
from kagent_sandbox.device.cuda.timing import Clock, Graph, GraphPool, Work
from kagent_sandbox.device.device_memory import lacks_memory
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.device.plan_ops import bind_op, strided_view


@dataclass
class _Prepared:
    """A plan bound to a placement: what each operation is called, and how to enqueue it."""

    steps: list[tuple[str, Callable[[], None]]]
    ran: bool = False
    graph: Graph | None = None

    def enqueue(self) -> None:
        for _, step in self.steps:
            step()


@dataclass
class Executor:
    """One device's context, arena and prepared plans. `products`: plans may multiply matrices."""

    index: int
    products: bool = True
    clock: Clock = field(init=False)
    kernels: Kernels = field(init=False)
    arena: torch.Tensor | None = None
    extra: dict[str, Work] = field(default_factory=dict)  # baselines, by key
    _prepared: dict[str, _Prepared] = field(default_factory=dict)
    _pool: GraphPool = field(default_factory=GraphPool)  # results are in the arena

    def __post_init__(self) -> None:
        self.clock = Clock(self.index)
        self.kernels = Kernels(self.index, self.clock.stream.cuda_stream)
        self._warm_up()

    def _warm_up(self) -> None:
        """Have torch load what plans may need before files become unreadable."""
        with torch.cuda.stream(self.clock.stream):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                a = torch.ones(64, 64, dtype=dtype, device=self.clock.device)
                c = torch.empty_like(a)
                if self.products:
                    torch.mm(a, a, out=c)
                    c.addmm_(a, a)
                c.copy_(a.t().float())
                c.fill_(2)
        self.clock.sync("warming up")

    def health(self) -> list[float]:
        """Results that are known: a sum of integers, and of a matrix product."""
        with torch.cuda.stream(self.clock.stream):
            numbers = torch.arange(1 << 20, dtype=torch.int64, device=self.clock.device)
            ones = torch.ones(256, 256, dtype=torch.bfloat16, device=self.clock.device)
            results = [(numbers * 3 + 1).sum(), (ones @ ones).float().sum()]
        self.clock.sync("computing known results")
        return [float(r) for r in results]

    def open(self, transport: Transport, handle: bytes, fd: int, nbytes: int) -> None:
        """Map the judge's arena.

        Raises:
            GpuError: The driver refuses.
        """
        address = open_shared(transport, handle, fd, nbytes, self.index)
        self.arena = bytes_tensor(address, nbytes, self.clock.device)

    def prepare(self, key: str, plan: Plan, offsets: Mapping[int, int]) -> None:
        """Bind a plan to places in the arena; see `Launcher.prepare`.

        Raises:
            LaunchFailed: Something of the plan cannot be had on this device.
        """
        arena = self.arena
        if arena is None:
            raise PlanError("no arena is open")
        for buffer in plan.buffers:
            base = offsets.get(buffer.id, -1)
            if not 0 <= base <= arena.numel() - buffer.nbytes:
                raise PlanError(f"buffer {buffer.id} has no place in the arena")
        start = arena.data_ptr()
        infos = {k.hash: k for k in plan.kernels}

        def view(tensor: TensorRef) -> torch.Tensor:
            return strided_view(arena, tensor, offsets[tensor.buffer])

        steps: list[tuple[str, Callable[[], None]]] = []
        with torch.cuda.stream(self.clock.stream):
            for op in plan.ops:
                if isinstance(op, Alloc | Free):
                    continue
                if isinstance(op, Launch):
                    kernel = infos[op.kernel]
                    step = self.kernels.bind(op, kernel, lambda b: start + offsets[b])
                    steps.append((f"running {kernel.name}", step))
                else:
                    name = getattr(op, "name", type(op).__name__.lower())
                    steps.append((f"running {name}", bind_op(op, view)))
        self.clock.sync("staging constants")
        self.forget(key)
        self._prepared[key] = _Prepared(steps)

    def forget(self, key: str) -> None:
        """Drop a prepared plan, if there is one under the key."""
        prepared = self._prepared.pop(key, None)
        if prepared is not None and prepared.graph is not None:
            self.clock.sync("finishing")
            prepared.graph.close()

    def run(self, key: str) -> None:
        """Execute once. The first time step by step, so that a fault names its kernel; then the
        graph that is timed, so that what is checked is what is timed.

        Raises:
            LaunchFailed: A kernel faulted or could not be launched.
        """
        prepared = self._get(key)
        if prepared.ran:
            self._graph(prepared).replay()
            self.clock.sync("replaying the plan")
            return
        with torch.cuda.stream(self.clock.stream):
            for doing, step in prepared.steps:
                step()
                self.clock.sync(doing)
        prepared.ran = True

    def enqueue(self, key: str) -> None:
        """Enqueue a plan's operations on the current stream, not as a graph: for a profiler."""
        self._get(key).enqueue()

    def samples(self, keys: Sequence[str], count: int) -> list[float]:
        """See `Launcher.samples`."""
        return self.clock.samples([self._work(k) for k in keys], count)

    def repeat(self, keys: Sequence[str], count: int) -> float:
        """Execute `count` times back to back; host time in µs."""
        return self.clock.repeat([self._work(k) for k in keys], count)

    def _work(self, key: str) -> Work:
        if key in self.extra:
            return self.extra[key]
        prepared = self._get(key)
        if not prepared.ran:
            self.run(key)
        return self._graph(prepared).replay

    def _graph(self, prepared: _Prepared) -> Graph:
        if prepared.graph is None:
            prepared.graph = Graph(self.clock, prepared.enqueue, self._pool)
        return prepared.graph

    def _get(self, key: str) -> _Prepared:
        if key not in self._prepared:
            raise PlanError(f"no plan was prepared as {key!r}")
        return self._prepared[key]

    def explain(self, error: Exception) -> LaunchFailed:
        """The failure behind an exception: torch's errors may only repeat an earlier fault."""
        if isinstance(error, LaunchFailed):
            return error
        if isinstance(error, GpuError):
            return failed(error)
        try:
            self.clock.sync("running a torch operation")
        except GpuError as fault:
            return failed(fault)
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        if lacks_memory(error):
            if not isinstance(error, torch.cuda.OutOfMemoryError):
                text = f"out of memory: {text}"
            return LaunchFailed(Status.RESOURCE_LIMIT, text, blame="unclear")
        return LaunchFailed(Status.RUNTIME_ERROR, text)
