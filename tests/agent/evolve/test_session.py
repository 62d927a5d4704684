"""The whole product on the CPU: a real builder, a real judge, a real run of a small task."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel_of_passes
from kagent.config.settings import load_config
from kagent.evolve.session import (
    choose_seeds,
    evolve,
    new_manifest,
    require_budget,
    resolve_config,
)
from kagent.evolve.stored_run import setting_of, todays_task
from kagent.runs.events import Phase, PhaseBegan, Progress, Raced, Started, Stop
from kagent.runs.lineage import Operator
from kagent.runs.store import RunStore
from kagent.search.tuner import Tuner
from kagent.tasks import find_task, refusal_file
from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import RunError, TaskError, UserError
from replaying import replay


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("double")
    # One case is enough: torch compiles for each.
    (folder / "task.toml").write_text(re.sub(r"  { name = \"long\".*\n", "", TASK))
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "cpp_parallel.py").write_text(kernel_of_passes(PARALLEL + PLAIN))
    (folder / "cpp_plain.py").write_text(kernel_of_passes(PLAIN, passes=8))
    (folder / "cpp_wrong.py").write_text(kernel_of_passes(PLAIN.replace("2 *", "3 *")))
    return folder


@pytest.mark.nightly
@pytest.mark.usefixtures("shared", "brief_timing", "few_compiled")
@pytest.mark.timeout(400)  # two runs, and torch's compiler
def test_a_real_run_is_resumed_and_replayed(task, own_cache, tmp_path, monkeypatch):
    events = []
    first = evolve(str(task), load_config(runs=tmp_path / "runs", budget=1), events.append)
    assert first.stop is Stop.BUDGET
    seeds = first.history.lineage.seeds
    assert [c.proposal.name for c in seeds] == ["cpp_parallel", "cpp_plain", "cpp_wrong"]
    assert [isinstance(c.verdict, Passed) for c in seeds] == [True, True, False]
    assert [e.phase for e in events if isinstance(e, PhaseBegan)] == list(Phase)
    assert any(isinstance(e, Started) for e in events)
    assert any(isinstance(e, Progress) for e in events)
    assert any(isinstance(e, Raced) for e in events)
    assert first.history.race.winner is not None
    assert set(first.history.baselines) == {"baselines", "ceilings"}

    monkeypatch.setenv("KAGENT_PASS", f"{os.environ['KAGENT_PASS']},TORCHDYNAMO_DISABLE")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # what torch compiles was in the first race
    config = load_config(runs=tmp_path / "runs", budget=3, seed=99)
    outcome = evolve(str(task), config, lambda e: None, resume=first.folder)
    assert outcome.stop is Stop.BUDGET
    assert outcome.history.lineage.counted == 3
    assert outcome.history.lineage[3] == first.history.lineage[3]
    with RunStore.open(outcome.folder, write=False) as store:
        assert store.manifest.seed == 0
        assert store.manifest.environment["isolation"]
        decided = replay(store.history(), setting_of(store, find_task(task)), Tuner())
        assert asyncio.run(decided) is None


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_timing_gpu_kernels_without_a_gpu_is_one_clear_line(task):
    with pytest.raises(UserError, match=r"needs an NVIDIA GPU.*--lang cpp evolves double"):
        choose_seeds(find_task(task), load_config(lang="triton"))
    kind, seeds = choose_seeds(find_task(task), load_config(lang="any"))
    assert kind == "cpu"
    assert len(seeds) == 3


def test_a_language_without_a_seed_is_named(task, tmp_path):
    for path in ("task.toml", "reference.py"):
        (tmp_path / path).write_bytes((task / path).read_bytes())
    expected = r"no cpp seed there; write one as cpp_NAME\.py in that folder"
    with pytest.raises(TaskError, match=expected):
        choose_seeds(find_task(tmp_path), load_config(lang="cpp"))


def test_the_reason_why_no_seed_could_be_derived_is_repeated(task, tmp_path):
    for path in ("task.toml", "reference.py"):
        (tmp_path / path).write_bytes((task / path).read_bytes())
    refusal_file(tmp_path, "cpu").write_text("incorrect in case odd: y[3] is NaN\n")
    expected = r"no cpp seed there: none could be derived: incorrect in case odd: y\[3\] is NaN; "
    with pytest.raises(TaskError, match=expected):
        choose_seeds(find_task(tmp_path), load_config(lang="cpp"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "other"}, "a run of other, not of double"),
        ({"task_digest": "0"}, "was changed since"),
    ],
)
def test_a_run_of_something_else_is_not_resumed(task, tmp_path, change, words):
    from simulated_evolution import manifest

    digest = find_task(task).digest
    made = manifest(**{"task": "double", "task_digest": digest, **change})
    with RunStore.create(tmp_path, made) as store:
        pass
    with pytest.raises(RunError, match=re.escape(words)):
        evolve(str(task), load_config(), lambda e: None, resume=store.folder)


def test_a_run_of_an_own_task_names_no_folder_of_the_machine(task, tmp_path):
    """It may be given to others, who have kagent's tasks elsewhere."""

    def made(of):
        return new_manifest(of, "cpu", "cpu", load_config(), {})

    assert made(find_task("softmax")).task_folder == "seeds/softmax"
    assert made(find_task(task)).task_folder == str(task)
    copy = tmp_path / "softmax"  # a task of the same name that a user has
    shutil.copytree(find_task("softmax").folder, copy)
    assert made(find_task(copy)).task_folder == str(copy)


def test_the_task_of_a_run_is_kagents_not_one_of_that_name_in_the_current_folder(
    tmp_path, monkeypatch
):
    manifest = new_manifest(find_task("softmax"), "cpu", "cpu", load_config(), {})
    shutil.copytree(find_task("softmax").folder, tmp_path / "seeds" / "softmax")
    monkeypatch.chdir(tmp_path)
    found = todays_task(tmp_path / "runs" / "one", manifest)
    assert found.folder == find_task("softmax").folder


def test_the_agent_does_without_torch():
    """Importing it takes seconds: what talks to the judge, asks, exports and reads does not."""
    modules = [
        "kagent.asktell.open_asks",
        "kagent.cli",
        "kagent.evolve.session",
        "kagent.export.export",
        "kagent.export.measuring",
        "kagent_sandbox.judge.timing.baselines",
    ]
    code = (
        f"import sys, {', '.join(modules)}; from kagent.asktell.prompt_preview import own_device; "
        "assert own_device('cpu')\n"
        "with kagent.cli.candidates._given_task('softmax', None) as task: pass\n"
        "from kagent.suite.problems import find_problems\n"
        "assert find_problems([str(task.folder.parent)])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_budget_below_what_is_under_way_is_refused():
    asks = [SimpleNamespace(operator=o) for o in (Operator.TUNE, Operator.RECOMBINE)]
    past = SimpleNamespace(lineage=SimpleNamespace(counted=3), waiting=1, asks=asks)
    require_budget(5, Path("runs/x"), past)
    expected = r"--budget 4: runs/x has 5 proposals \(3 evaluated, 2 under way .*--budget 5 finish"
    with pytest.raises(UserError, match=expected):
        require_budget(4, Path("runs/x"), past)


def test_a_budget_of_all_runs_is_none_of_a_recorded_one(task, tmp_path, monkeypatch):
    """A file's, or a variable's, would cut its repetition off."""
    from simulated_evolution import manifest

    made = manifest(task="double", task_digest=find_task(task).digest, kind="cpu")
    with RunStore.create(tmp_path, made) as store:
        pass
    monkeypatch.setenv("KAGENT_BUDGET", "2")
    again = {"runs": tmp_path, "proposer": f"replay:{store.folder.name}"}
    assert load_config().budget == 2
    assert resolve_config(load_config(**again), find_task(task)).budget == 0  # as many as it had
    assert resolve_config(load_config(**again, budget=7), find_task(task)).budget == 7
