"""Texts of others as they are shown, and sources that cannot be shown as they are."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.runtime.text import printable
from kagent_sandbox.syntax import refuse_unseen

ANY = st.text(st.characters(exclude_categories=()))


def test_what_cannot_be_seen_is_an_escape():
    shown = {
        "a\x1b[0mb\x00\x07": r"a\x1b[0mb\x00\x07",
        "\tc\r\nd\re": "\tc\nd\\re",
        "\u202ed\x9b\u2066": r"\u202ed\x9b\u2066",
        "\u200b\ud800\u2028\u00a0\U000e0041": r"\u200b\ud800\u2028\xa0\U000e0041",
        "é → 数 ❤\ufe0f": "é → 数 ❤\ufe0f",
    }
    assert {text: printable(text) for text in shown} == shown


@given(ANY)
def test_nothing_else_changes_and_nothing_is_left(text):
    found = printable(text)
    assert all(c in "\n\t" or c.isprintable() for c in found)
    assert printable(found) == found
    assert (found == text) == all(c in "\n\t" or c.isprintable() for c in text)
    assert found.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("character", "name"),
    [
        ("\x00", r"U+0000 (a control character), which nobody sees: write it as an escape (\x00)"),
        ("\x1b", "U+001B"),
        ("\x85", "U+0085"),
        ("\u202e", "U+202E (RIGHT-TO-LEFT OVERRIDE)"),
        ("\u2066", "U+2066 (LEFT-TO-RIGHT ISOLATE)"),
        ("\u200b", "U+200B (ZERO WIDTH SPACE)"),
        ("\u2028", "U+2028 (LINE SEPARATOR)"),
        ("\f", "U+000C"),
    ],
)
def test_a_source_that_is_not_what_it_looks_like_is_refused(character, name):
    with pytest.raises(SyntaxError) as refused:
        refuse_unseen(f"x = 1\ny = '{character}'\n")
    assert name in refused.value.msg
    assert refused.value.lineno == 2


@given(ANY)
def test_what_is_taken_is_what_is_seen(text):
    try:
        refuse_unseen(text)
    except SyntaxError:
        assert printable(text) != text
    else:
        kinds = {unicodedata.category(c) for c in text if c not in "\n\t\r"}
        assert kinds.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})


def test_ordinary_sources_are_taken():
    refuse_unseen("# é, 数, ×, →, \u00a0, ❤\ufe0f\nx = 1\r\n\tpass\n")
    refuse_unseen("#!/usr/bin/env python\n# -*- coding: UTF-8 -*-\n")
    refuse_unseen("x = 1\n\n# coding: latin-1, from the third line on, is a comment\n")


@pytest.mark.parametrize("first", ["", "#!/usr/bin/env python\n", "\n", "\r"])
@pytest.mark.parametrize("encoding", ["raw_unicode_escape", "utf-7", "latin-1", "no-such"])
def test_a_source_that_python_reads_as_another_text_is_refused(first, encoding):
    """What looks like a comment could hold statements."""
    with pytest.raises(SyntaxError) as refused:
        refuse_unseen(f"{first}# -*- coding: {encoding} -*-\n# note \\u000ax = 1\n")
    assert "UTF-8" in refused.value.msg
    assert encoding in refused.value.msg
    assert refused.value.lineno == 1 + len(first.splitlines())
