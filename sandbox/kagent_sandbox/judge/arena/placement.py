"""A plan's place in an arena: writes inputs and stale values, reads results, notices tampering.

Before every run, results and workspaces hold stale values: plausible and wrong
(`kagent_sandbox.judge.check.inputs`). An element that a kernel does not write is therefore wrong,
and nothing tells the kernel that it is tested. Gaps between an input's rows are NaN. Guard bands
are random bytes from 0x70 to 0x7F: huge numbers in every floating type (some NaN in float16), so
that a read past a buffer's end shows in the result. Every band has other bytes, so that a kernel is
noticed which reads past the end of one buffer and writes the same past the end of another.
"""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.data.plan import ITEMSIZE, Buffer, Plan, PlanError, TensorRef
from kagent_sandbox.device.plan_ops import strided_view

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kagent_sandbox.data.build import TensorSpec
    from kagent_sandbox.device.interface import Arena
    from kagent_sandbox.judge.arena.layout import Layout

_GAP = 0xFF  # NaN in every floating type, -1 in integers
_FILLED_AT_ONCE = 16 << 20  # bytes: few copies, and little memory beside what they fill
_LEAST_GUARD_BYTE, _MOST_GUARD_BYTE = 0x70, 0x7F
_PATTERN_BYTES = 1 << 16  # of which a band has a part, from anywhere


@dataclass(frozen=True)
class StaleValues:
    """Values that memory holds before an execution: plausible, and wrong.

    They are torch's results on another draw, off by a quarter. So they are wrong also where results
    do not depend on inputs (a row of one column). They are there before every execution: a kernel
    cannot tell when it is tested.

    Attributes:
        results: The bytes of each result, uint8, in the result's declared dtype.
        norms: Root mean square norm of each result's rows.
    """

    results: tuple[torch.Tensor, ...]
    norms: tuple[float, ...]

    @property
    def any(self) -> torch.Tensor:
        """The largest result's bytes: for workspaces."""
        return max(self.results, key=torch.Tensor.numel)


class PlanPlacement:
    """One placement of one plan. `key` is its name for the launcher, `owner` the contender.

    Raises:
        PlanError: The plan's inputs are not the case's.
    """

    def __init__(
        self,
        key: str,
        plan: Plan,
        layout: Layout,
        arena: Arena,
        inputs: Collection[TensorSpec],
        mutates: Collection[str],
        owner: str = "",
    ) -> None:
        self.key = key
        self.owner = owner
        self.plan = plan
        self.layout = layout
        self._arena = arena
        self._mutates = mutates
        self._written: Mapping[str, torch.Tensor] | None = None
        self._images: dict[int, torch.Tensor] = {}  # of inputs with gaps before or in them
        specs = {s.name: s for s in inputs}
        self._inputs: list[tuple[Buffer, torch.Tensor, bool]] = []
        self._refs: dict[int, TensorRef] = {}
        for buffer in plan.buffers:
            if buffer.kind == "input":
                ref = self._refs[buffer.id] = _input_ref(buffer, specs.get(buffer.name or ""))
                view = arena.view(ref, layout.offsets[buffer.id])
                whole = view.is_contiguous() and ref.offset == 0
                self._inputs.append((buffer, view, whole))
        guards = [arena.bytes(*g) for g in layout.guards if g[1] > g[0]]
        self._guards = [(g, _pattern(g)) for g in guards]
        results = {layout.offsets[t.buffer]: i for i, t in enumerate(plan.outputs)}
        self._scratch = [
            (arena.bytes(*s), results.get(s[0])) for s in layout.scratch if s[1] > s[0]
        ]

    @property
    def input_places(self) -> tuple[int, ...]:
        """Return the start of each input in the arena."""
        return tuple(self.layout.offsets[b.id] for b, _, _ in self._inputs)

    def write(self, inputs: Mapping[str, torch.Tensor], stale: StaleValues) -> None:
        """Put inputs (by name), stale values and guard bands in place. The launcher must be
        idle.
        """
        self.write_inputs(inputs)
        for scratch, result in self._scratch:
            _fill(scratch, stale.any if result is None else stale.results[result])
        for guard, pattern in self._guards:
            guard.copy_(pattern)

    def write_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Put only the inputs in place."""
        self._written = inputs
        self._images.clear()
        for buffer, view, contiguous in self._inputs:
            if not contiguous:
                self._bytes(buffer).fill_(_GAP)
            assert buffer.name is not None
            view.copy_(inputs[buffer.name])
            if not contiguous:
                self._images[buffer.id] = self._bytes(buffer).clone()

    def words(self, result: int, index: torch.Tensor) -> torch.Tensor:
        """Return the places of a result's elements in the arena, in units of its dtype's size.

        Args:
            result: Its number.
            index: Flat numbers of elements, [n] int64.
        """
        ref = self.plan.outputs[result]
        first = self.layout.offsets[ref.buffer] // ITEMSIZE[ref.dtype] + ref.offset
        if ref.strides == contiguous_strides(ref.shape):
            return index + first
        at = torch.full_like(index, first)
        for n, stride in zip(reversed(ref.shape), reversed(ref.strides), strict=True):
            at += index % n * stride
            index = index // n
        return at

    def outputs(self) -> list[torch.Tensor]:
        """Views of the results, valid until the placement is written again."""
        return [self._arena.view(t, self.layout.offsets[t.buffer]) for t in self.plan.outputs]

    def tampering(self) -> str | None:
        """Describe a forbidden change since `write`: of a guard band or an input. None if there is
        none.
        """
        assert self._written is not None, "write first"
        outside = (
            "memory outside of the plan's buffers was written (past the end of one, or before)"
        )
        checks = [(outside, (guard != pattern).any()) for guard, pattern in self._guards]
        for buffer, view, contiguous in self._inputs:
            assert buffer.name is not None
            if buffer.name in self._mutates:
                if not contiguous:  # the memory between its rows is somebody else's
                    text = f"memory between the rows of argument {buffer.name} was written"
                    checks.append((text, (self._bytes(buffer) != self._image_with(buffer)).any()))
                continue
            if contiguous:
                original = bit_view(self._written[buffer.name])
                changed = (bit_view(view) != original).any()
            else:
                changed = (self._bytes(buffer) != self._images[buffer.id]).any()
            checks.append((f"argument {buffer.name} was changed", changed))
        if not checks or not bool(torch.stack([c for _, c in checks]).any()):
            return None
        return next(text for text, changed in checks if bool(changed))

    def _image_with(self, buffer: Buffer) -> torch.Tensor:
        """The bytes that were written for an input with gaps, but its elements as they are now."""
        image = self._images[buffer.id].clone()
        ref = self._refs[buffer.id]
        strided_view(image, ref, 0).copy_(self._arena.view(ref, self.layout.offsets[buffer.id]))
        return image

    def _bytes(self, buffer: Buffer) -> torch.Tensor:
        at = self.layout.offsets[buffer.id]
        return self._arena.bytes(at, at + buffer.nbytes)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides)) if shape else ()


def _fill(memory: torch.Tensor, stale: torch.Tensor) -> None:
    """Copy stale values (uint8, 1-D) to memory as often as it takes.

    Few of them are first repeated in the judge's own memory: the loss of a batch is one number, and
    the workspace may take gigabytes.
    """
    size = stale.numel()
    if size == 0:
        memory.fill_(_GAP)
        return
    times = min(memory.numel(), _FILLED_AT_ONCE) // size
    if times > 1:
        stale = stale.repeat(times)
        size = stale.numel()
    for start in range(0, memory.numel(), size):
        part = memory[start : start + size]
        part.copy_(stale[: part.numel()])


@functools.cache
def _patterns(device: torch.device, nbytes: int) -> torch.Tensor:
    """Random bytes for guard bands, in the judge's own memory."""
    generator = torch.Generator(device=device).manual_seed(secrets.randbits(63))
    return torch.randint(
        _LEAST_GUARD_BYTE,
        _MOST_GUARD_BYTE + 1,
        (nbytes,),
        dtype=torch.uint8,
        device=device,
        generator=generator,
    )


def _pattern(guard: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a guard band: neighbours get different parts."""
    size = guard.numel()
    start = secrets.randbelow(_PATTERN_BYTES)
    # Bands have sizes of all kinds: few lengths of patterns are kept.
    whole = _patterns(guard.device, _PATTERN_BYTES + (1 << size.bit_length()))
    return whole[start : start + size]


def bit_view(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of its width: NaNs and signed zeros compare exactly."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(integer)


def _input_ref(buffer: Buffer, spec: TensorSpec | None) -> TensorRef:
    if spec is None:
        raise PlanError(f"the plan has an input {buffer.name!r} that the task does not")
    ref = spec.ref(buffer.id)
    if ref.extent_bytes[1] > buffer.nbytes:
        raise PlanError(f"the plan's input {buffer.name} has {buffer.nbytes} bytes: too few")
    return ref
