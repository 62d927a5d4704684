"""One model as it is to be called: name, address, key, limits, price."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pydantic import SecretStr

OPENAI_URL = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million tokens, as the user states them."""

    input: float
    output: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model at an address. Its text form shows neither the key nor what an address may hide."""

    name: str
    base_url: str = field(default=OPENAI_URL, repr=False)
    api_key: SecretStr | None = None  # None: the address is local and needs none
    temperature: float | None = None  # None: the endpoint's own default
    reply_tokens: int = 16_000  # most output tokens of a reply
    reply_s: float = 600.0  # wall clock of one reply, retries included
    retries: int = 4  # of a call that failed for a moment, within `reply_s`
    weight: float = 1.0  # share of the calls, relative to the other models
    prices: Prices | None = None  # None: from the table that ships with kagent

    @property
    def host(self) -> str:
        """Host and port to show: without user, password, path or query."""
        return host_of(self.base_url)

    @property
    def local(self) -> bool:
        """Whether the address is this machine's loopback."""
        return is_local(self.base_url)


def host_of(url: str) -> str:
    """Host and, where one is given, port of a URL."""
    return urlsplit(url).netloc.rpartition("@")[2]


def is_local(url: str) -> bool:
    """Whether a URL names this machine's loopback."""
    name = urlsplit(url).hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
