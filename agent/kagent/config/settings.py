"""User settings and their sources: flags, then KAGENT_* variables, then OPENAI_* variables, then
kagent.toml, then [tool.kagent] of pyproject.toml, then the defaults here.

The two files are those of the current folder, which may be a clone of somebody else's repository.
They send no key of a variable to an address of their own, join no cluster elsewhere, and do without
no isolation, unless the user's own variables or flags say so.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pydantic
from kagent_sandbox.data.language import ANY
from kagent_sandbox.errors import UserError
from kagent_sandbox.process.cores import usable_cores
from pydantic import Field, PrivateAttr, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from kagent.config.faults import problem_of, toml_help, with_value
from kagent.config.values import (
    Address,
    Key,
    Lang,
    ModelTable,
    Names,
    On,
    Proposer,
    Seconds,
    parse_key,
    parse_model_flag,
)
from kagent.llm.model_config import OPENAI_URL, ModelConfig, host_of, is_local

_FILE, _PROJECT = "kagent.toml", "pyproject.toml"
_HOSTS = "KAGENT_HOSTS"
"""Variable with the hosts, with commas, that these files may name. No file can set it."""
_OPENAI = ("api_key", "base_url", "model")  # set by OPENAI_*, too
_SECRET = ("api_key", "base_url")  # never shown in an error: an address may hold a password
_DEVICE = (
    "a file may be for several machines, and a device is of one machine: --device or KAGENT_DEVICE "
    "chooses it"
)
NO_MODEL = (
    "set a model: --model NAME, KAGENT_MODEL, or model in kagent.toml, with KAGENT_BASE_URL and "
    "KAGENT_API_KEY for its address and key"
)


def _default_proposer(data: dict[str, Any]) -> str:
    return "model" if data.get("model") or data.get("models") else "tune"


class OptionError(UserError):
    """A value does not fit an option that was given as a flag, or by a program.

    Attributes:
        option: Name of the option.
    """

    def __init__(self, text: str, option: str = "") -> None:
        super().__init__(text)
        self.option = option

    @property
    def on_command_line(self) -> str:
        """The text as the command line has it: '--max-time: ...' for 'option max_time: ...'."""
        flag = f"--{self.option.replace('_', '-')}"
        return str(self).replace(f"option {self.option}:", f"{flag}:", 1)


class _OpenAIVariables(PydanticBaseSettingsSource):
    """OPENAI_API_KEY, OPENAI_BASE_URL and OPENAI_MODEL, which other programs use too."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        name = f"OPENAI_{field_name.upper()}"
        return os.environ.get(name) or None, name, False

    def __call__(self) -> dict[str, Any]:
        found = {n: os.environ.get(f"OPENAI_{n.upper()}") for n in _OPENAI}
        return {name: value for name, value in found.items() if value}


class Config(BaseSettings):
    """All options of a run. An unknown one is an error."""

    model_config = SettingsConfigDict(
        env_prefix="KAGENT_",
        env_ignore_empty=True,
        toml_file=_FILE,
        pyproject_toml_table_header=("tool", "kagent"),
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    runs: Path = Field(Path("runs"), description="folder for run folders")
    budget: int = Field(50, ge=0, description="proposals to evaluate; seeds are free")
    lang: Lang = Field(ANY, description="language of the seeds to start from")
    model: Names = Field(
        (), description="models to ask, as NAME or NAME=WEIGHT; of `models`, or at `base_url`"
    )
    base_url: Address = Field(OPENAI_URL, description="address of an OpenAI-compatible endpoint")
    api_key: Key | None = Field(None, description="its key; none is needed at a local address")
    temperature: float | None = Field(
        None, ge=0, le=2, description="temperature of the sampling; the endpoint's own if not set"
    )
    reply_tokens: int = Field(16_000, ge=1, description="most output tokens of a reply")
    reply_s: Seconds = Field(600.0, description="wall clock of a reply, retries included")
    models: tuple[ModelTable, ...] = Field((), description="models with settings of their own")
    bandit: bool = Field(
        False, description="prefer the models that gain most per dollar, or per second"
    )
    proposer: Proposer = Field(
        default_factory=_default_proposer,
        description="source of kernels: tune, model (if one is set) or replay:RUN",
    )
    prompts: Path | None = Field(None, description="folder of prompt templates and cards to use")
    seed: int = Field(0, description="seed of all random decisions")
    jobs: int = Field(default_factory=usable_cores, ge=1, description="builds at once")
    on: On = Field("local", description="where: local, ray, or ray://HOST[:PORT]")
    accelerator: str | None = Field(
        None, description="type of a cluster's GPU to judge on, as Ray labels it: H100; cpu: none"
    )
    judges: int = Field(
        1, ge=1, le=64, description="judges of one run, each on a device of its own"
    )
    isolation: Literal["auto", "T0", "T1", "T2", "T3"] = Field(
        "auto", description="tier of docs/isolation.md: the highest that works, or exactly one"
    )
    in_flight: int = Field(4, ge=1, le=64, description="proposals worked on at once")
    configs: int = Field(
        1, ge=1, le=64, description="configurations of its tunables tried per candidate"
    )
    tune: int = Field(
        16,
        ge=1,
        le=64,
        description="configurations of a model's kernel tried before its verdict, the fastest kept",
    )
    fresh: bool = Field(False, description="measure baselines again, whatever is stored")
    max_time: Seconds | None = Field(
        None, description="wall clock of the search, the final race not counted: 90s, 8m, 1h30m"
    )
    race_time: Seconds = Field(60.0, description="wall clock of a CPU's race while it is not clear")
    cluster_wait: Seconds = Field(
        300.0, description="wall clock in which a judge or builder on a cluster must have started"
    )
    max_cost: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="dollars that the run may cost"
    )
    max_tokens: int | None = Field(None, gt=0, description="tokens that the run may use")
    early_stop: bool = Field(True, description="end the search when there is nothing left to gain")
    profile: bool = Field(
        True, description="take ncu's counters of each incumbent, where ncu is and works"
    )
    memory: bool = Field(
        True, description="start from kernels of earlier runs of related tasks, and keep this run's"
    )
    stop_at: float | None = Field(
        None, gt=0, le=1, description="share of the roofline at which the run ends"
    )
    _flags: frozenset[str] = PrivateAttr(frozenset())  # options that were given as flags
    _address_of: str = PrivateAttr("")  # file that base_url is of, where it came as a flag

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - no .env files
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - nor secrets
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings in order of precedence."""
        return (
            init_settings,
            env_settings,
            _OpenAIVariables(settings_cls),
            TomlConfigSettingsSource(settings_cls),
            PyprojectTomlConfigSettingsSource(settings_cls),
        )

    @property
    def flags(self) -> frozenset[str]:
        """Names of the options that were given as flags, or by a program: not by a file or a
        variable, which are of all runs alike.
        """
        return self._flags

    def note_origin(self, flags: Collection[str], address_of: str) -> None:
        """Remember which options are flags, and look at what files of the current folder set.

        Args:
            flags: Names of options.
            address_of: Name of the file that `base_url` among them is of; "" if the user gave it.

        Raises:
            UserError: Such a file decides what is the user's to decide.
        """
        self._flags = frozenset(flags)
        self._address_of = address_of if "base_url" in flags else ""
        if self.on.startswith("ray://"):  # what a cluster answers is unpickled: it may be any code
            _refuse_host(_file_of("on", flags), self.on, "join the cluster at")
        if self.isolation == "T0" and (file := _file_of("isolation", flags)):
            raise UserError(
                f"{file}: option isolation: T0 confines nothing, and a file may come with a folder "
                "of somebody else's: --isolation T0 or KAGENT_ISOLATION=T0 chooses it"
            )

    def model_configs(self) -> tuple[ModelConfig, ...]:
        """The models to ask: those of `model`, else all of `models`; none if none is set.

        Raises:
            UserError: A model has no key, is named twice, or is wanted and not set.
        """
        tables = {table.name: table for table in self.models}
        weights = dict(parse_model_flag(text) for text in self.model)
        if len(tables) < len(self.models) or len(weights) < len(self.model):
            raise UserError("a model is set twice: give every one of model and models once")
        if not weights and not tables and self.proposer == "model":
            raise UserError(f"the proposer model has no model to ask; {NO_MODEL}")
        if not weights:
            return tuple(self._of_table(table, table.weight) for table in self.models)
        plain = {name: ModelTable.model_validate({"name": name}) for name in weights}
        known = {**plain, **tables}
        return tuple(self._of_table(known[name], weight) for name, weight in weights.items())

    def _of_table(self, table: ModelTable, weight: float) -> ModelConfig:
        address = table.base_url or self.base_url
        return ModelConfig(
            name=table.name,
            base_url=address,
            api_key=self._key_of(table, address),
            temperature=self.temperature if table.temperature is None else table.temperature,
            reply_tokens=table.reply_tokens or self.reply_tokens,
            reply_s=self.reply_s,
            weight=weight,
            prices=table.prices,
        )

    def _key_of(self, table: ModelTable, address: str) -> SecretStr | None:
        """The table's own key, else the run's, which is only ever sent to the run's address.

        Raises:
            UserError: There is none, or a file of the current folder has it sent to a host that
                nobody else named.
        """
        key = self._known_key(table, address)
        own = table.api_key_env is None and _file_of("api_key", self._flags)
        if key is not None and not own and not is_local(address):
            option = "base_url" if table.base_url is None else "models"
            file = self._address_of if option == "base_url" else ""
            file = file or _file_of(option, self._flags)
            _refuse_host(file, address, "send a key of your variables to")
        return key

    def _known_key(self, table: ModelTable, address: str) -> SecretStr | None:
        if table.api_key_env is not None:
            try:
                given = parse_key(SecretStr(os.environ.get(table.api_key_env, "")))
            except ValueError as e:
                raise UserError(f"variable {table.api_key_env}: {e}") from None
            if given is not None:
                return given
            remedy = f"set the variable {table.api_key_env}"
        elif address == self.base_url:
            if self.api_key is not None:
                return self.api_key
            remedy = "set KAGENT_API_KEY or OPENAI_API_KEY"
        else:
            remedy = "set api_key_env in its table to the name of the variable that holds its key"
        if is_local(address):
            return None
        raise UserError(f"model {table.name} at {host_of(address)} has no key: {remedy}")


def load_config(**flags: object) -> Config:
    """The configuration; flags that are None were not given.

    Raises:
        UserError: A value does not fit, or an option does not exist; the text says which and where.
            Or a file of the current folder decides what is the user's to decide.
    """
    return load_config_of("", flags)


def load_config_of(file: str, flags: Mapping[str, object]) -> Config:
    """The configuration, as `load_config` has it, with options of a file that was named.

    Args:
        file: Name of the file that `base_url` among the flags is of; "" if the user gave it.
        flags: Options by their names.

    Raises:
        UserError: As `load_config`.
    """
    _no_misspelt_variable()
    if Path(_FILE).exists() and not Path(_FILE).is_file():
        raise UserError(f"{_FILE}: a folder or a device, where a file was expected: move it away")
    given = {name: value for name, value in flags.items() if value is not None}
    flag = ""
    try:
        config = Config(**given)  # type: ignore[arg-type]
    except pydantic.ValidationError as e:
        text = _fault(e, given)
        flag = _flag(e, given)
    except SettingsError as e:
        text = _no_json(e)
    except (ValueError, RecursionError) as e:  # TOML that cannot be read
        text = f"{_unreadable()}: no TOML: {e}: {toml_help('budget = 50')}"
    else:
        config.note_origin(given, file)
        return config
    # Out of the handlers: what was caught may hold a key.
    raise OptionError(text, flag) if flag else UserError(text)


def _refuse_host(file: str, address: str, does: str) -> None:
    """Make sure that the host of an address is named by a variable, too, where it is of a file.

    Raises:
        UserError: The file alone names it.
    """
    host = host_of(address).lower()
    name = (urlsplit(address).hostname or "").lower()
    known = {h.strip().lower() for h in os.environ.get(_HOSTS, "").split(",")}
    openai = address.startswith("https://") and name == host_of(OPENAI_URL)
    if file and not openai and not {host, name} & known:
        raise UserError(
            f"{file}: would {does} {host}, and a file may come with a folder of somebody else's: "
            f"set {_HOSTS}={host} if you know that host"
        )


def _no_json(error: SettingsError) -> str:
    """Fault of a variable that is no JSON: of all options models alone needs it."""
    named = re.search(r'field "(\w+)"', str(error))
    if named is None:
        return str(error)
    variable = f"KAGENT_{named[1].upper()}"
    got = os.environ.get(variable, "")
    return (
        f"""{variable}: expected JSON, as '[{{"name": "MODEL"}}]', got {got!r}; """
        "tables [[models]] of kagent.toml are easier to write"
    )


def _fault(error: pydantic.ValidationError, given: Mapping[str, object]) -> str:
    """The first thing that is wrong with the options, and where it is set, without a value that
    should stay unseen.
    """
    first = error.errors()[0]
    place = [p for p in first["loc"] if isinstance(p, str | int)]
    source = _source_of(str(place[0]), given) if place else ""
    if first["type"] == "extra_forbidden":
        nested = len(place) > 1
        if place == ["device"]:
            return f"{source}no option 'device': {_DEVICE}"
        have = ", ".join(ModelTable.model_fields if nested else Config.model_fields)
        where = f" in {_named(place[:-1])}" if nested else ""
        return f"{source}no option {place[-1]!r}{where}: there are {have}"
    problem = problem_of(first)
    secret = place[-1] in _SECRET if place else True
    said = problem if secret else with_value(problem, first["input"])
    return f"{source}option {_named(place)}: {said}"


def _flag(error: pydantic.ValidationError, given: Collection[str]) -> str:
    """The option of a fault, where it was given as a flag; else ""."""
    place = error.errors()[0]["loc"]
    return str(place[0]) if len(place) > 0 and place[0] in given else ""


def _unreadable() -> str:
    """The first file of settings that is no TOML."""
    for name in (_FILE, _PROJECT):
        try:
            _tables(name)
        except (ValueError, RecursionError):
            return name
    return f"{_FILE} or {_PROJECT}"


def _file_of(option: str, given: Collection[str]) -> str:
    """The file of the current folder that an option's value is of; "" if it is of none."""
    return next((f for f in (_FILE, _PROJECT) if _source_of(option, given) == f"{f}: "), "")


def _source_of(option: str, given: Collection[str]) -> str:
    """The variable or file that an option's value is of, as the beginning of an error; "" for a
    flag.
    """
    if option in given:
        return ""
    variables = [f"KAGENT_{option.upper()}"]
    variables += [f"OPENAI_{option.upper()}"] if option in _OPENAI else []
    set_here = [name for name in variables if os.environ.get(name)]
    files = [name for name in (_FILE, _PROJECT) if option in _tables(name)]
    return "".join(f"{name}: " for name in (*set_here, *files)[:1])


def _tables(name: str) -> dict[str, Any]:
    """Options that a file sets. A file that is not there sets none.

    Raises:
        ValueError: It is no TOML.
    """
    try:
        read = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError:
        return {}
    if name == _PROJECT:
        tool = read.get("tool", {})
        read = tool.get("kagent", {}) if isinstance(tool, dict) else {}
    return read if isinstance(read, dict) else {}


def _named(place: list[str | int]) -> str:
    """models[0].name of ("models", 0, "name")."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).removeprefix(".")


_NO_OPTIONS = frozenset({"KAGENT_JUDGE"})
"""Variables of other searches' scripts (`kagent.integrations`) that look like a misspelt option."""


def _no_misspelt_variable() -> None:
    """Raise UserError where a variable is almost an option. Others of the prefix are not ours."""
    for name in os.environ:
        option = name.removeprefix("KAGENT_").lower()
        if not name.startswith("KAGENT_") or option in Config.model_fields or name in _NO_OPTIONS:
            continue
        near = difflib.get_close_matches(option, Config.model_fields, 1, 0.8)
        if near:
            raise UserError(f"no option {name}: is KAGENT_{near[0].upper()} meant?")
