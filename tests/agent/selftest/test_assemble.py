"""Candidates of the corpus that are stored as edits of another file."""

import contextlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kagent.resources import corpus_folder
from kagent.selftest.assemble import assembled, candidate_text, candidates
from kagent.selftest.catalogue import Variant, load_catalogue
from kagent_sandbox.errors import UserError

FOLDER = corpus_folder()
BASE = '"""The plain one."""\n\none\n  two\n\n  two\nthree\n'
HEAD = '"""Another."""\nover base.py\n@@\n'


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        (HEAD + "-one\n+1\n", '"""Another."""\n\n1\n  two\n\n  two\nthree\n'),
        ("over base.py\n@@\n-one\n", '"""The plain one."""\n\n  two\n\n  two\nthree\n'),
        (HEAD + " three\n+\n+four\n", '"""Another."""\n\none\n  two\n\n  two\nthree\n\nfour\n'),
        (HEAD + "   two\n\n-  two\n+2\n", '"""Another."""\n\none\n  two\n\n2\nthree\n'),
        (HEAD + " one\n+@@\n@@\n-three\n", '"""Another."""\n\none\n@@\n  two\n\n  two\n'),
        ('"""Two\nlines."""\n' + HEAD[15:] + " one\n", '"""Two\nlines."""' + BASE[20:]),
    ],
)  # fmt: skip
def test_edits_stand_for_a_text(edits, text):
    assert assembled(edits, BASE) == text


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (HEAD + "-  two\n", "block 1 fits 2 places of the base"),
        (HEAD + "-one\n@@\n-four\n", "block 2 fits 0 places of the base"),
        (HEAD + "+four\n", "block 1 fits"),
        (HEAD + "-three\n@@\n-one\n", "block 2 begins in the base before block 1 ends"),
        (HEAD + " one\n   two\n@@\n   two\n\n", "block 2 begins in the base before"),
        (HEAD + "one\n", "block 1 has a line that begins with none of ' -+': 'one'"),
        (HEAD, "block 1 fits"),
        ("-one\n+1\n", "expected a docstring, 'over BASE'"),
        ("over base.py\n-one\n+1\n", "expected a docstring, 'over BASE'"),
        ("", "expected a docstring, 'over BASE'"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_where(edits, words):
    with pytest.raises(UserError) as e:
        assembled(edits, BASE)
    assert words in str(e.value)


def test_a_docstring_needs_one_to_replace():
    with pytest.raises(UserError, match="no docstring"):
        assembled(HEAD + "-one\n", "one\n")


@given(st.text(), st.text())
def test_any_text_gives_a_text_or_an_error(edits, base):
    for text in (edits, HEAD + edits, f"over a\n@@\n{base}\n{edits}"):
        with contextlib.suppress(UserError):
            assert isinstance(assembled(text, base), str)


@st.composite
def changes(draw):
    """A base of distinct lines, edits of it, and the text that they stand for."""
    lines = draw(st.lists(st.text(st.characters(exclude_characters="\n")), unique=True))
    base = [f"{i}{line}" for i, line in enumerate(lines)]
    edits, whole, at = ["over base.py"], [], 0
    while at < len(base):
        kept, gone, stays = (draw(st.integers(least, 2)) for least in (0, 0, 1))
        new = draw(st.lists(st.sampled_from(["", "@@", " x", "-", "+y", "over z"]), max_size=3))
        old, context = base[at + kept :][:gone], base[at + kept + gone :][:stays]
        whole += base[at : at + kept]
        if old or context:
            edits += ["@@", *(f"-{x}" for x in old), *(f"+{x}" for x in new)]
            edits += [f" {x}" for x in context]
            whole += new
        whole += context
        at += kept + gone + stays
    assume(len(edits) > 1)
    return base, edits, whole


@given(changes())
def test_edits_give_the_changed_text(change):
    base, edits, whole = ("".join(f"{line}\n" for line in lines) for lines in change)
    assert assembled(edits, base) == whole


def test_a_candidate_is_read_by_its_whole_name(tmp_path):
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "other.edits").write_text(HEAD + "-one\n+1\n")
    assert candidates(tmp_path) == [tmp_path / "base.py", tmp_path / "other.py"]
    assert candidate_text(tmp_path / "base.py") == BASE
    assert candidate_text(tmp_path / "other.py").startswith('"""Another."""\n\n1\n')
    with pytest.raises(UserError, match=r"absent\.py: no such file"):
        candidate_text(tmp_path / "absent.py")
    (tmp_path / "base.py").write_text("")
    with pytest.raises(UserError, match=r"other\.edits: the base has no docstring"):
        candidate_text(tmp_path / "other.py")
    (tmp_path / "base.py").rename(tmp_path / "base.edits")
    with pytest.raises(UserError, match=r"other\.edits: .*base\.py: no such file"):
        candidate_text(tmp_path / "other.py")


def test_all_edits_of_the_corpus_apply_and_are_shorter_than_what_they_stand_for():
    found = [
        p for folder in {f.parent for f in FOLDER.rglob("*.edits")} for p in candidates(folder)
    ]
    assert len(found) > 500
    for path in found:
        text, edits = candidate_text(path), path.with_suffix(".edits")
        if path.exists():
            assert not edits.exists(), "one of them is never read"
        else:
            assert text.count("\n") > edits.read_text().count("\n"), path


def test_all_files_of_items_are_there():
    variants = [e for e in load_catalogue() if isinstance(e, Variant)]
    for path in {p for v in variants for p in (v.path, v.twin)}:
        assert candidate_text(path), path
