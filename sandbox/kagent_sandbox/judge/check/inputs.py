"""Inputs from secret seeds, the reference's results on them, and torch's own errors.

Checks draw anew every time, or from a small pool of each case (`InputPolicy`). Timed executions
have inputs that their process has never seen: see `UnseenInputs`. No candidate learns which draw it
gets. Only messages carry anything from one evaluation to the next.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import random
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.data.build import ScalarSpec, TensorSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.device.cpu.facts import available_bytes
from kagent_sandbox.device.device_memory import (
    begin_request,
    lacks_memory,
    memory_use,
    total_bytes,
    tried_bytes,
)
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.errors import DeviceFull, KagentError, TaskError
from kagent_sandbox.judge.arena.placement import StaleValues
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.spot_checks import (
    SpotChecks,
    choose_rows,
    choose_spot_checks,
    spot_checks_at,
)
from kagent_sandbox.judge.check.tf32 import InTf32

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.reference import Reference
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.traits import InputPolicy

YARDSTICKS = 3
"""Draws of a check case on which torch's errors are known before a candidate's are held against
them."""
MANY_ELEMENTS = 1 << 22
"""Elements of a result from which on one draw shows torch's error: its worst element hardly
differs.
"""
STALE_SHARE = 1 / 32
"""Share of the device's memory that stale values of all cases may take together: larger ones are
made anew where another case comes, or another request.
"""
HOST_ROOM = 2.0
"""Bytes that must be available on the host for each that a reference had and asked for on the
device when that was full: it may ask for more.
"""


class NotAcceptable(TaskError):  # noqa: N818
    """The task's `accept` fails on a candidate's results, and not on the reference's."""


@dataclass
class InputSet:
    """One set of inputs of a case, on the judge's device, never shared with a launcher."""

    case: Case
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, object]
    seed: int | None = field(default=None, repr=False)
    number: int = field(default_factory=itertools.count().__next__)
    known_results: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)
    known_spot_checks: tuple[SpotChecks, ...] | None = field(default=None, repr=False)
    known_errors: tuple[numerics.Errors, ...] | None = field(default=None, repr=False)
    known_altered: tuple[InputSet, ...] | None = field(default=None, repr=False)
    is_altered: bool = False  # those of another draw but for one element

    @property
    def arguments(self) -> dict[str, object]:
        """Keyword arguments of the entry function."""
        return {**self.tensors, **self.scalars}

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs."""
        return sum(t.nbytes for t in self.tensors.values())


class UnseenInputs:
    """Draws of one case for the processes of one session, none of them twice.

    All are new, or they come from a stock that earlier and later processes use, too. Those share
    nothing with this one, not even memory (`session.Arenas`). If the stock has no draw that is new
    to this session, new ones are added to it.
    """

    def __init__(self, sampler: InputSampler, case: Case) -> None:
        self._sampler = sampler
        self._case = case
        self._seen: set[int] = set()
        self._queue: list[InputSet] = []

    def take(self, count: int) -> list[InputSet]:
        """Take `count` input sets.

        Raises:
            TaskError: `inputs` of the task fails or does not give what task.toml declares.
        """
        while len(self._queue) < count:
            known = {d.number for d in self._queue} | self._seen
            new = [d for d in self._sampler.stock(self._case) if d.number not in known]
            random.SystemRandom().shuffle(new)
            self._queue += new or self._sampler.add(self._case, count - len(self._queue))
        taken, self._queue = self._queue[:count], self._queue[count:]
        self._seen.update(d.number for d in taken)
        return taken


class InputSampler:
    """Source of draws for one task on one device."""

    def __init__(self, task: Task, device: torch.device, policy: InputPolicy) -> None:
        self.task = task
        self.device = device
        self.on_host = False  # whole references are computed there: see `compute_on_host`
        self._file = task.folder / "reference.py"  # that errors name
        self._pool = policy.pool
        self._tf32 = policy.tf32
        self._uses_tf32: dict[str, bool] = {}  # by the case's dtype, once it is known
        self._reference: Reference = task.reference()
        self._pools: dict[str, list[InputSet]] = {}
        self._yardsticks: dict[str, tuple[numerics.Errors, ...]] = {}
        self._random = random.SystemRandom()
        self._stock: OrderedDict[str, list[InputSet]] = OrderedDict()  # the case in use last
        self._stocked_bytes = 0
        self._stale: OrderedDict[str, StaleValues] = OrderedDict()  # the newest last
        self._most_stale_bytes = int(STALE_SHARE * total_bytes(device))
        self._eager_s: dict[str, float] = {}
        self.alterations: Counter[str] = Counter()  # turns of each argument (`altered_inputs`)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._most_stocked_bytes = int(policy.stock_share * memory)
        self._threads = ThreadPoolExecutor(policy.threads) if policy.threads else None

    @property
    def keeps_draws(self) -> bool:
        """Whether a check's inputs come from a pool."""
        return self._pool > 0

    def stock(self, case: Case) -> list[InputSet]:
        """Draws of a case that are kept for timing."""
        found = self._stock.setdefault(case.name, [])
        self._stock.move_to_end(case.name)
        return found

    def add(self, case: Case, count: int) -> list[InputSet]:
        """New draws of a case, kept as far as there is room: cases that have not been used for long
        make some, else they take the places of older ones.
        """
        if self._threads is None:
            return [self.fresh(case) for _ in range(count)]
        new = list(self._threads.map(self.fresh, [case] * count))
        stock = self.stock(case)
        stock += new
        self._stocked_bytes += sum(d.nbytes for d in new)
        while self._stocked_bytes > self._most_stocked_bytes:
            oldest = next(iter(self._stock))
            if oldest == case.name:
                dropped = [stock.pop(self._random.randrange(len(stock)))]
            else:
                dropped = self._stock.pop(oldest)
            self._stocked_bytes -= sum(d.nbytes for d in dropped)
        return new

    def typical_errors(self, case: Case) -> tuple[numerics.Errors, ...]:
        """Return torch's typical errors on a draw of the case, per result."""
        if case.name not in self._yardsticks:
            self.usual_errors(self.fresh(case), typical=True)
        return self._yardsticks[case.name]

    def release(self, input_set: InputSet) -> None:
        """Free a draw that has been compared, unless draws are kept: of a case of gigabytes the
        next one has no room beside it, and whoever has held it may hold it still.
        """
        if not self._pool and self._threads is None:
            input_set.tensors.clear()
            input_set.known_results = None

    def make_room(self) -> None:
        """Free stale values that are large: others work on the device next."""
        self._trim_stale(0)

    def _trim_stale(self, kept: int) -> None:
        """Free the oldest stale values while there are too many bytes of them, but not the newest
        `kept`.
        """
        while len(self._stale) > kept and (
            sum(r.nbytes for s in self._stale.values() for r in s.results) > self._most_stale_bytes
        ):
            self._stale.popitem(last=False)

    def stale(self, case: Case) -> StaleValues:
        """Return the stale values of a case; made once, but for large ones."""
        if case.name not in self._stale:
            outputs = self.call("eager", self.fresh(case))
            dtypes = [dtype_of(r.dtype) for r in build_case(self.task, case).compared]
            own = [o.to(d).contiguous() for o, d in zip(outputs, dtypes, strict=True)]
            self._stale[case.name] = StaleValues(
                tuple(_wrong(o).flatten().view(torch.uint8) for o in own),
                tuple(
                    numerics.typical_norm(o, r.row_dims)
                    for o, r in zip(own, self.task.compared, strict=True)
                ),
            )
            self._trim_stale(1)
        return self._stale[case.name]

    def eager_s(self, case: Case) -> float:
        """Return the seconds of one call of eager on the case; measured once."""
        if case.name not in self._eager_s:
            input_set = self.fresh(case)
            _wait_for(input_set.tensors.values())
            began = time.perf_counter()
            _wait_for(self.call("eager", input_set))
            self._eager_s[case.name] = time.perf_counter() - began
        return self._eager_s[case.name]

    @property
    def spots_are_torchs(self) -> bool:
        """Whether `spot_checks` are of torch's own results: whoever differs from these by more than
        it may err is held against the reference (`exact_spot_checks`).

        In float64 a convolution takes a GPU many times as long (benchmarks/draw_seconds.py), and
        every timed execution has a draw of its own. What asks a rule, or has only parts that count,
        needs the reference.
        """
        return (
            self._rows_alone is None
            and not self.task.accept
            and len(self.task.compared) == len(self.task.results)
            and not any(r.valid for r in self.task.compared)
        )

    def spot_checks(self, input_set: InputSet) -> tuple[SpotChecks, ...]:
        """Secret places of each result, and what the reference has there, or torch
        (`spots_are_torchs`); chosen once per draw.
        """
        if input_set.known_spot_checks is None:
            norms = self.stale(input_set.case).norms
            specs = build_case(self.task, input_set.case).compared
            widths = self._widths(specs)
            kept = input_set.known_results
            changed = self._changed_elements(input_set, specs, widths)
            counts = self._compared_rows(input_set, specs, widths)
            rows = tuple(
                choose_rows(n, self.device, c) for n, c in zip(counts, changed, strict=True)
            )
            found = self._reference_rows(input_set, rows, widths)
            input_set.known_results = kept  # whole arguments in float64, of every draw
            input_set.known_spot_checks = tuple(
                choose_spot_checks(r, f, dtype_of(s.dtype), n, None if c is None else c[r])
                for r, f, s, n, c in zip(rows, found, specs, norms, changed, strict=True)
            )
        return input_set.known_spot_checks

    def exact_spot_checks(
        self, input_set: InputSet, places: Sequence[torch.Tensor]
    ) -> list[SpotChecks]:
        """The reference at places of a draw that was released, perhaps.

        Args:
            input_set: The draw.
            places: Flat numbers of elements of each result, [n] int64.
        """
        specs = build_case(self.task, input_set.case).compared
        draw = self._drawn(input_set)
        full = draw.known_results or self._whole_reference(draw)  # not kept: whole, in float64
        return [
            spot_checks_at(at, f.reshape(-1, max(1, w)), dtype_of(s.dtype), n)
            for at, f, s, w, n in zip(
                places,
                full,
                specs,
                self._widths(specs),
                self.stale(input_set.case).norms,
                strict=True,
            )
        ]

    def _widths(self, specs: Sequence[TensorSpec]) -> list[int]:
        """Elements of a row of each result."""
        return [
            math.prod(s.shape[len(s.shape) - min(r.row_dims, len(s.shape)) :])
            if r.row_dims
            else math.prod(s.shape)
            for s, r in zip(specs, self.task.compared, strict=True)
        ]

    def _drawn(self, input_set: InputSet) -> InputSet:
        """A draw with its inputs, which are drawn again if it was released."""
        if not input_set.tensors and input_set.seed is not None:
            return self.fresh(input_set.case, input_set.seed)
        return input_set

    def _compared_rows(
        self, input_set: InputSet, specs: Sequence[TensorSpec], widths: Sequence[int]
    ) -> list[int]:
        """Number of rows of each result that are compared."""
        counts = [math.prod(s.shape) // max(1, w) for s, w in zip(specs, widths, strict=True)]
        if any(r.valid for r in self.task.compared):
            (parts,) = self.valid_parts(input_set, self.expected(input_set))
            counts = [p.numel() // max(1, w) for p, w in zip(parts, widths, strict=True)]
        return counts

    def _changed_elements(
        self, input_set: InputSet, specs: Sequence[TensorSpec], widths: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """Elements of written arguments that the reference changes, bool [rows, width]; None for
        results. Most of a cache stays as it is: places anywhere would seldom see a write.
        """
        count = len(self.task.results)
        found: list[torch.Tensor | None] = [None] * count
        if len(specs) == count:
            return found
        if input_set.known_results is None:
            input_set.known_results = self._whole_reference(input_set)
        for spec, width, ref in zip(
            specs[count:], widths[count:], input_set.known_results[count:], strict=True
        ):
            before = input_set.tensors[spec.name]
            after = ref.to(before.device, before.dtype)
            same = (after == before) | (after.isnan() & before.isnan())
            found.append(~same.reshape(-1, max(1, width)))
        return found

    def _reference_rows(
        self, input_set: InputSet, rows: Sequence[torch.Tensor], widths: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the reference's values in some rows of each result, [rows, width]: by the task's
        own `reference_rows` where it has one, else from all of its results; or torch's
        (`spots_are_torchs`).
        """
        by_rows = self._rows_alone
        if by_rows is None:
            full: Sequence[torch.Tensor] | None = input_set.known_results
            if full is None and self.spots_are_torchs:
                full = self.call("eager", input_set)
            elif full is None:
                full = self._whole_reference(input_set)
            full = [
                f.float() if f.dtype.itemsize == 1 and f.is_floating_point() else f for f in full
            ]
            return [
                f.reshape(-1, max(1, w))[r.to(f.device)].to(r.device)
                for f, w, r in zip(full, widths, rows, strict=True)
            ]
        try:
            with torch.no_grad():
                found = by_rows(tuple(rows), **input_set.arguments)
        except (Exception, SystemExit) as e:  # see fresh
            raise self._fault("reference_rows", input_set.case, e) from e
        found = self._tensors("reference_rows", input_set.case, found)
        shapes = [tuple(f.shape) for f in found]
        expected = [(len(r), w) for r, w in zip(rows, widths, strict=True)]
        if shapes != expected:
            text = f"returns shapes {shapes}, expected {expected}"
            raise self._error("reference_rows", input_set.case, text)
        return list(found)

    def draw(self, case: Case, *, other_than: InputSet | None = None) -> InputSet:
        """Inputs of a case: one of the case's pool, or fresh ones where there is none.

        Raises:
            TaskError: `inputs` of the task fails or does not give what task.toml declares.
        """
        if not self._pool:
            return self.fresh(case)
        pool = self._pools.setdefault(case.name, [])
        if len(pool) < self._pool:
            pool.append(self.fresh(case))
            return pool[-1]
        return self._random.choice([d for d in pool if d is not other_than])

    def expected(self, input_set: InputSet) -> tuple[torch.Tensor, ...]:
        """The reference's results, float64 or float32, computed once per draw; on the host where
        the device's memory was not enough.
        """
        if input_set.known_results is None:
            input_set.known_results = self._whole_reference(input_set)
        return input_set.known_results

    def compute_on_host(self, error: Exception) -> bool:
        """Compute whole references on the host from now on, where their results stay, if the device
        lacks memory for them: in float64 a reference keeps several times what the operation does,
        and in a race the results of every baseline lie beside it.

        Args:
            error: What failed.

        Returns:
            Whether that may help: not if the error is another one, if they are computed there
            already, if every timed draw needs one, which would take hours, or if the host has no
            room.
        """
        if self.on_host or not lacks_memory(error) or self._needs_one_for_every_draw:
            return False
        use = memory_use(self.device)
        needed = tried_bytes(str(error)) + (0 if use is None else use.peak)
        self.on_host = HOST_ROOM * needed < available_bytes()
        if self.on_host:
            begin_request(self.device)  # what it had until now is not needed there again
        return self.on_host

    @property
    def _needs_one_for_every_draw(self) -> bool:
        """Whether spot checks may need a whole reference; with a rule, a candidate decides it."""
        valid = any(r.valid for r in self.task.compared)
        by_rows = self._rows_alone is not None and not valid and not self.task.accept
        return not (self.spots_are_torchs or by_rows)

    @property
    def _rows_alone(self) -> Callable[..., object] | None:
        """The task's `reference_rows`, unless arguments that are written need a whole reference."""
        by_rows: Callable[..., object] | None = getattr(self._reference, "reference_rows", None)
        return by_rows if len(self.task.compared) == len(self.task.results) else None

    def _whole_reference(self, input_set: InputSet) -> tuple[torch.Tensor, ...]:
        """The reference's results, on the host after `compute_on_host`.

        Raises:
            TaskError: See `call`.
            DeviceFull: The host cannot compute it in the device's place.
        """
        if not self.on_host:
            return self.call("reference", input_set)
        there = {n: t.cpu() for n, t in input_set.tensors.items()}
        try:
            return self.call("reference", replace(input_set, tensors=there))
        except TaskError as e:
            raise DeviceFull(f"the device lacks memory for it, and on the host: {e}") from None

    def accepted(
        self, input_set: InputSet, outputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Results with the reference's values where others are as right, by the task's own rule.

        The rule is asked on the CPU and about copies: a value that leads it astray, such as an
        index out of range, ends no device's context, and what is compared is what it has seen.

        Args:
            input_set: The inputs.
            outputs: Results on them, in their own dtypes.

        Returns:
            The results, and where the rule has accepted other values, bool of the result's shape;
            None where it accepted none.

        Raises:
            NotAcceptable: The rule fails on these results.
            TaskError: It fails on the reference's own, or returns something else than masks.
        """
        nowhere: list[torch.Tensor | None] = [None] * len(outputs)
        if not self.task.accept:
            return list(outputs), nowhere
        expected = [
            e.to(o.device, o.dtype) for e, o in zip(self.expected(input_set), outputs, strict=True)
        ]
        own = [o.clone() for o in outputs]
        if all(map(torch.equal, own, expected)):
            return own, nowhere
        try:
            masks = self._ask_accept(input_set, own)
        except TaskError as e:
            self._ask_accept(input_set, expected)  # or it is the rule that is wrong
            raise NotAcceptable(str(e)) from None
        found = [torch.where(m, e, o) for m, e, o in zip(masks, expected, own, strict=True)]
        return found, list(masks)

    def _ask_accept(
        self, input_set: InputSet, results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Apply the task's rule to results. Returns a mask of each on its own device."""
        arguments = {
            n: v.cpu().clone() if isinstance(v, torch.Tensor) else v
            for n, v in input_set.arguments.items()
        }
        expected = tuple(t.cpu().clone() for t in self.expected(input_set))
        case = input_set.case
        try:
            with torch.no_grad():
                said = self._reference.accept(
                    tuple(t.cpu().clone() for t in results), expected, **arguments
                )
        except (Exception, SystemExit) as e:  # see fresh
            raise self._fault("accept", case, e) from e
        answers = tuple(said) if isinstance(said, tuple | list) else (said,)
        masks = [torch.as_tensor(a) if isinstance(a, bool) else a for a in answers]
        fine = len(masks) == len(results) and all(
            isinstance(m, torch.Tensor) and m.dtype == torch.bool and m.shape in ((), r.shape)
            for m, r in zip(masks, results, strict=True)
        )
        if not fine:
            text = "expected True, False or a bool tensor of its shape for each result"
            raise self._error("accept", case, text)
        return [m.to(r.device).expand(r.shape) for m, r in zip(masks, results, strict=True)]

    def valid_parts(
        self, input_set: InputSet, *results: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Several calls' results without the rows that nobody has to compute: of a result with
        `valid`, those beyond the reference's own number.
        """
        names = [r.name for r in self.task.compared]
        rows = [
            None if r.valid is None else int(self.expected(input_set)[names.index(r.valid)])
            for r in self.task.compared
        ]
        return [
            [t if n is None else t[:n] for t, n in zip(each, rows, strict=True)] for each in results
        ]

    def torch_errors(self, input_set: InputSet) -> tuple[numerics.Errors, ...]:
        """Return torch's own errors on such inputs, per result: the largest on this draw and on the
        case's first few.

        On one draw alone its error is chance where few elements decide, as in a row whose terms
        cancel: an honest kernel that rounds otherwise can err several times as much.
        """
        return _most([self.usual_errors(input_set), self._errors(input_set)])

    def errors_there(self, input_set: InputSet) -> tuple[numerics.Errors, ...]:
        """Return `torch_errors` of a draw that was released, perhaps, or is kept for others. Of
        what is drawn and computed for that, only the errors stay.
        """
        if input_set.known_errors is None:
            draw = self._drawn(input_set)
            kept = draw.known_results
            input_set.known_errors = self._errors(draw)
            draw.known_results = kept
        return self.torch_errors(input_set)

    def usual_errors(
        self, input_set: InputSet, *, typical: bool = False
    ) -> tuple[numerics.Errors, ...]:
        """Return torch's largest errors on the first few draws of the case, per result; on this one
        alone if it is the first and `typical`: eager on gigabytes costs more than the candidate.
        They are at most those of `torch_errors`, and known without asking torch again.
        """
        name = input_set.case.name
        if name not in self._yardsticks:
            others = [] if typical else self._others(input_set)
            self._yardsticks[name] = _most([*map(self._errors, [input_set, *others])])
        return self._yardsticks[name]

    def _errors(self, input_set: InputSet) -> tuple[numerics.Errors, ...]:
        """Return torch's errors on one draw, computed once."""
        if input_set.known_errors is None:
            found = [self._measured(input_set, self.call("eager", input_set))]
            dtype = input_set.case.dtype
            if self._tf32 and self._uses_tf32.get(dtype, True):
                in_tf32 = self.errors_in_tf32(input_set)
                self._uses_tf32[dtype] = in_tf32 is not None
                if in_tf32 is not None:
                    found.append(in_tf32)
            input_set.known_errors = _most(found)
        return input_set.known_errors

    def errors_in_tf32(self, input_set: InputSet) -> tuple[numerics.Errors, ...] | None:
        """Return the errors that torch has in TF32; None where it would compute nothing in it."""
        with InTf32() as mode:
            outputs = self.call("eager", input_set)
        return self._measured(input_set, outputs) if mode.used else None

    def _measured(
        self, input_set: InputSet, outputs: Sequence[torch.Tensor]
    ) -> tuple[numerics.Errors, ...]:
        """Return the errors of results of eager."""
        outputs, expected = self.valid_parts(
            input_set, self.accepted(input_set, outputs)[0], self.expected(input_set)
        )
        return tuple(
            numerics.measure_errors(out, ref, result.row_dims)
            for out, ref, result in zip(outputs, expected, self.task.compared, strict=True)
        )

    def _others(self, input_set: InputSet) -> list[InputSet]:
        """Further draws of the case, unless one says enough."""
        results = build_case(self.task, input_set.case).compared
        if max(math.prod(r.shape) for r in results) >= MANY_ELEMENTS:
            return []
        if not self._pool:
            return [self.fresh(input_set.case) for _ in range(YARDSTICKS - 1)]
        pool = self._pools.setdefault(input_set.case.name, [])
        pool += [self.fresh(input_set.case) for _ in range(self._pool - len(pool))]
        return [d for d in pool if d is not input_set][: YARDSTICKS - 1]

    def fresh(self, case: Case, seed: int | None = None) -> InputSet:
        """Inputs of a case that nothing has seen before, or those of a seed.

        Raises:
            TaskError: `inputs` of the task fails or does not give what task.toml declares.
        """
        seed = secrets.randbits(63) if seed is None else seed
        generator = torch.Generator(device=self.device).manual_seed(seed)
        try:
            tensors: object = self._reference.inputs(case, generator, self.device)
        # A user's reference.py: one clear line instead of its traceback, and no silent end.
        except (Exception, SystemExit) as e:
            raise self._fault("inputs", case, e) from e
        if not isinstance(tensors, dict):
            text = f"returns {type(tensors).__name__}, expected a dict of tensors by argument"
            raise self._error("inputs", case, text)
        spec = build_case(self.task, case)
        for argument in spec.arguments:
            if isinstance(argument, TensorSpec):
                self._check_input(case, argument, tensors.get(argument.name))
        odd = tensors.keys() - {a.name for a in spec.arguments if isinstance(a, TensorSpec)}
        if odd:
            text = f"returns {sorted(map(str, odd))} too: task.toml declares no such tensors"
            raise self._error("inputs", case, text)
        scalars = {a.name: a.given for a in spec.arguments if isinstance(a, ScalarSpec)}
        return InputSet(case, tensors, scalars, seed)

    def _check_input(self, case: Case, spec: TensorSpec, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise self._error("inputs", case, f"lacks the tensor {spec.name}")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype_of(spec.dtype):
            raise self._error(
                "inputs",
                case,
                f"{spec.name} is {tensor.dtype} {list(tensor.shape)}, "
                f"task.toml says {spec.dtype} {list(spec.shape)}",
            )
        if tensor.device.type != self.device.type:
            text = f"{spec.name} lies on {tensor.device}, expected {self.device}: use `device`"
            raise self._error("inputs", case, text)

    def _fault(self, function: str, case: Case, error: BaseException) -> KagentError:
        """The error for a function's exception: the task's fault, unless memory was not enough."""
        fault = self._error(function, case, f"{type(error).__name__}: {error}")
        return DeviceFull(str(fault)) if lacks_memory(error) else fault

    def _error(self, function: str, case: Case, text: str) -> TaskError:
        """One line that names the file, the function and the case."""
        line = " ".join(f"{self._file}: {function}: case {case.name}: {text}".split())
        return TaskError(line)

    def _tensors(self, function: str, case: Case, value: object) -> tuple[torch.Tensor, ...]:
        """Results of a function as a tuple of tensors."""
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        for each in values:
            if not isinstance(each, torch.Tensor):
                text = f"returns {type(each).__name__}, expected a tensor for each result"
                raise self._error(function, case, text)
        return values

    def call(
        self,
        which: str,
        input_set: InputSet,
        wrap: Callable[[Callable[..., object]], Callable[..., object]] = lambda f: f,
    ) -> tuple[torch.Tensor, ...]:
        """The results of `reference` or `eager`, and what is written. Arguments that may be changed
        are copies. `wrap` gives what is called in the place of the function.

        Raises:
            TaskError: It fails, or does not return what task.toml declares.
        """
        case = input_set.case
        arguments = input_set.arguments
        copies = {name: input_set.tensors[name].clone() for name in self.task.mutates}
        arguments.update(copies)
        function = wrap(getattr(self._reference, which))
        try:
            with torch.no_grad():
                value = function(**arguments)
        except (Exception, SystemExit) as e:  # see fresh
            raise self._fault(which, case, e) from e
        spec = build_case(self.task, case)
        if which == "reference" or spec.results:
            results = self._tensors(which, case, value)
        elif value is None:
            results = ()
        else:
            text = f"returns {type(value).__name__}: the task has no results but what it writes"
            raise self._error(which, case, text)
        if which != "reference":
            results = (*results, *(copies[a.name] for a in spec.written))
        shapes = [r.shape for r in spec.compared]
        got = [tuple(t.shape) for t in results]
        if got != shapes:
            raise self._error(which, case, f"returns shapes {got}, task.toml says {shapes}")
        return tuple(t.detach() for t in results)


def _wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until they are computed, on any device."""
    for tensor in tensors:
        tensor.flatten()[:1].cpu()


def _wrong(result: torch.Tensor) -> torch.Tensor:
    """Values like a result's that are none of its: zeros and what is not finite are replaced."""
    if result.dtype == torch.bool:
        return ~result
    if not result.dtype.is_floating_point:
        return result + 1
    if result.dtype.itemsize == 1:  # torch computes nothing in 8 bits
        return _wrong(result.float()).to(result.dtype)
    norm = numerics.typical_norm(result.reshape(1, -1), 1) if result.numel() else 0.0
    usual = norm / math.sqrt(max(1, result.numel())) or 1.0
    there = torch.isfinite(result) & (result != 0)
    return torch.where(there, result, usual).mul_(1.25)


def _most(errors: Sequence[tuple[numerics.Errors, ...]]) -> tuple[numerics.Errors, ...]:
    """Return the largest errors of each result."""
    return tuple(functools.reduce(operator.or_, each) for each in zip(*errors, strict=True))
