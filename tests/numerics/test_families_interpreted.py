"""Slightly wrong Triton kernels fail in Triton's interpreter, and their right twins pass."""

import pytest
from families import Judges, expect_verdict, with_runs
from kagent_sandbox.judge.interpreter import Interpreter

RUN_SEED = 36
"""Of 40 seeds the one with the fewest rows: each is a program, of some 0.5 ms interpreted."""


@pytest.fixture(scope="module")
def interpreters(shared):
    def make(task, stack):
        return stack.enter_context(Interpreter(task, RUN_SEED))

    judges = Judges(make)
    with judges.open:
        yield judges


@pytest.mark.sampled(of="member", one_in=10, each=True)
@pytest.mark.parametrize("member", with_runs("interpret"))
def test_in_the_interpreter(member, interpreters):
    expect_verdict(member, interpreters.of(member.task).interpret(member.text))
