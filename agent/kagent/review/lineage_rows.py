"""The lineage as rows of text: the winner's path is the trunk, and what was tried branches off.

Of a candidate's children one continues its column: the next one of the path, otherwise the one
with the most descendants, of equal ones the fastest. The others branch off before it, one column to
the right. So columns are few (a branch has at most half of its trunk's descendants), and no line
crosses a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_sandbox.data.verdict import Passed, Rejected

from kagent.runs.lineage import Candidate, Lineage
from kagent.ui.run_view import MOST_CHILDREN


@dataclass(frozen=True, slots=True)
class LineageRow:
    """A candidate, or a text about several. `guides` are the lines left of the text: class names
    of one cell per column.
    """

    guides: tuple[str, ...]
    id: int | None
    text: str = ""
    on_path: bool = False


@dataclass(frozen=True, slots=True)
class _Branch:
    """Something that hangs on a candidate: a child, or a text about several."""

    id: int | None
    text: str = ""


def lineage_rows(lineage: Lineage, path: Sequence[int]) -> list[LineageRow]:
    """Rows from top to bottom; the winner's seed comes first."""
    children, sizes = _children(lineage), _sizes(lineage)
    on_path = set(path)
    trunk = set(itertools.pairwise(path))

    def heir(candidate_id: int) -> int | None:
        of = children.get(candidate_id, [])
        following = [c for c in of if (candidate_id, c) in trunk]
        return max(
            following or of, key=lambda c: (sizes[c], lineage.log_speed(c), -c), default=None
        )

    rows: list[LineageRow] = []
    roots = sorted(children.get(None, []), key=lambda c: (c not in on_path, c))
    # What is still to be drawn, the next one last: an explicit stack, since a lineage may be deeper
    # than Python's own. With each the cells of the columns left of it, and the line from above.
    todo: list[tuple[_Branch, tuple[str, ...], str]] = [(_Branch(i), (), "") for i in roots[::-1]]
    while todo:
        branch, left, above = todo.pop()
        if branch.id is None:
            rows.append(LineageRow((*left, ""), None, branch.text))
            continue
        next_id = heir(branch.id)
        others = _branches(lineage, children, branch.id, next_id)
        line = "-path" if (branch.id, next_id) in trunk else ""
        kind = "rejected" if isinstance(lineage[branch.id].verdict, Rejected) else "passed"
        # Others hang on the line to the heir, and there are none without one.
        below = f" down{line}" if next_id is not None else ""
        rows.append(
            LineageRow((*left, f"{kind}{above}{below}"), branch.id, "", branch.id in on_path)
        )
        passing = tuple(cell.removeprefix("tee ") for cell in left)
        if next_id is not None:
            todo.append((_Branch(next_id), passing, f" up{line}"))
        tee = f"tee up{line} down{line}"
        todo += [(other, (*passing, tee), "") for other in reversed(others)]
    return rows


def _branches(
    lineage: Lineage,
    children: Mapping[int | None, Sequence[int]],
    parent: int,
    heir: int | None,
) -> list[_Branch]:
    """Branches of a parent: children with children, former bests and the fastest; the rest as a
    count.
    """
    others = [c for c in children.get(parent, []) if c != heir]
    promoted = {c.id for c in lineage.promotions}
    fast = sorted(others, key=lambda i: -lineage.log_speed(i))[:MOST_CHILDREN]
    named = [
        i
        for i in others
        if i in children or i in promoted or (i in fast and isinstance(lineage[i].verdict, Passed))
    ]
    rest = [lineage[i] for i in others if i not in named]
    text = _count_text(rest)
    return [*(_Branch(i) for i in named), *([_Branch(None, text)] if rest else [])]


def _count_text(rest: Sequence[Candidate]) -> str:
    failed = sum(isinstance(c.verdict, Rejected) for c in rest)
    slower = len(rest) - failed
    parts = [f"{slower} slower"] if slower else []
    parts += [f"{failed} rejected"] if failed else []
    return f"and {' and '.join(parts)}"


def _children(lineage: Lineage) -> dict[int | None, list[int]]:
    """Ids by first parent; None for those that have none."""
    found: dict[int | None, list[int]] = {}
    for c in _shown(lineage):
        found.setdefault(next(iter(c.proposal.parents), None), []).append(c.id)
    return found


def _sizes(lineage: Lineage) -> dict[int, int]:
    """Number of descendants of each candidate, itself included."""
    sizes = {c.id: 1 for c in _shown(lineage)}
    for c in reversed(_shown(lineage)):  # parents come before their children
        if c.proposal.parents:
            sizes[c.proposal.parents[0]] = sizes.get(c.proposal.parents[0], 1) + sizes[c.id]
    return sizes


def _shown(lineage: Lineage) -> list[Candidate]:
    """All but duplicates that led nowhere."""
    parents = {c.proposal.parents[0] for c in lineage if c.proposal.parents}
    return [c for c in lineage if not c.is_duplicate or c.id in parents]
