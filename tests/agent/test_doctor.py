import json

import pytest
from commands import run
from kagent import doctor
from kagent.doctor import Level
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import MachineError, ToolchainError
from kagent_sandbox.process.isolation_probe import probe

pytestmark = pytest.mark.usefixtures("shared", "brief_timing")


@pytest.fixture(scope="module")
def found(shared, tmp_path_factory):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("nothing-set"))
        for name in ("KAGENT_MODEL", "OPENAI_MODEL", "KAGENT_MODELS"):
            patch.delenv(name, raising=False)
        findings = doctor.examine(said.append)
    assert said == ["compilers, and kernels in the judge", "isolation", "GPU", "models"]
    return {f.name: f for f in findings}


def test_every_language_is_compiled_in_confinement(found):
    for name in ("C++ (g++)", "Triton", "CUDA (NVRTC)"):
        assert found[name].level is Level.OK, found[name].text
        assert "confined" in found[name].text
        ran = name.startswith("C++") or doctor.has_gpu()
        assert ("correct in a launcher" if ran else "not run here") in found[name].text
    assert "kernel against itself" in found["clock (CPU)"].text


def test_a_compiler_that_is_missing_hides_no_other_line(monkeypatch):
    whole = doctor._tried

    def without_gpp(kind, *rest):
        if kind == "cpu":
            raise ToolchainError("g++ is not to be found")
        yield from whole(kind, *rest)

    monkeypatch.setattr(doctor, "_tried", without_gpp)
    found = {f.name: f for f in doctor._compilers(print)}
    assert found["builder or judge (CPU)"].level is Level.BROKEN
    assert {"Triton", "CUDA (NVRTC)"} <= found.keys()


def test_isolation_is_what_was_observed(found):
    seen = probe()
    assert f"tier {seen.isolation.tier}" in found["isolation"].text
    assert f"of {len(seen.canaries)} attacks from inside stopped" in found["isolation"].text


def test_a_machine_without_a_gpu_is_told_what_works(found):
    if not doctor.has_gpu():
        assert found["GPU"].level is Level.MISSING
        assert "C++ kernels are evolved" in found["GPU"].text


def test_no_model_is_no_fault_and_says_how_to_set_one(found):
    assert found["model"].level is Level.MISSING
    for words in ("none is set", "built-in tuner", "--model NAME", "KAGENT_BASE_URL"):
        assert words in found["model"].text


def test_what_is_missing_comes_with_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "apt-get install g++" in doctor._gcc().text
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    versions = doctor._versions()
    assert versions.level is Level.BROKEN
    assert versions.text.endswith("not installed: no-such-package: pip install 'kagent[cuda]'")
    verdict = Rejected(Stage.BUILD, Status.COMPILE_ERROR, "cc1plus is missing")
    assert doctor._built("C++", "cpu", verdict).level is Level.BROKEN

    def no_landlock():
        raise MachineError("Landlock is missing: use a kernel of 5.13 or newer")

    monkeypatch.setattr(doctor, "probe", no_landlock)
    assert "Landlock is missing" in doctor._isolation().text


def test_a_machine_without_the_cuda_extra_is_not_broken(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-bindings"))
    monkeypatch.setattr(doctor, "CUDA_PACKAGES", ("no-such-bindings",))
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    spared = doctor._versions()
    assert spared.level is Level.OK
    assert "not needed without an NVIDIA GPU: no-such-bindings (" in spared.text
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)  # which nothing else can drive
    assert doctor._versions().level is Level.BROKEN

    class Bare:
        def build(self, request):
            raise ToolchainError("NVRTC cannot be loaded: pip install 'kagent[cuda]'")

    monkeypatch.setattr(doctor, "available", lambda kind: False)
    (tmp_path / "task.toml").write_text(doctor._TASK)
    (tmp_path / "reference.py").write_text(doctor._REFERENCE)
    found = list(doctor._tried("gpu", load_task(tmp_path), Bare(), print))
    assert [f.level for f in found] == [Level.MISSING, Level.MISSING]
    assert "kagent[cuda]" in found[0].text


def test_the_command_prints_findings_and_fails_when_something_is_broken(monkeypatch, capsys):
    made = [doctor.Finding(Level.OK, "Python", "3"), doctor.Finding(Level.BROKEN, "g++", "gone")]
    monkeypatch.setattr(doctor, "examine", lambda say, **flags: made)
    plain = run(monkeypatch, capsys, "doctor")
    assert plain.code == 5
    assert [line.split() for line in plain.out.splitlines()] == [
        ["ok", "Python", "3"],
        ["broken", "g++", "gone"],
    ]
    as_json = run(monkeypatch, capsys, "doctor", "--json")
    assert json.loads(as_json.out)[1] == {"level": "broken", "name": "g++", "text": "gone"}
    assert as_json.err == ""
