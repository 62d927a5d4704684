"""A library on disk, read back: PROVENANCE.json and the texts beside it."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.errors import UserError
from kagent_sandbox.syntax import parse

from kagent.export.generic import needs_reference
from kagent.export.import_rewrite import as_judged
from kagent.export.record import FORMAT, CompiledRecord, KernelRecord, LibraryRecord, OperatorRecord
from kagent.runs.files import read_regular

PROVENANCE = "PROVENANCE.json"
_MOST_BYTES = 256 << 20  # of it
PACKAGES = "build/torch-universal"
"""Folder of the Python package: where pip and Hugging Face's loader both take it from."""


@dataclass(frozen=True)
class OnDisk:
    """A library and the hashes that its files had when they were written, by relative path."""

    folder: Path
    library: LibraryRecord
    files: Mapping[str, str]

    @property
    def package(self) -> Path:
        """Folder of its Python package."""
        return self.folder / PACKAGES / self.library.name

    def changed(self) -> list[str]:
        """Files that are not as they were written, missing ones included."""
        return [p for p, digest in self.files.items() if hash_of(self.folder / p) != digest]

    def cubins(self) -> dict[str, bytes]:
        """CUDA kernels' binaries, by `Compiled.key`."""
        return {c.stem: c.read_bytes() for c in self.package.glob("cubins/*.cubin")}

    def contents(self) -> dict[str, bytes]:
        """Read the present files by path. Missing ones and links out of the folder are left out.

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


def kinds_of(operator: OperatorRecord) -> set[Kind]:
    """Kinds of device that an operator has kernels for."""
    return {k.written_in.kind for k in operator.kernels}


def no_device_text(disk: OnDisk, place: str) -> str:
    """Refusal of a library that has no kernel for a machine: every machine has a CPU."""
    return f"{disk.folder}: {place} has no device for any of its kernels: they need an NVIDIA GPU"


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
        data = json.loads(read_regular(path, _MOST_BYTES))
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
    if version != FORMAT:
        raise UserError(
            f"{folder}: written by kagent {data['library'].get('kagent', '?')} in format {version},"
            f" and this kagent reads format {FORMAT}: export its runs into a new library"
        )
    try:
        library = from_json(LibraryRecord, _with_blanks(data["library"]))
        files = {str(k): str(v) for k, v in data["files"].items()}
        operators = tuple(_with_texts(folder, library.name, o) for o in library.operators)
    except (
        RecordError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        SyntaxError,
        ValueError,
    ) as e:
        raise UserError(f"{path}: {e}") from None
    return OnDisk(folder, replace(library, operators=operators), files)


def _with_texts(folder: Path, name: str, operator: OperatorRecord) -> OperatorRecord:
    package, task = folder / PACKAGES / name, folder / "tests" / "tasks" / operator.task
    text = (package / "operators" / f"{operator.task}.py").read_text(encoding="utf-8")
    own = package / "operators" / f"_{operator.task}_reference.py"
    reference = own if needs_reference(text) else task / "reference.py"
    return replace(
        operator,
        kernels=tuple(_with_source(package, k) for k in operator.kernels),
        task_toml=(task / "task.toml").read_text(encoding="utf-8"),
        reference_py=reference.read_text(encoding="utf-8"),
        operator_py=text,
    )


def _with_source(package: Path, kernel: KernelRecord) -> KernelRecord:
    text = (package / "kernels" / f"{kernel.id}.py").read_text(encoding="utf-8")
    if kernel.written_in.kind != "cpu":
        return replace(kernel, source=as_judged(text))
    sources = (package / "kernels" / f"{kernel.id}.sources.json").read_text(encoding="utf-8")
    compiled = _compiled(sources, text)
    return replace(kernel, source=as_judged(text), compiled=compiled)


def without_texts(data: dict[str, Any]) -> dict[str, Any]:
    """A library's JSON as it is stored: texts are files, and not stored twice."""
    for record, name in _texts(data):
        del record[name]
    return data


def _with_blanks(data: dict[str, Any]) -> dict[str, Any]:
    """The inverse, but for the texts themselves, which are read from their files."""
    for record, name in _texts(data):
        record[name] = ""
    return data


def _texts(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Records of a library's JSON that hold a text, with its name in them."""
    for operator in data["operators"]:
        yield from ((operator, name) for name in ("task_toml", "reference_py", "operator_py"))
        for kernel in operator["kernels"]:
            yield kernel, "source"
            yield from ((compiled, "text") for compiled in kernel["compiled"])


def sources_json(kernel: KernelRecord) -> str:
    """kernels/ID.sources.json: what setup.py compiles ahead. A source that is a constant of the
    kernel's file is named by it.
    """
    constants = {text: name for name, text in _constants(kernel.source)}
    records = [to_json(c) for c in kernel.compiled]
    for record in records:
        assert isinstance(record, dict)
        if record["text"] in constants:
            record["constant"] = constants[record.pop("text")]
    return json.dumps({"sources": records}, indent=1) + "\n"


def _compiled(text: str, source: str) -> tuple[CompiledRecord, ...]:
    """The inverse of `sources_json`."""
    constants = dict(_constants(source))
    records = json.loads(text)["sources"]
    for record in records:
        if "constant" in record:
            record["text"] = constants[record.pop("constant")]
    return tuple(from_json(CompiledRecord, record) for record in records)


def _constants(source: str) -> Iterator[tuple[str, str]]:
    """Strings that a file assigns to names, with these."""
    for node in parse(source).body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(text))):
                yield name, text
