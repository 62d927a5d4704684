"""The confined side of a CPU launcher: binds plans to the arena and runs them when told to.

The process is locked from its first instruction here. It maps the arena and closes its descriptor,
starts torch's and OpenMP's threads (which inherit the lock), and a thread that executes plans for
each further caller; from the third on these have fewer threads of OpenMP. It forbids itself any
further thread, process or timer, and only then loads the first binary: constructors run inside all
of that. Native code shares the process, so nothing that it answers is believed but that it answers
at all: time and results are the judge's to observe.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import torch

from kagent_sandbox.confine.seccomp import forbid_new_threads
from kagent_sandbox.data.language import language
from kagent_sandbox.data.plan import (
    Alloc,
    Arg,
    Free,
    KernelInfo,
    Launch,
    Null,
    Plan,
    PlanError,
    Pointer,
    Scalar,
    TensorRef,
)
from kagent_sandbox.data.plan_json import parse_plan
from kagent_sandbox.device.cpu.arena import map_arena, populate, refuse_descriptors
from kagent_sandbox.device.cpu.execution_request import (
    FAILED,
    MOST_BYTES,
    REFUSED,
    TOKEN_BYTES,
    failure,
    numbers_of,
)
from kagent_sandbox.device.cpu.native_loop import NativeLaunch, NativeLoop, native_launch
from kagent_sandbox.device.cpu.process_state import ProcessState
from kagent_sandbox.device.plan_ops import bind_op, strided_view
from kagent_sandbox.process.channel import Channel, ChannelClosed
from kagent_sandbox.process.context import Context

Step: TypeAlias = Callable[[], object]
_SCALARS: Mapping[str, Callable[..., object]] = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def serve(context: Context) -> None:
    """Handler of the fork-server: answer the judge until it closes the channel."""
    fd, asked, *others = context.fds
    memory = map_arena(fd, os.fstat(fd).st_size)
    start_threads()
    fewer = max(1, _most_threads() - 1)
    runner = Runner(memory, context.tmp, functools.partial(populate, memory))
    first = _threads()
    runner.others = {
        _start_caller(runner, socket, fewer if number > 1 else None)
        for number, socket in enumerate(others, start=1)
    }
    runner.pools = _threads() - first - runner.others
    forbid_new_threads()
    refuse_descriptors()
    gc.collect()
    gc.freeze()
    gc.disable()  # no pauses where time is taken; a plan's objects live until the process ends
    context.channel.send({"ready": len(_threads())})
    with contextlib.suppress(ChannelClosed), torch.inference_mode():
        while request := runner.answer(asked):
            if len(request) < TOKEN_BYTES:
                _answer(runner, context.channel)
                continue
            os.write(asked, _executed(runner, request))


def _executed(runner: Runner, request: bytes) -> bytes:
    """Carry out a request for executions: the answer."""
    answer = request[:TOKEN_BYTES]
    try:
        runner.execute(numbers_of(request))
    except PlanError as e:
        answer += failure(REFUSED, str(e))
    except Exception as e:  # noqa: BLE001 - the process boundary: it becomes a verdict
        answer += failure(FAILED, f"{type(e).__name__}: {e}")
    return answer


def _threads() -> set[int]:
    """The process's threads by their numbers in its own namespace."""
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def _openmp_keeps_threads() -> bool:
    """Whether a caller's threads of OpenMP outlive it: LLVM's and Intel's keep them for the next.

    GCC's end. conda-forge installs LLVM's in the place of GCC's.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        files = {line.rstrip("\n").rpartition("/")[2] for line in maps if "/" in line}
    return any(name.startswith(("libomp", "libiomp")) for name in files)


def _most_threads() -> int:
    """Threads of the calling thread's teams, once `start_threads` has been called in it: torch's
    first operation has set what it takes itself, which may be fewer than OMP_NUM_THREADS says.
    """
    try:
        return int(ctypes.CDLL("libgomp.so.1").omp_get_max_threads())
    except OSError:
        return 1  # no g++ on this host


def _start_caller(runner: Runner, asked: int, fewer: int | None) -> int:
    """Start a thread that executes plans, too, and has threads of torch's and OpenMP's own: their
    pools belong to whoever begins a parallel region. Its number, as `_threads` has it.

    `fewer`: Threads of its teams at most, whatever a kernel asks for. None: as many as the first
    caller's.
    """
    ready = threading.Event()

    def answer() -> None:
        if fewer is None:
            start_threads()
        ready.set()
        with torch.inference_mode():
            while len(request := os.read(asked, MOST_BYTES)) >= TOKEN_BYTES:
                os.write(asked, _executed(runner, request))

    target = answer if fewer is None else functools.partial(_with_threads, fewer, answer)
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    ready.wait()
    return thread.native_id or 0


def _with_threads(count: int, function: Callable[[], object]) -> None:
    """Start that many threads of OpenMP and call a function that has these.

    `omp_get_max_threads` says so, and a `num_threads` clause gets no more: the limit on threads of
    a team is OpenMP's own. Without g++ nothing is different.
    """
    try:
        gomp = ctypes.CDLL("libgomp.so.1")
        teams = gomp.GOMP_teams_reg  # GCC 9
    except (OSError, AttributeError):
        start_threads()
        function()
        return

    def limited(_: object) -> None:
        start_threads()
        gomp.omp_set_num_threads(count)  # torch's first operation in a thread sets it, too
        function()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(limited)
    teams(callback, None, ctypes.c_uint(1), ctypes.c_uint(count), ctypes.c_uint(0))


def _answer(runner: Runner, channel: Channel) -> None:
    """Carry out the request that waits on the channel."""
    message = channel.recv(None)
    request = cast("dict[str, object]", message.obj)
    answer: dict[str, object] = {"token": request["token"]}
    try:
        runner.perform(request, message.blobs)
    except PlanError as e:
        answer["plan"] = str(e)
    except Exception as e:  # noqa: BLE001 - the process boundary: it becomes a verdict
        answer["error"] = f"{type(e).__name__}: {e}"[:4000]
    channel.send(answer)


def start_threads() -> None:
    """Have torch and OpenMP start their threads: a parallel region, and a matrix product.

    Kernels link libgomp. Torch's wheels carry one, which is the same library to the loader or
    another one.
    """
    torch.ones(1 << 20).mul_(2.0)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    try:
        gomp = ctypes.CDLL("libgomp.so.1")
    except OSError:
        return  # no g++ on this host, so no kernels either
    # An empty parallel region: every thread calls free(NULL).
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    gomp.GOMP_parallel(free, None, ctypes.c_uint(0), ctypes.c_uint(0))


@dataclass(frozen=True)
class _Launch:
    """A kernel with its arguments; `native` is the same for the loop, if that can call it."""

    function: Callable[..., object]
    arguments: Sequence[object]
    native: NativeLaunch | None

    def __call__(self) -> object:
        return self.function(*self.arguments)


@dataclass
class Runner:
    """Prepared plans over one arena."""

    memory: torch.Tensor
    folder: Path
    populate: Callable[[int, int], None] = lambda _start, _stop: None  # see `arena.populate`
    _plans: dict[int, list[Step]] = field(default_factory=dict)
    _ranges: dict[int, tuple[int, int]] = field(default_factory=dict)  # of plans, in the arena
    _libraries: dict[str, ctypes.CDLL] = field(default_factory=dict)
    _state: ProcessState = field(default_factory=ProcessState)
    _loop: NativeLoop | None = None
    others: Collection[int] = ()
    """Threads of the other callers."""
    pools: Collection[int] = ()
    """Threads that these have of torch and OpenMP."""

    def answer(self, asked: int) -> bytes:
        """Answer requests on a socket until one needs Python: that one; empty at the end."""
        return os.read(asked, MOST_BYTES) if self._loop is None else self._loop.answer(asked)

    def perform(self, request: Mapping[str, object], blobs: Sequence[bytes]) -> None:
        """Carry out one request of the judge that is not on the clock."""
        verb = request["do"]
        if verb == "loop":
            self._loop = NativeLoop(blobs[0], self.folder)
        elif verb == "load":
            for name, data in zip(cast("list[str]", request["hashes"]), blobs, strict=True):
                (self.folder / f"{int(name, 16):064x}.so").write_bytes(data)
        elif verb == "prepare":
            offsets = {int(k): v for k, v in cast("dict[str, int]", request["at"]).items()}
            plan = parse_plan(blobs[0])
            number = cast("int", request["number"])
            self._keep(number, self._bind(plan, offsets))
            # Before it is timed. Most of an arena may belong to others, or to other cases.
            starts = [offsets[b.id] for b in plan.buffers]
            stops = [offsets[b.id] + b.nbytes for b in plan.buffers]
            self._ranges[number] = min(starts, default=0), max(stops, default=0)
            self.populate(*self._ranges[number])
        elif verb == "populate":
            for number in cast("list[int]", request["numbers"]):
                self.populate(*self._ranges[number])
        elif verb == "forget":
            number = cast("int", request["number"])
            self._keep(number, None)
            self._ranges.pop(number, None)
        elif verb == "unload":
            self._unload()
        elif verb == "house":
            self._state.perform(request, self.memory.data_ptr(), self.memory.numel())
        else:
            raise PlanError(f"unknown request {verb!r}")

    def _unload(self) -> None:
        """Unload all libraries: their destructors run, as at the end of a process. The other
        callers, which have been told to end, have ended before, and destructors of what is theirs
        alone have run. So have their threads of OpenMP, unless it keeps them.

        Raises:
            PlanError: A plan that launches from them is still prepared.
        """
        if self._plans:
            raise PlanError("plans are prepared: forget them first")
        ending = {*self.others, *(() if _openmp_keeps_threads() else self.pools)}
        while not ending.isdisjoint(_threads()):
            time.sleep(1e-3)
        for library in self._libraries.values():
            _ctypes.dlclose(library._handle)  # noqa: SLF001 - ctypes has no other name
        self._libraries.clear()

    def _keep(self, number: int, steps: list[Step] | None) -> None:
        """Take a plan's steps, or drop them."""
        if self._loop is not None:
            native = [s.native for s in steps or () if isinstance(s, _Launch)]
            launches = [launch for launch in native if launch is not None]
            whole = steps is not None and len(launches) == len(steps)
            self._loop.keep(number, launches if whole else None)
        if steps is None:
            self._plans.pop(number, None)
        else:
            self._plans[number] = steps

    def execute(self, numbers: Iterable[int]) -> None:
        """Execute prepared plans once each, in order."""
        for number in numbers:
            for step in self._plans[number]:
                step()

    def _bind(self, plan: Plan, offsets: Mapping[int, int]) -> list[Step]:
        kernels = {k.hash: k for k in plan.kernels}

        def view(tensor: TensorRef) -> torch.Tensor:
            return strided_view(self.memory, tensor, offsets[tensor.buffer])

        steps: list[Step] = []
        for op in plan.ops:
            if isinstance(op, Alloc | Free):
                continue
            if isinstance(op, Launch):
                steps.append(self._bind_launch(op, kernels[op.kernel], offsets))
            else:
                steps.append(bind_op(op, view))
        return steps

    def _bind_launch(self, launch: Launch, kernel: KernelInfo, offsets: Mapping[int, int]) -> Step:
        if language(kernel.language).kind != "cpu":
            raise PlanError(f"kernel {kernel.name} is {kernel.language}: not for this target")
        arguments = [self._argument(a, offsets) for a in launch.args]
        library = self._libraries.get(kernel.hash)
        if library is None:
            path = self.folder / f"{kernel.hash}.so"
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            self._libraries[kernel.hash] = library
        function = getattr(library, kernel.name)
        function.restype = None
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        return _Launch(function, arguments, native_launch(address, arguments))

    def _argument(self, arg: Arg, offsets: Mapping[int, int]) -> object:
        if isinstance(arg, Pointer):
            address = self.memory.data_ptr() + offsets[arg.buffer] + arg.offset
            return ctypes.c_void_p(address)
        if isinstance(arg, Null):
            return ctypes.c_void_p(None)
        if isinstance(arg, Scalar) and arg.type in _SCALARS:
            return _SCALARS[arg.type](arg.value)
        raise PlanError(f"a kernel on the CPU cannot take {type(arg).__name__} {arg}")
