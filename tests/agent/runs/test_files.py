"""Files at paths that users name: what lies there is never replaced by one of another kind."""

import os
import stat

import pytest
from kagent.runs.files import place_for, require_folder, write_file
from kagent_sandbox.errors import UserError


def test_a_link_is_written_through(tmp_path):
    there, link = tmp_path / "there.html", tmp_path / "link.html"
    there.write_text("old")
    link.symlink_to(there)
    write_file(place_for(link), "new")
    assert link.is_symlink()
    assert there.read_text() == "new"


def test_a_link_to_nothing_makes_the_file_it_names(tmp_path):
    link = tmp_path / "link.html"
    link.symlink_to("there.html")
    write_file(place_for(link), "new")
    assert link.is_symlink()
    assert (tmp_path / "there.html").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(UserError, match=f"{path}: a pipe, where a file was expected: name a f"):
            place_for(path)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", "a folder, where a file was expected"),
        ("", "a folder, where a file was expected"),
        ("/", "a folder, where a file was expected"),
        ("/dev/null", "a device, where a file was expected"),
        ("nope/x.html", "there is no folder nope"),
        ("/proc/nope", "cannot be written"),
        ("loop", "cannot be written"),
        ("a\0b", "cannot be written"),
        ("n" * 300, "cannot be written"),
    ],
)
def test_other_places_are_refused(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=said):
        place_for(type(tmp_path)(name))
    assert [p.name for p in tmp_path.iterdir()] == ["loop"]


def test_a_folder_can_be_made_or_not(tmp_path):
    (tmp_path / "file").write_text("")
    require_folder(tmp_path / "a" / "b")
    for bad, said in (
        (tmp_path / "file", "a file, where a folder was expected"),
        (tmp_path / "file" / "a", "a file, where a folder was expected"),
        (type(tmp_path)("/proc/nope"), "cannot be written"),
    ):
        with pytest.raises(UserError, match=said):
            require_folder(bad)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
