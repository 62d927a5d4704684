"""Samples of sweeps."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import ONE_IN, drawn, left_out


def item(key, name="test_it", of="file", *, marked=True):
    mark = SimpleNamespace(kwargs={"of": of}) if marked else None
    return SimpleNamespace(
        path="test_file.py",
        originalname=name,
        callspec=SimpleNamespace(params={of: key}),
        get_closest_marker=lambda _: mark,
    )


KEYS = st.lists(st.from_regex(r"[ab]-[a-z]{1,4}", fullmatch=True), unique=True)


@given(KEYS)
def test_each_group_is_in_the_sample_which_is_always_the_same(keys):
    items = [item(key) for key in keys]
    out = left_out(items)
    assert left_out(items) == out
    kept = [i.callspec.params["file"] for i in items if i not in out]
    assert {k[0] for k in kept} == {k[0] for k in keys}
    firsts = {k[0]: k for k in reversed(keys)}
    assert set(kept) == {*firsts.values(), *filter(drawn, keys)}


def test_of_many_a_part_is_taken():
    items = [item(f"a-{i}") for i in range(3000)]
    assert len(items) - len(left_out(items)) == pytest.approx(3000 / ONE_IN, rel=0.15)


def test_each_kind_of_machine_has_a_file_of_a_group():
    files = [SimpleNamespace(id=f"a-{i}", runs="cpu" if i > 9 else "gpu") for i in range(20)]
    items = [item(file) for file in files]
    out = left_out(items)
    assert {i.callspec.params["file"].runs for i in items if i not in out} == {"cpu", "gpu"}


def test_all_of_one_file_are_taken_together():
    """A variant's honest twin is another test of the same entry."""
    items = [item(SimpleNamespace(id=f"a-{i}")) for i in range(20) for _ in range(2)]
    out = left_out(items)
    assert all((a in out) == (b in out) for a, b in zip(items[::2], items[1::2], strict=True))


def test_what_is_not_marked_stays():
    assert left_out([item("a-1", marked=False), item("a-2", marked=False)]) == []
