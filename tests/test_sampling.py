"""Samples of sweeps."""

import math
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples, left_out


def item(key, test="test_it", **marked):
    mark = SimpleNamespace(kwargs=marked) if marked else None
    return SimpleNamespace(
        path="test_file.py",
        name=f"{test}[{key}]",
        originalname=test,
        callspec=SimpleNamespace(params={"file": key}),
        get_closest_marker=lambda name: mark if name == "sampled" else None,
    )


def kept(items):
    out = left_out(items)
    return [i.callspec.params["file"] for i in items if i not in out]


KEYS = st.lists(st.from_regex(r"[ab]-[a-z]{1,4}", fullmatch=True), unique=True)


@given(KEYS, st.integers(1, 5))
def test_each_group_is_in_the_sample_which_is_always_the_same(keys, one_in):
    items = [item(key, of="file", one_in=one_in, each=True) for key in keys]
    found = kept(items)
    assert sorted(kept(items[::-1])) == sorted(found)
    for group in "ab":
        sizes = [sum(k.startswith(group) for k in some) for some in (keys, found)]
        assert sizes[1] == math.ceil(sizes[0] / one_in)


@given(KEYS, st.integers(1, 5))
def test_without_groups_a_part_of_all_is_taken(keys, one_in):
    for of in ({}, {"of": "file"}):
        found = kept([item(key, one_in=one_in, **of) for key in keys])
        assert len(found) == math.ceil(len(keys) / one_in)


def test_one_more_file_changes_little():
    keys = [f"a-{i}" for i in range(300)]
    before, after = (kept([item(k, one_in=10) for k in some]) for some in (keys, [*keys, "a-b"]))
    assert len(set(before) ^ set(after)) <= 2


def test_other_tests_of_the_same_files_take_others():
    keys = [f"a-{i}" for i in range(100)]
    first, second = (kept([item(k, name, one_in=4) for k in keys]) for name in ("test_a", "test_b"))
    assert 0 < len(set(first) & set(second)) < 15


def test_all_of_one_file_are_taken_together():
    """A variant's honest twin is another test of the same entry."""
    files = [SimpleNamespace(id=f"a-{i}") for i in range(20)]
    items = [item(file, of="file", one_in=4) for file in files for _ in range(2)]
    found = kept(items)
    assert len(found) == 10
    assert found[::2] == found[1::2]


def test_what_is_not_marked_stays():
    assert left_out([item("a-1"), item("a-2")]) == []


def test_what_is_nightly_is_left_out():
    nightly = SimpleNamespace(get_closest_marker=lambda name: name == "nightly" or None)
    assert left_out([item("a-1"), nightly]) == [nightly]


def test_a_property_has_fewer_examples_in_proportion():
    share = settings.default.max_examples / 100
    assert examples(100) == settings.default.max_examples
    assert [examples(n) for n in (1, 10, 1000)] == [math.ceil(n * share) for n in (1, 10, 1000)]
