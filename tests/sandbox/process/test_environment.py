import pytest
from kagent_sandbox.process.environment import for_confined, for_trusted, passed


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    monkeypatch.setenv("KAGENT_API_KEY", "a key")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("HF_HOME", "/models")


def test_what_would_change_times_and_keys_do_not_reach_processes():
    assert not {"OMP_NUM_THREADS", "OPENAI_API_KEY", "KAGENT_API_KEY", "HF_HOME"} & set(
        for_trusted()
    )
    assert for_trusted()["HOME"] == "/home/somebody"
    assert "HOME" not in for_confined()
    assert for_confined()["PATH"] == for_trusted()["PATH"]


def test_a_user_passes_variables_on_by_name(monkeypatch):
    monkeypatch.setenv("KAGENT_PASS", " HF_HOME,, NOT_SET")
    assert passed() == {"HF_HOME": "/models"}
    assert for_trusted()["HF_HOME"] == "/models"
    assert "HF_HOME" not in for_confined()
