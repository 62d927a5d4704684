'''Candidates of the corpus as they are run: whole files, or a few edits of one.

A candidate `scale_cpp.py` that is nearly another file is stored as `scale_cpp.edits`:

    """Every result is one part in a hundred too large."""
    over ../../honest/rows_cpp.py
    @@
    -    const float scale = float(1 / sum);
    +    const float scale = float(1.01 / sum);

The docstring takes the place of the base's; without one the base's stays. The base is a whole file,
found from this one. A block after `@@` reads as in a diff: `-` goes, `+` comes, and what is
indented by a space, or empty, stays. What goes and stays must be in the base once, in whole lines;
blocks come in the base's order.
'''

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kagent_sandbox.errors import UserError

from kagent.candidate_file import read_candidate

SUFFIX = ".edits"
_DOCSTRING = r'""".*?"""\n'
_HEAD = re.compile(rf"({_DOCSTRING})?over (\S+)\n@@\n", re.DOTALL)
_BASE = re.compile(rf"({_DOCSTRING})?(.*)", re.DOTALL)


def candidates(folder: Path) -> list[Path]:
    """All candidates of a folder, by the names that they have when they are whole."""
    files = [p for p in folder.iterdir() if p.suffix in (".py", SUFFIX)]
    return sorted({p.with_suffix(".py") for p in files})


def stored(path: Path) -> Path:
    """The file that holds a candidate: itself, or the one of its edits."""
    return path if path.is_file() else path.with_suffix(SUFFIX)


def candidate_text(path: Path) -> str:
    """The whole text of a candidate of the corpus, by the name that it has when it is whole.

    Raises:
        UserError: It cannot be read, or its edits do not fit; the text names file and block.
    """
    file = stored(path)
    if file == path or not file.is_file():
        return read_candidate(path)
    edits = read_candidate(file)
    try:
        return assembled(edits, read_candidate(file.parent / _head(edits)[2]))
    except UserError as e:
        raise UserError(f"{file}: {e}") from None


def assembled(edits: str, base: str) -> str:
    """The text that edits of a base stand for.

    Raises:
        UserError: They are not written as edits are, or do not fit the base.
    """
    head, whole = _head(edits), _BASE.fullmatch(base)
    assert whole is not None, "it fits any text"
    if head[1] and not whole[1]:
        raise UserError("the base has no docstring that this one could replace")
    # By "\n" alone: splitlines() ends lines at characters that an attack may hold.
    lines = whole[2].split("\n")
    done, result = 0, list[str]()
    for number, block in enumerate(_blocks(edits[head.end() :]), 1):
        if wrong := next((line for line in block if line[:1] not in ("", " ", "+", "-")), None):
            raise UserError(f"block {number} has a line that begins with none of ' -+': {wrong!r}")
        old = [line[1:] for line in block if line[:1] != "+"]
        places = _places(lines, old)
        if len(places) != 1:
            raise UserError(f"block {number} fits {len(places)} places of the base, not one")
        if places[0] < done:
            raise UserError(f"block {number} begins in the base before block {number - 1} ends")
        result += lines[done : places[0]]
        result += [line[1:] for line in block if line[:1] != "-"]
        done = places[0] + len(old)
    return (head[1] or whole[1] or "") + "\n".join([*result, *lines[done:]])


def _head(edits: str) -> re.Match[str]:
    head = _HEAD.match(edits)
    if head is None:
        raise UserError("expected a docstring, 'over BASE' and blocks, each after a line '@@'")
    return head


def _blocks(text: str) -> list[list[str]]:
    """The lines of each block. The line that opens the first one is not in the text."""
    blocks: list[list[str]] = [[]]
    for line in text.removesuffix("\n").split("\n"):
        if line == "@@":
            blocks.append([])
        else:
            blocks[-1].append(line)
    return blocks


def _places(lines: Sequence[str], old: Sequence[str]) -> list[int]:
    """Return the places of some lines among others."""
    count = len(old)
    return [i for i in range(len(lines) - count + 1) if lines[i : i + count] == old]
