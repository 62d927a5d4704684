"""Families of slightly wrong kernels: they build without a GPU, and get their verdicts on one."""

import pytest
from families import (
    FOLDER,
    MEMBERS,
    RUN_SEED,
    RUNS,
    Judges,
    a_judge,
    built_and_checked,
    expect_verdict,
    with_runs,
)
from kagent.selftest.assemble import candidates
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.judge.check.cases import check_cases
from seed_cases import TRAINING_TASKS


@pytest.fixture(scope="module")
def gpu_judges():
    from kagent_sandbox.device.cuda.backend import GpuBackend

    judges = Judges(lambda task, stack: a_judge(task, GpuBackend(), stack))
    with judges.open:
        yield judges


@pytest.mark.sampled(of="member", one_in=10, each=True)
@pytest.mark.parametrize(
    "member", [p for p in with_runs("gpu") if p.values[0].right or p.id.endswith("cuda")]
)
def test_builds_without_a_gpu(member, builder):
    """What is right in all cases that a GPU checks; mistakes in CUDA, of a line each, in two."""
    task = find_task(member.task)
    cases = check_cases(task, "gpu", RUN_SEED)[: None if member.right else 2]
    given = tuple(build_case(task, c) for c in cases)
    request = BuildRequest(member.text, task.entry, "sm_90a", given, task.allow)
    built = builder.build(request)
    assert isinstance(built, Built), built


@pytest.mark.gpu
@pytest.mark.parametrize("member", with_runs("gpu"))
def test_on_a_gpu(member, builder, gpu_judges):
    judge = gpu_judges.of(member.task)
    cases = check_cases(judge.task, "gpu", RUN_SEED)
    expect_verdict(member, built_and_checked(builder, judge, cases, member.text))


def test_the_catalogue_is_whole():
    """Every file is listed once, every task has a family with the kinds of mistakes promised."""
    listed = [m.file for m in MEMBERS]
    assert sorted(listed) == [f for folder in sorted(FOLDER.iterdir()) for f in candidates(folder)]
    assert {m.task for m in MEMBERS} == set(task_names())
    for member in MEMBERS:
        assert set(member.runs) <= set(RUNS)
        assert member.why
    for task in task_names():
        if task in TRAINING_TASKS:
            languages = {s.language for s in seeds_of(find_task(task))}
            for language in languages:
                wrong = [m for m in MEMBERS if m.task == task and m.file.stem.endswith(language)]
                assert len(wrong) >= 2
            continue
        passing = [m for m in MEMBERS if m.task == task and m.right]
        failing = {m.file.stem for m in MEMBERS if m.task == task} - {m.file.stem for m in passing}
        assert len(passing) >= 4
        for language in ("cpp", "triton", "cuda"):
            assert any(m.file.stem == f"honest_{language}" for m in passing)
            assert sum(s.endswith(language) for s in failing) >= 4
