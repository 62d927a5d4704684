"""Edits what the judge will import: torch, triton, kagent itself, and what Python imports by itself.

Files are opened, made, renamed over, linked and removed; of what exists nothing is changed.
"""

import importlib.util
import os
import pathlib
import site
import sys
import sysconfig

import torch
import triton
import triton.language as tl


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


def places():
    import torch.version as version

    packages = pathlib.Path(sysconfig.get_path("purelib"))
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    yield from (pathlib.Path(m.__file__) for m in (triton, torch, version))
    # Found, not imported: what the judge itself imports may lie where candidates cannot read.
    yield pathlib.Path(importlib.util.find_spec("kagent_sandbox.judge.judge").origin)
    yield from (packages / name for name in ("sitecustomize.py", "zz.pth", "__pycache__/zz.pyc"))
    yield from (library / name for name in ("site.py", "json/__init__.py", "usercustomize.py"))
    yield from (pathlib.Path(site.getusersitepackages()) / "usercustomize.py",)
    yield from map(pathlib.Path, ("/etc/ld.so.preload", "/usr/lib/libgomp.so.1", "/usr/bin/g++"))
    yield from map(pathlib.Path, (sys.executable, sys.prefix + "/pyvenv.cfg"))


def replaced(path):
    pathlib.Path("evil").write_text("raise SystemExit")
    os.rename("evil", path)


def attack():
    for path in places():
        exists = path.exists()
        if exists:
            tried(f"write {path}", lambda p=path: open(p, "r+b"))
            tried(f"truncate {path}", lambda p=path: os.truncate(p, p.stat().st_size))
        else:
            tried(f"make {path}", lambda p=path: open(p, "x"))
        beside = path.with_name("zz_planted")
        tried(f"rename into {path.parent}", lambda p=beside: replaced(p))
        tried(f"link into {path.parent}", lambda p=beside: os.symlink("/dev/null", p))
        tried(f"folder in {path.parent}", lambda p=beside: os.mkdir(p))


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


attack()


def rows(x: torch.Tensor) -> torch.Tensor:
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
