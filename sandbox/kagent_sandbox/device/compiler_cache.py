"""Compiled code of torch's compiler, carried from one launcher process to another.

Inductor and Triton find it by hash below `TORCHINDUCTOR_CACHE_DIR` and `TRITON_CACHE_DIR`. Only
processes that no candidate has been in are packed or copied from: Triton loads binaries from there
unchecked.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
from pathlib import Path

from kagent_sandbox import cache

MOST_FILES = 8000
MOST_BYTES = 512 << 20
"""Most bytes of a folder that is taken over: a private folder's size is limited."""
_MOST_PACKED_BYTES = 64 << 20  # of one archive: several travel in a message
_CHOICES = ".best_config"
_GROUP = "__grp__"
_TRITON = "triton"  # folder
_STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx")
"""Texts that Triton keeps beside a binary. Whoever loads the binary does without, and those of a
product's variants in float32 are larger than all that may be carried."""
_ROOT = b"@kagent-compiler-cache@"  # Triton's lists of files hold absolute paths


def use(folder: Path) -> None:
    """Have this process, which has compiled nothing yet, keep what it compiles there.

    But for choices among configurations: Inductor stores with a compiled kernel that they are kept,
    and under which name of a file; whoever loads it elsewhere would write to a folder that is not
    its own, and fail.

    And without Triton's files in Inductor's: they are in their own folder, as binaries alone.
    """
    from torch._inductor import config

    config.autotune_local_cache = False
    config.bundle_triton_into_fx_graph_cache = False
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / _TRITON)


def keep_headers() -> None:
    """Have this process keep precompiled headers of C++ beside what torch compiles.

    torch leaves them in the folder of temporary files (149 MB), whatever `TORCHINDUCTOR_CACHE_DIR`
    says, and for good. They are no part of the folder that is packed: it would grow too large.
    """
    from torch._inductor import codecache

    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if compiled is not None:
        headers = Path(compiled).parent / "precompiled_headers"
        codecache._HEADER_DIR = str(headers)  # noqa: SLF001 - torch has no setting for it
        codecache._HEADER_LOCK_DIR = str(headers / "locks")  # noqa: SLF001


def shared_folder() -> Path:
    """Folder of compiled code of the trusted worker that measures baselines on a GPU."""
    return cache.cache_folder() / "compiled"


def copy(source: Path, folder: Path) -> None:
    """Start from all that another folder holds, unless it has grown large or cannot be read."""
    with contextlib.suppress(OSError, shutil.Error):
        sizes = [p.stat().st_size for p in source.rglob("*") if p.is_file()]
        if len(sizes) <= MOST_FILES and sum(sizes) <= MOST_BYTES:
            shutil.copytree(source, folder, dirs_exist_ok=True)


def pack(folder: Path) -> bytes:
    """Pack a folder's files, of kernels the binaries alone.

    The choice of the fastest of several configurations of a kernel is left out: processes that
    compile side by side would not choose as they do alone.

    Empty when it is more than may be carried: whoever lacks it compiles by itself.
    """
    left = {_CHOICES, *_STAGES}
    names = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix not in left]
    if len(names) > MOST_FILES or sum(p.stat().st_size for p in names) > _MOST_PACKED_BYTES:
        return b""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path in names:
            data = path.read_bytes()
            if path.name.startswith(_GROUP):
                data = data.replace(os.fsencode(folder), _ROOT)
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Add what `pack` took from another folder."""
    if not archive:
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            path = folder / member.name
            content = members.extractfile(member) if member.isfile() else None
            if content is None or not path.resolve().is_relative_to(folder.resolve()):
                continue
            data = content.read()
            if path.name.startswith(_GROUP):
                data = data.replace(_ROOT, os.fsencode(folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
