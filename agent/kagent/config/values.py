"""The kinds of values that options take: how they are written, and what fits."""

from __future__ import annotations

import math
import re
from typing import Annotated
from urllib.parse import urlsplit

import pydantic
from kagent_sandbox.data.language import ANY, language
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

from kagent.llm.model_config import Prices

_N = r"(\d{1,9}(?:\.\d{1,9})?)"
_DURATION = re.compile(rf"(?:{_N}h)?(?:{_N}m)?(?:{_N}s)?")


def parse_seconds(value: object) -> float:
    """Seconds of "90s", "8m", "1h30m", or of a plain number of seconds.

    Raises:
        ValueError: It is none of these, or not above 0.
    """
    text = str(value).strip().lower().replace(" ", "")
    match = _DURATION.fullmatch(text)
    try:
        if match is None or not text:
            seconds = float(text)
        else:
            units = zip(match.groups(), (3600, 60, 1), strict=True)
            seconds = sum(float(part or 0) * unit for part, unit in units)
    except ValueError:
        expected = "expected a time such as 90s, 8m, 1h30m, or a number of seconds"
        raise ValueError(expected) from None
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
        raise ValueError("expected the name of a model, or NAME=WEIGHT")
    if not 0 < share < math.inf:
        raise ValueError("expected a weight above 0, as in NAME=2")
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
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its text may quote a password
        valid = False
    if not valid:
        raise ValueError("expected an address such as https://openrouter.ai/api/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("expected an address without user, password, ? or #: a key is set apart")
    return url.rstrip("/").removesuffix("/chat/completions")  # as an endpoint's page may show it


def parse_key(key: SecretStr) -> SecretStr | None:
    """A key as it is sent: surrounding white space is a slip of copying."""
    text = key.get_secret_value().strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a key is printable ASCII without spaces")
    return SecretStr(text) if text else None


def _proposer(value: str) -> str:
    if value not in ("tune", "model") and not value.startswith("replay:"):
        raise ValueError("expected tune, model or replay:RUN")
    return value


def _on(value: str) -> str:
    if value not in ("local", "ray") and not re.fullmatch(r"ray://[^/\s]+", value):
        raise ValueError("expected local, ray, ray://HOST[:PORT], or slurm on the command line")
    return value


def _lang(name: str) -> str:
    return name if name == ANY else language(name).name


Lang = Annotated[str, AfterValidator(_lang)]
"""A language's name, or "any"."""
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Address = Annotated[str, AfterValidator(_address)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
On = Annotated[str, AfterValidator(_on)]
Proposer = Annotated[str, AfterValidator(_proposer)]
Key = Annotated[SecretStr, AfterValidator(parse_key)]


class ModelTable(BaseModel):
    """A `[[models]]` table of kagent.toml. What it leaves out is as in the options of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="as the endpoint knows it")
    base_url: Address | None = Field(None, description="its address")
    api_key_env: str | None = Field(None, description="variable that holds its key")
    temperature: float | None = Field(None, ge=0, le=2, description="temperature of its sampling")
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
        """Prices that the user states."""
        if self.input_price is None or self.output_price is None:
            return None
        return Prices(self.input_price, self.output_price)

    @pydantic.model_validator(mode="after")
    def _both_prices(self) -> ModelTable:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("input_price and output_price are set together")
        return self
