"""Texts of others as they are shown: every character can be seen, and none does anything."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with what cannot be seen as an escape: `\x1b`, `\u202e`.

    Such are control characters but newline and tab, marks of direction, characters of no width,
    halves of characters, separators of lines that are no newline, and blanks that look like others.
    For terminals, prompts, pages and messages; what is stored, hashed or compiled stays as it is.
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode("ascii")
