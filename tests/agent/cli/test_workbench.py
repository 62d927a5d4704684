import os
from pathlib import Path

import pytest
from kagent.candidate_file import (
    MOST_FILE_BYTES,
    bench_files,
    build_file,
    check_file,
    contender_names,
    language_of_source,
    read_candidate,
)
from kagent.resources import corpus_folder
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge import interpreter as interpret
from kagent_sandbox.judge.interpreter import Interpreter

CPP = "from kagent_sandbox.lang import cpp_kernel\nk = cpp_kernel('k', '')\n"
TRITON = "@triton.jit\ndef k(): pass\n"
CUDA = "k = cuda_kernel('k', '')\n"

pytestmark = pytest.mark.usefixtures("shared")


def quiet(text):
    pass


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return [folder / f"{name}.py" for name in files]


def test_the_language_is_read_from_the_source():
    assert language_of_source(CPP).name == "cpp"
    assert language_of_source(CUDA).name == "cuda"
    assert language_of_source(TRITON).name == "triton"
    assert language_of_source(TRITON + CUDA).name == "triton"
    assert language_of_source(TRITON.replace("triton", "gluon")).name == "gluon"
    for name in task_names():
        for seed in seeds_of(find_task(name)):
            assert language_of_source(seed.source()).name == seed.language, seed.path


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"nope.py: no such file"):
        read_candidate(tmp_path / "nope.py")
    with pytest.raises(UserError, match="a folder, where a file was expected"):
        read_candidate(tmp_path)
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_candidate(tmp_path / "binary.py")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty", "fifo", "link"])
def test_devices_and_pipes_are_not_read(tmp_path, path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"a device, pipe or socket, where a plain file was"):
        read_candidate(tmp_path / path)


def test_a_pipe_that_takes_the_files_place_holds_nobody_up(tmp_path, monkeypatch):
    path = tmp_path / "kernel.py"
    path.write_text("x = 1\n")
    found = os.stat(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda _: found)
    with pytest.raises(UserError, match="a device, pipe or socket"):
        read_candidate(path)


def test_a_file_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "large.md"
    with path.open("wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)  # a hole: nothing of it is read
    with pytest.raises(UserError, match=r"large.md: larger than 16 MiB, the most that is read"):
        read_candidate(path)
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")  # as some editors mark and end what they write
    assert read_candidate(path) == "a\nb\nc\n"
    (tmp_path / "link.md").symlink_to(path)
    assert read_candidate(tmp_path / "link.md") == "a\nb\nc\n"


def test_names_are_short_where_they_are_unmistakable():
    a, b, c = Path("a/rows.py"), Path("b/rows.py"), Path("c/online.py")
    assert contender_names([a, c]) == ["rows", "online"]
    assert contender_names([a, b, c]) == ["a/rows.py", "b/rows.py", "online"]
    assert contender_names([a, c], {"rows", "eager"}) == ["a/rows.py", "online"]
    with pytest.raises(UserError, match=r"a/rows.py: named twice"):
        contender_names([a, c, a])


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (CPP, "sm_90a", "a C.. candidate cannot be built for sm_90a: omit --target"),
        (TRITON, "cpu", "a GPU candidate cannot be built for cpu: name an architecture"),
        (TRITON, "sm_99", "unknown target 'sm_99': expected cpu or one of sm_80"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused_before_building(tmp_path, source, target, words):
    (path,) = write(tmp_path, candidate=source)
    with pytest.raises(UserError, match=words):
        build_file(find_task("softmax"), path, target, print, configs=1, jobs=1)


without_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU")


@without_gpu
def test_without_a_gpu_it_is_said_what_is_possible_instead(tmp_path):
    task = find_task(corpus_folder() / "tasks" / "rows")
    honest = corpus_folder() / "honest"
    with pytest.raises(UserError, match=r"built for sm_90a, but not checked: CUDA kernels need"):
        check_file(task, honest / "rows_cuda.py", jobs=1)
    found = r"^rows_triton: builds for sm_90a, correct in \d+ results in Triton's interpreter; "
    missing = r"not timed: timing .* needs an NVIDIA GPU.*C\+\+ candidates are timed on the"
    with pytest.raises(UserError, match=found + missing):
        bench_files(task, [honest / "rows_triton.py"], jobs=1, configs=1, say=quiet)
    with pytest.raises(UserError, match=r"^rows_cuda: builds for sm_90a, not checked: CUDA"):
        bench_files(task, [honest / "rows_cuda.py"], jobs=1, configs=1, say=quiet)
    both = [honest / "rows_triton.py", honest / "rows_cpp.py"]
    with pytest.raises(UserError, match="cannot be timed side by side"):
        bench_files(task, both, jobs=1, configs=1, say=quiet)


@without_gpu
def test_where_every_case_is_too_large_nothing_is_said_to_pass(tmp_path, monkeypatch):
    task = find_task(corpus_folder() / "tasks" / "rows")
    monkeypatch.setattr(Interpreter, "_elements", lambda *_: 1 << 30)
    with pytest.raises(UserError, match="not checked: all its check cases are too large for"):
        check_file(task, corpus_folder() / "honest" / "rows_triton.py", jobs=1)


@without_gpu
def test_every_case_that_fails_is_named_without_a_gpu_too(tmp_path):
    honest = (corpus_folder() / "honest" / "rows_triton.py").read_text()
    (path,) = write(tmp_path, wrong=honest.replace("    x = tl.load(", "    x = 2.0 * tl.load("))
    found = check_file(find_task(corpus_folder() / "tasks" / "rows"), path, jobs=1)
    assert found.verdict == found.failed[0]
    assert len({f.case for f in found.failed}) > 1, found


@pytest.mark.nightly
@without_gpu
def test_a_hang_is_no_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(interpret, "CASE_LIMIT_S", 2.0)
    honest = (corpus_folder() / "honest" / "rows_triton.py").read_text()
    loop = "    while tl.program_id(0) >= 0:\n        inside = inside & inside\n"
    line = "    x = tl.load("
    (path,) = write(tmp_path, hang=honest.replace(line, loop + line))
    task = find_task(corpus_folder() / "tasks" / "rows")
    verdict = check_file(task, path, jobs=1).verdict
    assert isinstance(verdict, Rejected), verdict
    assert (verdict.stage, verdict.status) == (Stage.CHECK, Status.TIMEOUT), verdict
