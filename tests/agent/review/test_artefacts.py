"""kagent show RUN ID --source, --prompt, --reply, --plan, --ptx, --sass."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from kagent.review import artifacts
from simulated_evolution import stored_run

pytestmark = pytest.mark.usefixtures("warm_processes")
RUN = Path(__file__).parents[3] / "runs" / "softmax-ask-tell"


def show(*words):
    command = [sys.executable, "-m", "kagent", "show", str(RUN), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_texts_come_as_they_were_kept():
    source = show("5", "--source")
    assert source.stdout == (RUN / "kernels" / "2d21d2b4717c5a13.py").read_text()
    assert show("5", "--prompt").stdout in {p.read_text() for p in (RUN / "prompts").iterdir()}
    reply = show("5", "--reply").stdout
    assert "Predicted speed-up: 1.25×" in reply
    assert reply in {p.read_text() for p in (RUN / "replies").iterdir()}


def test_a_second_answer_to_an_ask_has_its_own_reply_and_the_same_prompt(monkeypatch, capsys):
    def text(*words):
        return run(monkeypatch, capsys, "show", RUN, *words).out

    for candidate, name in (("3", "0000.md"), ("4", "0000-2.md"), ("5", "0001.md")):
        assert text(candidate, "--reply") == (RUN / "replies" / name).read_text()
    assert text("3", "--prompt") == text("4", "--prompt") == (RUN / "prompts/0000.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("0", "--prompt"), "#0 has no prompt: it is a seed by kagent itself"),
        (("--sass",), f"--sass needs a candidate: kagent show {RUN} 14 --sass"),
        (("--sass", "--json"), "--sass prints a text: omit --json, or --sass"),
        (("5", "--plan", "--sass"), "--plan, --sass: give one of them"),
        (("5", "--ptx", "--json"), "omit --json"),
        (("5", "--plan", "--json"), "omit --json"),
    ],
)
def test_what_there_is_not_is_said(words, says, monkeypatch, capsys):
    done = run(monkeypatch, capsys, "show", RUN, *words)
    assert done.code != 0
    assert says in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def shown(builder, monkeypatch, capsys):
    """`kagent show` in this process, on a builder that has been started already."""
    monkeypatch.setattr(artifacts, "Builder", lambda *_, **__: contextlib.nullcontext(builder))
    return lambda *words: run(monkeypatch, capsys, "show", RUN, *words)


@pytest.mark.nightly
def test_plans_are_built_once_more():
    done = show("1", "--plan", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "bf16_16384x1024" in done.stdout
    assert "launch" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    "candidate", [pytest.param("1", id="triton"), pytest.param("0", id="cuda")]
)
def test_ptx_of_every_kernel_comes_from_the_compiler(candidate, shown):
    done = shown(candidate, "--ptx", "--jobs", "2")
    assert done.code == 0, done.err
    kernels = done.out.count(" .entry ")
    assert kernels == done.out.count("\n.target sm_90a") > 1
    assert "kept no PTX" not in done.out


def test_a_kernel_for_the_cpu_has_no_ptx(tmp_path, monkeypatch, capsys):
    done = run(monkeypatch, capsys, "show", stored_run(tmp_path), "0", "--ptx")
    assert done.code == 2
    assert "#0 is compiled for the CPU, where there is no PTX: --sass prints" in done.err


def test_machine_code_is_read_by_the_vendors_tool():
    from kagent_sandbox.builder.binary.disassemble import disassemble

    if shutil.which("objdump") is None or shutil.which("g++") is None:
        pytest.skip("no objdump or no g++ here")
    from kagent_sandbox.builder.compile.cpp import compile_cpp

    binary = compile_cpp("f", 'extern "C" void f(float* x) { x[0] *= 2; }')
    assert "<f>:" in disassemble({"f": ("cpp", binary)})["f"]


def test_what_is_no_binary_has_no_machine_code():
    from kagent_sandbox.builder.binary.disassemble import disassemble

    if shutil.which("objdump") is None:
        pytest.skip("no objdump here")
    assert disassemble({"f": ("cpp", b"not a binary")})["f"] == ""
