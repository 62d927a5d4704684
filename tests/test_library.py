"""The library that the repository keeps: certified, callable without a GPU, its tables current."""

import math
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import library_table
import pytest
from kagent.export.reading import read_library
from kagent.export.record import ChangeRecord, CompiledRecord, LibraryRecord
from kagent.export.writing import files_of, write_library
from kagent_sandbox.errors import UserError
from library_checks import operators_called, require_certified
from synthetic_library import cpu_library, gpu_library

import library

KEPT = [p for p in [library_table.LIBRARY] if p.exists()]


@pytest.fixture
def made(tmp_path):
    """A library of C++ kernels, its figures made up."""
    record = cpu_library()
    write_library(record, files_of(record, cubins={}), tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture(params=[*KEPT, None], ids=lambda p: p.name if p else "made")
def folder(request, made):
    """The library of the repository, if there is one, and one that is made here."""
    return request.param or made


def test_it_is_what_its_record_says(folder, tmp_path):
    require_certified(folder, tmp_path)


@pytest.mark.nightly
def test_every_operator_falls_back_and_passes_opcheck(folder, bare_python):
    names = [o.task for o in read_library(folder).library.operators]
    assert operators_called(folder, bare_python) == sorted(names)


def test_a_library_that_is_not_as_it_was_written_is_found(made, tmp_path):
    (path, *_) = made.glob("build/*/*/kernels/softmax_*.py")
    path.write_text(path.read_text() + "\n")
    with pytest.raises(AssertionError):
        require_certified(made, tmp_path)


def test_the_pages_have_the_tables_of_the_library_that_is_there():
    command = [sys.executable, str(Path(library_table.__file__)), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- the scripts themselves ------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    """A library for a GPU that is elsewhere, and made-up results of one of its operators."""
    record, work = gpu_library("kagent_kernels"), tmp_path / "work"
    folder = work / "kagent_kernels"
    write_library(record, files_of(record, cubins={}), folder)
    session = library.Session(work, folder, folder.name, ("attention",), ("cpu",), 1, 0.0, 1, False)
    for stage in ("tests", "sanitize", "bench"):
        (work / stage).mkdir()
    (device,) = read_library(session.library).library.operators[0].devices
    shapes = [
        {
            "device": device.name,
            "case": p.case,
            "recorded_us": p.times[p.best].us,
            "us": us,
            "recorded_eager_us": 2 * p.times[p.best].us,
            "eager_us": eager_us,
        }
        for p, us, eager_us in zip(device.points, (101.0, 220.0), (205.0, 441.0), strict=False)
    ]
    tools = [{"tool": "memcheck", "found": "0", "clean": True}]
    library.write(session, "tests", "attention", {"clean": True, "said": "18 passed"})
    library.write(session, "sanitize", "attention", {"clean": True, "tools": tools})
    library.write(session, "bench", "attention", {"shapes": shapes})
    return session


def test_the_tables_come_from_the_record_and_from_what_was_run(session, tmp_path):
    figures = library.gather(session)
    assert "18 passed" in library.table(session, figures)
    library.pack(session, figures, tmp_path / "out")
    kept = tmp_path / "kept"
    library_table.take(tmp_path / "out" / "kagent_kernels.tar.gz", kept)
    assert read_library(kept).changed() == []
    readme, results = library_table.tables(kept).values()
    line = next(li for li in readme.splitlines() if li.startswith("| attention "))
    assert line.startswith("| attention | Triton | 1.30 (1.30 to 1.30) | ")
    assert line.endswith(" | 1 of 2; × eager 2 | clean | – |")
    assert "- Not run: own tests of linear_cross_entropy." in readme
    assert "NVIDIA H100 80GB HBM3" in readme
    row = next(li for li in results.splitlines() if li.startswith("| attention "))
    assert "100.0 (97.00–104.0)" in row
    assert row.endswith("| 101.0 | 2.03, 2.00 |")


def test_operators_of_an_archive_replace_those_that_are_there_and_others_stay(session, tmp_path):
    kept, out = tmp_path / "kept", tmp_path / "out"
    library.pack(session, library.gather(session), out)
    library_table.take(out / "kagent_kernels.tar.gz", kept)
    operators = read_library(session.library).library.operators
    again = next(o for o in operators if o.task == "attention")
    kernel = replace(again.kernels[0], id="attention_again", source=again.kernels[0].source + "\n")
    (device,) = again.devices
    before = again.kernels[0].id

    def renamed(found):
        return {kernel.id if name == before else name: value for name, value in found.items()}

    points = [
        replace(p, best=kernel.id, times=renamed(p.times), config=renamed(p.config))
        for p in device.points
    ]
    again = replace(again, kernels=(kernel,), devices=(replace(device, points=tuple(points)),))
    record = replace(read_library(session.library).library, operators=(again,))
    shutil.rmtree(session.library)
    write_library(record, files_of(record, cubins={}), session.library)
    library.write(session, "tests", "attention", {"clean": True, "said": "19 passed"})
    library.pack(session, library.gather(session), out)
    library_table.take(out / "kagent_kernels.tar.gz", kept)
    disk = read_library(kept)
    assert disk.changed() == []
    assert [o.task for o in disk.library.operators] == [o.task for o in operators]
    assert [k.id for o in disk.library.operators for k in o.kernels if o.task == "attention"] == [
        "attention_again"
    ]
    assert [p.name for p in kept.rglob("kernels/attention_*.py")] == ["attention_again.py"]
    figures = library_table.figures_of(disk)
    assert figures["attention"]["tests"]["said"] == "19 passed"
    assert "bench" not in figures["attention"]  # it was of the kernel before
    assert disk.library.version == "1.3.0"  # 1.2.0 before
    assert (kept / "CHANGELOG.md").read_text().count("which was not measured again") == 1
    (kept / "CARD.md").write_text("faster\n")
    with pytest.raises(UserError, match="was edited"):
        library_table.take(out / "kagent_kernels.tar.gz", kept)


def test_a_stage_that_runs_on_another_day_is_added_to_what_is_known(session, tmp_path):
    kept, out = tmp_path / "kept", tmp_path / "out"
    library.pack(session, library.gather(session), out)
    library_table.take(out / "kagent_kernels.tar.gz", kept)
    (tmp_path / "later" / "certify").mkdir(parents=True)
    later = replace(session, work=tmp_path / "later", library=kept)
    library.write(later, "certify", "attention", {"clean": True, "found": {}, "date": "2026-12-01"})
    library.pack(later, library.gather(later), out)
    library_table.add(out / "figures.json", kept)
    readme, _ = library_table.tables(kept).values()
    line = next(li for li in readme.splitlines() if li.startswith("| attention "))
    assert line.endswith(" | 1 of 2; × eager 2 | clean | 2026-12-01 |")
    assert read_library(kept).changed() == []
    table = read_library(kept).package / "portfolio" / "attention.json"
    table.write_text(table.read_text().replace('"least": ', '"least": 1'))
    with pytest.raises(UserError, match="operators as they are"):
        library_table.add(out / "figures.json", kept)


@pytest.mark.nightly
def test_libraries_of_single_tasks_become_one_with_their_binaries(session):
    """When a task joins later, what is known of the others stays."""
    whole = gpu_library()
    key = "ab" * 32
    for operator in whole.operators:
        cubins, kernels = {}, operator.kernels
        if operator.task == "linear_cross_entropy":
            compiled = CompiledRecord(key, "sm_90a", "cuda", "rows", "text", (), ())
            cubins, kernels = {key: b"cubin"}, (replace(kernels[0], compiled=(compiled,)),)
        record = LibraryRecord(
            f"only_{operator.task}", "1.0.0", "0", (replace(operator, kernels=kernels),), ()
        )
        record = replace(record, history=(ChangeRecord("1.0.0", "today", ("added",)),))
        each = session.work / "each" / operator.task
        write_library(record, files_of(record, cubins=cubins), each)
    shutil.rmtree(session.library)
    library.merge(session)  # its only task is attention
    assert [o.task for o in read_library(session.library).library.operators] == ["attention"]
    assert library.gather(session)["operators"]["attention"]["tests"]["said"] == "18 passed"
    library.merge(replace(session, tasks=("attention", "linear_cross_entropy")))
    disk = read_library(session.library)
    assert [o.task for o in disk.library.operators] == ["attention", "linear_cross_entropy"]
    assert disk.changed() == []
    assert (disk.package / "cubins" / f"{key}.cubin").read_bytes() == b"cubin"
    assert library.gather(session)["operators"]["attention"]["tests"]["said"] == "18 passed"


def test_results_of_an_operator_as_it_was_do_not_count(session):
    disk = read_library(session.library)
    table = disk.package / "portfolio" / "attention.json"
    assert library.unknown_to(session, "bench") == []
    table.write_text(table.read_text().replace('"least": ', '"least": 1'))
    assert library.gather(session)["operators"]["attention"] == {}
    assert library.unknown_to(session, "bench") == ["attention"]


def test_a_library_that_no_gpu_measured_or_that_was_edited_is_not_taken(session, made, tmp_path):
    for source, edited, why in (
        (made, False, "measured on GPUs alone"),
        (session.library, True, "CARD.md is not as it was written"),
    ):
        copied, archive = tmp_path / why / "lib", tmp_path / f"{why}.tar.gz"
        shutil.copytree(source, copied)
        if edited:
            (copied / "CARD.md").write_text("faster\n")
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(copied, "lib")
        with pytest.raises(UserError, match=why):
            library_table.take(archive, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_what_runs_past_the_time_is_ended_and_what_is_left_is_named(session, tmp_path, capsys):
    late = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    code = library.command(session, tmp_path / "log", *late)
    assert library.ended(code) == "ended, the time is up"
    asked = []
    library.at_once(session, "bench", ["a", "b"], lambda task, _: asked.append(task) or "")
    assert asked == []
    assert capsys.readouterr().out.count("left out, the time is up") == 2


def test_what_fails_beside_others_is_tried_once_more_alone(session, capsys):
    """But for what lost a race. An error keeps no other task out."""
    asked, cores = Counter(), {}

    def one(task, slot):
        asked[task] += 1
        cores.setdefault(task, []).append(len(slot.cores))
        if task == "raises" and asked[task] == 1:
            raise OSError("no memory")
        return {"loses": f"a#1 {library.NOT_FASTER} than torch", "fails": "exit 1"}.get(task, "")

    busy = replace(session, ends_s=math.inf, at_once=2, devices=("cuda:0",))
    library.at_once(busy, "bench", ["raises", "loses", "fails", "works"], one)
    assert asked == {"raises": 2, "loses": 1, "fails": 2, "works": 1}
    assert cores["fails"][-1] == 0, "all cores"
    out = capsys.readouterr().out
    assert "OSError: no memory" in out
    assert "once more, alone: raises, fails" in out or "alone: fails, raises" in out
