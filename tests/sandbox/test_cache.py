"""The folder of what is measured and compiled once."""

import resource
import signal
import tempfile

import pytest
from kagent_sandbox import cache


@pytest.fixture
def unwritable(tmp_path, monkeypatch):
    """A place for the cache below which nothing can be made, and a folder of temporary files."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_where_the_user_wants_it_and_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "some" / "cache"))
    assert cache.cache_folder() == tmp_path / "some" / "cache" / "kagent"
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_kept_among_temporary_files(unwritable):
    folder = cache.cache_folder()
    assert folder.parent == unwritable
    assert folder.stat().st_mode & 0o777 == 0o700
    cache.save("figure", 3)
    assert cache.load("figure", int) == 3


def test_a_folder_that_others_may_write_is_not_used(unwritable):
    cache.cache_folder().chmod(0o777)
    assert cache.cache_folder() == unwritable / "file" / "cache" / "kagent"


def test_it_is_no_error_that_nothing_can_be_kept(unwritable, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(unwritable / "file"))
    cache.save("figure", 3)
    assert cache.load("figure", int) is None


def test_a_full_disk_gets_no_fuller(tmp_path, monkeypatch):
    """The limit on a file's size stands for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        cache.save("figure", 10**30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "kagent").iterdir()) == []
