"""Tables that fit the terminal: where it is narrow, they leave columns out instead of wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Cell: TypeAlias = str | Text
_GAP = 2  # characters between columns
_HEAD_RULE = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")  # a line below the headers
_NARROWEST = 24  # of a column that wraps: narrower, and it becomes a tower
_SHORTEST = 8  # of a name that is cut; verdicts are shorter


@dataclass(frozen=True, slots=True)
class Column:
    """A column. Where the table is too wide, the columns with the highest `drop` go first."""

    header: str
    right: bool = False  # a number
    drop: int = 0  # 0: never left out
    wrap: bool = False  # its text may take several lines; other cells end in "…" at worst


@dataclass
class TextTable:
    """A table of texts. Rows are added as to rich's `Table`; the layout waits for the width."""

    columns: Sequence[Column]
    title: str = ""
    _rows: list[tuple[Text, ...] | None] = field(default_factory=list)  # None: a gap

    def add_row(self, *cells: Cell) -> None:
        """Add a row with one cell per column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self._rows.append(tuple(c if isinstance(c, Text) else Text(c) for c in cells))

    def add_section(self) -> None:
        """Leave a gap between the rows before and after."""
        if self._rows:
            self._rows.append(None)

    @property
    def row_count(self) -> int:
        """Rows so far, gaps not counted."""
        return sum(row is not None for row in self._rows)

    def _natural(self, index: int) -> int:
        """Characters that a column wants."""
        cells = (row[index].plain for row in self._rows if row is not None)
        lines = (line for cell in cells for line in cell.split("\n"))
        return max([cell_len(self.columns[index].header), *map(cell_len, lines)])

    def _least(self, index: int) -> int:
        """Characters that a column must have to be read."""
        natural = self._natural(index)
        return min(natural, _NARROWEST) if self.columns[index].wrap else natural

    def shown(self, width: int) -> list[int]:
        """Columns for which there is room, by index."""
        kept = list(range(len(self.columns)))
        while self._width(kept) > width:
            droppable = [i for i in kept if self.columns[i].drop]
            if not droppable:
                break
            kept.remove(max(droppable, key=lambda i: self.columns[i].drop))
        return kept

    def _width(self, kept: Sequence[int]) -> int:
        return sum(self._least(i) + _GAP for i in kept) - _GAP

    def _widths(self, kept: Sequence[int], room: int) -> list[int]:
        """Least characters of each column; too many together are taken from the widest names."""
        widths = {i: self._least(i) for i in kept}
        for _ in range(self._width(kept) - room):
            names = [i for i in kept if widths[i] > _SHORTEST and not self.columns[i].right]
            if names:
                widths[max(names, key=lambda i: widths[i])] -= 1
        return list(widths.values())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = self.shown(options.max_width)
        fits = self._width(kept) <= options.max_width
        table = Table(
            box=_HEAD_RULE,
            padding=(0, _GAP - 1, 0, 0),
            pad_edge=False,
            show_edge=False,
            header_style="dim",
        )
        for i, width in zip(kept, self._widths(kept, options.max_width), strict=True):
            column = self.columns[i]
            table.add_column(
                column.header,
                justify="right" if column.right else "left",
                no_wrap=not column.wrap,
                width=None if fits else width,
                min_width=width,
                overflow="fold" if column.wrap else "ellipsis",
            )
        for row in self._rows:
            table.add_row(*(Text() if row is None else row[i] for i in kept))
        if self.title:
            yield Text(self.title, style="bold")
        yield table
