"""A library's files: the package, documents, tests, provenance.

Every file is written under another name first and moved into place, PROVENANCE.json last: a library
whose export was cut short is still the old one by its own account, and `kagent certify` names the
files that differ. Files that are not the library's own are left alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kagent_sandbox.data.language import CUDA
from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import UserError

from kagent.export import library as library_files
from kagent.export.card import card
from kagent.export.dispatch_table import portfolio_json
from kagent.export.flashinfer import flashinfer_files
from kagent.export.import_rewrite import as_shipped
from kagent.export.packaging import packaging_files, trying_files
from kagent.export.reading import PACKAGES, PROVENANCE, OnDisk, sources_json, without_texts
from kagent.export.record import LibraryRecord, OperatorRecord
from kagent.export.runtime_files import runtime_files
from kagent.runs.files import is_inside, write_file


def refuse_edited(disk: OnDisk) -> None:
    """Leave a library alone that somebody has edited.

    Raises:
        UserError: A file is not as it was written.
    """
    if changed := [p for p in disk.changed() if (disk.folder / p).exists()]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{disk.folder}: {', '.join(changed[:3])}{more} was edited since the last export: move "
            "the changes away, or overwrite them with --force"
        )


def files_of(
    library: LibraryRecord, *, cubins: Mapping[str, bytes], old: OnDisk | None = None
) -> dict[str, bytes]:
    """All files of a library but PROVENANCE.json, by their paths in it.

    Args:
        library: What it holds.
        cubins: CUDA kernels' binaries, by `Compiled.key`; those of kernels that were there are
            taken from the library on disk.
        old: The library that is replaced.

    Raises:
        UserError: A kernel cannot be carried into a library.
    """
    return dict(_files(library, cubins, old))


def write_library(
    library: LibraryRecord, files: Mapping[str, bytes], folder: Path, *, old: OnDisk | None = None
) -> None:
    """Write a library.

    Args:
        library: What it holds.
        files: `files_of` it.
        folder: Where; made if need be.
        old: The library that is replaced.

    Raises:
        UserError: The folder cannot be written, or a link or a name leads out of it.
    """
    try:
        _refuse_outside(folder, files)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_file(folder / path, data)
        record = {
            "library": without_texts(to_json(library)),
            "files": {p: hashlib.sha256(d).hexdigest() for p, d in sorted(files.items())},
        }
        write_file(folder / PROVENANCE, json.dumps(record, indent=1) + "\n")
        for path in set(old.files) - set(files) if old is not None else ():
            _remove(folder, path)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror}: {e.filename})") from None


def _refuse_outside(folder: Path, paths: Iterable[str]) -> None:
    """Make sure that files come to lie in the folder: it may be somebody else's library.

    Raises:
        UserError: One would not.
    """
    for path in paths:
        if not is_inside((folder / path).parent, folder):
            raise UserError(
                f"{folder}: {path} would be written outside of it: a link or a name there leads "
                "out: export into a new folder"
            )


def _files(
    library: LibraryRecord, cubins: Mapping[str, bytes], old: OnDisk | None
) -> Iterator[tuple[str, bytes]]:
    for path, text in documents(library).items():
        yield path, text.encode()
    for path, data in _package(library, cubins, old):
        yield f"{PACKAGES}/{library.name}/{path}", data


def _package(
    library: LibraryRecord, cubins: Mapping[str, bytes], old: OnDisk | None
) -> Iterator[tuple[str, bytes]]:
    for module in (Path(p) for p in library_files.__path__):
        for path in sorted(module.glob("*.py")):
            if path.name != "__init__.py":
                yield path.name, path.read_bytes()
    for name, data in runtime_files(library).items():
        yield f"_runtime/{name}", data
    for operator in library.operators:
        yield f"operators/{operator.task}.py", operator.operator_py.encode()
        yield f"portfolio/{operator.task}.json", portfolio_json(operator).encode()
        yield from _kernels(operator, cubins, old)


def _kernels(
    operator: OperatorRecord, cubins: Mapping[str, bytes], old: OnDisk | None
) -> Iterator[tuple[str, bytes]]:
    for kernel in operator.kernels:
        try:
            yield f"kernels/{kernel.id}.py", as_shipped(kernel.source).encode()
        except UserError as e:
            raise UserError(f"{kernel.id}: {e}") from None
        if kernel.written_in.kind == "cpu":
            yield f"kernels/{kernel.id}.sources.json", sources_json(kernel).encode()
        for compiled in kernel.compiled if kernel.written_in is CUDA else ():
            path = f"cubins/{compiled.key}.cubin"
            if compiled.key in cubins:
                yield path, cubins[compiled.key]
            elif old is not None and (old.package / path).is_file():
                yield path, (old.package / path).read_bytes()


def _remove(folder: Path, path: str) -> None:
    """A file of the old version, and folders that are empty without it. Never outside."""
    target = folder / path
    if not is_inside(target, folder):
        return
    target.unlink(missing_ok=True)
    for parent in target.parents:
        if parent == folder or any(parent.iterdir()):
            return
        parent.rmdir()


def documents(library: LibraryRecord) -> dict[str, str]:
    """Texts by their paths in the library.

    Raises:
        UserError: Two operators offer the same name, or an operator.py does not say what it offers.
    """
    return {
        **packaging_files(library),
        "CARD.md": card(library),
        **trying_files(library),
        **flashinfer_files(library),
    }
