"""The texts of a library: what is in them, and that nothing of others' becomes markup or code."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kagent.export.card import card
from kagent.export.dispatch_table import least, portfolio_json, repeats
from kagent.export.generic import operator_source
from kagent.export.packaging import names_of, packaging_files
from kagent.export.reading import read_library
from kagent.export.runtime_files import runtime_files
from kagent.export.templating import code, digest, figure, one_line, words
from kagent.export.writing import documents, files_of, write_library
from kagent.tasks import find_task, task_names
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import UserError
from markdown_it import MarkdownIt
from synthetic_library import HOSTILE, cpu_library, gpu_library


@pytest.fixture(scope="module")
def library():
    return cpu_library()


def test_the_card_has_the_figures_of_the_record_and_where_torch_wins(library):
    text = card(library)
    kernel = library.operators[0].kernels[0]
    assert "| `float32 M=1536 N=1024` | " in text
    assert (
        "100.0 (97.00–104.0) | 130.0 (126.1–135.2) eager | 1.300 (1.212–1.394) | FASTER |" in text
    )
    assert "FASTER than the fastest of torch on 2 of 3 measured shapes." in text
    assert "SLOWER on `float32 M=48 N=32768`." in text
    assert "No kernel is FASTER than eager torch, which is used, on `float32 M=48 N=32768`." in text
    assert f"what is used is {1.3 ** (2 / 3):.3f}× as fast" in text
    assert "1.250× (95 %: 1.200–1.300)" in text
    assert kernel.sha256 in text
    assert "isolation: namespaces" in text
    assert "selftest of the judge: not run on that machine" in text
    head = text.split("---\n")[1]
    assert {"library_name: kernels", "license: apache-2.0"} <= set(head.splitlines())


def test_the_card_says_where_a_kernel_is_used_without_being_faster(library):
    """`--allow-slower` exports such kernels."""
    operator, used = library.operators[0], " A kernel is used without being FASTER than it on "
    assert used not in card(library)
    device = operator.devices[0]
    first, *others = device.points
    tied = replace(first, verdicts={first.best: SpeedVerdict.TIE})
    changed = replace(operator, devices=(replace(device, points=(tied, *others)),))
    text = card(replace(library, operators=(changed,)))
    assert "TIE on `float32 M=1536 N=1024`." in text
    assert f"{used}`float32 M=1536 N=1024`." in text


def test_readme_says_which_operators_have_a_gradient(library):
    first, *others = library.operators
    task = find_task("int8_linear")  # has no operator.py
    made = replace(first, task=task.name, operator_py=operator_source(task))
    text = packaging_files(replace(library, operators=(made, *others)))["README.md"]
    rows = {r.split("(")[0]: r.split(" | ")[-1] for r in text.splitlines() if r.startswith("| `")}
    assert rows.pop(f"| `{task.entry}") == "no |"
    assert rows
    assert set(rows.values()) == {"yes |"}


@pytest.mark.parametrize("name", task_names())
def test_kagents_own_operators_say_whether_they_have_a_gradient(name):
    task = find_task(name)
    own = task.folder / "operator.py"
    text = own.read_text() if own.exists() else operator_source(task)
    record = replace(cpu_library().operators[0], task=name, operator_py=text)
    assert names_of(record).gradient == (own.exists() and name != "adamw_tensors")


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("tl.store(y, x)", True),
        ("# in the order of rows", True),
        ("tl.atomic_add(y, x)", False),
        ("atomicAdd(y, x);", False),
        ('asm volatile("red.global.add.f32 [%0], %1;");', False),
        ('asm("atom.global.inc.u32 %0, [%1], %2;");', False),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", False),
        ("#pragma omp parallel for reduction(+ : sum)", False),
        ("#pragma omp for simd reduction(+ : sum)", False),
        ("#pragma omp parallel for simd reduction(+ : sum)", False),
        ("#pragma omp simd reduction(+ : sum) reduction(max : most)", True),
        ("#pragma omp simd aligned(x : 64) \\\n  reduction(+ : sum)", True),
        ('_Pragma("omp simd reduction(+ : sum)")', True),
        (
            "#pragma omp declare reduction(most : float \\\n  : omp_out = max(omp_out, omp_in))",
            True,
        ),
        ("#pragma omp simd\n#pragma omp parallel for reduction(+ : sum)", False),
        ('_Pragma("omp simd") _Pragma("omp for reduction(+ : sum)")', False),
        ("#pragma omp simd reduction(+ : sum)\natomicAdd(y, sum);", False),
        ("/* omp simd */ atomicAdd(y, sum);", False),
        ("/* omp declare reduction */ atomicAdd(y, sum);", False),
        ("/* omp simd reduction(+ : sum) */ atomicAdd(y, sum);", False),
        ("#pragma omp parallel for /* omp simd */ reduction(+ : sum)", False),
        ("cute::SM90_TMA_REDUCE_ADD", False),
        ("std::atomic<float> sum;", False),
    ],
)
def test_what_has_atomic_operations_is_said_not_to_repeat(library, text, repeated):
    first, *others = library.operators
    kernel = replace(first.kernels[0], source=text, compiled=())
    made = replace(first, kernels=(kernel,))
    assert repeats(kernel) is repeated
    table = json.loads(portfolio_json(made))
    assert table["kernels"][kernel.id]["repeats"] is repeated
    readme = packaging_files(replace(library, operators=(made, *others)))["README.md"]
    assert (f"`torch.use_deterministic_algorithms(True)`: `{first.task}`" in readme) is not repeated
    compiled = [replace(c, text=text) for c in first.kernels[0].compiled]
    assert repeats(replace(kernel, source="", compiled=tuple(compiled))) is repeated


def test_the_card_has_the_least_size_below_which_torch_is_used(library):
    text = card(library)
    assert "| kernel | dtype | shapes | least size | cases |" in text
    assert f" | {least(library.operators[0])} | " in text


def test_a_library_without_layers_shows_none(library):
    with_layers = packaging_files(library)["README.md"]
    assert 'layer = LocalLayerRepository(repo_path=here, layer_name="' in with_layers
    text = library.operators[0].operator_py
    at = text.index("LAYERS")
    bare = replace(library.operators[0], operator_py=f"{text[:at]}LAYERS = {{}}\n")
    without = packaging_files(replace(library, operators=(bare,)))["README.md"]
    assert "layer_name" not in without
    assert "module = get_local_kernel(here)\n```" in without


def test_words_of_models_stay_words(library):
    for text in (card(library), packaging_files(library)["CHANGELOG.md"]):
        assert "<b>" not in text
        assert "\x1b" not in text
        assert "https://" not in text
        assert words(HOSTILE) in text


@pytest.mark.parametrize(
    "around", ["{}\n", "- {}\n", "1. {}\n", "| a | b |\n|---|---|\n| {} | c |\n"]
)
@given(text=st.text(max_size=60) | st.text("ab_*`[]()<>|#+-=~!&;:/1. \\$\n", max_size=30))
@example(text=HOSTILE)
@example(text="1. a")
@example(text="# https://www.example.org a_b _c_ me@example.org")
def test_words_are_read_as_they_were_written(around, text):
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = [t for t in page.parse(around.format(words(text))) if t.type == "inline"]
    children = [c for t in tokens for c in t.children]
    assert {c.type for c in children} <= {"text", "text_special"}
    read = [("".join(c.content for c in t.children)) for t in tokens]
    wanted = ["a", "b", one_line(text), "c"] if "|" in around else [one_line(text)]
    assert [r for r in read if r] == [w for w in wanted if w]
    assert not re.search(r"(?i)https?://|www\.", words(text))


@given(st.text(max_size=60))
def test_code_is_one_span(text):
    (paragraph,) = [t for t in MarkdownIt().parse(code(text)) if t.type == "inline"]
    assert [c.type for c in paragraph.children] == ["code_inline"]


@given(st.floats(1e-3, 1e6))
def test_figures_are_decimal_and_close(value):
    text = figure(value)
    assert re.fullmatch(r"\d+(\.\d+)?", text)
    assert float(text) == pytest.approx(value, rel=6e-3, abs=6e-5)


def test_python_toml_and_json_can_be_read(library):
    for made in (library, gpu_library()):
        for path, text in packaging_files(made).items():
            if path.endswith(".py"):
                ast.parse(text, path)
            if path.endswith(".toml"):
                tomllib.loads(text)
            if path.endswith(".json"):
                json.loads(text)


def test_dependencies_follow_from_the_languages(library):
    def project(made):
        return tomllib.loads(packaging_files(made)["pyproject.toml"])["project"]

    assert not any(d.startswith("triton") for d in project(library)["dependencies"])
    assert "cuda" not in project(library)["optional-dependencies"]
    gpu = project(gpu_library())
    assert any(d.startswith("triton") for d in gpu["dependencies"])
    assert any(d.startswith("cuda-bindings") for d in gpu["optional-dependencies"]["cuda"])
    assert not any(d.startswith("kagent") for d in gpu["dependencies"])


def test_the_hub_gets_a_name_and_a_backend(library):
    files = packaging_files(library)
    metadata = json.loads(files["build/torch-universal/metadata.json"])
    assert metadata["name"] == "made-kernels"
    assert metadata["backend"] == {"type": "cpu"}
    assert metadata["version"] == 1
    gpu = packaging_files(gpu_library())
    metadata = json.loads(gpu["build/torch-universal/metadata.json"])
    assert metadata["backend"] == {"type": "cuda"}


def test_every_content_has_a_namespace_of_its_own(library):
    other = cpu_library(able="x86_64-v1")
    assert digest(library) != digest(other)
    about = packaging_files(library)["build/torch-universal/made_kernels/_about.py"]
    assert f"made_kernels_{digest(library)}" in about


def test_operators_offer_what_their_modules_say(library):
    names = names_of(library.operators[0])
    assert names.function == "softmax"
    assert "Softmax" in names.layers
    init = packaging_files(library)["build/torch-universal/made_kernels/__init__.py"]
    assert "from .operators.softmax import Softmax, softmax" in init


def test_a_library_carries_what_its_kernels_use_of_the_runtime_and_nothing_twice(library):
    cpp, gpu = runtime_files(library), gpu_library()
    assert {"__init__.py", "cpp_kernels.py", "store.py"} <= cpp.keys()
    assert not any("cuda" in name or "nvrtc" in name or "driver" in name for name in cpp)
    assert b"cuda_kernel" not in cpp["__init__.py"]
    cuda = runtime_files(gpu)
    assert {
        "cuda_kernels.py",
        "nvrtc.py",
        "structs.py",
        "tensor_maps.py",
        "nvrtc_include/cmath",
    } <= cuda.keys()
    assert "cpp_kernels.py" not in cuda
    triton = replace(gpu, operators=tuple(o for o in gpu.operators if o.task == "attention"))
    assert runtime_files(triton) == {}
    for made in (library, gpu, triton):
        files = [f for p, f in files_of(made, cubins={}).items() if len(f) > 100]
        assert len(set(files)) == len(files)
    (sources,) = (
        json.loads(text)["sources"]
        for path, text in files_of(library, cubins={}).items()
        if "kernels/softmax_" in path and path.endswith(".json")
    )
    assert [s["constant"] for s in sources] == ["SOURCE"]


@pytest.mark.parametrize("made", [cpu_library, gpu_library])
def test_generated_python_is_in_the_house_style(made, tmp_path):
    files = {p: t for p, t in documents(made()).items() if p.endswith(".py") and "/tasks/" not in p}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--line-length", "100", "--target-version", "py311", str(tmp_path)]
    rules = ["--select", "A,B,C4,E,F,PERF,PIE,PT,RET,RUF,SIM,UP,W", "--ignore", "RUF001,RUF002"]
    for command in (["format", "--diff", *options], ["check", *rules, *options]):
        done = subprocess.run([*ruff, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("place", ["benchmarks", "build/torch-universal/made_kernels/_runtime"])
def test_nothing_is_written_behind_a_link(place, tmp_path):
    """A library of somebody else's may have a folder that leads to one of the reader's."""
    library = cpu_library()
    files = files_of(library, cubins={})
    folder, mine = tmp_path / "library", tmp_path / "mine"
    write_library(library, files, folder)
    disk = read_library(folder)
    shutil.move(folder / place, mine)
    (folder / place).symlink_to(mine)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=rf"library: {place}/\S+ would be written outside of it: "):
        write_library(library, files, folder, old=disk)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_nothing_is_written_where_a_name_leads_out(tmp_path):
    library = replace(cpu_library(), name="../../../outside")
    with pytest.raises(UserError, match="would be written outside of it"):
        write_library(library, files_of(library, cubins={}), tmp_path / "library")
    assert not (tmp_path / "outside").exists()
