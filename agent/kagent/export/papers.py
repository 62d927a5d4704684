"""All of a library's files besides its operators, its runtime, its kernels and their tables.

Pure functions of the library's record: the same record gives the same texts.
"""

from __future__ import annotations

from kagent.export.card import card
from kagent.export.contents import Library
from kagent.export.flashinfer import flashinfer_files
from kagent.export.packaging import packaging_files
from kagent.export.trying import trying_files


def papers(library: Library) -> dict[str, str]:
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
