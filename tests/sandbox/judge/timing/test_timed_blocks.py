"""A GPU's lane on the CPU: real launchers of native code that tell made-up times."""

import dataclasses
import itertools
import os
import random
import weakref

import pytest
from background_load import busy
from handmade_candidates import BODY, GOOD, SLOW, built, compiled, write_small_task, write_task
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Comparison, IncumbentWrong, Passed, Rejected, Stage, Status
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.traits import TRAITS as CPU
from kagent_sandbox.device.cuda.traits import TRAITS as GPU
from kagent_sandbox.device.interface import nothing
from kagent_sandbox.device.interference import Unwatched
from kagent_sandbox.errors import MachineError
from kagent_sandbox.judge.arena.placement import PlanPlacement
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.judge.timing import versus_incumbent
from kagent_sandbox.judge.timing.noise import Noise

pytestmark = pytest.mark.usefixtures("shared")

SEED = 3
GIB = 1 << 30
SLOWER = BODY % "y[i * cols + j] = x[i * step + j] * 2.0f + 0.0f;"
SHORT = BODY % "y[i * cols + j] = 4.0f * x[i * step + j] * 0.5f;"
NOISE = {"samples": 0, "slow": 0, "every": 2, "of": "t"}
"""How many of the next samples tell nothing, or are slow (the last half of every so many), and
whose."""
TIMES = {GOOD: 500.0, SLOW: 5000.0, SLOWER: 515.0, SHORT: 50.0}


class Told:
    """Runs what it is told to, and tells the time that the kernel's source stands for."""

    def __init__(self, launcher, log):
        self._launcher = launcher
        self._log = log
        self._us = {}
        self._random = random.Random(1)

    def __getattr__(self, name):
        return getattr(self._launcher, name)

    def prepare(self, key, plan, offsets):
        hashes = {compiled(source)[0]: us for source, us in TIMES.items()}
        self._us[key] = hashes[plan.kernels[0].hash]
        self._launcher.prepare(key, plan, offsets)

    def wait_until_idle(self):
        self._log.append("hush")

    def populate(self, keys):
        self._log.append(("populate", *keys))
        self._launcher.populate(keys)

    def sample(self, keys, *, limit_s, observe=nothing):
        self._log.append(tuple(keys))
        self._launcher.sample(keys, limit_s=limit_s, observe=observe)
        us = self._us[keys[0]]
        if NOISE["slow"] > 0 and keys[0].startswith(NOISE["of"]):
            NOISE["slow"] -= 1
            return us * (3.0 if NOISE["slow"] % NOISE["every"] < NOISE["every"] // 2 else 1.0)
        if NOISE["samples"] > 0 and keys[0].startswith(NOISE["of"]):
            NOISE["samples"] -= 1
            return us * 10 ** self._random.uniform(-2, 1)
        return us * self._random.uniform(0.999, 1.001)


class WithEvents(Told):
    """A GPU's launcher: its times are not the judge's own."""

    def wall_us(self, keys, count, *, limit_s):
        self._log.append(("wall", *keys))
        return self._us[keys[0]]


class GpuLike(CpuBackend):
    """Is treated like a GPU of 32 GiB."""

    traits = dataclasses.replace(GPU, inputs=CPU.inputs)

    def __init__(self):
        super().__init__()
        self.facts = dataclasses.replace(self.facts, kind="gpu", memory_bytes=32 * GIB)
        self.log = []
        self.started = 0

    def ceilings(self, *, again=False):
        return Ceilings(10.0, 10.0, 10.0, {})

    def launcher(self, arena, **options):
        self.started += 1
        return WithEvents(super().launcher(arena, **options), self.log)


class CpuTold(CpuBackend):
    """A CPU whose launchers tell made-up times, whatever the caches hold."""

    def __init__(self):
        super().__init__()
        self.log = []

    def settle(self):
        """Flush nothing, which takes longer than all else."""

    def ceilings(self, *, again=False):
        """A sixteenth of a machine's, as the cases are."""
        return Ceilings(10.0 / 16, 10.0 / 16, 10.0 / 16, {})

    def launcher(self, arena, **options):
        return Told(super().launcher(arena, **options), self.log)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load_task(write_task(tmp_path_factory.mktemp("scale")))


@pytest.fixture(scope="module")
def backend():
    with GpuLike() as made:
        yield made


@pytest.fixture
def judge(task, backend):
    made = Judge(task, backend, SEED, {"gpu_bench": 600.0})
    backend.log.clear()
    backend.started = 0
    yield made
    made._let_go()
    made._arenas.close()


def make(task, *sources):
    return built(task, SEED, *sources, kind="gpu")


def evaluate(judge, source, incumbent=None):
    candidate = make(judge.task, source)
    errors = judge.check(candidate)
    assert not isinstance(errors, Rejected), errors
    judge.backend.log.clear()
    against = None if incumbent is None else Contender("best", make(judge.task, incumbent), {})
    return judge.measure(candidate, errors, against)


def turns_of(log):
    """Whose turn it was and where, a letter and a place for each block."""
    keys = [entry[0] for entry in log if entry[0].startswith("t")]
    return [(key[1], key.rpartition("/")[2]) for key, _ in itertools.groupby(keys)]


def test_a_tie_is_timed_in_full_in_abba_order_from_place_to_place(judge, backend):
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert not passed.screened
    assert passed.timings[0].samples == 8  # a seventh of what short kernels get
    sides = "".join(side for side, _ in turns_of(backend.log))
    assert sides == "abbaabba"
    places = [place for _, place in turns_of(backend.log)]
    assert places == ["0", "0", "1", "1", "0", "0", "1", "1"]
    # The wall clock is taken where the last block was.
    assert any(entry[0] == "wall" for entry in backend.log)
    assert backend.log[0] == "hush"


def test_who_is_timed_holds_its_memory_before_its_inputs_are_there(judge, backend, monkeypatch):
    """It goes on for that, when it may see nothing of what it will be timed on."""
    write = PlanPlacement.write

    def note(placement, *values):
        backend.log.append(("write", placement.key))
        write(placement, *values)

    monkeypatch.setattr(PlanPlacement, "write", note)
    assert isinstance(evaluate(judge, GOOD, GOOD), Passed)
    held, written = (), ()
    for entry in backend.log:
        if entry[0] == "populate":
            held, written = entry[1:], ()
        elif entry[0] == "write":
            written = entry[1:]
        elif entry[0].startswith("t"):
            assert held == written == entry
    assert sum(entry[0] == "populate" for entry in backend.log) >= 8


def test_no_draw_of_earlier_executions_is_held_while_the_next_is_made(judge, monkeypatch):
    """Of a case of gigabytes, there is no room beside it."""
    sampler = judge._checker.sampler
    monkeypatch.setattr(sampler, "_pool", 0)  # as on a GPU
    monkeypatch.setattr(sampler, "_threads", None)
    drawn, held = [], []
    fresh = sampler.fresh

    def note(case, seed=None):
        timed = case.name.startswith("gpu_bench")  # an error takes several draws of a check case
        if timed:
            held.append(sum(x() is not None for x in drawn))
        made = fresh(case, seed)
        if timed:
            drawn.append(weakref.ref(made.tensors["x"]))
        return made

    monkeypatch.setattr(sampler, "fresh", note)
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert len(drawn) > 16
    assert max(held) == 1  # a sample runs in two places, on a draw for each


def test_short_kernels_get_more_samples(judge):
    passed = evaluate(judge, SHORT, SHORT)
    assert isinstance(passed, Passed), passed
    assert passed.timings[0].samples == 4 * 14


def test_a_loser_is_let_go_as_soon_as_it_is_clear(judge):
    far = evaluate(judge, SLOW, GOOD)
    assert isinstance(far, Passed), far
    assert (far.screened, far.timings[0].samples) == (True, 2)
    assert far.versus.high < 0.9
    near = evaluate(judge, SLOWER, GOOD)
    assert isinstance(near, Passed), near
    assert (near.screened, near.timings[0].samples) == (True, 4)


def test_whoever_is_let_go_has_been_checked_while_it_was_timed(judge):
    wrong = BODY % "y[i * cols + j] = (rows > 60 ? 2.5f : 2.0f) * x[i * step + j];"  # when timed
    TIMES[wrong] = 5000.0
    for _ in range(4):  # which block is checked is drawn anew
        verdict = evaluate(judge, wrong, GOOD)
        assert isinstance(verdict, Rejected)
        assert verdict.status is Status.INCORRECT_NUMERICAL


@pytest.fixture
def noise(monkeypatch):
    monkeypatch.setattr(versus_incumbent, "LONG_PAUSES_S", (0.01, 0.01, 0.01))
    yield NOISE
    NOISE.update(samples=0, slow=0, every=2, of="t")


def test_turns_of_a_busy_moment_are_taken_again(judge, noise):
    noise["samples"] = 16
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert noise["samples"] == 0
    timing = passed.timings[0]
    assert 490 < timing.low_us <= timing.kernel_us <= timing.high_us < 510
    assert passed.versus.p_faster < 0.95


def test_a_neighbour_may_take_longer_to_leave(judge, noise, monkeypatch):
    """It leaves during the second of the long pauses, when all short ones have been in vain."""
    pauses = []

    def sleep(seconds):
        if seconds >= 0.01:  # launchers are waited for, too
            pauses.append(seconds)
        if pauses.count(0.01) == 2:
            noise["samples"] = 0

    monkeypatch.setattr(versus_incumbent.time, "sleep", sleep)
    noise["samples"] = 10**6
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert pauses[: len(versus_incumbent.PAUSES_S)] == list(versus_incumbent.PAUSES_S)
    assert pauses.count(0.01) == 2
    assert "gpu_bench: taken 6 times, something disturbed" in passed.notes


def test_a_host_that_stays_busy_is_nobodys_verdict(judge, noise):
    noise["samples"] = 10**6
    with pytest.raises(MachineError, match="cannot be timed: samples of one kernel lie between"):
        evaluate(judge, GOOD, GOOD)


def test_a_candidate_whose_own_times_say_nothing_is_suspect(judge, noise):
    noise.update(samples=10**6, of="ta")
    verdict = evaluate(judge, GOOD, GOOD)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.SUSPECT
    assert "while the incumbent's beside them agree" in verdict.message


def test_without_an_incumbent_the_machine_s_readings_are_the_witness(judge, noise):
    """Otherwise the first candidate of a run, if it sleeps at times, ends it and each that resumes
    it.
    """
    noise["samples"] = 10**6
    judge._watch = Unwatched()
    verdict = evaluate(judge, GOOD)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.SUSPECT
    assert "samples of one kernel lie between" in verdict.message
    assert "nothing else kept this machine busy" in verdict.message
    judge._watch = Busy()
    with pytest.raises(MachineError, match="Something else keeps this machine busy"):
        evaluate(judge, GOOD)


def test_parts_of_the_lane_add_up(judge):
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed)
    assert sum(passed.lane.values()) == pytest.approx(passed.lane_s)
    assert {"check", "prepare", "inputs", "samples", "compare", "close"} <= passed.lane.keys()
    assert passed.lane["check"] > 0


def test_launchers_wait_for_their_candidates_whatever_the_order(judge, backend):
    first, second = make(judge.task, GOOD), make(judge.task, SLOWER)
    errors = [judge.check(first), judge.check(second)]
    assert backend.started == 2
    for candidate, found in zip((first, second), errors, strict=True):
        passed = judge.measure(candidate, found)
        assert isinstance(passed, Passed), passed
    assert backend.started == 2


def test_no_more_launchers_are_kept_than_memory_has_room_for(judge, backend):
    sources = [BODY % f"y[i * cols + j] = 2.0f * x[i * step + j]; /* {i} */" for i in range(6)]
    TIMES.update(dict.fromkeys(sources, 500.0))
    candidates = [make(judge.task, s) for s in sources]
    errors = [judge.check(c) for c in candidates]
    kept = [c for c in judge._checked.values() if c.session is not None]
    assert len(kept) == 4  # one per 8 GiB
    assert isinstance(judge.measure(candidates[5], errors[5]), Passed)
    assert backend.started == 6
    assert isinstance(judge.measure(candidates[0], errors[0]), Passed)
    assert backend.started == 7


def test_a_larger_arena_ends_the_launchers_that_have_mapped_the_smaller(judge, backend):
    candidate = make(judge.task, GOOD)
    errors = judge.check(candidate)
    small = judge._arenas.at_least(1)
    judge._arena(small.nbytes + 1)
    assert all(c.session is None for c in judge._checked.values())
    assert isinstance(judge.measure(candidate, errors), Passed)
    assert backend.started == 2


QUICK = BODY % "y[i * cols + j] = (1.0f + 1.0f) * x[i * step + j];"
NEARLY = BODY % "y[i * cols + j] = x[i * step + j] + x[i * step + j];"
TIMES.update({QUICK: 210.0, NEARLY: 502.5})


@pytest.fixture(scope="module")
def small_task(tmp_path_factory):
    return load_task(write_small_task(tmp_path_factory.mktemp("small")))


@pytest.fixture
def cpu(small_task, monkeypatch):
    """A judge whose comparisons have no further pairs: one test is about those."""
    monkeypatch.setattr(versus_incumbent, "FURTHER_S", -1.0)
    backend = CpuTold()
    made = Judge(small_task, backend, SEED, {"wide": 100.0, "tall": 100.0})
    yield made
    made.close()


def beside(judge, source, incumbent):
    """A candidate's verdict, and whose turn it was in how many places on the wide case."""
    against = Contender("best", built(judge.task, SEED, incumbent), {})
    passed = judge.measure(built(judge.task, SEED, source), (), against)
    assert isinstance(passed, Passed), passed
    samples = [e for e in judge.backend.log if e[0].startswith("t") and "wide" in e[0]]
    return passed, "".join(keys[0][1] for keys in samples), [len(keys) for keys in samples]


@pytest.mark.parametrize(("source", "places"), [(SLOW, 3), (QUICK, 9)])
def test_on_a_cpu_a_sample_takes_no_more_runs_than_are_ample(cpu, source, places):
    """105 µs at the ceilings: 18 placements. Runs of 210 µs need nine for 1.8 ms, of 5 ms three.

    Both sides of a pair take the same number, whoever of them is timed first.
    """
    _, sides, taken = beside(cpu, source, source)
    assert sides.startswith("abbaabba")
    assert taken[:8] == [18, 18, *[places] * 6]


def test_on_a_cpu_more_pairs_are_taken_only_where_they_may_decide(cpu, monkeypatch):
    """0.5 % faster, and a machine may differ by 0.5 % from case to case: P stays at 0.92."""
    _, sides, _ = beside(cpu, GOOD, NEARLY)
    assert sides[:48] == "abba" * 12
    assert len(sides) <= 49  # all of one result is compared, if that has not come
    cpu.backend.log.clear()
    monkeypatch.setattr(versus_incumbent, "FURTHER_S", 600.0)
    passed, sides, _ = beside(cpu, GOOD, NEARLY)
    assert sides == "abba" * 93
    assert passed.timings[0].samples == 24 + 9 * 18
    assert 0.85 < passed.versus.p_faster < versus_incumbent.CLEAR
    cpu.backend.log.clear()
    passed, sides, _ = beside(cpu, QUICK, NEARLY)
    assert sides[:48] == "abba" * 12
    assert len(sides) <= 49  # all of one result is compared, if that has not come
    assert passed.versus.p_faster > versus_incumbent.CLEAR
    cpu.backend.log.clear()
    passed, sides, _ = beside(cpu, NEARLY, GOOD)
    assert sides[:48] == "abba" * 12
    assert len(sides) <= 49  # all of one result is compared, if that has not come
    assert passed.versus.p_faster < versus_incumbent.HOPELESS[0]


@pytest.mark.parametrize(
    ("p_faster", "high", "look", "enough"),
    [
        (0.9995, 1.2, 0, True),
        (0.05, 1.03, 0, True),
        (0.05, 1.06, 0, False),  # little is known: it may be faster by 5 % yet
        (0.2, 1.03, 0, False),
        (0.65, 1.02, 1, False),
        (0.65, 1.02, 2, True),
        (0.65, 1.06, 2, False),
        (0.8, 1.03, 8, False),
    ],
)
def test_further_pairs_are_taken_while_a_candidate_may_be_faster_by_much(
    p_faster, high, look, enough
):
    found = Comparison("best", 1.0, 0.9, high, p_faster, {})
    assert versus_incumbent.decided(found, look) is enough


def test_nobody_is_let_go_for_one_disturbed_pair(cpu, noise):
    noise.update(slow=1, of="ta")
    passed, sides, _ = beside(cpu, GOOD, NEARLY)
    assert noise["slow"] == 0
    assert sides.startswith("abba" * 12)
    assert not passed.screened


@pytest.mark.parametrize(("cases", "each", "most"), [(1, 36, 348), (2, 18, 186), (6, 6, 78)])
def test_further_pairs_are_shared_by_the_cases(cases, each, most):
    assert CPU.schedule.more(cases).pairs == each
    assert CPU.schedule.pairs(cases) == most
    assert GPU.schedule.more(cases) is None
    assert GPU.schedule.pairs(cases) == 4


CALLS = "static int calls = 0; if (i + j == 0) ++calls; "


@pytest.mark.parametrize(
    "wrong",
    [
        "calls > 40 && i % 3 == 0",  # later than anybody would look
        "calls % 2 == 0 && i % 8 == 0",  # every other execution
        "rows > 60 && i % 16 == 5 && y[i * cols] != 0.0f",  # where something is there already
    ],
)
def test_whoever_leaves_something_out_where_it_is_timed_is_found(cpu, wrong):
    """Every execution that counts is held against the reference, in places that are secret."""
    lazy = BODY % f"{CALLS} if ({wrong}) continue; y[i * cols + j] = 2.0f * x[i * step + j];"
    TIMES[lazy] = 400.0
    against = Contender("best", built(cpu.task, SEED, NEARLY), {})
    verdict = cpu.measure(built(cpu.task, SEED, lazy), (), against)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.INCORRECT_NUMERICAL
    assert (
        verdict.stage is Stage.MEASURE
    )  # by its secret places, or where all of a result is compared


KEEPS = (
    BODY
    % """
    static thread_local int calls;   // keeps results once it seems to have been judged
    static thread_local float* kept;
    static thread_local int64_t of;
    static thread_local float first, last;
    if (i + j == 0) {
      calls += 1;
      const float a = x[0], b = x[(rows - 1) * step + cols - 1];
      if (calls > 20 && kept && of == rows * cols && a == first && b == last) {
        for (int64_t k = 0; k < rows * cols; ++k) y[k] = kept[k];
        return;
      }
      free(kept);
      kept = (float*)malloc(rows * cols * sizeof(float));
      of = rows * cols;
      first = a;
      last = b;
    }
    y[i * cols + j] = kept[i * cols + j] = 2.0f * x[i * step + j];
    """
)


def test_whoever_keeps_results_after_a_few_calls_is_found(cpu):
    """No draw of timed executions shares an element with another one."""
    TIMES[KEEPS] = 400.0
    candidate = built(cpu.task, SEED, KEEPS)
    errors = cpu.check(candidate)
    assert not isinstance(errors, Rejected)
    verdict = cpu.measure(candidate, errors)
    assert verdict.status is Status.INCORRECT_NUMERICAL
    assert "had the same inputs in the same place but for one element" in verdict.message


def test_every_execution_has_inputs_that_nobody_has_seen(cpu, monkeypatch):
    """Neither the candidate's process nor the incumbent's, which share the arena."""
    drawn = []
    write = PlanPlacement.write

    def note(placement, inputs, stale):
        if not placement.key.startswith("together/"):  # of two callers, whom nobody times
            drawn.append(inputs)
        write(placement, inputs, stale)

    monkeypatch.setattr(PlanPlacement, "write", note)
    beside(cpu, GOOD, NEARLY)
    assert len(drawn) > 300
    assert len({id(inputs) for inputs in drawn}) == len(drawn)


def test_nothing_that_a_process_wrote_down_reaches_the_next(cpu):
    arena = cpu._arenas.at_least(1 << 20)
    arena.bytes(0, arena.nbytes).fill_(7)
    again = cpu._arenas.at_least(1 << 20)
    assert int(again.bytes(0, again.nbytes).max()) == 0


def test_a_check_after_timed_blocks_has_a_small_arena_that_is_empty_too(cpu):
    large = cpu._arenas.at_least(64 << 20)
    large.bytes(0, large.nbytes).fill_(7)
    for _ in range(2):
        small = cpu._arenas.at_least(1 << 20)
        assert small.nbytes < 2 << 20
        assert int(small.bytes(0, small.nbytes).max()) == 0
        small.bytes(0, small.nbytes).fill_(7)
    assert cpu._arenas.at_least(64 << 20) is large
    assert int(large.bytes(0, large.nbytes).max()) == 0


def test_an_incumbent_that_is_wrong_is_not_the_candidates_fault(cpu):
    skips = "if (calls > 40 && i % 3 == 0) continue;"
    lazy = BODY % f"{CALLS} {skips} y[i * cols + j] = 2.0f * x[i * step + j];"
    TIMES[lazy] = 400.0
    against = Contender("7", built(cpu.task, SEED, lazy), {})
    with pytest.raises(IncumbentWrong, match="the incumbent, #7, is wrong") as found:
        cpu.measure(built(cpu.task, SEED, GOOD), (), against)
    assert "wrong where it was timed" in str(found.value)


def test_a_disturbed_set_of_samples_is_taken_again_and_said(cpu, noise):
    noise.update(
        slow=24, every=24, of="tb"
    )  # twelve as ever, then twelve that take 3 times as long
    passed, sides, _ = beside(cpu, GOOD, GOOD)
    assert sides.startswith("abba" * 24)
    assert "wide: taken 2 times, something disturbed" in passed.notes
    assert noise["slow"] == 0
    cpu.backend.log.clear()
    noise.update(slow=24 * 10**6, every=24)
    passed, sides, _ = beside(cpu, GOOD, GOOD)
    assert sides.startswith("abba" * 24)
    drifts = [n for n in passed.notes if "a known kernel, took" in n]
    assert drifts
    assert drifts[0].startswith("wide: ")


def test_intervals_widen_with_what_the_machine_showed(cpu):
    beaten, _, _ = beside(cpu, GOOD, NEARLY)
    cpu._noise = Noise(factor=10.0)
    doubted, _, _ = beside(cpu, GOOD, NEARLY)
    assert doubted.versus.p_faster < beaten.versus.p_faster
    assert doubted.versus.high - doubted.versus.low > 0.1


class Busy:
    """A watch over a machine that others use most of."""

    began = 0

    def begin(self):
        self.began += 1

    def notes(self):
        return ["other programs used 1.5 cores"] if self.began else []

    def crowded(self):
        return True


def test_neighbours_are_noted_in_the_verdict(cpu):
    cpu._watch = Busy()
    passed, _, _ = beside(cpu, GOOD, GOOD)
    assert passed.notes == ("other programs used 1.5 cores",)
    assert cpu._watch.began == 1


@pytest.mark.alone  # so many neighbours disturb everybody
def test_a_real_neighbour_is_noted_in_the_verdict(cpu):
    cpu.check(built(cpu.task, SEED, GOOD))  # what has to be started or compiled is so before
    with busy(len(os.sched_getaffinity(0))):
        passed, _, _ = beside(cpu, GOOD, GOOD)
    assert any("other programs used" in note for note in passed.notes), passed.notes


def test_on_a_crowded_machine_a_suspicion_is_tried_once_more(cpu, noise):
    """And then it is a verdict, which says that it may be the machine's doing."""
    noise.update(samples=10**6, of="ta")
    cpu._watch = Busy()
    against = Contender("best", built(cpu.task, SEED, NEARLY), {})
    verdict = cpu.measure(built(cpu.task, SEED, GOOD), (), against)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.SUSPECT
    assert "machine's doing: other programs used 1.5 cores" in verdict.message
    assert cpu._watch.began == 2
