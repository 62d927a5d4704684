"""What a user can set, and from where: flags, then KAGENT_* variables, then kagent.toml, then
[tool.kagent] of pyproject.toml, then the defaults here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pydantic
from kagent_sandbox.errors import UserError
from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Config(BaseSettings):
    """All options of a run. An unknown one is an error."""

    model_config = SettingsConfigDict(
        env_prefix="KAGENT_",
        toml_file="kagent.toml",
        pyproject_toml_table_header=("tool", "kagent"),
        extra="forbid",
        frozen=True,
    )

    runs: Path = Field(Path("runs"), description="folder that run folders are made in")
    budget: int = Field(50, ge=0, description="proposals to evaluate; seeds are free")
    lang: Literal["triton", "cuda", "cpp", "any"] = Field(
        "any", description="language of the seeds to start from"
    )
    proposer: Literal["tune"] = Field("tune", description="what invents kernels")
    seed: int = Field(0, description="of all random decisions")
    jobs: int = Field(default_factory=cores, ge=1, description="builds at once")
    in_flight: int = Field(4, ge=1, le=64, description="proposals worked on at once")
    configs: int = Field(
        1, ge=1, le=64, description="configurations of its tunables tried per candidate"
    )
    minutes: float | None = Field(None, gt=0, description="time after which nothing new starts")

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
            TomlConfigSettingsSource(settings_cls),
            PyprojectTomlConfigSettingsSource(settings_cls),
        )


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
