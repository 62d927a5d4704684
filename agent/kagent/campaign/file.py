"""Settings of a campaign, from a TOML file or from names of tasks, checked before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import ANY, languages_of
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import UserError
from pydantic import BaseModel, ConfigDict, Field

from kagent import resources
from kagent.campaign.record import Campaign, CampaignRun
from kagent.config.devices import kind_of_device
from kagent.config.faults import problem_of, toml_help, with_value
from kagent.config.settings import NO_MODEL, Config, load_config, load_config_of
from kagent.config.values import Seconds
from kagent.evolve.proposers import check_models
from kagent.evolve.session import kind_for, kind_here, seeds_for
from kagent.fleet.fleet import LOCAL, fleet_of
from kagent.runs.files import read_regular
from kagent.suite.problems import Form, Problem, find_problems
from kagent.suite.record import Settings
from kagent.tasks import find_task
from kagent.text import local_time, short

BUDGET = 50
OWN = (
    *("lang", "model", "base_url", "temperature", "bandit", "proposer", "prompts", "in_flight"),
    *("configs", "tune", "early_stop", "stop_at"),
)
"""Options of a run that a campaign's file may set, for all tasks or for one."""
_NONE = "no task there: expected a task's folder, a folder of tasks, or a TOML file"
_MOST_BYTES = 1 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskTable(_Strict):
    """A task with options of its own."""

    task: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)


class CampaignFile(_Strict):
    """A campaign's file. What it leaves out is None, or empty."""

    tasks: list[str | TaskTable] = Field(min_length=1)
    devices: list[str] = Field(default_factory=list)
    seeds: int | None = Field(None, ge=1)
    budget: int | None = Field(None, ge=1)
    max_time: Seconds | None = None
    max_cost: float | None = Field(None, gt=0, allow_inf_nan=False, strict=False)
    options: dict[str, Any] = Field(default_factory=dict)


def read_file(path: Path) -> CampaignFile:
    """Read a campaign's file.

    Raises:
        UserError: It cannot be read, is no TOML, or holds something else than a campaign.
    """
    try:
        text = read_regular(path, _MOST_BYTES).decode()
        return CampaignFile.model_validate(tomllib.loads(text))
    except pydantic.ValidationError as e:
        # A misspelt key comes before the one that is missing for it.
        first = min(e.errors(), key=lambda each: each["type"] != "extra_forbidden")
        place = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            have = ", ".join(CampaignFile.model_fields)
            raise UserError(f"{path}: no key {place}: a campaign has {have}") from None
        if first["type"] == "missing":
            raise UserError(f'{path}: no {place}: expected {place} = ["softmax", ...]') from None
        said = with_value(problem_of(first), first["input"])
        raise UserError(f"{path}: {place}: {short(said, 200)}") from None
    except OSError as e:
        missing = isinstance(e, FileNotFoundError)
        reason = "no such file" if missing else f"cannot be read ({e.strerror})"
        raise UserError(f"{path}: {reason}: expected a campaign's TOML file") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: no TOML: {e}: {toml_help('tasks = [...]')}") from None


def asked_for(sources: Sequence[str], given: Mapping[str, Any]) -> CampaignFile:
    """Read settings from files or names of tasks, and from flags. A flag goes before the file.

    Args:
        sources: One TOML file, or tasks by name or folder.
        given: Flags by the names of the file's keys; None was not given. `options` add up.

    Raises:
        UserError: They do not fit.
    """
    files = [s for s in sources if s.endswith(".toml") and Path(s).name != "task.toml"]
    if files and len(sources) > 1:
        raise UserError(f"{files[0]}: a campaign's file names all tasks: give it alone")
    asked = (
        read_file(Path(files[0]))
        if files
        else CampaignFile.model_validate({"tasks": list(sources)})
    )
    changes = {k: v for k, v in given.items() if v not in (None, (), []) and k != "options"}
    options = {**asked.options, **{k: v for k, v in given["options"].items() if v is not None}}
    return asked.model_copy(update={**changes, "options": options})


def plan(sources: Sequence[str], asked: CampaignFile, on: str = LOCAL) -> Campaign:
    """The campaign that was asked for, before its first slice.

    Args:
        sources: As the user gave them.
        asked: What was asked for.
        on: Where its runs are to be: "local", "ray", "ray://HOST[:PORT]".

    Raises:
        UserError: A task, an option or the budget does not fit.
    """
    general = _config("options", asked.options)  # a task may have another address, and its key
    devices = tuple(asked.devices) or (_first_device(general.model_copy(update={"on": on})),)
    twice = {d for d in devices if devices.count(d) > 1}
    if twice:
        raise UserError(f"device {twice.pop()} is named twice: name each once")
    seeds = asked.seeds or 1
    problems: list[Problem] = []
    runs: list[CampaignRun] = []
    asks_models = False
    tables = [TaskTable(task=t) if isinstance(t, str) else t for t in asked.tasks]
    for table in tables:
        for problem in find_problems([table.task], _NONE):
            if problem.form is not Form.TASK:
                raise UserError(f"{problem.path}: no task: kagent import makes one of it")
            options = {**asked.options, **table.options}
            config = _config(f"tasks: {table.task}: options", options)
            models = check_models(config.model_copy(update={"max_cost": asked.max_cost}))
            asks_models = asks_models or bool(models)
            for device in devices:
                _check_language(find_task(problem.path), device, config.lang, on)
                name = problem.name if len(devices) == 1 else f"{device}/{problem.name}"
                if any(p.name == name for p in problems):
                    raise UserError(f"task {problem.name} is named twice: name each once")
                problems.append(Problem(name, Form.TASK, problem.path))
                runs += [
                    CampaignRun(
                        name=f"{problem.name}, {device}, seed {seed}",
                        task=problem.path,
                        device=device,
                        seed=seed,
                        target=name,
                        options=options,
                    )
                    for seed in range(seeds)
                ]
    if asked.max_cost is not None and not asks_models:
        raise UserError(
            "max_cost limits what calls of models cost, and proposals come from "
            f"{general.proposer}: omit it, or {NO_MODEL}"
        )
    budget = asked.budget or BUDGET
    if budget < len(runs):
        raise UserError(
            f"budget {budget} over {len(runs)} runs ({len(tables)} tasks, {len(devices)} devices, "
            f"{seeds} seeds): every run gets a first slice: give --budget {len(runs)} or more"
        )
    settings = Settings.of(general.model_copy(update={"budget": budget}))
    return Campaign(
        sources=tuple(sources),
        settings=Settings(budget, settings.lang, settings.proposer, settings.model, asked.max_time),
        problems=tuple(problems),
        version=resources.version(),
        started=local_time(),
        devices=devices,
        seeds=seeds,
        max_cost=asked.max_cost,
        runs=tuple(runs),
    )


def _first_device(config: Config) -> str:
    """The device of a campaign that names none."""
    if kind_here(config, "these tasks") == "cpu":
        return "cpu"
    return "cuda:0" if config.on == LOCAL else "cuda"


def _kind_of(device: str, on: str) -> Kind:
    """The kind of a device of this machine, or of a cluster.

    Raises:
        UserError: There is no such device.
    """
    if on == LOCAL:
        return kind_of_device(device)
    if device == "cpu":
        return "cpu"
    if not fleet_of(load_config(on=on, accelerator=accelerator_of(device))).has("gpu"):
        raise UserError(
            f"no device {device!r} on the Ray cluster ({on}): expected cpu, cuda for any GPU, or a "
            "type of GPU as Ray labels it, such as H100"
        )
    return "gpu"


def places_of(device: str, on: str) -> int:
    """Number of runs that a device can judge at once: on a cluster one for each such GPU.

    Args:
        device: As a campaign names it.
        on: Where its runs are to be.
    """
    if on == LOCAL or device == "cpu":
        return 1
    fleet = fleet_of(load_config(on=on, accelerator=accelerator_of(device)))
    return max(1, fleet.gpus())


def accelerator_of(device: str) -> str | None:
    """Value of `--accelerator` for a campaign's device on a cluster."""
    return None if device == "cuda" else device


def _check_language(task: Task, device: str, lang: str, on: str) -> None:
    """Make sure that a task has seeds for a device.

    Raises:
        UserError: There is no such device, the language is for others, or no seed is in it.
    """
    kind = _kind_of(device, on)
    if kind_for(lang, gpu=kind == "gpu") != kind:
        fitting = ", ".join(each.name for each in languages_of(kind))
        raise UserError(f"language {lang} has no kernels for {device}: expected {fitting} or {ANY}")
    seeds_for(task, kind, lang)


def _config(where: str, options: Mapping[str, Any]) -> Config:
    """The configuration of a run with these options.

    Raises:
        UserError: One is not for a campaign's runs, or does not fit.
    """
    for name in options:
        if name not in OWN:
            raise UserError(f"{where}: no option {name!r}: there are {', '.join(OWN)}")
    config = load_config_of("the campaign's file", options)
    if config.proposer.startswith("replay:"):
        raise UserError(f"{where}: a campaign searches, and {config.proposer} repeats a run")
    return config
