"""The connection to a Ray cluster: found, or started on this machine. One for a process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kagent_sandbox.errors import MachineError, UserError

if TYPE_CHECKING:
    from types import ModuleType

CLIENT = "ray://"
CLIENT_PORT = 10001
ROLE = "kagent-role"
"""Label of nodes that are meant for a role: `ray start --labels kagent-role=builder`."""
ACCELERATOR = "ray.io/accelerator-type"
_INSTALL = "install it with pip install 'kagent[ray]', on every node"
_KEYS = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Of a cluster that is started here. Workers at nice 15 would leave builders, at +10, no lower.
_LOCAL = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "RAY_DEDUP_LOGS": "0"}


@dataclass(frozen=True)
class Node:
    """A node that is alive, with what it has in all."""

    host: str
    cpus: int
    gpus: int
    labels: Mapping[str, str]


def connect(on: str) -> ModuleType:
    """Connect this process to a cluster, once, and return the module `ray`.

    The cluster is the one at an address, or that RAY_ADDRESS names, or that runs on this machine;
    if there is none, one is started here. It ends with this process.

    Args:
        on: "ray", or "ray://HOST[:PORT]" of a Ray Client server.

    Raises:
        UserError: Ray is not installed.
        MachineError: There is no cluster at the address, or it refuses.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"--on {on} needs Ray, and it is not installed here: {_INSTALL}")
    with _without(_key_names()), _with(_QUIET):
        import ray

        if not ray.is_initialized():
            with _handlers():
                _connect(ray, on)
        found: ModuleType = ray  # without Ray's types it is Any
    return found


def _connect(ray: ModuleType, on: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if on.startswith(CLIENT):
            ray.init(client_address(on), **quiet)
            return
        try:
            ray.init("auto", **quiet)
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):
                raise
            with _with(_LOCAL):
                ray.init("local", include_dashboard=False, **quiet)
    except Exception as e:  # noqa: BLE001 - Ray has no common class of these
        where = on if on.startswith(CLIENT) else os.environ.get("RAY_ADDRESS") or "this machine"
        text = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise MachineError(
            f"no Ray cluster at {where}: {text[:300]}. Expected a cluster of the same versions of "
            "Python and Ray, with the same token where it asks for one (RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH): ray status shows whether it is up"
        ) from None


def client_address(on: str) -> str:
    """`ray://HOST:PORT` of "ray://HOST" or "ray://HOST:PORT"."""
    rest = on.removeprefix(CLIENT)
    return on if re.search(r":\d+$", rest) else f"{CLIENT}{rest}:{CLIENT_PORT}"


def nodes(ray: ModuleType) -> Sequence[Node]:
    """The nodes that are alive."""
    found: list[Node] = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node.get("Resources", {})
            cpus, gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0))
            found.append(Node(node["NodeManagerHostname"], cpus, gpus, node.get("Labels") or {}))
    return found


def _key_names() -> list[str]:
    """Variables that may hold keys. A cluster that is started here inherits the environment."""
    return [n for n in os.environ if _KEYS.search(n) and not n.startswith("RAY_")]


@contextlib.contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def _with(values: Mapping[str, str]) -> Iterator[None]:
    """Have variables set, unless the user has set them."""
    new = {n: v for n, v in values.items() if n not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    """Keep this process's own handling of signals, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
