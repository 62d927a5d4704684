"""`kagent prompt`."""

import json
from dataclasses import replace

import pytest
from asktell_runs import ask, start
from commands import run
from kagent.asktell.prompt_preview import explanation, of_run, own_device
from kagent.config.settings import load_config
from kagent.llm.drafts import text_of
from kagent.prompting import Prompter, run_facts_of
from kagent.runs.lineage import Operator
from kagent.runs.store import read_history
from kagent_sandbox.data.verdict import Rejected
from simulated_evolution import stored_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stored_run(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def show(monkeypatch, capsys):
    return lambda *words: run(monkeypatch, capsys, "prompt", *words)


def of(folder, *words):
    return folder.parents[1] / "task", "--run", folder.name, "--runs", folder.parent, *words


def test_a_task_has_a_first_prompt_for_any_target(show):
    shown = show("softmax", "--target", "sm_90a")
    assert shown.code == 0
    assert "# The parent: #0 triton_rows" in shown.out  # it explains itself best
    assert "the usual device of this architecture" in shown.out
    assert "Predicted speed-up" in shown.out
    other = show("softmax", "--target", "sm_90a", "--parent", "cuda_cluster", "--card", "waves")
    assert "# The parent: #0 cuda_cluster" in other.out
    assert "# The technique to try: Waves, and the last one" in other.out


def test_without_a_target_it_is_this_machines_own(show, monkeypatch):
    monkeypatch.setattr("kagent.asktell.open_run.available", lambda kind: kind == "cpu")
    shown = show("gelu", "--json")
    data = json.loads(shown.out)
    assert (data["operator"], data["parent"]) == ("structure", 0)
    assert "for OpenMP" in data["system"]
    assert "# The parent: #0 cpp_simd" in data["user"]
    assert "technique to try: " in data["user"]
    assert data["card"]


def test_a_run_shows_exactly_what_a_model_would_be_sent(folder, show):
    store, history = read_history(folder)
    shown = show(*of(folder))
    assert shown.code == 0
    preview = of_run(load_config(), folder, str(folder.parents[1] / "task"))
    run_facts = run_facts_of(store.manifest, history)
    run_facts = replace(run_facts, device=own_device("cpu"))  # it knows none: a made-up run
    task = preview.ask.setting.task
    prompter = Prompter(task, "cpu", "cpu", run_facts)
    assert shown.out == text_of(prompter.write(preview.ask))
    assert preview.ask.id == history.asked
    again = json.loads(show(*of(folder, "--json")).out)
    assert again["system"] == prompter.write(preview.ask).system


def test_operator_and_parent_may_be_named(folder, show):
    _, history = read_history(folder)
    rejected = next(c.id for c in history.lineage if isinstance(c.verdict, Rejected))
    repair = json.loads(show(*of(folder, "--operator", "repair", "--json")).out)
    assert repair["operator"] == "repair"
    assert isinstance(history.lineage[repair["parent"]].verdict, Rejected)
    chosen = json.loads(show(*of(folder, "--parent", rejected, "--json")).out)
    assert (chosen["operator"], chosen["parent"]) == ("repair", rejected)
    other = json.loads(show(*of(folder, "--parent", "1", "--operator", "tune", "--json")).out)
    assert (other["operator"], other["parent"]) == ("tune", 1)
    assert "Its tunables:" in other["user"]
    crossed = json.loads(show(*of(folder, "--operator", "crossover", "--json")).out)
    assert "# The other parent" in crossed["user"]


def test_what_does_not_fit_is_answered_with_what_does(folder, show):
    rejected = next(
        c.id for c in read_history(folder)[1].lineage if isinstance(c.verdict, Rejected)
    )
    for words, said in (
        ((), "name a task"),
        (("softmax", *of(folder)[1:]), "a run of toy, not of softmax"),
        (of(folder, "--target", "sm_90a"), "a run has its own target"),
        (of(folder, "--parent", "99"), "no candidate 99: the run has 0 to "),
        (of(folder, "--parent", "x"), "expected the id of one of the run's candidates"),
        (of(folder, "--parent", "0", "--operator", "repair"), "#0 has passed: --operator repair"),
        (
            of(folder, "--parent", rejected, "--operator", "tune"),
            f"#{rejected} was rejected: --operator tune needs a --parent that has passed",
        ),
        (of(folder, "--card", "none"), "no card 'none': there are "),
        (("softmax", "--parent", "none"), "no seed 'none': softmax has cpp_online, cpp_rows"),
        (("softmax", "--target", "sm_1"), "unknown target 'sm_1'"),
        (("softmax", "--target", "cpu", "--lang", "cuda"), "--lang cuda has no kernels for cpu"),
        (("softmacks",), "did you mean softmax?"),
        (("softmax", "--operator", "repair"), "no candidate was rejected"),
    ):
        shown = show(*words)
        assert shown.code == 2, words
        assert said in shown.err, shown.err
    shown = show(*of(folder)[1:])
    assert (shown.code, "no task toy on this machine" in shown.err) == (4, True)


def test_the_next_prompt_of_a_run_that_is_answered_is_the_one_that_ask_writes(tmp_path, show):
    """It knows what is asked already, and the task as the run has it."""
    run = start(tmp_path)
    ask(run, 2)
    shown = show("--run", run.name, "--runs", run.parent)
    (asked,) = ask(run, 1)
    assert shown.out.strip() == asked.prompt.strip()
    assert "tries up to 16 combinations" in asked.prompt


def test_where_constants_are_not_tuned_no_prompt_says_that_they_are(tmp_path, show, monkeypatch):
    monkeypatch.setenv("KAGENT_TUNE", "1")
    run = start(tmp_path)
    (asked,) = ask(run, 1)
    assert "combinations" not in asked.prompt
    assert "combinations" not in show("--run", run.name, "--runs", run.parent).out
    assert "combinations" not in show("softmax", "--target", "cpu").out


def test_a_run_in_which_nothing_passed_has_no_next_prompt(tmp_path, show):
    from kagent.runs.store import RunStore
    from simulated_evolution import manifest
    from simulated_landscape import toy_task

    task = toy_task(tmp_path / "task")
    made = manifest(task_folder=str(task.folder), task_digest=task.digest)
    RunStore.create(tmp_path / "runs", made).close()
    name = next((tmp_path / "runs").iterdir())
    shown = show(task.folder, "--run", name)
    assert shown.code == 2
    assert "no candidate has passed yet" in shown.err


def test_own_templates_are_used(folder, show, tmp_path):
    for operator in Operator:
        (tmp_path / f"{operator}.md.j2").write_text("mine: {{ parent.name }}\n")
    shown = show(*of(folder, "--prompts", tmp_path))
    assert "mine: cpp_" in shown.out


def test_explanation_counts_words_per_line():
    assert explanation('"""One two."""\nx = 1  # three four\ny = 2\n') == 5 / 3
    assert explanation('S = """\nint a;  // one two\n"""\n') == 2 / 3
