from pathlib import Path

import pytest
from kagent.config import Config, load_config
from kagent_sandbox.errors import UserError


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_precedence(monkeypatch):
    assert load_config().budget == 50
    Path("pyproject.toml").write_text(
        "[tool.kagent]\nbudget = 1\nseed = 1\njobs = 1\nlang = 'cpp'\n"
    )
    Path("kagent.toml").write_text("budget = 2\nseed = 2\njobs = 2\n")
    monkeypatch.setenv("KAGENT_BUDGET", "3")
    monkeypatch.setenv("KAGENT_SEED", "3")
    config = load_config(budget=4, seed=None)
    assert (config.budget, config.seed, config.jobs, config.lang) == (4, 3, 2, "cpp")


def test_an_unknown_option_is_an_error():
    Path("kagent.toml").write_text("buget = 2\n")
    with pytest.raises(UserError, match=r"no option 'buget': there are runs, budget"):
        load_config()


@pytest.mark.parametrize(
    ("option", "value"), [("budget", -1), ("jobs", 0), ("lang", "rust"), ("max_time", 0)]
)
def test_a_wrong_value_is_named(option, value):
    with pytest.raises(UserError, match=f"option {option}: .*got {value!r}"):
        load_config(**{option: value})


def test_toml_that_cannot_be_read_is_named():
    Path("kagent.toml").write_text("budget = = 2\n")
    with pytest.raises(UserError, match=r"kagent\.toml"):
        load_config()


def test_every_option_is_described():
    assert all(f.description for f in Config.model_fields.values())
