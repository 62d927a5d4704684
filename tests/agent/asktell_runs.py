"""Ask-and-tell runs of the simulated landscape, on the simulated machine."""

import asyncio
import contextlib
import shutil

import pytest
from kagent.asktell import answers, judging, merging, open_asks, open_run
from kagent.asktell.state import read_state
from kagent.config.settings import load_config
from kagent.evolve.stored_run import setting_of, task_of_run
from kagent.runs.store import RunStore
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.records import to_json
from replaying import replay
from simulated_landscape import toy_source, toy_task
from simulated_machine import machine

FACTS = DeviceFacts("cpu", "Toy 1", "cpu", "Toy 1, driver 7", 0, 0, 1, 0.0)


def make_task(folder, joins=False):
    """The toy task with two seeds; with `joins`, each is faster than the other on some case."""
    task = toy_task(folder)
    (folder / "cpp_plain.py").write_text(toy_source())
    other = toy_source(flavour="wide") if joins else toy_source(extra="WIDE = 1")
    (folder / "cpp_wide.py").write_text(other)
    return task


def opener(facts=FACTS, **parts):
    """What stands for `session.open_machine`."""

    @contextlib.contextmanager
    def open_toy(task, kind, config, secret, say=None, accept=None, judges=1):
        made = {"device": facts.name, "key": facts.key, "facts": to_json(facts)}
        if accept is not None:
            accept(made, facts)
        yield machine(**parts), facts, made

    return open_toy


@pytest.fixture
def toy_machine(monkeypatch):
    """The machine that judges: the toy. Call it to have another one."""

    def use(facts=FACTS, **parts):
        monkeypatch.setattr(judging, "open_machine", opener(facts, **parts))

    use()
    return use


def kernel(x=1, y=1, note=0, **more):
    return toy_source(x, y, extra=f"Z = {note}", **more)


def reply(x=1, y=1, note=0, predicted=1.2, hypothesis="wider loads", **more):
    return (
        f"Hypothesis: {hypothesis}\nPredicted speed-up: {predicted}×\n\n"
        f"```python\n{kernel(x, y, note, **more)}```\n"
    )


def start(folder, runs="runs", joins=False, **options):
    """A new run of the toy task; its folder."""
    make_task(folder / "toy", joins)
    config = load_config(runs=folder / runs, **options)
    return open_run.new_run(str(folder / "toy"), config, None)


def ask(run, count=1):
    return open_asks.ask(run, count, load_config())


def tell(run, *given, parent=None):
    """Accept pairs of ask (or None) and text, without judging."""
    with RunStore.open(run) as store:
        task = task_of_run(run, store.manifest)
        open_run.ready(store, task)
        state = read_state(store.history())
        read = [answers.given(t, "x", store, state, task.entry, ask=n) for n, t in given]
        return answers.accept(store, task, read, 50, parent)


def judge(run, **options):
    events = options.pop("events", [])
    with RunStore.open(run) as store:
        task = task_of_run(run, store.manifest)
        return judging.judge_all(store, task, load_config(), events.append, **options)


def merge(home, copy):
    return merging.merge(home, copy)


def copied(run, name="copy"):
    """The run's folder copied beside it."""
    return shutil.copytree(run, run.parent / name)


def history_of(run):
    with RunStore.open(run, write=False) as store:
        return store.history()


def state_of(run):
    return read_state(history_of(run))


def divergence(run):
    """What replaying finds: nothing."""
    with RunStore.open(run, write=False) as store:
        task = task_of_run(run, store.manifest)
        return asyncio.run(replay(store.history(), setting_of(store, task), None))


def decisions(run):
    """All that a run decided and found, without the times of the day."""
    return [(e.kind, e.data) for e in history_of(run).events if e.kind != "opened"]
