"""What torch errs on a case's inputs, as a yardstick for candidates."""

import weakref

import pytest
import torch
from handmade_candidates import REFERENCE, write_task
from kagent.tasks import find_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Stage
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import DeviceFull
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check import inputs as draws
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.checker import Checker
from kagent_sandbox.judge.check.inputs import InputSampler, InputSet

CPU = torch.device("cpu")
CLUMSY = REFERENCE.replace("return x * 2", "return x * 2 * (1 + 1e-3 * x[0, 0].abs())")


@pytest.fixture
def task(tmp_path):
    """Torch's own implementation errs on each draw as much as its first element says."""
    folder = write_task(tmp_path)
    (folder / "reference.py").write_text(CLUMSY)
    return load_task(folder)


def own_row_error(input_set):
    return 1e-3 * abs(float(input_set.tensors["x"][0, 0]))


def test_the_yardstick_is_the_most_of_some_draws(task):
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    first = source.draw(case)
    (errors,) = source.torch_errors(first)
    drawn = {id(d): d for d in (source.draw(case) for _ in range(60))}
    assert id(first) in drawn
    assert len(drawn) == TRAITS.inputs.pool >= draws.YARDSTICKS
    assert errors.row == pytest.approx(max(map(own_row_error, drawn.values())), rel=1e-2)
    for input_set in drawn.values():
        assert source.torch_errors(input_set) == (errors,)


def test_a_draw_with_larger_errors_counts_for_itself(task):
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    (usual,) = source.torch_errors(source.draw(case))
    odd = source.fresh(case)
    odd.tensors["x"][0, 0] = 50.0
    (errors,) = source.torch_errors(odd)
    assert errors.row == pytest.approx(0.05, rel=1e-2)
    assert source.torch_errors(source.draw(case)) == (usual,)


def test_of_many_elements_one_draw_is_enough(task, monkeypatch):
    monkeypatch.setattr(draws, "MANY_ELEMENTS", 1)
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    first = source.draw(case)
    (errors,) = source.torch_errors(first)
    assert errors.row == pytest.approx(own_row_error(first), rel=1e-2, abs=1e-6)


def test_what_was_found_is_enough_for_timed_results(task, monkeypatch):
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    found = source.usual_errors(source.draw(case), typical=True)
    monkeypatch.setattr(source, "call", None)
    assert source.usual_errors(source.fresh(case), typical=True) == found


def test_torch_is_asked_about_a_draw_only_where_that_decides(task, monkeypatch):
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    checker = Checker(task, source)
    (usual,) = source.torch_errors(source.draw(case))
    asked = []
    call = source.call
    monkeypatch.setattr(source, "call", lambda which, d: asked.append(which) or call(which, d))

    def compare(input_set, error):
        results = [call("reference", input_set)[0].float() * (1 + error)]
        return checker.compare(results, input_set, Stage.CHECK)

    compare(source.fresh(case), usual.row)
    assert "eager" not in asked
    odd = source.fresh(case)
    odd.tensors["x"][0, 0] = 50.0  # torch's error there is 0.05
    (error,) = compare(odd, 0.05)
    assert "eager" in asked
    assert error.torch_row == pytest.approx(0.05, rel=1e-2)
    with pytest.raises(CandidateRejected, match="err"):
        compare(odd, 0.5)


def plain(x, weight, target):
    """Loss and gradients as a loop over the vocabulary computes them, in float32."""
    z = x @ weight.T
    at = torch.arange(len(target)), target
    maximum = z.amax(1, keepdim=True)
    e = torch.exp(z - maximum)
    total = e.cumsum(1)[:, -1:]  # one after the other
    loss = (total.log() + maximum)[:, 0] - z[at]
    p = e * (1 / total)
    p[at] -= 1
    p *= 1 / len(target)
    return loss.mean(), p @ weight, p.T @ x


def test_shifted_logits_can_be_met_by_an_honest_kernel_that_rounds_otherwise():
    """Their gradient has a part that is exactly 0, where only rounding is left: what is compared
    must not hang on it.
    """
    task = find_task("linear_cross_entropy")
    reference = task.reference()
    case = next(c for c in task.cases("cpu").check if c.inputs == "shifted")
    source = InputSampler(task, CPU, TRAITS.inputs)

    def drawn(seed):
        tensors = reference.inputs(case, torch.Generator().manual_seed(seed), CPU)
        return InputSet(case, tensors, {"ignore_index": -100})

    first = [source._errors(drawn(seed)) for seed in range(draws.YARDSTICKS)]
    for seed in range(100, 130):
        input_set = drawn(seed)
        limits = draws._most([*first, source._errors(input_set)])
        for result, out, ref, errors in zip(
            task.results,
            plain(**input_set.tensors),
            source.expected(input_set),
            limits,
            strict=True,
        ):
            found = numerics.measure_errors(out, ref, result.row_dims)
            limit = numerics.allowed(errors, result, out.dtype)
            assert numerics.share(found, limit) <= 1, (seed, result.name)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_shifted_logits_cannot_be_exponentiated_unshifted(kind):
    task = find_task("linear_cross_entropy")
    case = next(c for c in task.cases(kind).check if c.inputs == "shifted")
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        drawn = task.reference().inputs(case, generator, CPU)
        logits = drawn["x"].double() @ drawn["weight"].double().T
        assert float(logits.abs().min()) > 85
        lost = torch.exp(logits.float())
        assert bool((lost.sum(1).isinf() | (lost.sum(1) < 1e-35)).all())
        if case.dtype == "bfloat16":
            assert torch.equal(logits.bfloat16().double(), logits)


def test_no_process_gets_a_draw_twice_and_others_share_the_stock(task):
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    one, other = draws.UnseenInputs(source, case), draws.UnseenInputs(source, case)
    first = [d.number for _ in range(4) for d in one.take(3)]
    assert len(set(first)) == 12
    second = [d.number for _ in range(4) for d in other.take(3)]
    assert set(second) == set(first)
    assert second != first
    assert not {d.number for d in one.take(5)} & set(first)


def test_the_stock_keeps_to_its_memory_and_nobody_sees_a_draw_again_for_that(task):
    source = InputSampler(task, CPU, TRAITS.inputs)
    small, large = task.cases("cpu").check[0], task.cases("cpu").bench[0]
    source._most_stocked_bytes = 3 * source.fresh(large).nbytes
    source.add(small, 2)
    unseen = draws.UnseenInputs(source, large)
    numbers = [d.number for _ in range(4) for d in unseen.take(2)]
    assert len(set(numbers)) == 8
    assert len(source.stock(large)) <= 3
    assert source.stock(small) == []  # the one that was not used for long made room


def test_large_stale_values_are_those_of_the_case_in_use(task, monkeypatch):
    source = InputSampler(task, CPU, TRAITS.inputs)
    one, two = task.cases("cpu").bench
    (small,) = source.stale(one).results
    assert source.stale(one).results[0] is small
    source.stale(two)
    assert source.stale(one).results[0] is small
    monkeypatch.setattr(draws, "STALE_SHARE", 0.0)
    source = InputSampler(task, CPU, TRAITS.inputs)
    first = weakref.ref(source.stale(one))
    assert source.stale(one) is first()
    source.stale(two)
    assert first() is None
    second = weakref.ref(source.stale(two))
    source.make_room()
    assert second() is None


def test_draws_that_are_not_kept_are_freed_once_they_are_compared(task):
    case = task.cases("cpu").check[0]
    source = InputSampler(task, CPU, InputPolicy())
    draw = source.draw(case)
    inputs, results = map(weakref.ref, (draw.tensors["x"], source.expected(draw)[0]))
    source.release(draw)
    assert (inputs(), results()) == (None, None)
    source = InputSampler(task, CPU, TRAITS.inputs)
    draw = source.draw(case)
    source.release(draw)
    assert set(draw.tensors) == {"x"}


def test_stale_values_are_plausible_and_wrong(task):
    source, case = InputSampler(task, CPU, TRAITS.inputs), task.cases("cpu").check[0]
    (stale,) = source.stale(case).results
    values = stale.view(torch.float32)
    assert bool(torch.isfinite(values).all())
    assert 0.5 < float(values.std()) < 10
    same = draws._wrong(torch.tensor([0.0, float("nan"), 1.0, float("inf")]))
    assert bool(torch.isfinite(same).all())
    assert not bool((same == torch.tensor([0.0, 1.0, 1.0, 1.0])).any())
    assert draws._wrong(torch.tensor([True, False])).tolist() == [False, True]
    assert draws._wrong(torch.tensor([3, 4])).tolist() == [4, 5]


LACKING = REFERENCE.replace(
    "def reference(*, x):",
    "FULL = []\n\n\ndef reference(*, x):\n    if FULL:\n"
    "        raise torch.OutOfMemoryError(FULL.pop())",
).replace("def reference_rows(", "def _rows(")


@pytest.fixture
def full_task(tmp_path):
    """A reference that lacks memory as often as its list `FULL` has entries."""
    folder = write_task(tmp_path)
    (folder / "reference.py").write_text(LACKING)
    return load_task(folder)


def test_a_reference_that_lacks_memory_is_computed_on_the_host(full_task, monkeypatch):
    source, case = InputSampler(full_task, CPU, InputPolicy()), full_task.cases("cpu").check[0]
    lacks, draw = source._reference.FULL, source.fresh(case)
    places = [torch.tensor([3, 1])]
    known, exact = source.expected(draw), source.exact_spot_checks(draw, places)
    draw.known_results = None
    lacks.append("CUDA out of memory. Tried to allocate 12.00 MiB.")
    with pytest.raises(DeviceFull, match=r"12\.00 MiB") as full:
        source.expected(draw)
    begun = []
    monkeypatch.setattr(draws, "begin_request", begun.append)
    assert not source.compute_on_host(ValueError("no"))
    with monkeypatch.context() as patch:
        patch.setattr(draws, "available_bytes", lambda: 0)
        assert not source.compute_on_host(full.value)
    assert not begun  # the error is still to say how much was needed
    assert source.compute_on_host(full.value)
    assert begun == [CPU]
    assert not source.compute_on_host(full.value)
    assert all(map(torch.equal, source.expected(draw), known))
    draw.known_results = None
    (again,) = source.exact_spot_checks(draw, places)
    assert torch.equal(again.expected, exact[0].expected)
    lacks.append("out of memory")
    with pytest.raises(DeviceFull, match=r"reference: case .*out of memory"):
        source.expected(draw)
