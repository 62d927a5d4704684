"""Hidden sizes and inputs: evenly in the logarithm, within their cost, of all kinds, and enough to
find kernels that are wrong for some of them alone.
"""

import contextlib
import functools
import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.export.regions import regions_of
from kagent.selftest.assemble import candidate_text, candidates
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.data.build import BuildRequest, Built, TensorSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.generator import Generator
from kagent_sandbox.data.ranges import Range
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.judge.check.cases import check_cases
from kagent_sandbox.judge.check.numerics import allowed, measure_errors, share
from kagent_sandbox.judge.judge import Judge
from mutation.conditions import of_sizes, of_values
from mutation.engines import with_race
from pydantic import ValidationError
from seed_cases import arguments, as_tuple, outputs

PARTLY_WRONG = Path(__file__).parent / "partly_wrong"  # more of what item 122 of the corpus is


@functools.cache
def softmax():
    return find_task("softmax")


def drawn(generator, seed):
    """Cases of one generator, in a task of its own."""
    task = softmax()
    cases = task.cpu.model_copy(update={"hidden_check": (generator,)})
    return draw_hidden(task.model_copy(update={"cpu": cases}), "cpu", "check", seed)


@st.composite
def ranges(draw, most=5000):
    low = draw(st.integers(1, most))
    high = draw(st.integers(low, most))
    multiple = draw(st.sampled_from([1, 1, 2, 7, 96]))
    prime = draw(st.booleans()) if multiple == 1 else False
    try:
        return Range(min=low, max=high, multiple=multiple, prime=prime)
    except ValidationError:  # nothing to draw from
        return Range(min=low, max=high)


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


@given(ranges(), ranges(), st.integers(1, 8), st.integers())
@settings(deadline=None)
def test_sizes_are_of_their_range(columns, rows, count, seed):
    generator = Generator(count=count, dtype=("float32",), dims={"N": columns, "M": rows})
    for case in drawn(generator, seed):
        for name, sizes in (("N", columns), ("M", rows)):
            size = case.dims[name]
            assert sizes.min <= size <= sizes.max
            assert size % sizes.multiple == 0
            assert is_prime(size) or not sizes.prime


@given(st.integers(1, 64), st.integers(1, 10**6), st.integers(1, 8), st.integers())
@settings(deadline=None)
def test_products_stay_within_the_cost(low, most, count, seed):
    generator = Generator(
        count=count, dtype=("float32",), cost="M * N", most=max(most, low * low),
        dims={"N": {"min": low, "max": 10**5}, "M": {"min": low, "max": 10**5}},
    )  # fmt: skip
    for case in drawn(generator, seed):
        assert case.dims["M"] * case.dims["N"] <= generator.most


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_the_last_size_makes_up_the_least_cost(seed):
    generator = Generator(
        count=3, dtype=("float32",), cost="M * N", least=10**6, most=2 * 10**6,
        dims={"N": {"min": 512, "max": 32768}, "M": {"min": 1, "max": 4096}},
    )  # fmt: skip
    for case in drawn(generator, seed):
        assert 10**6 <= case.dims["M"] * case.dims["N"] <= 2 * 10**6


@given(st.integers(2, 8), st.integers())
@settings(deadline=None)
def test_cases_of_a_generator_divide_the_range_among_them(count, seed):
    sizes = {"min": 1, "max": 2**20 - 1}
    generator = Generator(count=count, dtype=("float32",), dims={"N": sizes, "M": [1]})
    logarithms = sorted(math.log2(c.dims["N"]) for c in drawn(generator, seed))
    step = 20 / count
    assert all(b - a <= step + 1 for a, b in itertools.pairwise(logarithms))
    assert logarithms[0] <= step + 1
    assert logarithms[-1] >= 20 - step - 1


def test_sizes_are_even_in_the_logarithm():
    generator = Generator(
        count=3, dtype=("float32",), dims={"N": {"min": 1, "max": 2**15 - 1}, "M": [1]}
    )
    sizes = [c.dims["N"] for seed in range(1000) for c in drawn(generator, seed)]
    octaves = Counter(int(math.log2(n)) for n in sizes)
    assert set(octaves) == set(range(15))
    assert all(150 < octaves[i] < 250 for i in range(15))  # 200 each


def test_values_of_a_list_come_equally_often():
    generator = Generator(
        count=4,
        dtype=("float32",),
        noncontiguous=(False, True),
        offset=(0, 1, 3),
        dims={"N": [8], "M": [2]},
    )
    for seed in range(20):
        cases = drawn(generator, seed)
        assert Counter(c.noncontiguous for c in cases) == {False: 2, True: 2}
        assert {c.offset for c in cases} == {0, 1, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dims": {"N": {"min": 24, "max": 28, "prime": True}}},
        {"dims": {"N": {"min": 8, "max": 4}}},
        {"dims": {"N": {"min": 1, "max": 8}}, "most": 8},
        {"dims": {"N": {"min": 9, "max": 18}}, "cost": "N", "most": 8},
        {"dims": {"N": {"min": 1, "max": 8, "prime": True, "multiple": 2}}},
    ],
)
def test_generators_that_cannot_draw_are_refused(wrong):
    with pytest.raises(ValidationError):
        Generator(count=1, dtype=("float32",), **wrong)


def test_an_offset_moves_the_start_and_enlarges_the_buffer():
    task = find_task("softmax")
    case = task.cpu.check[0].model_copy(update={"offset": 3})
    (x,) = (a for a in build_case(task, case).arguments if isinstance(a, TensorSpec))
    plain = build_case(task, task.cpu.check[0]).arguments[0]
    assert (x.offset, x.extent) == (3, plain.extent + 3)
    assert build_case(task, case).results == build_case(task, task.cpu.check[0]).results


def test_bench_cases_have_no_offset():
    task = find_task("softmax")
    bench = (task.cpu.bench[0].model_copy(update={"offset": 1}),)
    cpu = task.cpu.model_copy(update={"bench": bench})
    with pytest.raises(ValidationError, match="bench inputs are aligned"):
        type(task)(**{n: getattr(task, n) for n in type(task).model_fields} | {"cpu": cpu})


# -- what a run samples of what a library would use ------------------------------------------------


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_hidden_sizes_cover_the_regions_of_an_export(name, kind):
    """Every dimension, of each dtype that benchmarks have, from one end of its region to the other.

    The volume of a region is that of the largest benchmark case.
    """
    task = find_task(name)
    cases = task.cases(kind)
    visible = (*cases.check, *cases.bench)
    dtypes = {c.dtype for c in cases.bench}
    for region in regions_of(visible):
        if region.dtype not in dtypes:
            continue
        generators = [
            g for g in (*cases.hidden_check, *cases.hidden_bench) if region.dtype in g.dtype
        ]
        for dim, low in region.low.items():
            sizes = [g.dims[dim] for g in generators]
            ends = [(s.min, s.max) if isinstance(s, Range) else (min(s), max(s)) for s in sizes]
            assert min(e[0] for e in ends) <= max(4, 4 * low), dim
            assert max(e[1] for e in ends) >= region.high[dim] / 2, dim


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_torchs_errors_are_a_measure_for_others(name, kind):
    """Where torch itself is far off, everything would be allowed."""
    task = find_task(name)
    reference = task.reference()
    for seed in range(4):
        for case in (*task.cases(kind).check, *draw_hidden(task, kind, "check", seed)):
            if (
                task.min_bytes(case) > 1e6
                or task.flop_count(case) > 1e8
                or case.inputs == "subnormal"
            ):
                continue
            if case.dtype == "float16" and name == "cross_entropy":
                continue  # on a CPU torch adds up 16-bit losses in 16 bits
            given_ = arguments(task, reference, case, seed=seed)
            refs = as_tuple(reference.reference(**given_))
            outs = outputs(task, reference.eager, given_)
            for result, out, ref in zip(task.compared, outs, refs, strict=True):
                errors = measure_errors(out, ref, result.row_dims)
                most = 1e-3 if out.dtype == torch.float32 and case.dtype == "float32" else 0.4
                assert errors.row < most, case
                assert errors.element < most, case


@pytest.mark.parametrize("which", [1, 2], ids=["dk", "dv"])
def test_the_last_keys_of_a_long_causal_call_count(which):
    """Beside the first keys of their head they are small: few queries see them."""
    task = find_task("attention_backward")
    reference = task.reference()
    dims = {"B": 1, "H": 1, "Hkv": 1, "S": 2048, "D": 64, "causal": True}
    case = Case(name="long", dtype="bfloat16", **dims)
    given_ = arguments(task, reference, case, seed=0)
    ref, result = reference.reference(**given_)[which], task.compared[which]
    out = reference.eager(**given_)[which]
    limit = allowed(measure_errors(out, ref, result.row_dims), result, out.dtype)
    out[:, :, -1:] = 0
    assert share(measure_errors(out, ref, result.row_dims), limit) > 1


# -- files that are wrong for some of them alone ---------------------------------------------------


@pytest.fixture(scope="module")
def softmax_checks(builder, untimed):
    """A check of a file on the CPU, as in a run with a secret."""
    task = find_task("softmax")

    def check(source, secret):
        cases = tuple(build_case(task, c) for c in check_cases(task, "cpu", secret))
        built = builder.build(BuildRequest(source, task.entry, "cpu", cases, task.allow))
        assert isinstance(built, Built), built
        with contextlib.closing(Judge(task, CpuBackend(), secret)) as judge:
            return judge.check(built)

    return check


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("path", candidates(PARTLY_WRONG), ids=lambda path: path.stem)
def test_a_kernel_that_is_wrong_for_some_inputs_is_refused(softmax_checks, path):
    secret = random.Random(path.stem).randrange(1000)  # the mutation score has many of them
    found = softmax_checks(candidate_text(path), secret)
    assert isinstance(found, Rejected), secret
    assert found.status == "INCORRECT_NUMERICAL", found


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", task_names())
def test_mutants_of_conditions_are_files(name):
    task = find_task(name)
    every = with_race(task, "cpu", 1).cpu.check
    for seed in seeds_of(task):
        sizes = of_sizes(task, seed.path, every, 10, 0)
        assert len({m.now for m in sizes}) == 10
        assert sizes == of_sizes(task, seed.path, every, 10, 0)
        for mutant in (*sizes, *of_values(seed.path)):
            compile(mutant.source, mutant.now, "exec")
            assert mutant.source != seed.source()
    some = of_values(next(s for s in seeds_of(find_task("softmax")) if s.language == "cpp").path)
    assert len(some) == 11


@pytest.mark.parametrize("name", task_names())
def test_costs_are_those_of_the_dimensions(name):
    task = find_task(name)
    for kind in ("gpu", "cpu"):
        cases = task.cases(kind)
        for which, generators in (("check", cases.hidden_check), ("bench", cases.hidden_bench)):
            for seed in range(6):
                hidden = iter(draw_hidden(task, kind, which, seed))
                for generator in generators:
                    for _ in range(generator.count):
                        case = next(hidden)
                        if generator.cost:
                            cost = evaluate(generator.cost, case.dims)
                            assert cost <= generator.most, case
                            name, sizes = list(generator.dims.items())[-1]
                            largest = sizes.max if isinstance(sizes, Range) else max(sizes)
                            at_most = case.dims[name] == largest
                            assert cost >= 0.5 * generator.least or at_most, case
