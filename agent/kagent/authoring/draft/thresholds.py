"""Numbers with which an operation compares or clamps, and inputs at which these matter.

A usual draw is never exactly at such a number, and may be on one side of it alone. So a kernel
could have another number there, or `>` for `>=`, or know one branch only. Comparisons are seen
where the reference runs in simpler operations: softplus and hardshrink come down to one, hardswish
to two clamps. Those of whole numbers are not looked at. Between an input and what is compared there
may be anything: the reference is computed with an argument that is one number everywhere, which is
varied until what is compared reaches the threshold. Where several inputs make what is compared, it
is equal where they have few numbers. What does not vary with the inputs may be a table, of limits
for each column or of boundaries: each of its elements is a threshold.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check.inputs import InputSet
from kagent_sandbox.judge.check.omissions import name_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from kagent.authoring.draft.draft import COARSE, DraftCase, TaskDraft
from kagent.authoring.draft.trial import Trials, are_cases
from kagent.authoring.proofs import SHAPED

_COMPARING = frozenset(
    {"lt", "le", "gt", "ge", "eq", "ne", "clamp", "clamp_min", "clamp_max", "hardtanh"}
    | {"maximum", "minimum", "fmax", "fmin"}
)
"""Operations that compare their elements with others at the same place, or with numbers."""
_SEARCHING = frozenset({"bucketize", "searchsorted"})
"""Operations that compare each element with all of a table."""
_HALVES, _WHOLE = (-1.5, -0.5, 0.5, 1.5, 2.5), (-2.0, -1.0, 0.0, 1.0, 2.0)
_ROUNDING = {"round": _HALVES, "floor": _WHOLE, "ceil": _WHOLE, "trunc": _WHOLE, "frac": _WHOLE}
"""Operations that jump at numbers of their own, with the least of these."""
_DIVIDING = frozenset({"remainder", "fmod", "floor_divide", "div"})
"""Operations that jump at multiples of a divisor, `div` where it rounds."""
_JUMPING = frozenset({*_ROUNDING, *_DIVIDING, "_to_copy"})
"""Operations of all these kinds: usual draws are on both sides of their jumps, and never at one."""
_DISTANCES = (0, 1, 8)
"""Least distances of draws from a threshold, in machine epsilons. Closer by, rounding may decide:
0.1 is another number in float32 than in float64, and what is compared may be rounded before."""
_DIGITS = 9  # those of float32
_EXPONENTS = (*range(-10, 11), *range(14, 64, 4), 128, 256, 508)
"""Powers of 4 between which thresholds are looked for, as far as an argument's dtype goes. Usual
ones are closer together."""
_PROBES = (0.0, 1.0, 4.0, -4.0)
_STEPS = 64
_MOST = 256
"""Thresholds of an argument: as many as codes of 8 bits have. An unrolled loop compares with the
same number many times. Of a larger table every so many elements are taken."""
_MOST_TRIES = 40
"""Drafts that are tried to find thresholds at which rounding decides, for each distance: where
these are many, all the others are tried once, further away."""
_LEAST = 2.0**-125
"""Least magnitude of a draw, but for 0: the reciprocals of smaller ones are infinite in float32."""
_EQUAL = 2.0**-23
"""Share of a number by which elements that are that number may differ: rounding."""
_LEAST_SHARE = 1e-3
"""Least share of elements that are a number where more than chance has brought them there."""

_NOTE = f"an argument is compared with many numbers: inputs are around {_MOST} of them"

_Key = tuple[str, float, int]


@dataclass(frozen=True, slots=True)
class _Compared:
    """Finite elements that were compared with a number: the least, the largest, and the share of
    them that are that number.
    """

    low: float
    high: float
    share: float


_Seen = Callable[[float], Mapping[_Key, _Compared]]
"""Gives what is compared where an argument is one number everywhere."""


class _Watch(TorchDispatchMode):
    """Notes what is made of the inputs and compared with numbers, by operation and number, and by
    how many of both came before.
    """

    def __init__(self, inputs: InputSet) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[_Key, _Compared] = {}
        self.together = False  # whether two that vary were compared, or one with a table's columns
        self.left_out = 0  # elements of the largest table that are not looked at
        self._before: Counter[tuple[str, float]] = Counter()
        self._varies: Any = WeakIdKeyDictionary(dict.fromkeys(inputs.tensors.values(), True))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note a comparison, and run the operation."""
        given, name = [*args, *(kwargs or {}).values()], name_of(func)
        varies = any(t in self._varies for t in _tensors(given)) and name not in SHAPED
        if varies:
            self._note(name.removesuffix("_"), given)
        out = func(*args, **(kwargs or {}))
        if varies:
            self._varies.update(dict.fromkeys(_tensors(out), True))
        return out

    def _note(self, name: str, given: Sequence[Any]) -> None:
        jumps = _jumps(name, given)
        compares = name in _COMPARING or name in _SEARCHING or jumps
        operands = [v for v in given if isinstance(v, torch.Tensor) and v in self._varies]
        if not compares or not operands or not operands[0].is_floating_point():
            return
        if len(operands) > 1:
            self.together = True
            return
        (operand,) = operands
        if jumps:
            self._note_numbers(name, operand, jumps)
            return
        for other in (v for v in given if v is not operand):
            table = other if isinstance(other, torch.Tensor) and other.numel() > 1 else None
            if table is None or name in _SEARCHING or bool((table == table.flatten()[0]).all()):
                self._note_numbers(name, operand, self._numbers(other))
            elif not table.is_complex():
                self.together = True
                shape = (operand == table).shape
                self._note_places(name, operand.expand(shape), table.expand(shape))

    def _numbers(self, value: Any) -> Sequence[float]:
        """A number, or those of a tensor, each once; none for all else."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return [float(value)]
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return []
        return self._some(_distinct(value)).tolist()

    def _some(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers in ascending order; of too many every so many, with the least and largest."""
        numbers = numbers[numbers.isfinite()]
        self.left_out = max(self.left_out, len(numbers) - _MOST)
        if len(numbers) <= _MOST:
            return numbers
        return numbers[torch.linspace(0, len(numbers) - 1, _MOST).round().long()]

    def _note_numbers(self, name: str, operand: torch.Tensor, numbers: Sequence[float]) -> None:
        """Note that all elements are compared with each of some numbers."""
        elements = operand[operand.isfinite()].double().sort().values
        limits = torch.tensor([n for n in numbers if math.isfinite(n)], dtype=torch.float64)
        room = _EQUAL * limits.abs()
        ends = torch.searchsorted(elements, limits + room, right=True)
        shares = (ends - torch.searchsorted(elements, limits - room)) / max(1, len(elements))
        for number, share in zip(limits.tolist(), shares.tolist(), strict=True):
            key = self._key(name, number)
            if len(elements):
                self.seen[key] = _Compared(float(elements[0]), float(elements[-1]), share)

    def _note_places(self, name: str, operand: torch.Tensor, table: torch.Tensor) -> None:
        """Note that each element is compared with that of a table at its place."""
        finite = operand.isfinite() & table.isfinite()
        limits, order = table[finite].double().sort()
        if not len(limits):
            return
        elements = operand[finite].double()[order]
        equal = ((elements - limits).abs() <= _EQUAL * limits.abs()).double()
        numbers = _distinct(limits)
        counts = torch.searchsorted(limits, numbers, right=True).diff(prepend=torch.zeros(1)).long()
        found = {
            number: _Compared(*of_each)
            for number, *of_each in zip(
                numbers.tolist(),
                torch.segment_reduce(elements, "min", lengths=counts).tolist(),
                torch.segment_reduce(elements, "max", lengths=counts).tolist(),
                torch.segment_reduce(equal, "mean", lengths=counts).tolist(),
                strict=True,
            )
        }
        for number in self._some(_distinct(table)).tolist():
            key = self._key(name, number)
            if number in found:
                self.seen[key] = found[number]

    def _key(self, name: str, number: float) -> _Key:
        self._before[name, number] += 1
        return name, number, self._before[name, number] - 1


def _jumps(name: str, given: Sequence[Any]) -> Sequence[float]:
    """Numbers at which an operation that rounds what it is given jumps; none for others."""
    if name in _ROUNDING:
        return _ROUNDING[name] if len(given) == 1 else ()  # not where it keeps some digits
    if name == "_to_copy":
        to = next((v for v in given if isinstance(v, torch.dtype)), torch.bool)
        return () if to.is_floating_point or to.is_complex or to == torch.bool else _WHOLE
    divides = name in _DIVIDING and (name != "div" or any(isinstance(v, str) for v in given))
    divisor = given[1] if divides and len(given) > 1 else None
    if isinstance(divisor, torch.Tensor) and not divisor.dim() and not divisor.is_complex():
        divisor = float(divisor)
    return [n * divisor for n in _WHOLE] if isinstance(divisor, int | float) else ()


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor in ascending order, float64."""
    numbers: torch.Tensor = tensor.double().unique()  # type: ignore[no-untyped-call]
    return numbers


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def find_thresholds(
    draft: TaskDraft, trials: Trials, cases: Sequence[DraftCase], dtypes: Iterable[str]
) -> TaskDraft:
    """The draft with thresholds at which cases draw as well, as far as others do not reach them,
    and with `coarse` where several inputs make what is compared.

    Args:
        draft: The draft, without either.
        trials: Its trials.
        cases: Its cases, the first of which is tried around thresholds.
        dtypes: Dtypes of cases on any device.
    """
    dtypes, scales = sorted(dtypes), sorted({c.scale for c in cases})
    plans = [replace(cases[0], dtype=d, scale=s) for d in dtypes for s in scales]
    drawn = trials.drawn(cases[0])
    watched = _watched(trials, drawn)
    missing = {}
    if watched.seen:  # else no case compares
        further = (_watched(trials, trials.drawn(c)).seen for c in cases[1:])
        missing = _missing([watched.seen, *further])
    if draft.varied and (watched.together or (missing and len(draft.varied) > 1)):
        tried = draft.with_(coarse=True)
        draft = tried if are_cases(tried, [replace(p, inputs=COARSE) for p in plans]) else draft
    if not missing:
        return draft
    jumps = {k: v for k, v in missing.items() if k[0] in _JUMPING}
    branches = {k: v for k, v in missing.items() if k not in jumps}
    found, more = _found(draft, trials, drawn, branches)
    if more or watched.left_out:
        draft = draft.with_(notes=(*draft.notes, _NOTE))
    exact, others = _by_exactness(found, dtypes)
    for among in (exact, others):
        waiting = among
        for distance in _DISTANCES:
            draft, waiting = _with_most(draft, waiting, distance, plans, itertools.count())
    exact, _ = _by_exactness(_found(draft, trials, drawn, jumps)[0], dtypes)
    exact = [p for p in exact if p[1] not in draft.thresholds.get(p[0], {})]
    return _with_most(draft, exact, 0, plans, itertools.count())[0]


def _by_exactness(
    found: Sequence[tuple[str, float]], dtypes: Iterable[str]
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Arguments with numbers that all dtypes have, and the others, where rounding may decide."""
    exact = set(found)
    for dtype in dtypes:
        numbers = torch.tensor([n for _, n in found], dtype=torch.float64)
        same = numbers.to(getattr(torch, dtype)).double() == numbers
        exact &= {p for p, is_same in zip(found, same.tolist(), strict=True) if is_same}
    return [p for p in found if p in exact], [p for p in found if p not in exact]


def _with_most(
    draft: TaskDraft,
    found: Sequence[tuple[str, float]],
    distance: int,
    plans: Sequence[DraftCase],
    tries: Iterator[int],
) -> tuple[TaskDraft, list[tuple[str, float]]]:
    """The draft with those thresholds, by halves, with which its cases can be computed at a
    distance; and the others.
    """
    if not found or next(tries) >= _MOST_TRIES:
        return draft, list(found)
    tried = draft
    for name, number in found:
        own = {**tried.thresholds.get(name, {}), number: distance}
        tried = tried.with_(thresholds={**tried.thresholds, name: own})
    if are_cases(tried, [replace(p, inputs=k) for k in tried.kinds_around for p in plans]):
        return tried, []
    if len(found) == 1:
        return draft, list(found)
    waiting = []
    for half in (found[: len(found) // 2], found[len(found) // 2 :]):
        draft, left = _with_most(draft, half, distance, plans, tries)
        waiting += left
    return draft, waiting


def _watched(trials: Trials, inputs: InputSet) -> _Watch:
    """Comparisons of the reference; none where torch cannot decompose it."""
    watch = _Watch(inputs)
    try:
        trials.watch(watch, inputs)
    except TaskError:
        return _Watch(inputs)
    return watch


def _missing(cases: Iterable[Mapping[_Key, _Compared]]) -> dict[_Key, bool]:
    """The comparisons of which cases lack something: one side (true), or the number itself."""
    seen: dict[_Key, list[_Compared]] = {}
    for case in cases:
        for key, compared in case.items():
            seen.setdefault(key, []).append(compared)
    missing = {}
    for key, found in seen.items():
        one_sided = not any(c.low < key[1] for c in found) or not any(
            c.high > key[1] for c in found
        )
        if one_sided or not any(c.share >= _LEAST_SHARE for c in found):
            missing[key] = one_sided
    return dict(sorted(missing.items(), key=lambda m: not m[1]))  # those matter most


def _found(
    draft: TaskDraft, trials: Trials, drawn: InputSet, missing: Mapping[_Key, bool]
) -> tuple[list[tuple[str, float]], bool]:
    """Arguments with numbers that, everywhere, bring what is compared to the threshold; and whether
    there are more of them.
    """
    found, more = [], False
    for example in draft.varied:
        own: dict[float, None] = {}
        seen = functools.cache(functools.partial(_seen_of, trials, drawn, example.name))
        for root in _roots_of(seen, missing, _grid(example.dtype)) if missing else ():
            if len(own) == _MOST and root not in own:
                more = True
                break
            if root == 0 or abs(root) >= _LEAST:
                own[root] = None
        found += [(example.name, root) for root in own]
    return found, more


def _grid(dtype: torch.dtype) -> list[float]:
    """Numbers from a dtype's least to its largest, in ascending order."""
    largest = torch.finfo(dtype).max
    above = [*(4.0**k for k in _EXPONENTS if 4.0**k < largest), largest]
    return [*(-x for x in reversed(above)), 0.0, *above]


def _roots_of(seen: _Seen, missing: Mapping[_Key, bool], grid: Sequence[float]) -> Iterator[float]:
    """Numbers of an argument that bring what is compared to the thresholds."""
    for key, one_sided in missing.items():
        compared = [c for p in _PROBES if (c := seen(p).get(key)) is not None]
        if len(set(compared)) < 2:
            continue  # it does not depend on this argument
        alike = all(c.low == c.high for c in compared)
        # Of several that are compared, none is at the number; but both sides can be reached.
        for end in ("low",) if alike else ("low", "high") if one_sided else ():
            yield from _roots(functools.partial(_off, seen, key, end), grid)


def _seen_of(trials: Trials, drawn: InputSet, name: str, value: float) -> Mapping[_Key, _Compared]:
    """Comparisons where an argument is one number everywhere."""
    filled = torch.full_like(drawn.tensors[name], value, dtype=torch.float64)
    return _watched(trials, replace(drawn, tensors={**drawn.tensors, name: filled})).seen


def _off(seen: _Seen, key: _Key, end: str, value: float) -> float:
    """Distance of the least or largest of what is compared above the threshold; NaN if unknown."""
    compared = seen(value).get(key)
    return math.nan if compared is None else float(getattr(compared, end)) - key[1]


def _roots(function: Callable[[float], float], grid: Sequence[float]) -> Iterator[float]:
    """Places at which a function is 0, and is not beside, or has one sign on each side."""
    known = [(x, function(x)) for x in grid]
    known = [(-math.inf, math.nan), *known, (math.inf, math.nan)]  # it may be 0 at the ends
    for (_, before), (x, at_x), (_, after) in zip(known, known[1:], known[2:], strict=False):
        if at_x == 0 and before != 0 and after != 0:
            yield x
    for (a, at_a), (b, at_b) in itertools.pairwise(known):
        if at_a * at_b < 0:
            yield _between(function, a, at_a, b, at_b)


def _between(
    function: Callable[[float], float], a: float, at_a: float, b: float, at_b: float
) -> float:
    """A root between two places: by secants, which find that of a straight line at once, and by
    halves in turn.
    """
    for step in range(_STEPS):
        x = a + (b - a) * at_a / (at_a - at_b) if step % 2 == 0 else (a + b) / 2
        x = float(f"{x:.{_DIGITS}g}")
        if not a < x < b:
            continue
        at_x = function(x)
        if at_x == 0:
            return x
        if (at_x < 0) == (at_a < 0):
            a, at_a = x, at_x
        else:
            b, at_b = x, at_x
    return a if abs(at_a) <= abs(at_b) else b
