"""Reads a model's reply: a hypothesis, a predicted speed-up, how likely it works, one fenced file.

    Hypothesis: rows of 1024 fit into registers, so one read and one write are enough.
    Predicted speed-up: 1.15×
    Probability that it works: 0.8

    ```python
    ...
    ```

Honest deviations are read all the same. What cannot be used is refused with a text that helps the
next attempt. Pure, linear in the text's length, and total: any text gives one or the other.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kagent_sandbox.data.language import LANGUAGES
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.syntax import parse

from kagent.llm import claims
from kagent.llm.chat import join_surrogates
from kagent.llm.code_blocks import Block, split

FORM = "answer with a line 'Hypothesis: …', a line 'Predicted speed-up: …' and one ```python block"

_THINK = re.compile(r"\s*<(think|thinking)>", re.IGNORECASE)
_THOUGHT = re.compile(r"</(think|thinking)>", re.IGNORECASE)
_CPP_TEXT = re.compile(
    r"__global__|__device__|^[ \t]*#[ \t]*include\b|\bextern \"C\"", re.MULTILINE
)
_DIFF_TEXT = re.compile(r"^(?:@@ .*@@|--- \S|diff --git )", re.MULTILINE)
_STARTS = re.compile(r"""^(?:import |from |def |class |@|\"""|''')""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """The proposal in a reply."""

    hypothesis: str  # one line
    predicted: float | None  # speed-up over the parent: 1.2 = 20 % faster
    source: str
    works: float | None = None  # stated probability that it is correct, 0 to 1


def read_reply(text: str, entry: str, *, truncated: bool = False) -> Answer | Rejected:
    """The answer in a reply's text, or why there is none.

    Args:
        text: The whole reply.
        entry: Name of the function that the file must define.
        truncated: The reply was cut at a limit.
    """
    text = join_surrogates(text).replace("\r\n", "\n").removeprefix("\ufeff")
    opened = _THINK.match(text)
    thought = _THOUGHT.search(text, opened.end() if opened else 0)
    if opened is not None and thought is None:
        return _refused(f"the reply ends before its thinking does: think less, then {FORM}")
    if thought is not None and (opened is not None or not claims.begins(text)):
        # Some templates open the thinking themselves, so that the reply only ends it.
        answer = _read(text[thought.end() :], entry, truncated=truncated)
        if opened is not None or isinstance(answer, Answer):
            return answer
    return _read(text, entry, truncated=truncated)


def _read(text: str, entry: str, *, truncated: bool) -> Answer | Rejected:
    parts = split(text)
    files = [b for b in parts.blocks if _is_file(b, entry, truncated=truncated)]
    distinct = {b.body.strip(): b for b in files}
    if len(distinct) > 1:
        return _refused(
            f"the reply holds {len(distinct)} files that define {entry} ({_places(files)}): "
            "choose one, and answer with that one alone"
        )
    source = files[0].body if files else None
    prose: Sequence[str] = parts.prose
    if source is None and not parts.blocks and not truncated:
        source, prose = _unfenced(text, entry)
    if source is None:
        return _refused(_why_none(parts.blocks, text, entry, truncated=truncated))
    return Answer(claims.hypothesis(prose), claims.predicted(prose), source, claims.works(prose))


def _refused(message: str) -> Rejected:
    return Rejected(Stage.PARSE, Status.NO_KERNEL, message)


def _places(blocks: Sequence[Block]) -> str:
    return ", ".join(f"lines {b.first}–{b.last}" for b in blocks)


def _is_file(block: Block, entry: str, *, truncated: bool) -> bool:
    """Whether a block is a whole file that defines the entry. A syntax error is the compiler's to
    report, with its line; but a block that was never closed must make sense to be whole.
    """
    if entry not in block.body:
        return False
    tree = _parsed(block.body)
    if tree is not None:
        return entry in set(_defined(tree)) and (block.closed or not truncated)
    name = re.escape(entry)
    looks = re.search(rf"^(?:(?:async )?def {name}\b|{name} *=)", block.body, re.MULTILINE)
    return block.closed and block.is_python and looks is not None


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python dislikes, and takes
            return parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a file's top level sets. What it imports, as a usage example does, is not its
    own.
    """
    rest: list[ast.AST] = list(tree.body)
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign):
            yield from (t.id for t in [node.target] if isinstance(t, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            rest += ast.iter_child_nodes(node)


def _unfenced(text: str, entry: str) -> tuple[str | None, Sequence[str]]:
    """A file that stands in a reply as it is, and what comes before it."""
    starts = _STARTS.search(text)
    for at in dict.fromkeys((0, starts.start() if starts else 0)):
        source = text[at:]
        tree = _parsed(source) if entry in source else None
        if tree is not None and entry in set(_defined(tree)):
            return source.rstrip() + "\n", text[:at].split("\n")
    return None, ()


def _why_none(blocks: Sequence[Block], text: str, entry: str, *, truncated: bool) -> str:
    """Explain why there is no kernel, as advice for the next attempt."""
    if not text.strip():
        return f"the reply is empty: {FORM}"
    if truncated or any(not b.closed for b in blocks):
        until = "ended" if blocks else "began"
        return (
            f"the reply was cut short in its line {text.count(chr(10)) + 1}, before its file "
            f"{until}: write a shorter file and less around it (or raise reply_tokens)"
        )
    changes = [b for b in blocks if b.tag in ("diff", "patch") or _DIFF_TEXT.search(b.body)]
    if changes:
        return f"the reply holds a diff ({_places(changes)}): answer with the whole file instead"
    alone = [each for each in LANGUAGES.values() if each.kernel_fences]
    tags = {tag for each in alone for tag in each.kernel_fences}
    native = [b for b in blocks if b.tag in tags or _is_native(b)]
    if native:
        titles = " or ".join(each.title for each in alone)
        return (
            f"the reply holds {titles} alone ({_places(native)}): answer with a Python file "
            f"that defines {entry}, has this source in a string, and wraps it with "
            + " or ".join(each.written for each in alone)
        )
    python = [b for b in blocks if b.is_python]
    if python:
        trees = map(_parsed, {b.body for b in python})
        names = sorted({n for t in trees if t is not None for n in _defined(t)})
        have = f" (it defines {', '.join(names[:12])})" if names else ""
        return (
            f"the file in the reply does not define {entry}{have}: answer with one whole file "
            f"whose top level has def {entry}(...)"
        )
    return f"the reply holds no Python file: {FORM} that defines {entry}"


def _is_native(block: Block) -> bool:
    looks = block.is_python and _CPP_TEXT.search(block.body) is not None
    return looks and _parsed(block.body) is None
