"""A library on disk, read back: PROVENANCE.json and the texts beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kagent_sandbox.data.records import RecordError, from_json
from kagent_sandbox.errors import UserError

from kagent.export.import_rewrite import as_judged
from kagent.export.record import FORMAT, CompiledRecord, KernelRecord, LibraryRecord, OperatorRecord

PROVENANCE = "PROVENANCE.json"


@dataclass(frozen=True)
class OnDisk:
    """A library and the hashes that its files had when they were written, by relative path."""

    folder: Path
    library: LibraryRecord
    files: Mapping[str, str]

    @property
    def package(self) -> Path:
        """Folder of its Python package."""
        return self.folder / "torch-ext" / self.library.name

    def changed(self) -> list[str]:
        """Files that are not as they were written, missing ones included."""
        return [p for p, digest in self.files.items() if hash_of(self.folder / p) != digest]

    def contents(self) -> dict[str, bytes]:
        """Its files as they are now, by path; none that is missing, or leads out of the folder.

        Raises:
            UserError: One cannot be read.
        """
        root = self.folder.resolve()
        paths = {p: (root / p).resolve() for p in self.files}
        try:
            return {
                p: path.read_bytes()
                for p, path in paths.items()
                if path.is_relative_to(root) and path.is_file()
            }
        except OSError as e:
            raise UserError(f"{self.folder}: cannot be read ({e.strerror}: {e.filename})") from None


def hash_of(path: Path) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def is_library(folder: Path) -> bool:
    """Whether a folder holds one."""
    return (folder / PROVENANCE).is_file()


def read_library(folder: Path) -> OnDisk:
    """Read a library.

    Raises:
        UserError: There is none, it is damaged, or of a newer format.
    """
    path = folder / PROVENANCE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: no library there (no {PROVENANCE}): kagent export makes one"
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("library"), dict):
        raise UserError(f"{path}: it does not describe a library")
    version = data["library"].get("format")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"{folder}: written by kagent {data['library'].get('kagent', '?')} in format {version},"
            f" and this kagent reads formats up to {FORMAT}: update kagent"
        )
    try:
        library = from_json(LibraryRecord, data["library"])
        files = {str(k): str(v) for k, v in data["files"].items()}
        operators = tuple(_with_texts(folder, library.name, o) for o in library.operators)
    except (RecordError, KeyError, AttributeError, OSError, SyntaxError, ValueError) as e:
        raise UserError(f"{path}: {e}") from None
    return OnDisk(folder, replace(library, operators=operators), files)


def _with_texts(folder: Path, name: str, operator: OperatorRecord) -> OperatorRecord:
    package, task = folder / "torch-ext" / name, folder / "tests" / "tasks" / operator.task
    return replace(
        operator,
        kernels=tuple(_with_source(package, k) for k in operator.kernels),
        task_toml=(task / "task.toml").read_text(encoding="utf-8"),
        reference_py=(task / "reference.py").read_text(encoding="utf-8"),
        operator_py=(package / "operators" / f"{operator.task}.py").read_text(encoding="utf-8"),
    )


def _with_source(package: Path, kernel: KernelRecord) -> KernelRecord:
    text = (package / "kernels" / f"{kernel.id}.py").read_text(encoding="utf-8")
    if kernel.written_in.kind != "cpu":
        return replace(kernel, source=as_judged(text))
    sources = (package / "kernels" / f"{kernel.id}.sources.json").read_text(encoding="utf-8")
    compiled = tuple(from_json(CompiledRecord, c) for c in json.loads(sources)["sources"])
    return replace(kernel, source=as_judged(text), compiled=compiled)


def without_texts(data: dict[str, Any]) -> dict[str, Any]:
    """A library's JSON as it is stored: texts are files, and not stored twice."""
    for operator in data["operators"]:
        operator["task_toml"] = operator["reference_py"] = operator["operator_py"] = ""
        for kernel in operator["kernels"]:
            kernel["source"] = ""
            for compiled in kernel["compiled"]:
                compiled["text"] = ""
    return data
