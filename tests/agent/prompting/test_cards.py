"""Cards are well formed, and all code in them parses, builds and, on the CPU, computes."""

import ast
import json
import os
from pathlib import Path

import pytest
from card_snippets import (
    CARDS,
    FOLDER,
    INFO,
    error_of,
    fences,
    name_of,
    needs_a_file,
    snippets,
)
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.verdict import Rejected

SNIPPETS = {s.name: s for s in snippets()}


def test_there_are_cards_for_every_bound_and_language():
    assert len(CARDS) >= 20
    pairs = {(b, n) for c in CARDS.values() for b in c.front.bound for n in c.front.languages}
    wanted = {(b, n) for b in ("memory", "compute") for n in ("triton", "cuda", "cpp")}
    assert wanted | {("latency", "triton"), ("latency", "cuda")} <= pairs


@pytest.mark.parametrize("name", CARDS)
def test_code_is_marked_by_its_language_and_parses(name):
    for language, info, number, text in fences(CARDS[name]):
        assert info == INFO[language], (name, number)
        if info == "python":
            ast.parse(text)
        if needs_a_file(language, text):
            assert name_of(name, language, number) in SNIPPETS, f"{name}: no file builds {number}"


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_short(name):
    card = CARDS[name]
    for language in card.front.languages:
        assert len(card.text([language], 0)) < 6500, (name, language)
    assert all(len(line) <= 100 for *_, text in fences(card) for line in text.splitlines())


def test_a_paragraph_for_later_architectures_is_theirs_alone():
    card = CARDS["packed_math"]
    assert "fma.rn.f32x2" in card.text(["cuda"], 100)
    assert "fma.rn.f32x2" not in card.text(["cuda"], 90)
    assert "**What goes wrong**" in card.text(["cuda"], 90)
    assert not [n for n, c in CARDS.items() if "sm_100" in c.text(c.front.languages, 90)]


def test_tasks_of_a_card_may_be_patterns():
    assert CARDS["checkpointing"].is_for_task("attention_backward")
    assert CARDS["checkpointing"].is_for_task("swiglu_backward")
    assert not CARDS["checkpointing"].is_for_task("attention")
    assert not CARDS["pipelining"].is_for_task("gelu_backward")  # any except gelu*
    assert CARDS["pipelining"].is_for_task("attention_train")


def test_every_file_of_snippets_belongs_to_a_fence():
    assert {p.name for p in FOLDER.glob("*.py")} == set(SNIPPETS)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", SNIPPETS)
def test_code_builds(name, builder):
    snippet = SNIPPETS[name]
    if snippet.missing:
        pytest.skip(f"not installed: {snippet.missing}")
    built = builder.build(snippet.request())
    if isinstance(built, Rejected) and "launches no kernel" in built.message:
        assert name == "chunking.triton.py"  # what goes around a kernel: traced, and no candidate
        return
    assert isinstance(built, Built), f"{built.status}: {built.message}"
    if "loads" in snippet.fields:
        kernels = [k for plan in built.plans.values() for k in plan.kernels]
        assert {w for k in kernels for w in k.load_bytes} == {int(snippet.fields["loads"])}
    if "spills" in snippet.fields:
        assert {k.spill_bytes for p in built.plans.values() for k in p.kernels} == {0}
    if "threads" in snippet.fields:  # warp specialisation took effect
        blocks = {op.block for plan in built.plans.values() for op in plan.launches}
        assert blocks == {(int(snippet.fields["threads"]), 1, 1)}


@pytest.mark.parametrize("name", [n for n in SNIPPETS if ".cpp." in n])
def test_code_for_the_cpu_computes(name, tmp_path):
    assert error_of(SNIPPETS[name], "cpu", tmp_path) < 1


@pytest.mark.nightly
def test_triton_code_computes_in_the_interpreter(bare_python):
    """In a process of its own: TRITON_INTERPRET decides at import what `triton.jit` returns."""
    names = [n for n, s in SNIPPETS.items() if ".triton." in n and "interpret" not in s.fields]
    script = Path(__file__).with_name("run_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = bare_python.run(script, *names, cwd=Path.cwd(), env=environment)
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    assert set(errors) == set(names)
    assert {n: e for n, e in errors.items() if not e < 1} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in SNIPPETS if ".cpp." not in n])
def test_code_for_gpus_computes(name, tmp_path):
    if SNIPPETS[name].missing:
        pytest.skip(f"not installed: {SNIPPETS[name].missing}")
    assert error_of(SNIPPETS[name], "cuda", tmp_path) < 1
