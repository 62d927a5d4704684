"""The installed package: its version, and the folders that ship with it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from kagent_sandbox.errors import MachineError


def resource(name: str) -> Path:
    """The folder `seeds`, `prompts` or `corpus`.

    Raises:
        MachineError: It is in neither place.
    """
    package = Path(__file__).resolve().parent
    # An editable install imports agent/kagent of the checkout, two folders below its root.
    for folder in (package / name, package.parents[1] / name):
        if folder.is_dir():
            return folder
    raise MachineError(f"kagent's own folder {name}/ is missing beside {package}: install it again")


def corpus_folder() -> Path:
    """Return the folder of the corpus: in the installed package, or at a checkout's root."""
    return resource("corpus")


def version() -> str:
    """Return kagent's version.

    Raises:
        MachineError: The package is imported from a folder without being installed.
    """
    try:
        return importlib.metadata.version("kagent")
    except importlib.metadata.PackageNotFoundError:
        package = Path(__file__).resolve().parent
        text = f"kagent at {package} is not installed: run pip install -e {package.parents[1]}"
        raise MachineError(text) from None
