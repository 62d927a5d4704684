"""A language of a user's own: a package that KAGENT_LANGUAGES names, and no other file."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from doubling_task import REFERENCE, TASK
from warm_python import WHOLE_PROGRAM

RECORD = """
from kagent_sandbox.data.language import Language, register

TOY = register(
    Language(
        name="toy",
        title="Toy",
        kind="cpu",
        pattern=r"\\btoy_kernel\\s*\\(",
        written="toy_kernel(name, formula)",
        compiler="kagent_toy.compiler",
        fences=("toy",),
        kernel_fences=("formula",),
        rules="- `toy_kernel(name, formula)`: one formula for every element, such as `2 * x`.",
    )
)
"""
KERNELS = '''
"""What candidates import: a formula for every element of a tensor."""

from kagent_sandbox.runtime import Source, cpp_kernel
from kagent_sandbox.runtime.launches import Launching, watch


def in_cpp(name, formula):
    loop = f"for (long i = 0; i < n; ++i) {{ float x = xs[i]; ys[i] = {formula}; }}"
    return f'extern "C" void {name}(const float* xs, float* ys, long n) {{ {loop} }}'


def toy_kernel(name, formula):
    def call(x, y):
        arguments = (x, y, x.numel())
        source = Source("toy", name, formula)
        if watch.instead is None or not watch.instead(source, arguments, Launching()):
            cpp_kernel(name, in_cpp(name, formula))(*arguments)

    return call
'''
COMPILER = """
from kagent_sandbox.builder.compile import cpp
from kagent_toy.kernels import in_cpp

parameters = cpp.parameters


def compile_source(source, target):
    return cpp.compile_cpp(source.name, in_cpp(source.name, source.text)), source.name
"""
SEED = """
import torch
from kagent_toy.kernels import toy_kernel


def double(x):
    y = torch.empty_like(x)
    toy_kernel("twice", "2 * x")(x, y)
    return y
"""
CARD = """+++
title = "Fewer operations"
bound = ["compute"]
languages = ["cpp", "toy"]
+++
## When it pays
Often.
## C++
Write less.
## Toy
Write `2 * x`.
## What goes wrong
Nothing.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The package beside a task with one seed in the language. One for all: later processes of one
    environment are forked from a template.
    """
    tmp_path = tmp_path_factory.mktemp("toy")
    files = {
        "kagent_toy/__init__.py": RECORD,
        "kagent_toy/kernels.py": KERNELS,
        "kagent_toy/compiler.py": COMPILER,
        "double/task.toml": TASK,
        "double/reference.py": REFERENCE,
        "double/toy_twice.py": SEED,
        "card.md": CARD,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)  # the template imports the language, too
        yield tmp_path


def run(folder, *words, languages="kagent_toy"):
    """`python WORDS...` as a user of the language has it."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "KAGENT_LANGUAGES": languages}
    environment |= {"COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def answer(folder, code):
    """What a program finds that knows the language: its `answer`."""
    program = f"{WHOLE_PROGRAM}\n{textwrap.dedent(code)}\nimport json; print(json.dumps(answer))"
    done = run(folder, "-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_offered(folder):
    offered = run(folder, "-m", "kagent", "evolve", "--help")
    assert "<triton|gluon|cuda|cute|cutile|cpp|toy|any>" in offered.stdout, offered.stderr
    without = run(folder, "-m", "kagent", "prompt", "double", "--lang", "toy", languages="")
    assert "'toy' is not one of" in without.stderr


def test_it_is_recognised_by_its_kernels_and_by_a_seeds_name(folder):
    assert answer(
        folder,
        """
        from kagent.evolve.session import seeds_for
        from kagent.tasks import find_task, seeds_of
        from kagent_sandbox.data.language import language_of_source
        task = find_task("double")
        answer = [
            [s.name for s in seeds_for(task, "cpu", lang)] for lang in ("toy", "any")
        ] + [s.language for s in seeds_of(task)]
        answer.append(language_of_source(seeds_of(task)[0].source()).name)
        """,
    ) == [["toy_twice"], ["toy_twice"], "toy", "toy"]


@pytest.mark.nightly
def test_a_card_can_have_a_section_for_it(folder):
    text = answer(
        folder,
        """
        from pathlib import Path
        from kagent.prompting.cards import read_card
        answer = read_card(Path("card.md")).text(["toy"], 0)
        """,
    )
    assert "**Toy**\n\nWrite `2 * x`." in text
    assert "C++" not in text


def test_a_reply_is_read_from_its_fence(folder):
    whole, alone = answer(
        folder,
        f"""
        from kagent.llm.reply import read_reply
        SEED = {SEED!r}
        answer = [
            read_reply("Hypothesis: short\\n\\n```toy\\n" + SEED + "```\\n", "double").source,
            read_reply("Hypothesis: short\\n\\n```formula\\n2 * x\\n```\\n", "double").message,
        ]
        """,
    )
    assert whole == SEED
    assert "holds CUDA or C++ or Toy alone (lines 4–4)" in alone
    assert "or toy_kernel(name, formula)" in alone


def test_a_model_is_told_how_to_write_it(folder):
    done = run(folder, "-m", "kagent", "prompt", "double", "--lang", "toy")
    assert "- `toy_kernel(name, formula)`: one formula for every element" in done.stdout, (
        done.stderr
    )
    assert "# The parent: #0 toy_twice" in done.stdout


def test_it_is_built_and_judged(folder):
    found = answer(
        folder,
        """
        from kagent.evolve.open_machine import request_maker, search_cases
        from kagent.tasks import find_task, seeds_of
        from kagent_sandbox.builder.client import Builder
        from kagent_sandbox.data.verdict import Rejected
        from kagent_sandbox.judge.client import JudgeClient
        task = find_task("double")
        right = seeds_of(task)[0].source()
        answer = []
        with Builder() as builder, JudgeClient(task.folder, "cpu", 1) as judge:
            request = request_maker(task, judge.facts, search_cases(task, "cpu", 1), 1)
            for source in (right, right.replace("2 * x", "3 * x"), right.replace("2 * x", "2 *")):
                built = builder.build(request(source))
                verdict = built if isinstance(built, Rejected) else judge.check(built)
                if isinstance(verdict, Rejected):
                    answer.append(verdict.status)
                else:
                    answer += [k.language for p in built.plans.values() for k in p.kernels]
        """,
    )
    assert set(found[:-2]) == {"toy"}
    assert found[-2:] == ["INCORRECT_NUMERICAL", "COMPILE_ERROR"]


def test_a_package_that_cannot_be_imported_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kagent", "tasks"],
        cwd=tmp_path,
        env={**os.environ, "KAGENT_LANGUAGES": "nobody_has_it"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kagent: KAGENT_LANGUAGES names nobody_has_it")
    assert done.stderr.count("\n") == 1
