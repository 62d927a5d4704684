"""Cases of a draft, tried on real tensors before they become part of a task."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError, UserError
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.inputs import InputSampler, InputSet
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from kagent.authoring.draft.draft import (
    BLANK,
    COARSE,
    KINDS_AROUND,
    NONFINITE,
    DraftCase,
    TaskDraft,
)
from kagent.authoring.draft.inputs import constraints_of_draws
from kagent.authoring.draft.orders import ORDERS, ROOM, Reordered, draws_of
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.toml import task_toml
from kagent.authoring.inductor.decompositions import plain_loops
from kagent.authoring.tracing.trace import run

MOST_NOISE, MOST_EAGER = 256.0, 128.0
"""Machine epsilons that rounding may become in a case, and that torch may err by. Where it is more,
a case says nothing."""
CHAIN_NOISE, CHAIN_EAGER = 4.0, 2.0
"""The same for each operation of the longest chain, where that is more: rounding adds up."""
MOST_IN_TF32 = numerics.MOST_TORCH_ERROR / 4
"""Relative error of torch in TF32: a quarter of what counts, since other draws may be worse."""
_SAME = 1e-4
_TIMED_S = 0.05
"""Time for which an operation is repeated to find its shortest one."""
_LEAST_CALLS, _MOST_TIMED_S = 5, 2.0
"""Calls that it takes at least, as a busy machine lengthens some; but not for longer than that."""
TRIED_SEEDS = (1, 2)
"""Seeds of draws that are tried."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of trying a case.

    Attributes:
        why: Why it cannot be a case; empty if it can.
        rounding: Whether that is because rounding is amplified, which it may be less at other
            sizes.
        failed: Whether that is because it could not be computed.
        tied: Whether that is because a result depends on which of equal elements is chosen.
        noise: Machine epsilons that rounding each operation otherwise makes of the worst result.
        eager: Machine epsilons that torch errs by there.
        seconds: Time of torch's own implementation, the shortest of some calls; 0 if it was not to
            be timed.
    """

    why: str = ""
    rounding: bool = False
    failed: bool = False
    tied: bool = False
    noise: float = 0.0
    eager: float = 0.0
    seconds: float = 0.0


class RandomRounding(TorchDispatchMode):
    """Rounds the result of each operation at random, within one machine epsilon."""

    def __init__(self, *, powers: bool = True) -> None:
        """`powers`: whether products with powers of two are rounded, too, which are exact."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._powers = powers
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and round."""
        out = func(*args, **(kwargs or {}))
        given = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        if func.is_view or not any(t.is_floating_point() for t in given):
            return out
        if func.overloadpacket.__name__ in _EXACT or (not self._powers and _scales(func, args)):
            return out
        for each in pytree.tree_leaves(out):
            if not isinstance(each, torch.Tensor) or not each.is_floating_point():
                continue
            if each.numel() and each.dtype.itemsize > 1:  # torch computes nothing in 8 bits
                noise = torch.rand(each.shape, generator=self._generator, dtype=each.dtype)
                eps = torch.finfo(each.dtype).eps
                each.mul_(noise.sub_(0.5).mul_(eps).add_(1.0))
        return out


def _scales(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation multiplies with a power of two, or divides by one."""
    product = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.div) and len(args) == 2
    by = args[1] if product else None
    by = float(by) if isinstance(by, torch.Tensor) and not by.dim() else by
    return isinstance(by, int | float) and abs(math.frexp(by)[0]) == 0.5


class Decomposed(TorchDispatchMode):
    """Has operations computed by simpler ones, as the seeds out of Inductor do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = _simpler_operations()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the simpler operations, where there are any."""
        simpler, out = self._table.get(func), NotImplemented
        if simpler is not None:
            with self:
                out = simpler(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if out is NotImplemented else out


class Flushed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has functions and quotients take subnormal numbers for 0. Sums, products and comparisons are
    as they are.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, a function on numbers that are 0 or normal."""
        if func.overloadpacket.__name__ in _FUNCTIONS:
            args = pytree.tree_map(_flushed, args)
        return func(*args, **(kwargs or {}))


def _flushed(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if value.dtype.itemsize == 1:
        return value
    return value.masked_fill(value.abs() < torch.finfo(value.dtype).tiny, 0.0)


_FUNCTIONS = frozenset(
    {"log", "log2", "log10", "log1p", "rsqrt", "sqrt", "reciprocal", "div", "pow", "exp", "exp2"}
    | {"expm1", "tanh", "tan", "sin", "cos", "atan", "atan2", "asinh", "erf", "erfinv", "lgamma"}
    | {"sigmoid", "logit", "digamma", "special_entr", "xlogy", "linalg_vector_norm"}
)
"""Functions that instructions of a GPU, and libraries, approximate."""


class OtherTies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has the last of equal elements chosen where torch chooses the first, and the other way."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, a choice of elements on them in reverse."""
        kwargs = kwargs or {}
        if func not in _CHOOSING or kwargs.get("stable"):
            return func(*args, **kwargs)
        place, usual = _CHOOSING[func]
        dim = args[place] if len(args) > place else kwargs.get("dim", usual)
        x = args[0]
        if dim is None or not x.dim():
            return func(*args, **kwargs)
        found = func(x.flip(dim), *args[1:], **kwargs)
        last = x.shape[dim] - 1
        return last - found if isinstance(found, torch.Tensor) else (found[0], last - found[1])


_CHOOSING: Mapping[Any, tuple[int, int | None]] = {
    torch.ops.aten.topk.default: (2, -1),
    torch.ops.aten.sort.default: (1, -1),
    torch.ops.aten.sort.stable: (1, -1),
    torch.ops.aten.argmax.default: (1, None),
    torch.ops.aten.argmin.default: (1, None),
    torch.ops.aten.max.dim: (1, None),
    torch.ops.aten.min.dim: (1, None),
    torch.ops.aten.kthvalue.default: (2, -1),
    torch.ops.aten.median.dim: (1, None),
}
"""Operations that choose elements: the place of the dimension, and which one it is by default."""


@functools.cache
def _simpler_operations() -> Mapping[Any, Any]:
    """Decompositions by operation. torch walks all operations that there are for it: 0.1 s."""
    torchs = core_aten_decompositions()  # its `get` finds only what was looked up before
    return {**{op: torchs[op] for op in torchs}, **plain_loops("gpu", ())}


_EXACT = frozenset(
    {"clone", "_to_copy", "copy_", "cat", "stack", "where", "masked_fill", "relu", "clamp"}
    | {"max", "min", "amax", "amin", "maximum", "minimum", "neg", "abs", "sign", "floor", "ceil"}
    | {"index", "gather", "max_pool2d_with_indices", "max_pool3d_with_indices", "constant_pad_nd"}
    | {
        "clamp_min",
        "clamp_max",
        "index_select",
        "embedding",
        "tril",
        "triu",
        "flip",
        "_unsafe_view",
    }
    | {"detach", "detach_", "fill_", "zero_", "sort", "topk", "hardtanh", "repeat", "round"}
    | {"median", "kthvalue", "cummax", "cummin", "take"}
)
"""Operations that do not round."""


class Trials:
    """Tries the cases of one draft on the CPU."""

    def __init__(self, draft: TaskDraft, folder: Path) -> None:
        """`folder`: of the draft, written."""
        self._draft = draft
        self._constraints = constraints_of_draws(draft)
        self._task = load_task(folder)
        policy = InputPolicy(pool=1, tf32=True)  # of a GPU's cases
        self._sampler = InputSampler(self._task, torch.device("cpu"), policy)

    def case(self, case: DraftCase, name: str, seed: int = 1, *, timed: bool = False) -> Tried:
        """Compute a draw of a case: the reference, torch's own, the function as it was given."""
        if unmet := [c for c in self._constraints if not evaluate(c, case.sizes)]:
            return Tried(f"its arguments need {unmet[0]}", failed=True)
        try:
            return self._tried(_case(case, name), seed, timed)
        except (TaskError, RuntimeError, MemoryError) as e:
            return Tried(self._words(e), failed=True)

    def _words(self, error: BaseException) -> str:
        """An error in one line. Its reference.py is gone by then: so it names the line instead."""
        file = str(self._task.folder / "reference.py")
        frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
        lines = [(f.lineno, f.line) for f in frames if f.filename.endswith("reference.py")]
        place = f"reference.py, line {lines[-1][0]} ({lines[-1][1]})" if lines else "reference.py"
        return " ".join(str(error).replace(file, place).split())[:400]

    def floor_needed(self, case: DraftCase, name: str) -> float:
        """The `floor` that other orders of rounding need beside the draft's `k`, as a calibration
        finds it: large where results cancel by chance, and infinite where the case cannot be tried.
        """
        if not all(evaluate(c, case.sizes) for c in self._constraints):
            return math.inf
        try:
            drawn = _case(case, name)
            return max(self._floor(drawn, s) for s in range(draws_of(self._task, drawn)))
        except (TaskError, RuntimeError, MemoryError):
            return math.inf

    def _floor(self, case: Case, seed: int) -> float:
        sampler, needed = self._sampler, 0.0
        inputs = sampler.fresh(case, seed)
        expected, yardsticks = sampler.expected(inputs), sampler.torch_errors(inputs)
        if max((max(e.row, e.element) for e in yardsticks), default=0.0) > MOST_IN_TF32:
            return math.inf
        if any(e.is_floating_point() and e.numel() and not e.isfinite().any() for e in expected):
            return math.inf  # as a variance of one element is NaN: that shows nothing
        ways = [RandomRounding(), *(Reordered(split, pairs=p) for split, p in ORDERS.values())]
        for way in ways:
            with way:
                outputs = sampler.accepted(inputs, sampler.call("eager", inputs))[0]
            parts = zip(*sampler.valid_parts(inputs, outputs, expected), yardsticks, strict=True)
            for result, (out, ref, of_torch) in zip(self._task.compared, parts, strict=True):
                if not out.dtype.is_floating_point:
                    continue
                errors = numerics.measure_errors(out, ref, result.row_dims)
                by_torch, by_floor = (
                    numerics.allowed(of_torch, result.model_copy(update=update), out.dtype)
                    for update in ({"floor": 0.0}, {"k": 0.0, "floor": 1.0})
                )
                for kind in ("row", "element", "bias"):
                    more = ROOM * getattr(errors, kind) - getattr(by_torch, kind)
                    needed = max(needed, more / getattr(by_floor, kind))
        return needed

    def agrees_at_infinities(self, case: DraftCase, name: str) -> bool:
        """Whether torch is finite where the reference is when half of one argument is infinite, for
        each argument that cases vary. A few infinities, as cases draw them, hardly ever meet an
        element of another argument of which something vanishes in float32 alone.
        """
        inputs = self._sampler.fresh(_case(case, name), 1)
        generator = torch.Generator().manual_seed(0)
        for example in self._draft.varied:
            tensor = inputs.tensors[example.name]
            infinite = torch.rand(tensor.shape, generator=generator) < 0.5
            negative = torch.rand(tensor.shape, generator=generator) < 0.5
            changed = tensor.masked_fill(infinite, math.inf).masked_fill(
                infinite & negative, -math.inf
            )
            drawn = InputSet(inputs.case, {**inputs.tensors, example.name: changed}, inputs.scalars)
            try:
                pair = [self._sampler.call(f, drawn) for f in ("eager", "reference")]
            except TaskError:
                return False
            if not all(map(_same_places, *pair)):
                return False
        return True

    def agrees_decomposed(self, case: DraftCase, name: str, seed: int) -> bool:
        """Whether a draw has infinities and NaN at the same places where simpler operations compute
        it. Where it has not, torch's formula decides, which differs from device to device: torch's
        gradient of a layer norm has NaN in the whole row of an infinite gradient on a CPU, and on a
        GPU infinities, too.
        """
        inputs = self._sampler.fresh(_case(case, name), seed)
        outputs = self._sampler.call("eager", inputs)
        try:
            simpler = self._in_simpler_operations("eager", inputs)
        except TaskError:  # what torch cannot decompose here
            return True
        return all(map(_same_places, outputs, simpler))

    def agrees_flushed(self, case: DraftCase, name: str, seed: int) -> bool:
        """Whether results of a draw stay where functions take subnormal numbers for 0, as a GPU's
        approximate logarithms and roots do.
        """
        inputs = self._sampler.fresh(_case(case, name), seed)
        expected = self._sampler.expected(inputs)
        with Flushed():  # type: ignore[no-untyped-call]
            outputs = self._sampler.accepted(inputs, self._sampler.call("eager", inputs))[0]
        for result, out, ref in zip(self._task.compared, outputs, expected, strict=True):
            errors = numerics.measure_errors(out, ref, result.row_dims)
            worst = max(errors.row, errors.element)
            if not worst <= MOST_EAGER * numerics.epsilon(out.dtype):
                return False
        return True

    def drawn(self, case: DraftCase, seed: int = 1) -> InputSet:
        """A draw of a case."""
        return self._sampler.fresh(_case(case, "drawn"), seed)

    def watch(self, mode: TorchDispatchMode, inputs: InputSet) -> None:
        """Compute the reference of a draw, in simpler operations, while a mode looks on.

        Raises:
            TaskError: It cannot be decomposed, or fails.
        """
        self._in_simpler_operations("reference", inputs, mode)

    def _in_simpler_operations(
        self, function: str, inputs: InputSet, mode: AbstractContextManager[Any] | None = None
    ) -> Sequence[torch.Tensor]:
        # Inductor traces with it: torch's resizing is decomposed before any mode sees it.
        with enable_python_dispatcher(), mode or nullcontext(), Decomposed():
            return self._sampler.call(function, inputs)

    def _tried(self, case: Case, seed: int, timed: bool) -> Tried:
        sampler, task = self._sampler, self._task
        inputs = sampler.fresh(case, seed)
        try:
            expected = sampler.expected(inputs)
        except TaskError as e:
            if not self._runs(inputs):
                raise
            text = "it does not run in float64, as the reference does: write it with what does"
            raise TaskError(f"{text}: {e}") from (e.__cause__ or e)
        outputs, seconds = sampler.call("eager", inputs), 0.0
        if timed:
            outputs, seconds = self._timed(lambda: sampler.call("eager", inputs))
        outputs = tuple(sampler.accepted(inputs, outputs)[0])
        original = self._original(inputs.tensors, case.dims)
        if original is not None:
            original = tuple(sampler.accepted(inputs, original)[0])
            for result, mine, its in zip(task.compared, outputs, original, strict=True):
                if mine.dtype != its.dtype or not _close(mine, its):
                    return Tried(f"result {result.name} is not what the function itself gives")
        if why := self._off_in_tf32(inputs, outputs):
            return Tried(why, rounding=True)
        if why := self._tied(inputs, outputs):
            return Tried(why, tied=True)
        # What is exact decides at which side of a threshold it is.
        with RandomRounding(powers=case.inputs not in (*KINDS_AROUND, COARSE)):
            rounded = sampler.call("eager", inputs)
        chain = self._draft.trace.longest_chain
        noise, eager, most_eager = 0.0, 0.0, max(MOST_EAGER, CHAIN_EAGER * chain)
        inputs_eps = [numerics.epsilon(t.dtype) for t in inputs.tensors.values()]
        for result, out, other, ref in zip(task.compared, outputs, rounded, expected, strict=True):
            if not out.dtype.is_floating_point:
                if not torch.equal(out, ref.to(out.dtype)):
                    return Tried(f"result {result.name} depends on rounding", rounding=True)
                continue
            if not _fits(_wide(out), ref) and case.inputs != NONFINITE:
                return Tried(f"result {result.name} is not finite")
            if not ref.any() and case.inputs not in ("zeros", BLANK):
                return Tried(f"result {result.name} is 0 everywhere")
            eps = max([numerics.epsilon(out.dtype), *inputs_eps])
            whole = numerics.measure_errors(out, ref, row_dims=0).row
            rows = numerics.measure_errors(out, ref, result.row_dims)
            errors = {
                "as a whole": whole,
                "in its worst row": rows.row,
                "in its worst element": rows.element,
            }
            worst = max(errors, key=errors.__getitem__)
            if not errors[worst] < most_eager * eps:
                why = (
                    f"result {result.name}: torch errs by {errors[worst] / eps:.3g} epsilons "
                    f"{worst}, {most_eager:.3g} at most are expected"
                )
                return Tried(why + self._narrower(eps), rounding=True)
            if not _fits(_wide(other), ref) and case.inputs != NONFINITE:
                why = f"result {result.name}: rounding decides where it is infinite"
                return Tried(why, rounding=True)
            shaken = numerics.measure_errors(other, ref, result.row_dims)
            noise = max(noise, shaken.row / eps, shaken.element / eps)
            eager = max(eager, rows.row / eps, rows.element / eps)
        if not noise <= max(MOST_NOISE, CHAIN_NOISE * chain):
            why = f"rounding makes {noise:.3g} epsilons of the result"
            return Tried(why, rounding=True, noise=noise)
        return Tried(noise=noise, eager=eager, seconds=seconds)

    def _tied(self, inputs: InputSet, outputs: Sequence[torch.Tensor]) -> str:
        """Say which result depends on the one of equal elements that torch chooses; "" for none. A
        kernel may choose another one.
        """
        with OtherTies():  # type: ignore[no-untyped-call]
            others = self._sampler.call("eager", inputs)
        others = tuple(self._sampler.accepted(inputs, others)[0])
        for result, mine, other in zip(self._task.compared, outputs, others, strict=True):
            if not _close(mine, other):
                return (
                    f"result {result.name} depends on which of equal elements is chosen: sort and "
                    "argsort with stable=True keep their order; of max and topk return values alone"
                )
        return ""

    def _narrower(self, eps: float) -> str:
        """Words about a dtype that the function computes in, coarser than its arguments and
        results; "" for none.
        """
        values = [n.meta.get("val") for n in self._draft.trace.graph.graph.nodes]
        found = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
        found -= {self._draft.dtype}
        coarser = [d for d in found if numerics.epsilon(d) > eps]
        if not coarser:
            return ""
        name = max(coarser, key=numerics.epsilon)
        return f": it computes in {name} on the way: let it return that, or take it"

    def _runs(self, inputs: InputSet) -> bool:
        """Whether `eager` takes them."""
        try:
            self._sampler.call("eager", inputs)
        except TaskError:
            return False
        return True

    def _off_in_tf32(self, inputs: InputSet, outputs: Sequence[torch.Tensor]) -> str:
        """Say why torch is no yardstick on a GPU that uses TF32; "" if it is one."""
        found = self._sampler.errors_in_tf32(inputs)
        if found is None:
            return ""
        for result, out, errors in zip(self._task.compared, outputs, found, strict=True):
            worst = max(errors.row, errors.element)
            if not out.dtype.is_floating_point:
                continue
            # A result of 8 bits alone is rounded by more than that.
            if not worst <= max(MOST_IN_TF32, numerics.epsilon(out.dtype)):
                return f"result {result.name}: torch errs by {worst:.3g} in TF32"
        return ""

    def _original(
        self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """Results of the function as it was given; None where it takes other dtypes only."""
        operation, trace = self._draft.trace.operation, self._draft.trace
        if any(tensors[operation.examples[i].name].dtype != operation.examples[i].dtype
               for i in trace.used):  # fmt: skip
            return None
        given = []
        for i, example in enumerate(operation.examples):
            if i in trace.used:
                given.append(tensors[example.name].clone())
            else:
                shape = trace.sizes(trace.shapes[i], dims)
                given.append(torch.zeros(shape, dtype=example.dtype))
        with torch.no_grad():
            results, _ = run(operation, given)
        return (*results, *(given[i] for i in trace.written))

    @staticmethod
    def _timed(function: Any) -> tuple[tuple[torch.Tensor, ...], float]:
        """The function's results, and its shortest time in seconds: others use the cores, too."""
        best, start = math.inf, time.perf_counter()
        for call in itertools.count():
            began = time.perf_counter()
            outputs = function()
            best = min(best, time.perf_counter() - began)
            spent = time.perf_counter() - start
            enough = _TIMED_S if call >= _LEAST_CALLS - 1 else _MOST_TIMED_S
            if call and spent >= enough:
                break
        return outputs, best


def _case(case: DraftCase, name: str) -> Case:
    return Case(
        name=name,
        dtype=case.dtype,
        inputs=case.inputs,
        scale=case.scale,
        noncontiguous=case.noncontiguous,
        offset=case.offset,
        **case.sizes,
    )


def _same_places(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether infinities and NaN are at the same places."""
    one, two = _wide(one), _wide(two)
    return torch.equal(one.isnan(), two.isnan()) and torch.equal(one.isinf(), two.isinf())


def _fits(one: torch.Tensor, ref: torch.Tensor) -> bool:
    """Whether the reference has no NaN, some numbers, and its infinities are the other's, too."""
    finite = ref.isfinite()
    if finite.all():
        return True
    same = torch.equal(one.to(ref.dtype)[~finite], ref[~finite])
    return same and bool(finite.any() and one[finite].isfinite().all())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that torch computes in: none of 8 bits."""
    floating = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.float() if floating else tensor


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, two)
    return torch.allclose(one.double(), two.double(), rtol=_SAME, atol=_SAME, equal_nan=True)


@contextmanager
def written(draft: TaskDraft) -> Iterator[Path]:
    """A draft as a folder, for as long as it is tried."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / draft.trace.operation.name
        write(draft, path)
        yield path


def write(draft: TaskDraft, folder: Path) -> None:
    """Write the two files of a draft.

    Raises:
        UserError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.toml").write_text(task_toml(draft), encoding="utf-8")
        (folder / "reference.py").write_text(reference_py(draft), encoding="utf-8")
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror})") from None


def accepted(trials: Trials, cases: Iterable[DraftCase]) -> Iterator[tuple[DraftCase, Tried]]:
    """The cases that can be cases of a task, with what they showed."""
    for i, case in enumerate(cases):
        tried = trials.case(case, f"trial_{i}")
        if not tried.why:
            yield case, tried


def are_cases(draft: TaskDraft, cases: Sequence[DraftCase]) -> bool:
    """Whether all of some cases of a draft can be cases of a task, in more than one draw."""
    with written(draft) as folder:
        trials = Trials(draft, folder)
        return not any(
            trials.case(c, f"{c.inputs}_{i}", seed).why
            for seed in TRIED_SEEDS
            for i, c in enumerate(cases)
        )
