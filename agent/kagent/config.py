"""What a user can set, and from where: flags, then KAGENT_* variables, then OPENAI_* variables,
then kagent.toml, then [tool.kagent] of pyproject.toml, then the defaults here.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from kagent_sandbox.errors import UserError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kagent.model.spec import OPENAI_URL, ModelConfig, Prices, host_of, is_local

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECRET = ("api_key", "base_url")  # never shown in an error: an address may hold a password
NO_MODEL = (
    "set a model: --model NAME, KAGENT_MODEL, or model in kagent.toml, with KAGENT_BASE_URL and "
    "KAGENT_API_KEY for its address and key"
)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def parse_seconds(value: object) -> float:
    """Seconds of "90s", "8m", "1h30m", or of a plain number of seconds.

    Raises:
        ValueError: It is none of these, or not above 0.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        text = str(value).strip().lower().replace(" ", "")
        match = _DURATION.fullmatch(text)
        if not text or match is None:
            raise ValueError("expected a time such as 90s, 8m, 1h30m, or a number of seconds")
        seconds = sum(
            float(part or 0) * unit
            for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)
        )
    if not (0 < seconds < math.inf):
        raise ValueError("expected a time above 0")
    return seconds


def parse_model_flag(text: str) -> tuple[str, float]:
    """Name and weight of "NAME" (weight 1) or "NAME=WEIGHT".

    Raises:
        ValueError: There is no name, or the weight is not a number above 0.
    """
    name, equals, weight = text.strip().rpartition("=")
    if not equals:
        name, weight = weight, "1"
    try:
        share = float(weight)
    except ValueError:
        share = math.nan
    if not name.strip():
        raise ValueError(f"{text!r} names no model: expected NAME or NAME=WEIGHT")
    if not 0 < share < math.inf:
        raise ValueError(f"{text!r}: the weight of a model is a number above 0, as in NAME=2")
    return name.strip(), share


def _names(value: object) -> object:
    """The models of a flag that may be repeated, or of one text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, list | tuple):
        for part in parts:
            parse_model_flag(str(part))
        return tuple(str(part).strip() for part in parts)
    return value


def _address(url: str) -> str:
    """A base URL that can be called, and shown."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address such as https://openrouter.ai/api/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("expected an address without user, password, ? or #: a key is set apart")
    _ = parts.port  # raises ValueError where it is no number
    return url.rstrip("/")


def _key(key: SecretStr) -> SecretStr | None:
    """A key as it is sent: surrounding white space is a slip of copying."""
    text = key.get_secret_value().strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a key is printable ASCII without spaces")
    return SecretStr(text) if text else None


def _proposer(value: str) -> str:
    if value not in ("tune", "model") and not value.startswith("replay:"):
        raise ValueError("expected tune, model or replay:RUN")
    return value


def _default_proposer(data: dict[str, Any]) -> str:
    return "model" if data.get("model") or data.get("models") else "tune"


Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Address = Annotated[str, AfterValidator(_address)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
Proposer = Annotated[str, AfterValidator(_proposer)]
Key = Annotated[SecretStr, AfterValidator(_key)]


class ModelTable(BaseModel):
    """A `[[models]]` table of kagent.toml. What it leaves out is as in the options of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="as the endpoint knows it")
    base_url: Address | None = Field(None, description="its address")
    api_key_env: str | None = Field(None, description="variable that holds its key")
    temperature: float | None = Field(None, ge=0, le=2, description="of its sampling")
    reply_tokens: int | None = Field(None, ge=1, description="most output tokens of a reply")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="share of the calls")
    input_price: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="dollars per million input tokens"
    )
    output_price: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="dollars per million output tokens"
    )

    @property
    def prices(self) -> Prices | None:
        """What the user says that it costs."""
        if self.input_price is None or self.output_price is None:
            return None
        return Prices(self.input_price, self.output_price)

    @pydantic.model_validator(mode="after")
    def _both_prices(self) -> ModelTable:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("input_price and output_price are set together")
        return self


class _OpenAIVariables(PydanticBaseSettingsSource):
    """OPENAI_API_KEY, OPENAI_BASE_URL and OPENAI_MODEL, which other programs use too."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        name = f"OPENAI_{field_name.upper()}"
        return os.environ.get(name) or None, name, False

    def __call__(self) -> dict[str, Any]:
        found = {n: os.environ.get(f"OPENAI_{n.upper()}") for n in ("api_key", "base_url", "model")}
        return {name: value for name, value in found.items() if value}


class Config(BaseSettings):
    """All options of a run. An unknown one is an error."""

    model_config = SettingsConfigDict(
        env_prefix="KAGENT_",
        env_ignore_empty=True,
        toml_file="kagent.toml",
        pyproject_toml_table_header=("tool", "kagent"),
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    runs: Path = Field(Path("runs"), description="folder that run folders are made in")
    budget: int = Field(50, ge=0, description="proposals to evaluate; seeds are free")
    lang: Literal["triton", "cuda", "cpp", "any"] = Field(
        "any", description="language of the seeds to start from"
    )
    model: Names = Field(
        (), description="models to ask, as NAME or NAME=WEIGHT; of `models`, or at `base_url`"
    )
    base_url: Address = Field(OPENAI_URL, description="address of an OpenAI-compatible endpoint")
    api_key: Key | None = Field(None, description="its key; none is needed at a local address")
    temperature: float | None = Field(
        None, ge=0, le=2, description="of the sampling; left to the endpoint if not set"
    )
    reply_tokens: int = Field(16_000, ge=1, description="most output tokens of a reply")
    reply_s: Seconds = Field(600.0, description="wall clock of a reply, retries included")
    models: tuple[ModelTable, ...] = Field((), description="models with settings of their own")
    bandit: bool = Field(
        False, description="prefer the models that gain most per dollar, or per second"
    )
    proposer: Proposer = Field(
        default_factory=_default_proposer,
        description="what invents kernels: tune, model (if one is set) or replay:RUN",
    )
    prompts: Path | None = Field(None, description="folder of prompt templates and cards to use")
    seed: int = Field(0, description="of all random decisions")
    jobs: int = Field(default_factory=cores, ge=1, description="builds at once")
    in_flight: int = Field(4, ge=1, le=64, description="proposals worked on at once")
    configs: int = Field(
        1, ge=1, le=64, description="configurations of its tunables tried per candidate"
    )
    max_time: Seconds | None = Field(
        None, description="wall clock of the search, the final race not counted: 90s, 8m, 1h30m"
    )
    max_cost: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="dollars that the run may cost"
    )
    max_tokens: int | None = Field(None, gt=0, description="tokens that the run may use")
    stop_at: float | None = Field(
        None, gt=0, le=1, description="share of the roofline at which the run ends"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - no .env files
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - nor secrets
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """In order of precedence."""
        return (
            init_settings,
            env_settings,
            _OpenAIVariables(settings_cls),
            TomlConfigSettingsSource(settings_cls),
            PyprojectTomlConfigSettingsSource(settings_cls),
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
        """The table's own key, else the run's, which is only ever sent to the run's address."""
        if table.api_key_env is not None:
            given = os.environ.get(table.api_key_env, "").strip()
            if given:
                return SecretStr(given)
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
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Config(**given)  # type: ignore[arg-type]
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        name = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            have = ", ".join(Config.model_fields)
            raise UserError(f"no option {name!r}: there are {have}") from None
        raise UserError(f"option {name}: {first['msg']}, got {first['input']!r}") from None
    except ValueError as e:  # TOML that cannot be read
        raise UserError(f"kagent.toml or pyproject.toml: {e}") from None
