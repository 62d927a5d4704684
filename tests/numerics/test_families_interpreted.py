"""Slightly wrong Triton kernels fail in Triton's interpreter, and their right twins pass."""

import pytest
from families import Judges, expect_verdict, with_runs
from kagent_sandbox.judge.interpreter import Interpreter

RUN_SEED = 2
"""Its hidden cases have few rows: each row is a program, of some 5 ms in the interpreter."""


@pytest.fixture(scope="module")
def interpreters(shared):
    def make(task, stack):
        return stack.enter_context(Interpreter(task, RUN_SEED))

    judges = Judges(make)
    with judges.open:
        yield judges


@pytest.mark.parametrize("member", with_runs("interpret"))
def test_in_the_interpreter(member, interpreters):
    expect_verdict(member, interpreters.of(member.task).interpret(member.text))
