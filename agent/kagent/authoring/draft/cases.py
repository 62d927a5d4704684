"""Cases and tolerances of a task: those that an operation computes well, of many that are tried."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kagent_sandbox.data.calibration import MOST_FLOOR, MOST_K, ResultCalibration
from kagent_sandbox.data.formula import evaluate

from kagent.authoring.draft.draft import (
    ALONE,
    FAINT,
    HALVES,
    MASKS,
    MIXED,
    NONFINITE,
    NORMAL,
    ROWS,
    WIDE,
    DraftCase,
    DraftGenerator,
    DraftKind,
    TaskDraft,
    case_dtype,
    plain,
)
from kagent.authoring.draft.inputs import (
    PART,
    bounds_of_draws,
    constraints_of_draws,
    kinds_without_rows,
)
from kagent.authoring.draft.pointers import has_computed_places, rounded_index
from kagent.authoring.draft.rooms import CHECK_ELEMENTS, CHECK_WORK, LEAST_SIZE, bare, shrunk
from kagent.authoring.draft.thresholds import find_thresholds
from kagent.authoring.draft.trial import TRIED_SEEDS, Trials, Tried, accepted, are_cases, written
from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.graph import operation_name
from kagent.authoring.tracing.sizes import Room, Sizes, above_power, below_power, prime, widest
from kagent.authoring.tracing.trace import TracedOperation

MOST_GROWN = 4.0**5
"""Times that a first case that cannot be one is made larger, at most: seconds on a CPU."""
LARGE_ELEMENTS, LARGE_WORK = 1e6, 3e8
"""Elements and operations of the larger check cases for GPUs."""
BENCH_ELEMENTS, BENCH_WORK = 3e6, 1e8
"""Elements and operations of a benchmark case for CPUs, before it is timed."""
LEAST_BENCH = 1 / 16
"""Least share that a benchmark case is reduced to, so that a slow moment does not make it tiny."""
BENCH_S = 1.5e-3
"""Longest time of a call of a scaled benchmark case for CPUs, where sizes allow it."""
MOST_BENCH_S = 20e-3
"""Longest time of a call of the example's own sizes as a benchmark case for CPUs: a comparison
repeats it some hundred times."""
MANY_ELEMENTS, MANY_WORK = 1e6, 1e9
"""Elements and operations of a case that is small for its operation, and still so large that few
cases must do."""
_FEW = 16
MOST_BOUNDED = 2e7
"""Elements of a case that shows whether a dimension bounds what whole numbers point into."""
NOISE_ROOM = 1.5
"""Factor on what rounding at random changes."""
ROUNDED = "every operation rounded at random, and sums in other orders"
NONFINITE_DRAWS = 4
"""Draws of infinities and NaN that are tried at each scale."""
_SCALES = (30.0, 1e-3)


def make_draft(room: Room) -> TaskDraft:
    """Choose cases and tolerances: what the operation computes well at, of what could be tried."""
    found = room.trace
    dtype = plain(case_dtype(found))
    cpu_dtype = "float32" if case_dtype(found) in HALVES else dtype
    first = DraftCase(shrunk(room, CHECK_ELEMENTS, CHECK_WORK), cpu_dtype)
    draft = TaskDraft(
        found, DraftKind((first,), (first,)), DraftKind((first,), (first,)), rows=tuple(ROWS)
    )
    with written(draft) as folder:
        trials = Trials(draft, folder)
        room, first = _usable(room, trials, first)
        room, needed = _without_few(room, trials, first)
        small = {n: max(s, room.least[n]) for n, s in first.sizes.items()}
        small = small if found.fits(small) else dict(first.sizes)
        first = replace(first, sizes=small)
        rows = _row_kinds(room, draft, trials, first)
        draft = draft.with_(rows=rows)
    if rows and not draft.matrix:
        with written(draft) as folder:  # beside the rows that are left
            draft = draft.with_(nonfinite=_takes_nonfinite(room, Trials(draft, folder), first))
    with written(draft) as folder:
        trials = Trials(draft, folder)
        plans = list(_check_plans(room, draft, small, cpu_dtype))
        pairs = list(accepted(trials, plans))
        check = _distinct([c for c, _ in pairs] or [first])
        if not _is_large(found, small):
            draft = find_thresholds(draft, trials, check, {cpu_dtype, dtype})
    draft = _with_masks(draft, check[0], {cpu_dtype, dtype})
    draft = _with_wide(draft, check[0], {cpu_dtype, dtype})
    with written(draft) as folder:
        trials = Trials(draft, folder)
        further_kinds = draft.kinds_around + kinds_without_rows(draft)
        for kind in further_kinds:
            further = replace(check[0], inputs=kind, words=kind)
            pairs += accepted(trials, [further])
            check = _distinct([*check, further])
        bench, words = _cpu_bench(room, trials, cpu_dtype)
        gpu_check = [with_dtype(c, dtype) for c in check]
        if dtype != cpu_dtype:
            gpu_check = [c for c, _ in accepted(trials, gpu_check)] or gpu_check[:1]
        large = _large_plans(room, draft, dtype)
        gpu_check = _distinct([*gpu_check, *(c for c, _ in accepted(trials, large))])
    scales = sorted({c.scale for c in check})
    hidden = {MIXED, NONFINITE, NORMAL, *ALONE, *further_kinds}
    kinds = sorted({c.inputs for c in check} & hidden)
    padded = sorted({c.noncontiguous for c in check})
    offsets = sorted({c.offset for c in check})
    fields: dict[str, Sequence[Any]] = {
        "inputs": kinds,
        "scale": scales,
        "noncontiguous": padded,
        "offset": offsets,
    }
    given = DraftCase(found.dims, dtype)
    on_cpu = None
    k, floor = _tolerance(found, pairs, needed)
    if dtype != cpu_dtype:  # what float32 needs, 16 bits do not
        noise = max((t.noise for _, t in pairs), default=0.0)
        of_torch = max((t.noise / t.eager for _, t in pairs if t.eager), default=0.0)
        on_cpu = ResultCalibration(k, floor, of_torch, noise, f"kagent new: {ROUNDED}")
        k, floor = 3.0, 2.0
    return draft.with_(
        k=k,
        floor=floor,
        on_cpu=on_cpu,
        constraints=(*_constraints(room), *constraints_of_draws(draft)),
        gpu=DraftKind(
            tuple(gpu_check),
            (given,),
            *_hidden(room, small, found.dims, 4.0, dtype, fields),
            "The sizes of the example.",
        ),
        cpu=DraftKind(
            tuple(check),
            bench,
            *_hidden(room, small, bench[0].sizes, 2.0, cpu_dtype, fields),
            words,
        ),
    )


def _tolerance(
    found: TracedOperation, tried: Sequence[tuple[DraftCase, Tried]], needed: float
) -> tuple[float, float]:
    """`k` and `floor` that have room for what rounding was seen to change, as far as a calibration
    goes. What a `floor` may not allow for, times torch's own error does, which is as large there:
    so it is where a kind of rows makes it so.
    """
    sums = math.sqrt(_summed(found))
    noise = [(NOISE_ROOM * t.noise, t.eager, c.inputs in ALONE) for c, t in tried]
    usual = [n for n, _, alone in noise if not alone]
    floor = min(MOST_FLOOR, max([2.0, needed, min(32.0, 0.25 * sums), *usual]))
    k = max([3.0, *((n - floor) / eager for n, eager, _ in noise if eager)])
    return float(min(MOST_K, math.ceil(k))), float(f"{floor:.2g}")


def _usable(room: Room, trials: Trials, first: DraftCase) -> tuple[Room, DraftCase]:
    """The smallest case that can be one: `first`, or a larger one where that amplifies rounding, as
    a batch normalisation of few elements does. The room then begins at the larger one's sizes.

    Raises:
        AuthoringError: None of those that were tried can be.
    """
    tried = trials.case(first, "trial")
    refused, grown = [first.sizes], 1.0
    while tried.rounding and grown < MOST_GROWN and dict(first.sizes) != room.trace.dims:
        grown *= 4
        sizes = shrunk(room, CHECK_ELEMENTS * grown, CHECK_WORK * grown)
        if sizes == first.sizes:
            continue
        first = replace(first, sizes=sizes)
        tried = trials.case(first, f"trial_{grown:g}")
        if not tried.why:
            room = replace(room, least=sizes)
        refused.append(sizes)
    if tried.why:
        texts = (_sizes_text(each) for each in refused)
        of = f" of {'; '.join(texts)}" if first.sizes else ""
        text = f"its example cannot be a case{of}: {tried.why}"
        if tried.rounding and (why := rounded_index(room.trace.graph)):
            text += f"; {why}"
        if tried.failed and first.sizes:
            text += _choose(room.trace)
        raise NoCaseError(text, failed=tried.failed)
    _require_bounds(room, trials, first)
    return room, first


def _require_bounds(room: Room, trials: Trials, first: DraftCase) -> None:
    """Make sure that whole numbers are such at other sizes, too: what they point into may have a
    size of its own that is small, or is equal to a dimension that bounds them by chance.

    Raises:
        NoCaseError: They are not.
    """
    draft, dims = bare(room.trace), room.trace.dims
    computed = has_computed_places(draft)
    if all(e.dtype.is_floating_point for e in draft.arguments) and not computed:
        return
    few = {n: room.rounded(n, _FEW) for n in dims}
    more = {n: room.rounded(n, s * 3 / 2) for n, s in dims.items()}
    plans = [(n, {**first.sizes, n: s}) for n, s in few.items()]
    bounds = bounds_of_draws(draft)
    plans += [(n, {**first.sizes, n: more[n]}) for n in (dims if computed else bounds)]
    plans += [("", {**room.least, n: more[n]}) for n in bounds]
    needed = constraints_of_draws(draft)
    for i, (name, sizes) in enumerate(plans):
        fits = room.trace.count(sizes) < MOST_BOUNDED and room.trace.fits(sizes)
        if not fits or not all(evaluate(c, sizes) for c in needed):
            continue
        tried = trials.case(replace(first, sizes=sizes), f"bounds_{i}")
        if tried.failed:
            text = f"its example cannot be a case of {_sizes_text(sizes)}: {tried.why}"
            alike = [n for n in dims if name and n != name and dims[n] == dims[name]]
            together = (
                n
                for n in alike
                if not trials.case(
                    replace(first, sizes={**sizes, n: sizes[name]}), f"bounds_{i}_{n}"
                ).failed
            )
            raise NoCaseError(
                f"{text}{_choose(room.trace)}", failed=True, name=name, other=next(together, "")
            )


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{n} = {s}" for n, s in sizes.items())


class NoCaseError(AuthoringError):
    """The first case cannot be one.

    Attributes:
        failed: Because it could not be computed.
        name: Not at another size of that dimension alone; "" if of more than one.
        other: Dimension that may have another size together with it; "" for none.
    """

    def __init__(self, text: str, *, failed: bool, name: str = "", other: str = "") -> None:
        super().__init__(text)
        self.failed, self.name, self.other = failed, name, other


def _choose(found: TracedOperation) -> str:
    """Words on how to choose the dimensions that vary, with those that do."""
    names = [e.name for e in found.operation.examples]
    places = [f"{names[i]}:{d}={n}" for n in found.dims for i, d in found.axes(n)[:1]]
    way = "Where sizes belong together, name those that may vary: --vary ARG:DIM=NAME"
    return f". {way} ({', '.join(places)})"


def _without_few(room: Room, trials: Trials, first: DraftCase) -> tuple[Room, float]:
    """The room without rows of so few elements that all of a row may cancel by chance: what is left
    is a sum's rounding, and each order of additions has another. And the `floor` that the least
    sizes need.
    """
    if not room.trace.dims or _is_large(room.trace, first.sizes):
        return room, 0.0

    def needed(sizes: Sizes) -> float:
        if not room.trace.fits(sizes):
            return math.inf
        name = "few_" + "x".join(map(str, sizes.values()))
        return trials.floor_needed(replace(first, sizes=sizes), name)

    def raised(name: str, size: int) -> int:
        return max(least[name], -(-size // room.steps[name]) * room.steps[name])

    least = dict(room.least)
    few = [n for n in least if least[n] < min(LEAST_SIZE, room.trace.dims[n])]
    found: list[float] = []
    for names in (*([n] for n in few), few):  # each alone, then all together
        usual = least if names is few else first.sizes
        for size in (0, LEAST_SIZE, 2 * LEAST_SIZE):
            sizes = {n: min(raised(n, size), room.trace.dims[n]) for n in names}
            floor = needed({**usual, **sizes})
            if floor <= MOST_FLOOR:
                least |= sizes
                found.append(floor)
                break
    return replace(room, least=least), max(found, default=0.0)


def _with_masks(draft: TaskDraft, first: DraftCase, dtypes: Iterable[str]) -> TaskDraft:
    """The draft with rows of masks drawn anew, also without a true value where all is right then:
    a softmax of nothing is NaN.
    """
    wanted: tuple[Literal["any", "some"], ...] = ("any", "some")
    for masks in wanted if draft.masked else ():
        tried = draft.with_(masks=masks)
        if are_cases(tried, [replace(first, inputs=MASKS, dtype=d) for d in dtypes]):
            return tried
    return draft


def _with_wide(draft: TaskDraft, first: DraftCase, dtypes: Iterable[str]) -> TaskDraft:
    """The draft with whole numbers of any magnitude in those arguments that take them: places of
    other tensors do not. Shifts by so many bits are no operation that a language defines.
    """
    if any("shift" in operation_name(n) for n in draft.trace.graph.graph.nodes):
        return draft
    for example in draft.whole:
        tried = draft.with_(wide=(*draft.wide, example.name))
        if are_cases(tried, [replace(first, inputs=WIDE, dtype=d) for d in dtypes]):
            draft = tried
    return draft


def _is_large(found: TracedOperation, sizes: Mapping[str, int]) -> bool:
    """Whether few cases of such sizes must do."""
    return found.count(sizes) > MANY_ELEMENTS or found.work(sizes) > MANY_WORK


def _summed(found: TracedOperation) -> float:
    """Numbers that are added up, or multiplied, for one of a result, about."""
    dims = found.dims
    results = sum(math.prod(found.sizes(r.shape, dims)) for r in found.compared)
    read = sum(math.prod(found.sizes(found.shapes[i], dims)) for i in found.used)
    products = evaluate(found.products, dims) / 2
    return max(1.0, read / max(1, results), products / max(1, results), found.scanned(dims))


def _row_kinds(room: Room, draft: TaskDraft, trials: Trials, first: DraftCase) -> tuple[str, ...]:
    """Kinds of rows that the operation computes well. Of constant ones a whole row may cancel by
    chance, also where their number is no power of two: else their sum is exact.
    """
    if not draft.varied:
        return ()
    cases = {r: replace(first, inputs=r) for r in ROWS}
    found = [r for r, c in cases.items() if not trials.case(c, f"rows_{r}").why]
    if not _is_large(draft.trace, first.sizes):
        below = room.changed(dict(first.sizes), below_power)
        for i, sizes in enumerate([first.sizes] if below is None else [first.sizes, below]):
            kinds = {"constant", *ALONE}.intersection(found)
            if not kinds:
                break
            usual = trials.floor_needed(replace(first, sizes=sizes), f"few_{first.inputs}_{i}")
            for kind in kinds:
                case = replace(cases[kind], sizes=sizes)
                if usual <= MOST_FLOOR < trials.floor_needed(case, f"few_{kind}_{i}"):
                    found.remove(kind)
    if trials.case(replace(first, inputs=MIXED), "rows_mixed").tied:  # beside rows of others
        found = [r for r in found if r not in ("constant", "zeros", *FAINT)]
    return _without_faint(draft, first, found)


def _without_faint(draft: TaskDraft, first: DraftCase, rows: Sequence[str]) -> tuple[str, ...]:
    """The rows, without those of numbers near 0 that the operation does not compute well beside
    others, or not where functions take subnormal ones for 0.
    """
    plain = tuple(r for r in rows if r not in FAINT)
    if _is_large(draft.trace, first.sizes):
        return plain
    cases = [replace(first, inputs=MIXED, scale=s) for s in (1.0, min(_SCALES))]
    draws = [(c, seed) for c in cases for seed in TRIED_SEEDS]
    with written(draft.with_(rows=plain)) as folder:
        trials = Trials(draft, folder)
        draws = [(c, seed) for c, seed in draws if not trials.case(c, "rows_plain", seed).why]
    for kinds in (FAINT, FAINT[:1]):
        found = tuple(r for r in rows if r in plain or r in kinds)
        with written(draft.with_(rows=found)) as folder:
            trials = Trials(draft, folder)
            if all(
                not trials.case(c, "rows_faint", seed).why
                and trials.agrees_flushed(c, "rows_faint", seed)
                for c, seed in draws
            ):
                return found
    return plain


def _takes_nonfinite(room: Room, trials: Trials, first: DraftCase) -> bool:
    """Whether all is right at infinities and NaN, at each scale of hidden cases, in some draws, and
    at other sizes: an infinity may meet a number that is 0 in float32 and not in float64, torch's
    own formula may decide, and sizes may decide which formula that is, as in a Fourier transform.
    """
    scales, name = (1.0, *_SCALES), "rows_nonfinite"
    broken = replace(first, inputs=NONFINITE)
    changed = [] if _is_large(room.trace, first.sizes) else [prime, below_power, above_power]
    sizes = [s for how in changed if (s := room.changed(dict(first.sizes), how)) is not None]
    if not all(
        not trials.case(replace(broken, sizes=s), f"{name}_{i}", seed).why
        and trials.agrees_decomposed(replace(broken, sizes=s), f"{name}_{i}", seed)
        for i, s in enumerate(sizes)
        for seed in range(1, NONFINITE_DRAWS + 1)
    ):
        return False
    return all(
        trials.agrees_at_infinities(replace(first, inputs=MIXED, scale=scale), "infinities")
        for scale in scales
    ) and all(
        not trials.case(case, name, seed).why and trials.agrees_decomposed(case, name, seed)
        for seed in range(1, NONFINITE_DRAWS + 1)
        for case in (replace(first, inputs=NONFINITE, scale=scale) for scale in scales)
    )


def _check_plans(room: Room, draft: TaskDraft, small: Sizes, dtype: str) -> Iterator[DraftCase]:
    """Cases worth trying: odd and prime sizes, one of each, large and tiny magnitudes."""
    primes = room.changed(small, prime) or small
    below = room.changed(small, below_power) or small
    above = room.changed(small, above_power) or small
    yield DraftCase(small, dtype)
    if _is_large(room.trace, small):
        if draft.rows and _mixes(draft, small):
            yield DraftCase(small, dtype, inputs=MIXED, noncontiguous=True, words="mixed")
        yield DraftCase(dict(room.least), dtype, words="least")
        return
    yield DraftCase(primes, dtype, words="prime")
    yield DraftCase(below, dtype, words="below", noncontiguous=True)
    yield DraftCase(above, dtype, words="above", offset=1)
    for name in dict.fromkeys([*list(small)[:1], *list(small)[-1:]]):
        one = {**small, name: room.least[name]}
        if one != small and room.trace.fits(one):
            yield DraftCase(one, dtype, words=f"least_{name}")
    yield DraftCase(dict(room.least), dtype, words="least")
    second = {n: size + room.steps[n] for n, size in room.least.items()}
    if room.trace.fits(second):  # where a window, or a step of several, is not full
        yield DraftCase(second, dtype, words="second_least")
    if draft.rows:
        for scale in _SCALES:
            yield DraftCase(primes, dtype, scale=scale, words="large" if scale > 1 else "tiny")
        if _mixes(draft, small):
            yield DraftCase(small, dtype, inputs=MIXED, words="mixed")
        if _mixes(draft, above):
            yield DraftCase(above, dtype, inputs=MIXED, noncontiguous=True, words="mixed_padded")
        for kind in draft.rows if _has_rows(draft, below) else ():
            if kind in ("constant", "spiked", *ALONE):
                yield DraftCase(below, dtype, inputs=kind, words=kind)
    if draft.nonfinite:
        yield DraftCase(primes, dtype, inputs=NONFINITE, words="nonfinite")


def _has_rows(draft: TaskDraft, sizes: Sizes) -> bool:
    """Whether rows have more than one element: else constant ones are like all others."""
    found = draft.trace
    shapes = zip(found.operation.examples, found.shapes, strict=True)
    return any(found.sizes(s, sizes)[-1] > 1 for e, s in shapes if e in draft.varied)


def _mixes(draft: TaskDraft, sizes: Sizes) -> bool:
    """Whether a tensor has several rows: one alone may be as the example draws it."""
    found = draft.trace
    every = zip(found.operation.examples, found.shapes, strict=True)
    shapes = [found.sizes(s, sizes) for e, s in every if e in draft.varied]
    if all(len(s) == 1 for s in shapes):
        return any(s[0] > PART for s in shapes)
    return any(math.prod(s[:-1]) > 1 for s in shapes if len(s) > 1)


def _large_plans(room: Room, draft: TaskDraft, dtype: str) -> Iterator[DraftCase]:
    large = shrunk(room, LARGE_ELEMENTS, LARGE_WORK)
    yield DraftCase(large, dtype, words="large_sizes")
    odd = room.changed(large, prime)
    if odd is not None:
        inputs = MIXED if draft.rows and _mixes(draft, odd) else NORMAL
        yield DraftCase(odd, dtype, inputs=inputs, words="large_prime")


def with_dtype(case: DraftCase, dtype: str) -> DraftCase:
    """The case in another dtype."""
    return replace(case, dtype=dtype)


def _distinct(cases: Iterable[DraftCase]) -> list[DraftCase]:
    """The first of cases that would have one name, or be equal but for it."""
    found: dict[object, DraftCase] = {}
    for c in cases:
        key = (*c.sizes.values(), c.dtype, c.inputs, c.scale, c.noncontiguous, c.offset)
        found.setdefault(key, c)
    named: dict[str, DraftCase] = {}
    for c in found.values():
        named.setdefault(c.name(""), c)
    return list(named.values())


def _cpu_bench(room: Room, trials: Trials, dtype: str) -> tuple[tuple[DraftCase, ...], str]:
    """The example's own sizes where torch is quick at them, and sizes of about a millisecond: a
    case or two, and what to say of them.
    """
    elements, work = BENCH_ELEMENTS, BENCH_WORK
    own, found = DraftCase(room.trace.dims, dtype), room.trace
    case, tried = own, Tried("not tried")
    likely_s = math.inf  # of the example's sizes: other programs make times longer, never shorter
    for _ in range(6):
        case = DraftCase(shrunk(room, elements, work), dtype)
        tried = trials.case(case, f"bench_{elements:g}_{work:g}", timed=True)
        if not tried.why:
            larger = found.count(own.sizes) / found.count(case.sizes)
            harder = found.work(own.sizes) / max(1.0, found.work(case.sizes))
            likely_s = min(likely_s, tried.seconds * max(larger, harder))
        small = min(elements / BENCH_ELEMENTS, work / BENCH_WORK) <= LEAST_BENCH
        if tried.why or tried.seconds <= BENCH_S or small:
            break
        share = max(0.2, 0.8 * BENCH_S / tried.seconds)
        elements, work = elements * share, work * share
    if tried.why:  # it rounds badly, or is too large for this machine
        return (case,), "The sizes of the example, scaled down."
    if dict(case.sizes) == dict(own.sizes):
        return (case,), f"The sizes of the example: torch took {_ms(tried.seconds)} here."
    scaled = f"The sizes of the example, scaled down: torch took {_ms(tried.seconds)} here."
    if likely_s > MOST_BENCH_S:
        why = f"torch would take about {_ms(likely_s)}, and {_ms(MOST_BENCH_S)} is the most"
        return (case,), f"{scaled} Its own are no case: {why}."
    if why := trials.case(own, "bench_own").why:
        return (case,), f"{scaled} Its own are no case: {why}."
    words = f"The sizes of the example: torch takes some {_ms(likely_s)} here"
    return (own, case), f"{words}. And scaled down: {_ms(tried.seconds)}."


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2g} ms" if ms < 100 else f"{ms:.0f} ms"


def _hidden(
    room: Room,
    small: Mapping[str, int],
    bench: Mapping[str, int],
    most: float,
    dtype: str,
    fields: Mapping[str, Sequence[Any]],
) -> tuple[tuple[DraftGenerator, ...], tuple[DraftGenerator, ...]]:
    """Generators of hidden check and benchmark cases.

    Args:
        room: What dimensions may be.
        small: Sizes of a usual check case.
        bench: Sizes of the benchmark.
        most: Elements or operations of a small hidden case, over those of `small`.
        dtype: Of all.
        fields: Distributions and others of the check cases.
    """
    found, steps = room.trace, room.steps
    own = {"dtype": [dtype]}
    if not found.dims:
        return (DraftGenerator(1, {**own, **fields}, {}),), (DraftGenerator(1, own, {}),)
    by_work = found.work(dict(bench)) > 4 * found.count(dict(bench))
    cost = _work(found) if by_work else _elements(found)

    def value(sizes: Mapping[str, int]) -> float:
        return evaluate(cost, sizes)

    usual = value(bench)
    # Around the benchmark, with as much to do.
    near = {n: max(room.least[n], bench[n] // 2 // s * s) for n, s in steps.items()}
    far = _far(room, bench)
    timed_dims = _ranges(room, *widest(room, near, far, bench))
    timed = DraftGenerator(2, own, timed_dims, cost, 0.5 * usual, 1.5 * usual)
    # From the least sizes to those: small cases of every kind, and some in between.
    low, far = widest(room, room.least, far, small)
    dims = _ranges(room, low, far)
    limit = max(most * value(small), value(low))
    # As many as it has dimensions: each may be small or large beside each other.
    many = max(3, len(dims))
    checks = [DraftGenerator(many, {**own, **fields}, dims, cost, value(low), limit)]
    if usual > 2 * limit and far != low:
        plain_fields = {**own, "inputs": fields["inputs"]}
        checks.append(DraftGenerator(many - 1, plain_fields, dims, cost, limit, usual))
        # As large as what a library has kernels for, which gives them padded rows, too.
        padded = {"noncontiguous": [True]} if True in fields.get("noncontiguous", ()) else {}
        checks.append(DraftGenerator(1, plain_fields | padded, dims, cost, usual, 1.5 * usual))
    return tuple(checks), (timed,)


def _far(room: Room, bench: Mapping[str, int]) -> dict[str, int]:
    """The largest size of each dimension in hidden cases around a benchmark."""
    return {n: max(room.least[n], bench[n] * 3 // 2 // s * s) for n, s in room.steps.items()}


def _constraints(room: Room) -> tuple[str, ...]:
    """Constraints that keep sizes multiples of what the operation demands, which an exported
    operator leaves to torch else, and arguments and results within 32-bit indices in hidden cases,
    where those of the example are.

    Kernels that Inductor writes for the example have such indices, as those of torch.compile: for
    larger tensors it would compile others.
    """
    found = room.trace
    far = _far(room, found.dims)
    return (
        *(f"{name} % {step} == 0" for name, step in room.steps.items() if step > 1),
        *(
            f"{elements} < 2 ** 31"
            for elements in _elements_of_each(found)
            if evaluate(elements, found.dims) < 2**31 <= evaluate(elements, far)
        ),
    )


def _ranges(room: Room, low: Mapping[str, int], high: Mapping[str, int]) -> dict[str, str]:
    found = {}
    for name in room.trace.dims:
        if low[name] == high[name]:
            found[name] = f"[{low[name]}]"
            continue
        step = room.steps[name]
        multiple = f", multiple = {step}" if step > 1 else ""
        found[name] = f"{{ min = {low[name]}, max = {high[name]}{multiple} }}"
    return found


def _elements(found: TracedOperation) -> str:
    """Formula: elements of all arguments and results."""
    parts = _elements_of_each(found)
    total = [p for p in parts if not re.fullmatch(r"[\d* ]+", p)]
    return " + ".join(total or parts)


def _elements_of_each(found: TracedOperation) -> list[str]:
    """Formulas: elements of an argument or result, each formula once."""
    shapes = [found.shapes[i] for i in found.used] + [r.shape for r in found.results]
    products = (
        " * ".join(
            f"({s})" if isinstance(s, str) and not s.isidentifier() else str(s) for s in shape
        )
        or "1"
        for shape in shapes
    )
    return list(dict.fromkeys(products))


def _work(found: TracedOperation) -> str:
    return " + ".join(p for p in (found.products, found.elements) if p != "0")
