"""Pieces of prompts: residency, cases, elites, ledger, faults, text."""

import dataclasses
import re

import h100_run
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent.prompting import Prompter, RunFacts, run_facts_of
from kagent.prompting.cases import bench_cases, bounds_of, case_line
from kagent.prompting.elites import diverse, elite
from kagent.prompting.excerpts import essentials, outline, sketch
from kagent.prompting.failure_text import distil, excerpt
from kagent.prompting.hardware import ARCHITECTURES, hardware
from kagent.prompting.ledger import entry, ledger
from kagent.prompting.measured import measured
from kagent.prompting.task_text import EPSILON, about_task
from kagent.prompting.text import (
    amount,
    clipped,
    cut_at_a_pause,
    fenced,
    microseconds,
    one_line,
    quoted,
    table,
)
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal
from kagent.runs.store import RunStore, read_history
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.data import target as targets
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.language import CPP, CUDA, TRITON, languages_in
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import RunError
from simulated_evolution import manifest
from synthetic_lineages import passed

SOFTMAX = find_task("softmax")
H100 = hardware("sm_90a", h100_run.RUN_FACTS.device, h100_run.RUN_FACTS.ceilings)


def cases_of(name="softmax", run_facts=h100_run.RUN_FACTS, device=H100):
    return bench_cases(find_task(name), "gpu", device, run_facts)


# -- the device ------------------------------------------------------------------------------------


def test_every_target_has_an_architecture():
    assert set(ARCHITECTURES) == set(targets._DEVICES)
    for capability in ARCHITECTURES:
        device = hardware(f"sm_{capability}", None, None)
        assert not device.found
        assert device.units > 0
    assert hardware("cpu", None, None).is_cpu


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limit"),
    [
        (1024, 32, 0, 2, "registers and threads"),  # 64 warps of 1024 registers
        (512, 64, 1024, 2, "registers"),
        (256, 168, 0, 1, "registers"),  # 12 warps fit, 8 of them make a block
        (128, 255, 0, 2, "registers"),
        (128, 16, 0, 16, "threads"),
        (32, 16, 0, 32, "blocks"),
        (128, 32, 100 << 10, 2, "shared memory"),
        (128, 32, 227 << 10, 1, "shared memory"),
        (544, 62, 224 << 10, 1, "registers and shared memory"),  # 2 · 17 warps of 2048 registers
    ],
)
def test_resident_blocks_follow_from_the_scarcest_resource(
    threads, registers, shared, blocks, limit
):
    found = H100.residency(threads, registers, shared)
    assert (found.blocks, " and ".join(found.limits)) == (blocks, limit)
    assert found.warps == blocks * -(-threads // 32)


def test_the_data_sheet_peak_is_the_known_one():
    assert H100.peak_tflop_per_s == pytest.approx(1070, rel=0.01)  # 989 at 1830 MHz
    assert hardware("sm_80", None, None).peak_tflop_per_s == pytest.approx(312, rel=0.01)


# -- cases -----------------------------------------------------------------------------------------


def test_cases_have_floors_and_bounds():
    cases = {c.name: c for c in cases_of()}
    assert cases["bf16_4096x131072"].floor_us == pytest.approx(712, rel=0.01)
    assert cases["bf16_4096x131072"].best_of_torch == ("compile max-autotune", 1156.5)
    assert {c.bound for c in cases.values()} == {"memory"}
    assert {c.bound for c in cases_of("attention")} == {"compute"}
    assert cases_of("attention")[0].row is None
    unknown = bench_cases(SOFTMAX, "cpu", hardware("cpu", None, None), RunFacts())
    assert [c.floor_us for c in unknown] == [None, None, None]


@pytest.mark.parametrize(("target", "faster"), [("sm_80", 1), ("sm_89", 2), ("sm_90a", 2)])
def test_the_data_sheet_knows_products_of_8_bits(target, faster):
    """Before sm_89 a GPU has none of float8: it converts, and multiplies as with bfloat16."""
    device = hardware(target, None, None)
    few, _, large = cases_of("fp8_linear", RunFacts(), device)
    assert (few.name, few.bound) == ("bf16_16x14336x4096", "memory")
    assert large.bound == "compute"
    assert large.floor_us == pytest.approx(large.flops / faster / device.peak_tflop_per_s / 1e6)


def test_what_limits_a_task():
    assert bounds_of(SOFTMAX, cases_of(), 1) == {"memory"}
    assert bounds_of(SOFTMAX, cases_of(), 3) == {"memory", "latency"}
    assert bounds_of(SOFTMAX, cases_of(), None) == {"memory", "latency"}
    fused = find_task("linear_cross_entropy")
    assert bounds_of(fused, cases_of("linear_cross_entropy"), 1) == {"memory", "compute"}
    fast = Ceilings(1e5, 1e5, 1e5, {})
    device = hardware("sm_90a", h100_run.RUN_FACTS.device, fast)
    assert "latency" in bounds_of(SOFTMAX, cases_of(device=device), 1)


def test_a_check_case_says_what_is_special_about_it():
    padded = next(c for c in SOFTMAX.gpu.check if c.noncontiguous)
    assert case_line(SOFTMAX, padded).endswith("bf16 M=19 N=1021 (x has strides (1029, 1))")


def test_what_a_task_means_is_torch_itself():
    about = about_task(find_task("cross_entropy"), "gpu")
    assert "F.cross_entropy(leaf, target, ignore_index=ignore_index)" in about.meaning
    assert '"""' not in about.meaning
    assert about.arguments[2] == "ignore_index: a plain Python integer, always -100"
    assert about.tolerances[0] == (
        "loss: k = 2, floor = 512 eps (fp32 6.1e-05); the whole tensor is one row"
    )
    assert "floor = 2 eps (bf16 0.016, fp32 2.4e-07, fp16 0.002)" in about.tolerances[1]
    assert "`padded`" in about.inputs
    assert about_task(find_task("attention"), "gpu").arguments[3] == "causal: a plain Python flag"
    assert about_task(find_task("linear_cross_entropy"), "gpu").allowed == (
        "torch.mm",
        "torch.addmm",
    )


# -- candidates ------------------------------------------------------------------------------------


def test_languages_are_those_of_the_kernels():
    seeds = {c.proposal.name: c.proposal.source for c in h100_run.history().seeds}
    assert languages_in(seeds["triton_rows"]) == (TRITON,)
    assert languages_in(seeds["cuda_cluster"]) == (CUDA,)
    assert languages_in(seeds["triton_rows"] + seeds["cuda_cluster"]) == (TRITON, CUDA)
    assert languages_in("k = cpp_kernel('k', S)") == (CPP,)


def test_facts_are_of_cases_below_the_roofline():
    lineage = h100_run.history()
    visible = frozenset(h100_run.CASES)

    def facts(number):
        candidate = lineage[number]
        return measured(candidate, lineage, cases_of(), H100, visible, matrix=False).facts

    assert facts(3) == {"long_rows"}  # the short ones run at the speed of a copy
    assert facts(0) == {"long_rows", "spills"}
    assert facts(2) == {"long_rows", "several_launches", "narrow_loads", "spills"}  # not known
    assert facts(1) >= {"long_rows", "short_rows"}


def test_elites_are_those_that_add_something():
    ask = h100_run.ask(parent=1)  # triton_online: both others win cases
    assert [c.id for c in diverse(ask)] == [3, 0]
    assert diverse(h100_run.ask(parent=3)) == []  # made of 2 and 0, far ahead of 1
    assert [c.id for c in diverse(h100_run.ask(parent=2))] == [0]


def test_an_elite_is_shown_whole_if_short_and_by_what_differs_if_alike():
    ask = h100_run.ask(parent=2)
    shown = elite(ask.lineage[0], ask, cases_of(), second=False)
    assert ask.lineage[0].proposal.source.rstrip() in shown.body
    assert "bf16_16384x1024 1.043×" in shown.cases
    source = ask.parent.proposal.source
    proposal = Proposal(7, (2,), Operator.STRUCTURE, "x", source.replace("__ldcs", "__ldcg"), "")
    other = elite(Candidate(proposal, ask.parent.verdict), ask, cases_of(), second=False)
    assert other.body.startswith("It differs from #2 in this:")
    assert other.body.count("\n+") == 2
    text = outline(source, "softmax")
    assert text.startswith("```text\nSoftmax with each row in the registers")
    assert "A row is divided among" not in text  # its second paragraph
    assert "def " not in text
    silent = source[source.index("import torch") :]
    assert "def softmax(x: torch.Tensor)" in outline(silent, "softmax")


def test_a_second_parent_is_cut_to_what_the_first_lacks():
    ask = h100_run.ask(parent=0)
    long = ask.lineage[2]
    shown = elite(long, ask, cases_of(), second=True).body
    assert shown.count("\n") < 190
    assert "softmax_on_chip(" in shown
    assert "def softmax(x: torch.Tensor)" in shown
    assert "for length." in shown
    source = long.proposal.source
    changed = source.replace("__ldcs(p);", "__ldcg(p);")
    only = essentials(source, changed, "softmax", 150)  # one piece of C++ differs
    assert "__ldcs(p)" in only
    assert "__global__" not in only
    assert re.search(r"Left out: \d+ pieces that the parent has too\.$", only)
    assert essentials(source, source, "softmax", 150) == ""
    assert essentials("def f(:", "", "f", 9) == ""


@given(st.sampled_from([s.source() for n in task_names() for s in seeds_of(find_task(n))]))
def test_essentials_are_bounded_and_of_the_file(source):
    text = essentials(source, "", "nothing", 60)
    inner = text.partition("\n")[2].rpartition("```")[0]
    assert inner.count("\n") <= 130
    for piece in filter(str.strip, inner.split("\n\n")):
        first = piece.strip("\n").split("\n")[0]
        assert first in source or first.startswith("[")


def test_an_unmeasured_file_is_sketched():
    sources = {s.name: s.source() for s in seeds_of(SOFTMAX)}
    assert sources["triton_rows"].rstrip() in sketch(sources["triton_rows"], "softmax")
    text = sketch(sources["cuda_cluster"], "softmax")
    assert text.startswith("```text\nSoftmax with each row in the registers")
    assert "def softmax(x: torch.Tensor)" in text
    assert "__global__" not in text


def test_what_hidden_cases_are_drawn_from_is_told_in_words():
    about = about_task(SOFTMAX, "gpu")
    assert about.hidden_checks[0] == (
        "3 × bf16, fp32 or fp16, N 1 to 131072, M 1 to 131072, M * N at most 4.1943e+06; inputs "
        "mixed, nonfinite or normal, scale 0.1, 1 or 5, rows padded or not, offset 0, 1 or 3"
    )
    assert "N a prime from 600 to 1023" in about.hidden_checks[2]
    assert about.hidden_bench[0].startswith(
        "3 × bf16, N 1000 to 131072 in steps of 8, M 512 to 131072, M * N at least 6.71089e+07 and "
    )
    assert about.bench_inputs == "normal"
    padded = "but for bf16_19x1021_padded or some hidden check cases: there each row starts 8"
    assert padded in about.strides
    assert "data_ptr() is a multiple of the element's size and no more there" in about.strides
    other = about_task(find_task("linear_cross_entropy"), "gpu").strides
    assert other.startswith("Inputs are contiguous in every case, hidden ones included.")
    assert about_task(find_task("cross_entropy"), "cpu").bench_inputs == "normal or padded"


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_strides_and_offsets_are_told_as_they_are_drawn(name, kind):
    task = find_task(name)
    text = about_task(task, kind).strides
    drawn = [c for seed in range(8) for c in draw_hidden(task, kind, "check", seed)]
    assert any(c.noncontiguous for c in drawn) == ("some hidden check cases" in text)
    assert any(c.offset for c in drawn) == ("a few elements after an aligned address" in text)
    assert not any(c.offset for seed in range(8) for c in draw_hidden(task, kind, "bench", seed))


def test_epsilons_are_torchs():
    assert {n: torch.finfo(getattr(torch, n)).eps for n in EPSILON} == EPSILON


def test_the_ledger_has_the_parents_line_first_and_then_the_newest():
    lines = ledger(h100_run.ask())
    assert [line.split()[0] for line in lines] == ["#3", "#6", "#5", "#4"]
    assert lines[0].endswith("→ 1.012× #2 (1.276× the best of torch), new incumbent")
    assert "(predicted 1.030×) → INCORRECT_NUMERICAL in a hidden case: “result y:" in lines[2]
    repair = ledger(h100_run.ask(Operator.REPAIR, 4))
    assert [line.split()[0] for line in repair] == ["#3", "#6", "#5"]  # its own fault is shown


def test_the_ledger_is_short_and_free_of_mere_constants():
    lineage = h100_run.history()
    for number in range(len(lineage), 40):
        operator = Operator.TUNE if number % 2 else Operator.STRUCTURE
        proposal = Proposal(number, (3,), operator, "x", f"x = {number}", "an idea " * 100)
        times = {"bf16_16384x1024": 30.0 + number}
        lineage.record(Candidate(proposal, passed(times)))
    lines = ledger(h100_run.ask(lineage=lineage))
    assert len(lines) == 12
    assert sum(" tune of " in line for line in lines) == 3
    assert all(len(line) < 400 for line in lines)


def test_a_repaired_file_is_compared_with_what_the_broken_one_was_made_from():
    lineage = h100_run.history()
    proposal = Proposal(len(lineage), (4,), Operator.REPAIR, "x", "x = 1", "mended")
    lineage.record(Candidate(proposal, h100_run.passed(h100_run.JOINED)))
    told = entry(lineage[7], lineage)
    assert told.endswith("“mended” → 1.000× #3 (1.276× the best of torch)")
    orphan = lineage[4].proposal
    broken = [Candidate(dataclasses.replace(orphan, id=0, parents=()), lineage[4].verdict)]
    only = Lineage(broken)
    only.record(Candidate(dataclasses.replace(proposal, id=1, parents=(0,)), lineage[0].verdict))
    assert "“mended” → works, 0.964× the best of torch" in entry(only[1], only)


def test_of_two_answers_that_say_the_same_the_ledger_tells_the_faster():
    lineage = h100_run.history()
    for factor in (1.0, 0.9, 1.1):
        number = len(lineage)
        proposal = Proposal(
            *(number, (3,), Operator.REWRITE, "x", f"x = {number}", "the same idea"), ask=9
        )
        times = tuple(t * factor for t in h100_run.JOINED)
        lineage.record(Candidate(proposal, h100_run.passed(times)))
    told = [line for line in ledger(h100_run.ask(lineage=lineage)) if "the same idea" in line]
    assert [line.split()[0] for line in told] == ["#8"]
    for number in (10, 11):  # of other asks, as decided by the tuner
        proposal = dataclasses.replace(lineage[8].proposal, id=number, ask=None)
        lineage.record(Candidate(proposal, lineage[8].verdict))
    told = [line for line in ledger(h100_run.ask(lineage=lineage)) if "the same idea" in line]
    assert [line.split()[0] for line in told] == ["#11", "#10", "#8"]


# -- faults ----------------------------------------------------------------------------------------

FILE = '''import torch

SOURCE = r"""
int a;
int b;
__global__ void k() {
  int b;
}
"""


def f(x):
    return torch.softmax(x, -1)
'''


@pytest.mark.parametrize(
    ("message", "marked"),
    [
        ("line 13: `return torch.softmax(x, -1)`: torch operation 'softmax' is not allowed", 13),
        ("kernel k: line 3: expected a ;\n    3 | int b;", 5),  # the first of two such lines
        ("kernel k: line 5: redeclared\n    5 | int b;", 7),
        ("kernel k: line 99: elsewhere\n    99 | not in the file", None),
        ("kernel k: line 2: what the compiler did not quote", None),
        ("result y: worst element [0, 3]: expected 1, got 2", None),
        ("line 99: past the end", None),
    ],
)
def test_an_error_is_shown_at_its_line_of_the_file(message, marked):
    text = excerpt(message, FILE)
    found = [int(line[1:].split("|")[0]) for line in text.splitlines() if line.startswith(">")]
    assert found == ([marked] if marked else [])
    assert len(text.splitlines()) <= 7


def test_a_fault_names_the_visible_case_with_its_strides():
    verdict = Rejected(Stage.CHECK, Status.INCORRECT_NUMERICAL, "off", "bf16_19x1021_padded")
    fault = distil(verdict, FILE, SOFTMAX, "gpu")
    assert fault.case == "bf16_19x1021_padded: bf16 M=19 N=1021 (x has strides (1029, 1))"
    hidden = distil(dataclasses.replace(verdict, case="hidden_check_3"), FILE, SOFTMAX, "gpu")
    assert hidden.case == "a hidden case, whose shape differs from all visible ones"
    assert distil(dataclasses.replace(verdict, case=None), FILE, SOFTMAX, "gpu").case == ""


def test_a_log_of_megabytes_is_cut():
    verdict = Rejected(Stage.BUILD, Status.COMPILE_ERROR, "x" * 10**6 + "\nline\n" * 10**4)
    assert len(distil(verdict, FILE, SOFTMAX, "gpu").message) < 6000


# -- the situation ---------------------------------------------------------------------------------


def test_a_runs_situation_is_read_from_its_records(tmp_path):
    made = manifest(environment={"facts": to_json(h100_run.RUN_FACTS.device)}, lang="triton")
    with RunStore.create(tmp_path, made) as store:
        baselines = {"us": {"short": {"eager": 3.0}}, "peak_bytes": {}, "captured": {}}
        store.append(
            "baselines", {"baselines": baselines, "ceilings": to_json(h100_run.RUN_FACTS.ceilings)}
        )
    store, history = read_history(store.folder)
    run_facts = run_facts_of(store.manifest, history)
    assert run_facts.device == h100_run.RUN_FACTS.device
    assert run_facts.ceilings == h100_run.RUN_FACTS.ceilings
    assert run_facts.baselines == {"short": {"eager": 3.0}}
    assert run_facts.lang == "triton"
    bare = run_facts_of(manifest(), history)
    assert bare.device is None
    broken = manifest(environment={"facts": {"kind": "gpu"}})
    with pytest.raises(RunError, match="damaged"):
        run_facts_of(broken, history)


def test_an_unmeasured_run_has_an_empty_situation(tmp_path):
    with RunStore.create(tmp_path, manifest()) as store:
        history = store.history()
    assert run_facts_of(store.manifest, history) == RunFacts()
    assert Prompter(SOFTMAX, "gpu", "sm_90a", RunFacts()).cards


# -- text ------------------------------------------------------------------------------------------


def test_numbers_take_few_characters():
    assert [microseconds(us) for us in (1.234, 21.23, 353.4, 1130.2)] == [
        *("1.23", "21.2", "353", "1,130")
    ]
    assert [amount(b, "B") for b in (0, 67.1e6, 2.1475e9, 12)] == [
        "0 B",
        "67.1 MB",
        "2.15 GB",
        "12 B",
    ]


def test_fences_are_longer_than_any_in_the_text():
    assert fenced("x", "python") == "```python\nx\n```"
    assert fenced("```\nx\n```").startswith("````text\n")
    assert fenced("a\n`````\n").startswith("``````text\n")


def test_text_is_cut_and_cleaned():
    assert one_line("a\n b\t\x1b[31m c", 100) == r"a b \x1b[31m c"
    assert one_line("word " * 10, 12) == "word word w…"
    assert cut_at_a_pause("One two. Three four five, six", 27) == "One two. Three four five…"
    assert cut_at_a_pause("One two three. Four, five six seven", 18) == "One two three."
    assert cut_at_a_pause("One, two three four five six", 20) == "One, two three four…"
    assert cut_at_a_pause("One,\n two.", 20) == "One, two."
    assert quoted("a\n“b” `c`\u202e", 100) == '“a "b" `c`\\u202e”'
    assert quoted(" \n", 100) == ""
    assert clipped("a\nb\nc\nd", 2) == "a\nb\n[2 more lines]"
    assert table(("a", "b"), [("1", ""), ("2", "")]) == "| a |\n| --- |\n| 1 |\n| 2 |"
