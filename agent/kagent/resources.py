"""Folders of the files that ship with kagent: in the installed package, or at a checkout's root."""

from __future__ import annotations

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
