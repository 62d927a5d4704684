"""Operations of a reference that cannot change a result, shown by algebra and not by values.

A value says nothing: a mask that no input reaches looks as one that has no use. So the reference
runs in a dispatch mode that knows of tensors only what operations guarantee:

- whole numbers: the bits that may be set. A byte shifted right by 4 has four, and `& 0xF` keeps
  them;
- matrices: the diagonal below or above which all is 0, since `triu` or `tril` drew or made it so. A
  product of two upper triangular matrices is one, and `triu` keeps it, for finite numbers;
- limits: what `clamp` cuts off and nothing else reads is cut off again by a narrower `clamp` after
  a multiplication or addition of a number, which keep the order: in floating point, which overflows
  to infinity. Whole numbers and 8-bit floats do not;
- zeros: what a constant of zeros is made into, while that is 0, sums with it, and its products, of
  finite numbers: a state that begins at 0 is multiplied before anything is added;
- reads: what is read by products with such zeros alone, or for its shape, decides nothing, nor does
  what that is made of. Nothing is known of the reads of a reference that writes in place;
- norms of which mean and deviation alone are read, as by a gradient: the result itself, its weight
  and its bias decide neither;
- numbers that one operation of torch asks for, and that no other one reads, as `one_hot` does to
  refuse others.

All else is unknown, and what is written in place makes everything unknown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.known_results import storage_of, written_parameters
from kagent_sandbox.judge.check.omissions import (
    ZEROS,
    Omission,
    Watching,
    instead,
    name_of,
    omission_at,
    omissions_of,
)
from kagent_sandbox.judge.task_check import TaskCheck, check_kinds
from torch.utils.weak import WeakIdKeyDictionary

from kagent.authoring.task_toml import task_toml

_MOST_WORK = 5e8
"""Bytes or operations of the largest case that a proof looks at."""
_SHIFTS = frozenset({"__rshift__", "bitwise_right_shift"})
_ANDS = frozenset({"__and__", "bitwise_and"})
_PRODUCTS = frozenset({"mm", "bmm"})
_CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh", "relu"})
_NORMS = frozenset({"native_layer_norm", "native_group_norm"})
"""Operations whose first result alone depends on `weight` and `bias`."""
_ASKED = "_local_scalar_dense"
"""The operation that gives Python, or torch itself, a tensor's number."""
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_FULL = {"full": 1, "full_like": 1, "new_full": 2}
"""Operations that fill a new tensor, and the place of the number among their arguments."""
SHAPED = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"new_empty", "new_zeros", "new_ones", "new_full"}
)
"""Operations that read a tensor's shape alone."""
_TRIANGLES = {"triu": "upper", "tril": "lower"}
_SIDES = {"upper": "below", "lower": "above"}
_ELEMENTWISE = frozenset({"neg", "mul", "div", "clone", "_to_copy", "detach", "alias"})
"""Operations that leave 0 as it is, if their second operand is a finite number."""
_SAME_ELEMENTS = frozenset(
    {"view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "slice", "select", "transpose"}
    | {"permute", "t", "clone", "_to_copy", "detach", "alias", "repeat", "index", "index_select"}
)
"""Operations whose results have elements of their first operand alone."""
_KEEP_ORDER = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes of results in which too large a number is infinite: it neither wraps round nor is NaN."""


@dataclass(frozen=True, slots=True)
class Proof:
    """An operation that changes nothing.

    Attributes:
        operation: As the check of the task names it, and `without_effect` of task.toml.
        reason: Why.
    """

    operation: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Facts:
    """Knowledge of a tensor.

    Attributes:
        bits: Bits that may be set in its elements, none of which is negative.
        upper: Largest diagonal below which all is 0, as `triu` counts them.
        lower: Smallest diagonal above which all is 0.
        zero: Whether all elements are 0, whatever the inputs.
    """

    bits: int | None = None
    upper: int | None = None
    lower: int | None = None
    zero: bool = False


_NOTHING = _Facts()


@dataclass(frozen=True, slots=True)
class _Ran:
    """An operation that ran: numbers of the tensors that it read and made, and its omissions."""

    read: set[int]
    made: list[int]
    omissions: list[Omission]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The last clamp before a tensor, with its limits as numbers on the way have moved them."""

    words: str
    low: float
    high: float

    def after(self, name: str, args: Sequence[Any]) -> _Cut | None:
        """The same behind an operation that keeps the order; None behind others."""
        if name in ("clone", "_to_copy"):
            return self
        number = args[1] if len(args) == 2 else None
        if not isinstance(number, int | float) or not math.isfinite(number):
            return None
        if name in ("mul", "div") and number > 0:
            factor = number if name == "mul" else 1 / number
            return replace(self, low=self.low * factor, high=self.high * factor)
        if name in ("add", "sub"):
            step = number if name == "add" else -number
            return replace(self, low=self.low + step, high=self.high + step)
        return None

    def within(self, limits: tuple[float, float]) -> bool:
        """Whether other limits are as narrow or narrower."""
        return self.low <= limits[0] and limits[1] <= self.high


def _found(known: Any, value: object) -> Any:
    """An entry for a tensor; None where there is none."""
    return known[value] if isinstance(value, torch.Tensor) and value in known else None


def _limits(name: str, args: Sequence[Any]) -> tuple[float, float] | None:
    """The numbers between which an operation leaves its input; None for other operations."""
    if name not in _CLAMPS:
        return None
    if name == "relu":
        return 0.0, math.inf
    low, high = (-1.0, 1.0) if name == "hardtanh" else (-math.inf, math.inf)
    given = [None, args[1]] if name == "clamp_max" else [*args[1:3], None, None][:2]
    given = [end if g is None else g for g, end in zip(given, (low, high), strict=True)]
    if not all(isinstance(g, int | float) for g in given):
        return None
    return float(given[0]), float(given[1])


class _Prover(Watching):  # type: ignore[no-untyped-call]
    """Knows facts of tensors, and finds operations that these make idle. A context manager."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._facts: Any = WeakIdKeyDictionary()  # _Facts by tensor
        self._cuts: Any = WeakIdKeyDictionary()  # of each tensor the _Cut of the clamp before it
        self.proven: dict[str, str] = {}
        self.open: set[str] = set()  # of the same words, and not proven there
        self._made: Any = WeakIdKeyDictionary()  # of each tensor its operation left out
        self._unread: dict[int, tuple[torch.Tensor, list[str]]] = {}  # of norms, by memory
        self._numbers: Any = WeakIdKeyDictionary()  # of tensors, in the order in which they came
        self._next = itertools.count()
        self._asked: set[int] = set()
        self._ran: list[_Ran] | None = []  # None once something is written in place
        self.needed: set[str] = set()  # words of what decides a result, and of what does not
        self.unneeded: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note what is known of its result."""
        kwargs = kwargs or {}
        name = name_of(func)
        if name != _ASKED:
            self.read([*args, *kwargs.values()])
        given = [self._of(a) for a in args]
        out = func(*args, **kwargs)
        frame = self.frame()
        if name in _NORMS and frame is not None:
            ways = (instead("input"), "no weight", "no bias")
            norms = [omission_at(frame, func, way).words for way in ways]
            self._unread[storage_of(out[0])] = out[0], norms
            self.proven |= dict.fromkeys(norms, "its mean and deviation alone are read")
        if frame is not None:
            self._ask(omission_at(frame, func, ZEROS), args, out)
        words = omission_at(frame, func, instead("self")).words if frame is not None else ""
        self._cut(name, [*args, *kwargs.values()], out, words)
        if written_parameters(func):
            self._facts, self._ran = WeakIdKeyDictionary(), None
            return out
        read = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        zero = isinstance(out, torch.Tensor) and _is_zero(func, args, [*map(self._of, read)], out)
        if name in SHAPED:
            read = []
        elif zero and name == "mul":
            read = [t for t in read if self._of(t).zero]
        omissions = [] if frame is None else omissions_of(frame, func, args, kwargs, out)
        self._note(read, out, omissions)
        if not isinstance(out, torch.Tensor):
            return out
        if not args or not isinstance(args[0], torch.Tensor):
            self._facts[out] = _Facts(zero=zero)
            return out
        triangle = _triangle(name, args, given, out)
        facts = _Facts(_bits(name, args, given, out), *triangle, zero=zero)
        if facts != _NOTHING:
            self._facts[out] = facts
        summed = name in ("add", "mul") and len(args) > 1 and torch.is_tensor(args[1])
        if frame is not None and summed:
            other = omission_at(frame, func, instead("other")).words
            self._see(other, _reason_of_other(name, given, kwargs, zero=zero))
        reason = _reason(name, args, given, zero=zero)
        if words and (reason or name not in _CLAMPS):
            self._see(words, reason)
        return out

    def _see(self, words: str, reason: str) -> None:
        """Note whether an operation changes nothing there, and why."""
        if reason:
            self.proven.setdefault(words, reason)
        else:
            self.open.add(words)

    def read(self, values: object) -> None:
        """Note what an operation is given, or the reference returns."""
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) in self._unread:
                self.open.update(self._unread[storage_of(tensor)][1])
            if (made := _found(self._made, tensor)) is not None:
                self.open.add(made.words)

    def begin(self) -> None:
        """Forget what was read and written where inputs are drawn."""
        self._ran, self._asked = [], set()

    def finish(self, results: object) -> None:
        """Note what the reference returns, and what it computed without need."""
        self.read(results)
        returned = (t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))
        live = self._asked.union(map(self._number, returned))
        for ran in reversed(self._ran or []):
            needed = not live.isdisjoint(ran.made)
            live |= ran.read if needed else set()
            first = ran.made[0] in live
            for each in ran.omissions:
                # All but those that leave out an operand change the first result alone.
                read = needed if each.how.startswith("no ") else first
                (self.needed if read else self.unneeded).add(each.words)

    def _note(self, read: Iterable[torch.Tensor], out: Any, omissions: list[Omission]) -> None:
        """Note what an operation reads and makes."""
        numbers = set(map(self._number, read))
        made = [self._number(t) for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not made:  # Python goes on with a number of it
            self._asked |= numbers
        elif self._ran is not None:
            self._ran.append(_Ran(numbers, made, omissions))

    def _number(self, tensor: torch.Tensor) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = next(self._next)  # of none that is gone
        return int(self._numbers[tensor])

    def _ask(self, here: Omission, args: Sequence[Any], out: Any) -> None:
        """Note where a tensor is made, and that the same call asks for its number."""
        made = _found(self._made, args[0]) if args and here.operation == _ASKED else None
        if made is not None and made.call_id == here.call_id:
            self.proven.setdefault(made.words, "torch asks for it, and no operation reads it")
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._made[tensor] = here

    def _cut(self, name: str, args: Sequence[Any], out: Any, words: str) -> None:
        """Follow what a clamp has cut off."""
        given = [c for a in pytree.tree_leaves(args) if (c := _found(self._cuts, a)) is not None]
        cut = given[0] if len(given) == 1 and given[0] is _found(self._cuts, args[0]) else None
        limits = _limits(name, args)
        ordered = isinstance(out, torch.Tensor) and out.dtype in _KEEP_ORDER
        after = cut.after(name, args) if cut is not None and ordered else None
        if cut is not None and limits is not None and cut.within(limits):
            self.proven.setdefault(cut.words, "all that it cuts off is cut off again afterwards")
        elif after is None:
            self.open.update(c.words for c in given)
        if limits is not None and words:
            self._cuts[out] = _Cut(words, *limits)
        elif after is not None:
            self._cuts[out] = after

    def _of(self, value: object) -> _Facts:
        if not isinstance(value, torch.Tensor):
            return _NOTHING
        known: _Facts = _found(self._facts, value) or _NOTHING
        if known.bits is None and value.dtype in _UNSIGNED:
            known = replace(known, bits=_UNSIGNED[value.dtype])
        return known


_UNSIGNED = {
    torch.bool: 1,
    torch.uint8: 0xFF,
    torch.uint16: 0xFFFF,
    torch.uint32: 0xFFFFFFFF,
}


def _bits(name: str, args: Sequence[Any], given: Sequence[_Facts], out: torch.Tensor) -> int | None:
    """Bits that may be set in a result."""
    bits = given[0].bits
    if bits is None or out.dtype.is_floating_point or out.dtype == torch.bool:
        return None
    number = args[1] if len(args) > 1 and type(args[1]) is int else None
    if name in _SHIFTS and number is not None and 0 <= number < 64:
        return bits >> number
    if name in _ANDS and number is not None:
        return bits & number if number >= 0 else None
    if name in _ANDS and len(given) > 1 and given[1].bits is not None:
        return bits & given[1].bits
    fits = bits <= torch.iinfo(out.dtype).max
    joined = any(isinstance(a, torch.dtype) for a in args)  # `view`: of bytes that are neighbours
    return bits if name in _SAME_ELEMENTS and fits and not joined else None


def _triangle(
    name: str, args: Sequence[Any], given: Sequence[_Facts], out: torch.Tensor
) -> tuple[int | None, int | None]:
    """The diagonals below and above which a result is 0."""
    first = given[0]
    upper, lower = first.upper, first.lower
    if name in _TRIANGLES:
        number = args[1] if len(args) > 1 else 0
        if name == "triu":
            return (number if upper is None else max(upper, number)), lower
        return upper, (number if lower is None else min(lower, number))
    if name in _PRODUCTS:
        second = given[1]
        return (
            None if upper is None or second.upper is None else upper + second.upper,
            None if lower is None or second.lower is None else lower + second.lower,
        )
    if _swaps_last(name, args, out.dim()):
        return (None if lower is None else -lower), (None if upper is None else -upper)
    finite = all(isinstance(a, int | float) and math.isfinite(a) for a in args[1:])
    by_zero = name == "div" and args[1] == 0
    return (upper, lower) if name in _ELEMENTWISE and finite and not by_zero else (None, None)


def _swaps_last(name: str, args: Sequence[Any], dims: int) -> bool:
    """Whether an operation transposes matrices."""
    if name == "transpose":
        return {d % max(1, dims) for d in args[1:3]} == {dims - 1, dims - 2}
    if name == "permute":
        return list(args[1]) == [*range(dims - 2), dims - 1, dims - 2]
    return name == "t" and dims == 2


def _is_zero(func: Any, args: Sequence[Any], given: Sequence[_Facts], out: torch.Tensor) -> bool:
    """Whether a result is 0 whatever the inputs: a constant, or made of such alone. Its values say
    whether it still is 0, and none is -0, of which another operation may make another number.
    """
    name = name_of(func)
    if name in _ZEROS:
        return True
    if name in _FULL:
        return bool(args[_FULL[name]] == 0)
    known = bool(given) and (any if name == "mul" else all)(f.zero for f in given)
    return known and not (out.any() or (out.is_floating_point() and out.signbit().any()))


def _reason(name: str, args: Sequence[Any], given: Sequence[_Facts], *, zero: bool) -> str:
    """The reason why an operation leaves its first operand as it is; empty if none is known."""
    first = given[0]
    if first.zero and zero:
        return "it is given 0, and gives 0"
    if name in ("add", "sub") and len(given) > 1 and given[1].zero:
        return "what is added or subtracted is 0"
    number = args[1] if len(args) > 1 else 0
    if name in _ANDS and type(number) is int and number >= 0 and first.bits is not None:
        if not first.bits & ~number:
            return f"only the bits of {first.bits:#x} can be set before"
        return ""
    if name not in _TRIANGLES or type(number) is not int:
        return ""
    kind = _TRIANGLES[name]
    known = first.upper if name == "triu" else first.lower
    if known is None or (known < number if name == "triu" else known > number):
        return ""
    return f"what it is given is {kind} triangular already: all {_SIDES[kind]} is 0"


def _reason_of_other(
    name: str, given: Sequence[_Facts], kwargs: dict[str, Any], *, zero: bool
) -> str:
    """The reason why a sum or product leaves its second operand as it is; empty if unknown."""
    if name == "mul":
        return "it is 0, and so is the product" if given[1].zero and zero else ""
    return "what is added to it is 0" if given[0].zero and kwargs.get("alpha", 1) == 1 else ""


def prove_idle(folder: Path) -> list[Proof]:
    """Find the operations of a task's reference that cannot change a result.

    They are looked for in the check cases with usual inputs, as far as these are computed at once:
    sizes and flags may decide what an operation does, so that it has to be proven in each. The
    check of the task holds them against all cases.

    Raises:
        TaskError: The reference fails.
    """
    task = load_task(folder)
    sampler = InputSampler(task, torch.device("cpu"), InputPolicy(pool=1))
    cases = [c for c in (*task.cpu.check, *task.gpu.check) if c.inputs == "normal"]
    work = [max(task.min_bytes(c), task.flop_count(c)) for c in cases]
    most = max(_MOST_WORK, min(work, default=0))
    proven: dict[str, str] = {}
    refuted, needed, unneeded = set[str](), set[str](), set[str]()
    for case in (c for c, w in zip(cases, work, strict=True) if w <= most):
        with _Prover(task.folder / "reference.py") as prover:
            inputs = sampler.fresh(case, 1)
            prover.begin()
            results = sampler.call("reference", inputs)
        prover.finish(results)
        proven |= prover.proven
        refuted |= prover.open
        needed |= prover.needed
        unneeded |= prover.unneeded
    proofs = {w: r for w, r in proven.items() if w not in refuted}
    unread = dict.fromkeys(sorted(unneeded - needed), "no result depends on it")
    return [Proof(w, r) for w, r in (unread | proofs).items()]


def prove_holes(folder: Path, find_checks: Callable[[], Iterable[TaskCheck]]) -> list[Proof]:
    """Find the operations that the check of a task calls holes, and that cannot change a result.

    Args:
        folder: Of the task.
        find_checks: Gives what the check finds. It is called only where something is proven: a
            check takes far longer than the proofs.

    Raises:
        TaskError: The reference fails, or the check finds a fault.
    """
    proofs = prove_idle(folder)
    holes = [h for c in find_checks() for h in c.holes] if proofs else []
    return [p for p in proofs if any(p.operation in h for h in holes)]


def declare_idle(folder: Path, data: dict[str, Any]) -> None:
    """Write a task.toml anew with what `prove_holes` finds, if that is anything.

    Nothing is declared in a task with a fault: its next check names the fault.

    Args:
        folder: Of the task, both files written.
        data: The contents of task.toml.

    Raises:
        TaskError: The reference fails.
    """

    def find_checks() -> list[TaskCheck]:
        try:
            return check_kinds(load_task(folder))
        except TaskError:
            return []

    found = prove_holes(folder, find_checks)
    if found:
        whole = {"name": data["name"], "without_effect": [asdict(p) for p in found], **data}
        (folder / "task.toml").write_text(task_toml(whole), encoding="utf-8")
