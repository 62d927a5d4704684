"""Which paths the children of kagent's roles may read."""

from pathlib import Path

import pytest
from kagent_sandbox.confine.presets import package_folders


def test_a_package_in_site_packages_opens_all_of_them():
    assert [Path(p).name for p in package_folders("pytest")] == ["site-packages"]


def test_a_package_on_pythonpath_opens_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folders("elsewhere") == [str(tmp_path / "elsewhere")]


@pytest.mark.parametrize("name", ["nobody_has_this_package", "textwrap"])
def test_what_is_no_package_opens_nothing(name):
    assert package_folders(name) == []
