"""The wheel holds what is promised, and nothing else."""

import importlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """What an image is built from: the files that .dockerignore lets through."""
    folder = tmp_path_factory.mktemp("context")
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for name in [line[1:] for line in lines if line.startswith("!")]:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(context, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(context)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield {n: archive.read(n) for n in archive.namelist()}


def test_import_names_are_kagent_and_kagent_sandbox_only(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"kagent", "kagent_sandbox"}


def test_seeds_prompts_licence_and_types_are_inside(wheel):
    names = set(wheel)
    assert "kagent/seeds/softmax/task.toml" in names
    assert "kagent/seeds/softmax/reference.py" in names
    assert any(n.startswith("kagent/prompts/") for n in names)
    assert "kagent/corpus/tasks/rows/task.toml" in names
    assert "kagent/corpus/honest/rows_cpp.py" in names
    assert "kagent/corpus/cheats/66_caching/item.toml" in names
    assert "kagent/corpus/cheats/66_caching/by_pointer_cpp.edits" in names
    assert {"kagent/export/templates/card.md.j2", "kagent/export/templates/LICENSE"} <= names
    assert {"kagent/py.typed", "kagent_sandbox/py.typed"} <= names
    licence = next(data for name, data in wheel.items() if name.endswith("licenses/LICENSE"))
    assert b"Apache License" in licence


def test_the_toolkit_comes_with_an_extra_only(wheel):
    lines = metadata(wheel).partition("\n\n")[0].splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist: ")]
    toolkit = [
        line
        for line in needed
        if line.startswith(("Requires-Dist: cuda-", "Requires-Dist: nvidia-"))
    ]
    assert sum(line.endswith("; extra == 'cuda'") for line in toolkit) == 6
    assert all("; extra == '" in line for line in toolkit)
    assert {f"Provides-Extra: {extra}" for extra in ("cpu", "cuda", "cutlass", "docs")} <= set(
        lines
    )


def test_the_description_links_to_nothing_that_is_not_there(wheel):
    text = metadata(wheel).partition("\n\n")[2]
    assert "# kagent" in text
    assert "docs/measuring.md" in text
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", text)


def test_a_release_links_to_the_files_of_its_tag(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    hook = importlib.import_module("hatch_build").RepositoryMetadataHook(str(ROOT), {})
    monkeypatch.setenv("KAGENT_REPOSITORY_URL", "https://example.org/kagent/")
    made = {"version": "1.2.3"}
    hook.update(made)
    text = made["readme"]["text"]
    assert made["urls"]["Source"] == "https://example.org/kagent"
    assert "(https://example.org/kagent/blob/v1.2.3/docs/tutorial.md)" in text
    assert "(https://example.org/kagent/raw/v1.2.3/docs/report.png)" in text
    links = re.findall(r"\]\(https://example.org/kagent/(?:blob|raw)/v1.2.3/([^)#]*)", text)
    assert len(links) > 10
    assert all((ROOT / link).exists() for link in links)
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", text)
    monkeypatch.setenv("KAGENT_REPOSITORY_URL", "example.org")
    with pytest.raises(ValueError, match="expected a URL that begins with https://"):
        hook.update(made)


def metadata(wheel):
    return next(data for name, data in wheel.items() if name.endswith("/METADATA")).decode()


def test_all_modules_of_the_tree_are_in_the_wheel(wheel):
    for source in ("agent", "sandbox"):
        for path in (ROOT / source).rglob("*.py"):
            assert path.relative_to(ROOT / source).as_posix() in wheel


def test_sandbox_never_imports_the_agent():
    for path in (ROOT / "sandbox").rglob("*.py"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        bad = [s for s in lines if s.startswith(("import kagent.", "from kagent.", "from kagent "))]
        assert not bad, path


def test_docker_s_profile_denies_no_call_that_namespaces_need():
    """Tried with runc: docs/isolation.md."""
    profile = json.loads((ROOT / "docker" / "seccomp.json").read_text())
    denied = [n for rule in profile["syscalls"] for n in rule["names"]]
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    assert len(denied) == len(set(denied))
    assert not {"clone", "clone3", "unshare", "mount", "umount2", "pivot_root", "prctl"} & {*denied}
    assert {"bpf", "keyctl", "io_uring_setup", "perf_event_open", "setns", "kexec_load"} <= {
        *denied
    }
