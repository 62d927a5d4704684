"""Index of a run's texts: finds equal ones, and those that differ only in layout or comments."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from kagent_sandbox.builder.identity import source_hash, tree_hash

from kagent.runs.lineage import Proposal


class HasSource(Protocol):
    """The common part of a proposal and a draft of one."""

    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def fault(self) -> str: ...  # noqa: D102
    @property
    def configs(self) -> int | None: ...  # noqa: D102


@functools.lru_cache(maxsize=128)  # a draft is looked up, and then added
def text_identity(source: str) -> str:
    """Hash of the normalised syntax tree, or of the text where it is not Python."""
    try:
        return tree_hash(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source_hash(source)


class SourceIndex:
    """All accepted proposals of a run by what their text means."""

    def __init__(self, proposals: Iterable[Proposal] = ()) -> None:
        self._ids: dict[tuple[str, int | None], int] = {}
        self._sources: list[str] = []
        for proposal in proposals:
            self.add(proposal)

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, proposal: Proposal) -> None:
        """The next accepted proposal: its id is the number of those before."""
        assert proposal.id == len(self._sources)
        self._sources.append(proposal.source)
        if not proposal.fault:
            self._ids.setdefault(_key(proposal), proposal.id)

    def tuned(self, proposal: Proposal) -> None:
        """An accepted proposal has other constants now: its id stands for both texts."""
        self._sources[proposal.id] = proposal.source
        self._ids.setdefault(_key(proposal), proposal.id)

    def written(self, proposal: Proposal, source: str) -> None:
        """An accepted proposal that was tuned had this text before: its id stands for it, too."""
        self._ids.setdefault(_key(replace(proposal, source=source)), proposal.id)

    def same(self, text: HasSource) -> int | None:
        """Id of the first proposal with this text or syntax tree, built in as many configurations.

        A reply without a kernel is like no other.
        """
        return None if text.fault else self._ids.get(_key(text))

    def since(self, seen: int) -> tuple[str, ...]:
        """Texts of the proposals from id `seen` on."""
        return tuple(self._sources[seen:])


def _key(text: HasSource) -> tuple[str, int | None]:
    return text_identity(text.source), text.configs
