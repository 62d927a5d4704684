"""Shared memory of a simulated program: barriers, buffers, and what moves between it and others.

Everything asynchronous happens as late as it may. A TMA copy poisons its buffer when it is issued,
and lands when the schedule says so. A product of warp groups reads its operands in shared memory
when it is waited for. A TMA store reads its buffer when `store_wait` asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kagent_sandbox.judge.gluon.schedule import NotSimulated, ProgramRun, SimulatedFault
from kagent_sandbox.judge.gluon.values import RegisterValue, poison, raw, sizes, triton_type


class Barrier:
    """An mbarrier. `phases` counts those that have ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0  # arrivals of a phase; 0: not initialised
        self.pending = 0
        self.missing_bytes = 0
        self.phases = 0

    def init(self, count: int) -> None:
        """Begin its first phase."""
        self.count = self.pending = int(count)
        self.missing_bytes = self.phases = 0

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        """Arrivals, and bytes that are to come before the phase can end.

        Raises:
            SimulatedFault: It was not initialised, or more arrive than it counts.
        """
        self.used()
        if count > self.pending:
            raise SimulatedFault(
                f"{self.name} gets {count} arrivals, and its phase {self.phases} waits for "
                f"{self.pending} of {self.count}"
            )
        self.missing_bytes += expected_bytes
        self.pending -= count
        self._step()

    def complete(self, landed_bytes: int) -> None:
        """Bytes have landed."""
        self.missing_bytes -= landed_bytes
        self._step()

    def passes(self, parity: int) -> bool:
        """Whether a wait for the end of the phase of this parity goes on."""
        return self.phases & 1 != parity & 1

    def used(self) -> None:
        """Check that it was initialised."""
        if not self.count:
            raise SimulatedFault(f"{self.name} is used and was not initialised")

    def _step(self) -> None:
        if self.pending == 0 and self.missing_bytes == 0:
            self.phases += 1
            self.pending = self.count


class Barriers:
    """Barriers in shared memory: an array of them, or one."""

    def __init__(self, barriers: Sequence[Barrier]) -> None:
        self.barriers = barriers

    def index(self, i: Any) -> Barriers:
        """One of them."""
        i = int(i)
        if not 0 <= i < len(self.barriers):
            raise SimulatedFault(f"barrier {i} of {len(self.barriers)}")
        return Barriers(self.barriers[i : i + 1])

    @property
    def one(self) -> Barrier:
        """The only one."""
        if len(self.barriers) != 1:
            raise NotSimulated(f"{len(self.barriers)} barriers at once")
        return self.barriers[0]


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, data: torch.Tensor, layout: Any) -> None:
        self.data, self.layout = data, layout

    dtype = property(lambda self: triton_type(self.data.dtype))
    shape = property(lambda self: list(self.data.shape))
    rank = property(lambda self: self.data.dim())
    numel = property(lambda self: self.data.numel())
    type = property(lambda self: SimpleNamespace(shape=self.shape, element_ty=self.dtype))

    def index(self, i: Any) -> Shared:
        """One of the buffers along the first dimension."""
        i = int(i)
        if not 0 <= i < self.data.shape[0]:
            raise SimulatedFault(f"buffer {i} of {self.data.shape[0]} in shared memory")
        return Shared(self.data[i], self.layout)

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        """A part along one dimension."""
        return Shared(self.data.narrow(int(dim), int(start), int(length)), self.layout)

    def reshape(self, shape: Any) -> Shared:
        """Return the elements in another shape."""
        return Shared(self.data.view(sizes(shape)), self.layout)

    def permute(self, order: Any) -> Shared:
        """Return the elements with another order of dimensions."""
        return Shared(self.data.permute(sizes(order)), self.layout)

    def overlaps(self, other: Shared) -> bool:
        """Whether both have memory in common."""
        (a, a_bytes), (b, b_bytes) = ((d.data_ptr(), d.nbytes) for d in (self.data, other.data))
        return a < b + b_bytes and b < a + a_bytes

    def load(self, layout: Any = None) -> RegisterValue:  # noqa: ARG002 - Gluon's signature
        """Return the present elements."""
        return RegisterValue(self.data.clone())

    def store(self, value: RegisterValue) -> None:
        """Write all of it."""
        self.data.copy_(value.data)


class Descriptor:
    """A tensor map of a tensor in global memory, and the block that a copy takes."""

    def __init__(self, host: Any) -> None:
        base = host.base
        self._tensor = base.as_strided(sizes(host.shape), sizes(host.strides))
        self.block_shape = sizes(host.block_shape)
        self.layout = host.layout
        self.dtype = triton_type(base.dtype)
        self.shape, self.strides = sizes(host.shape), sizes(host.strides)
        self._padding = float("nan") if host.padding == "nan" else 0
        nbytes = math.prod(self.block_shape) * base.element_size()
        self.nbytes_per_cta = nbytes
        self.block_type = SimpleNamespace(
            nbytes=nbytes, shape=self.block_shape, element_ty=self.dtype
        )

    def read(self, at: Sequence[int], to: torch.Tensor) -> None:
        """Copy a block to a buffer; what lies outside is padding."""
        part, where = self._window(at)
        to = to.view(self.block_shape)
        to.fill_(self._padding)
        to[where] = part

    def write(self, at: Sequence[int], source: torch.Tensor) -> None:
        """Copy a buffer to a block; what lies outside is dropped."""
        part, where = self._window(at)
        part.copy_(source.view(self.block_shape)[where])

    def _window(self, at: Sequence[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        inside, where = [], []
        for first, block, size in zip(at, self.block_shape, self.shape, strict=True):
            start, stop = max(first, 0), min(first + block, size)
            inside.append(slice(start, max(start, stop)))
            where.append(slice(start - first, max(start, stop) - first))
        return self._tensor[tuple(inside)], tuple(where)


class Product:
    """A product of a warp group that may not have been computed yet."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self.done: RegisterValue | None = None

    def finish(self) -> None:
        """Read the operands, and compute."""
        self.done = RegisterValue(self._compute())

    def __getattr__(self, name: str) -> Any:
        raise SimulatedFault(
            f"the result of a warpgroup_mma is used ({name}) before warpgroup_mma_wait has it"
        )

    def __add__(self, _: object) -> Any:
        return self.__getattr__("in arithmetic")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = __add__


# What kernels call: `schedule` is the running program's.


def multiply(
    schedule: ProgramRun,
    a: Any,
    b: Shared,
    acc: Any,
    *,
    use_acc: Any = True,
    is_async: bool = False,
) -> Any:
    """`warpgroup_mma`: a [M, K] in shared memory or registers, b [K, N], acc [M, N]."""
    for operand in (a, b):
        if isinstance(operand, Shared) and any(map(operand.overlaps, schedule.filling())):
            raise SimulatedFault(
                "a warpgroup_mma is issued on shared memory that a TMA copy is still filling: wait "
                "for its barrier first"
            )
    left = (
        a.data.clone() if isinstance(a, RegisterValue) else a.data
    )  # registers are read as they are now
    adds = bool(use_acc)

    def compute() -> torch.Tensor:
        if isinstance(acc, Product):
            assert acc.done is not None, "products end in the order of their issue"
            before = acc.done.data
        else:
            before = acc.data
        product = left.to(torch.float32) @ b.data.to(torch.float32)
        return (before + product if adds else product).to(before.dtype)

    product = Product(compute)
    schedule.running.products.append(product)
    return product if is_async else wait_for_products(schedule, 0, [product])


def wait_for_products(schedule: ProgramRun, outstanding: Any = 0, deps: Any = None) -> Any:
    """`warpgroup_mma_wait`: all but the last so many are computed. Others get ahead of it first:
    they may overwrite operands as soon as the program lets them.
    """
    schedule.pause(last=True)
    products = schedule.running.products
    while len(products) > int(outstanding):
        products.pop(0).finish()
    done = [d.done if isinstance(d, Product) and d.done is not None else d for d in deps or ()]
    return done[0] if len(done) == 1 else tuple(done)


def copy_in(
    schedule: ProgramRun,
    descriptor: Descriptor,
    at: Sequence[Any],
    barrier: Barriers,
    to: Shared,
    pred: Any = True,
    multicast: Any = False,
) -> None:
    """`tma.async_copy_global_to_shared`."""
    if multicast:
        raise NotSimulated("multicast copies")
    if not pred:
        return
    barrier.one.used()
    place = [int(a) for a in at]

    def land() -> None:
        descriptor.read(place, to.data)
        barrier.one.complete(descriptor.nbytes_per_cta)

    poison(to.data)  # whoever still reads it sees that
    schedule.later(land, to)
    schedule.pause()


def copy_out(
    schedule: ProgramRun, descriptor: Descriptor, at: Sequence[Any], source: Shared
) -> None:
    """`tma.async_copy_shared_to_global`."""
    place = [int(a) for a in at]
    schedule.running.stores.append(lambda: descriptor.write(place, source.data))


def wait_for_stores(schedule: ProgramRun, pendings: Any = 0) -> None:
    """`tma.store_wait`: all but the last so many have read their buffers."""
    schedule.pause(last=True)
    stores = schedule.running.stores
    while len(stores) > int(pendings):
        stores.pop(0)()


def wait_for_barrier(
    schedule: ProgramRun, barriers: Barriers, parity: Any, pred: Any = True, deps: Any = ()
) -> None:
    """`mbarrier.wait`."""
    del deps  # what must not be moved behind it: nothing is moved here
    if not pred:
        return
    barrier, wanted = barriers.one, int(parity)
    barrier.used()
    schedule.wait(
        lambda: barrier.passes(wanted),
        lambda: (
            f"parity {wanted & 1} of {barrier.name} ({barrier.phases} phases have ended, "
            f"{barrier.pending} of {barrier.count} arrivals and {barrier.missing_bytes} bytes are "
            "missing)"
        ),
    )


def arrive(
    schedule: ProgramRun, barriers: Barriers, count: Any = 1, pred: Any = True, nbytes: Any = 0
) -> None:
    """`mbarrier.arrive` and `mbarrier.expect`."""
    if pred:
        barriers.one.arrive(int(count), int(raw(nbytes)))
        schedule.pause()
