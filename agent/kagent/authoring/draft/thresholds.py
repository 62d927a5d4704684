"""Numbers with which an operation compares or clamps, and inputs at which these matter.

A usual draw is never exactly at such a number, and may be on one side of it alone. So a kernel
could have another number there, or `>` for `>=`, or know one branch only. Comparisons are seen
where the reference runs in simpler operations: softplus and hardshrink come down to one, hardswish
to two clamps. Those of whole numbers are not looked at. Between an input and what is compared there
may be anything: the reference is computed with an argument that is one number everywhere, which is
varied until what is compared reaches the threshold. Where several inputs make what is compared, it
is equal where they have few numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
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

from kagent.authoring.draft.draft import COARSE, THRESHOLDS, DraftCase, TaskDraft
from kagent.authoring.draft.trial import Trials, written
from kagent.authoring.proofs import SHAPED

_COMPARING = frozenset(
    {"lt", "le", "gt", "ge", "eq", "ne", "clamp", "clamp_min", "clamp_max", "hardtanh"}
    | {"maximum", "minimum", "fmax", "fmin"}
)
"""Operations that compare their elements with others, or with numbers."""
_DISTANCES = (0, 1, 8)
"""Least distances of draws from a threshold, in machine epsilons. Closer by, rounding may decide:
0.1 is another number in float32 than in float64, and what is compared may be rounded before."""
_GRID = (*(-(4.0**k) for k in range(10, -11, -1)), 0.0, *(4.0**k for k in range(-10, 11)))
_PROBES = (0.0, 1.0, 4.0, -4.0)
_STEPS = 64
_MOST = 8
"""Thresholds of an argument: an unrolled loop compares with the same number many times."""
_LEAST = 1e-18
"""Least magnitude of a draw, but for 0: the squares of smaller ones are no normal float32."""
_DIGITS = 9  # those of float32
_EQUAL = 2.0**-23
"""Share of a number by which elements that are that number may differ: rounding."""
_LEAST_SHARE = 1e-3
"""Least share of elements that are a number where more than chance has brought them there."""

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
        self.together = False  # whether two that vary were compared
        self._varies: Any = WeakIdKeyDictionary(dict.fromkeys(inputs.tensors.values(), True))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note a comparison, and run the operation."""
        given, name = [*args, *(kwargs or {}).values()], name_of(func)
        varies = any(t in self._varies for t in _tensors(given)) and name not in SHAPED
        if varies and name.removesuffix("_") in _COMPARING:
            self._note(name, given)
        out = func(*args, **(kwargs or {}))
        if varies:
            self._varies.update(dict.fromkeys(_tensors(out), True))
        return out

    def _note(self, name: str, given: Sequence[Any]) -> None:
        operands = [v for v in given if isinstance(v, torch.Tensor) and v in self._varies]
        if not operands or not operands[0].is_floating_point():
            return
        if len(operands) > 1:
            self.together = True
            return
        elements = operands[0][operands[0].isfinite()].double()
        for number in map(_number, (v for v in given if v is not operands[0])):
            if not math.isfinite(number) or not elements.numel():
                continue
            which = next(i for i in itertools.count() if (name, number, i) not in self.seen)
            equal = (elements - number).abs() <= _EQUAL * abs(number)
            found = map(float, (*elements.aminmax(), equal.double().mean()))
            self.seen[name, number, which] = _Compared(*found)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _number(value: Any) -> float:
    """A number, or the one that a tensor has everywhere; NaN for all else."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, torch.Tensor) or value.is_complex() or not value.numel():
        return math.nan
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) else math.nan


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
    first = replace(cases[0], inputs=THRESHOLDS)
    plans = [
        replace(first, dtype=d, scale=s) for d in dtypes for s in sorted({c.scale for c in cases})
    ]
    drawn = trials.drawn(cases[0])
    watched = _watched(trials, drawn)
    missing = {}
    if watched.seen:  # else no case compares
        others = (_watched(trials, trials.drawn(c)).seen for c in cases[1:])
        missing = _missing([watched.seen, *others])
    if draft.varied and (watched.together or (missing and len(draft.varied) > 1)):
        tried = draft.with_(coarse=True)
        draft = tried if _fits(tried, [replace(p, inputs=COARSE) for p in plans]) else draft
    for name, number in _found(draft, trials, drawn, missing) if missing else ():
        for distance in _DISTANCES:
            own = {**draft.thresholds.get(name, {}), number: distance}
            tried = draft.with_(thresholds={**draft.thresholds, name: own})
            if _fits(tried, plans):
                draft = tried
                break
    return draft


def _fits(draft: TaskDraft, plans: Sequence[DraftCase]) -> bool:
    """Whether all of some cases of a draft can be cases of a task."""
    with written(draft) as folder:
        trials = Trials(draft, folder)
        return not any(trials.case(p, f"{p.inputs}_{i}").why for i, p in enumerate(plans))


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
) -> list[tuple[str, float]]:
    """Arguments with numbers that, everywhere, bring what is compared to the threshold."""
    found = []
    for example in draft.varied:
        own: dict[float, None] = {}
        seen = functools.cache(functools.partial(_seen_of, trials, drawn, example.name))
        for root in _roots_of(seen, missing):
            if root == 0 or abs(root) >= _LEAST:
                own[root] = None
            if len(own) == _MOST:
                break
        found += [(example.name, root) for root in own]
    return found


def _roots_of(seen: _Seen, missing: Mapping[_Key, bool]) -> Iterator[float]:
    """Numbers of an argument that bring what is compared to the thresholds."""
    for key, one_sided in missing.items():
        compared = [c for p in _PROBES if (c := seen(p).get(key)) is not None]
        if len(set(compared)) < 2:
            continue  # it does not depend on this argument
        alike = all(c.low == c.high for c in compared)
        # Of several that are compared, none is at the number; but both sides can be reached.
        for end in ("low",) if alike else ("low", "high") if one_sided else ():
            yield from _roots(functools.partial(_off, seen, key, end))


def _seen_of(trials: Trials, drawn: InputSet, name: str, value: float) -> Mapping[_Key, _Compared]:
    """Comparisons where an argument is one number everywhere."""
    filled = torch.full_like(drawn.tensors[name], value, dtype=torch.float64)
    return _watched(trials, replace(drawn, tensors={**drawn.tensors, name: filled})).seen


def _off(seen: _Seen, key: _Key, end: str, value: float) -> float:
    """Distance of the least or largest of what is compared above the threshold; NaN if unknown."""
    compared = seen(value).get(key)
    return math.nan if compared is None else float(getattr(compared, end)) - key[1]


def _roots(function: Callable[[float], float]) -> Iterator[float]:
    """Places at which a function is 0, and is not beside, or has one sign on each side."""
    known = [(x, function(x)) for x in _GRID]
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
