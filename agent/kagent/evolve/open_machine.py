"""Builder and judge for a task, started."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.data.build import BuildRequest
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.device.table import find_device

from kagent.config.settings import Config
from kagent.evolve.incumbent_profiles import profiling
from kagent.evolve.machine import Machine, Unit
from kagent.evolve.units import like_the_first, unit_names
from kagent.fleet.fleet import LOCAL, LocalFleet, fleet_of
from kagent.runs.manifest import versions
from kagent.runs.selftest_record import in_environment
from kagent.tasks import sound_task


def require_machine(kind: Kind, config: Config, judges: int = 1) -> None:
    """Make sure that this machine has the programs and devices that judging here needs.

    Raises:
        MachineError: A program is missing.
        UserError: There are fewer devices than judges.
    """
    if config.on == LOCAL:
        find_device(kind).require()
        LocalFleet().require_seats(kind, judges)


@contextlib.contextmanager
def open_machine(
    task: Task,
    kind: Kind,
    config: Config,
    secret: int,
    say: Callable[[str], None],
    accept: Callable[[Mapping[str, object], DeviceFacts], None] = lambda *_: None,
    judges: int = 1,
    *,
    race: bool = False,
) -> Iterator[tuple[Machine, DeviceFacts, Mapping[str, object]]]:
    """Start a builder and a judge for a task; at the end close them with all that they started.

    Args:
        task: The task.
        kind: "gpu" or "cpu".
        config: Where, jobs and isolation.
        secret: Seed of the hidden cases. The judge gets it now, the store with the final race.
        say: Is told what is being done, and who has the device while it is waited for.
        accept: Is called with the environment and the device's facts before anything is measured;
            what it raises ends the call.
        judges: How many, each on a device of its own.
        race: Whether a race on hidden cases ends it, which the judge prepares for.

    Returns:
        The machine, the device's facts, and the environment as a run stores it.

    Raises:
        TaskError: The task has a fault.
        MachineError: This machine cannot judge.
    """
    require_machine(kind, config)  # before a task is checked, and the device is waited for
    ask_for(config.isolation)
    fleet = fleet_of(config)
    sound_task(task, kind, say)
    # The cores of this machine say nothing of others.
    jobs = config.jobs if config.on == LOCAL or "jobs" in config.model_fields_set else None
    with fleet.station(task, kind, secret, jobs, config.race_time, say, judges) as station:
        judge = station.judge
        facts = judge.facts
        environment: dict[str, object] = {
            "device": facts.name,
            "key": facts.key,
            "memory_bytes": facts.memory_bytes,
            "facts": to_json(facts),
            "isolation": min(station.tiers.values()).value,
            "isolation_by_role": {role: tier.value for role, tier in station.tiers.items()},
            "canaries": station.canaries,
            "host": platform.platform(),
            "python": platform.python_version(),
            "versions": versions(),
            "selftest": in_environment(facts.key, versions()),
        }
        if station.places:
            environment["places"] = station.places
        accept(environment, facts)
        say("timing a kernel against itself")
        noise = judge.noise()
        environment["noise"] = to_json(noise)
        if task.calibration is not None and kind in task.calibration.kinds:
            environment["calibration"] = to_json(task.calibration.kinds[kind])
        hidden = draw_hidden(task, kind, "bench", secret)
        search = search_cases(task, kind, secret)

        def prepare(say: Callable[[str], None]) -> Mapping[str, object]:
            say(f"noise: {noise.text}")
            judge.compile_ahead(race=race, cached=not config.fresh)
            baselines = judge.baselines(say, cached=not config.fresh)
            say("ceilings of the device")
            return {"baselines": to_json(baselines), "ceilings": to_json(judge.ceilings())}

        names = unit_names((judge, *station.others), [platform.node()] * (1 + len(station.others)))
        further = [Unit(n, j) for n, j in zip(names[1:], station.others, strict=True)]

        def others(say: Callable[[str], None]) -> Sequence[Unit]:
            if further:
                say("noise, ceilings and baselines of the other devices")
            return like_the_first(judge, noise, further, say, cached=not config.fresh)

        machine = Machine(
            builder=station.builder,
            judge=judge,
            jobs=station.jobs,
            quiet=station.quiet,
            request=request_maker(task, facts, search, config.configs),
            race_request=request_maker(task, facts, hidden, config.configs) if hidden else None,
            prepare=prepare,
            timed_request=request_maker(task, facts, [*task.cases(kind).bench], 1),
            tune=config.tune,
            unit=names[0],
            others=others if further else None,
            moves=config.on != LOCAL and bool(facts.unit),
            profile=profiling(task, kind, config, facts),
        )
        yield machine, facts, environment


def visible_cases(task: Task, kind: Kind) -> list[Case]:
    """Cases that every command builds a candidate for."""
    return [*task.cases(kind).check, *task.cases(kind).bench]


def search_cases(task: Task, kind: Kind, secret: int) -> list[Case]:
    """Cases that a candidate is built for before it is checked, from whatever source it came.

    The visible cases come first: what refuses a candidate there is the same everywhere, whatever
    is drawn.
    """
    return [*visible_cases(task, kind), *draw_hidden(task, kind, "check", secret)]


def request_maker(
    task: Task, device: DeviceFacts | str, cases: list[Case], configs: int
) -> Callable[[str], BuildRequest]:
    """Return a function that makes build requests for any source on some of the task's cases.

    Args:
        task: The task.
        device: That it is judged on, or the target alone where nobody judges.
        cases: To be built.
        configs: Most configurations of a source.
    """
    target, known = (device, None) if isinstance(device, str) else (device.target, device.device)
    built_cases = tuple(build_case(task, c) for c in cases)

    def request(source: str) -> BuildRequest:
        return BuildRequest(
            source=source,
            entry=task.entry,
            target=target,
            cases=built_cases,
            allow=task.allow,
            mutates=task.mutates,
            max_configs=configs,
            device=known,
        )

    return request
