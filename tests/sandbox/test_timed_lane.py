"""A GPU's lane on the CPU: real launchers of native code that tell made-up times."""

import dataclasses
import os
import random

import pytest
from judging import BODY, GOOD, SLOW, built, compiled, write_task
from kagent_sandbox import turns
from kagent_sandbox.blocks import PACES
from kagent_sandbox.errors import MachineError
from kagent_sandbox.figures import Contender
from kagent_sandbox.judge import Judge
from kagent_sandbox.launch.base import Ceilings
from kagent_sandbox.launch.cpu_backend import CpuBackend
from kagent_sandbox.noise import Noise
from kagent_sandbox.task import load_task
from kagent_sandbox.verdict import Comparison, Passed, Rejected, Status
from neighbours import busy

SEED = 3
GIB = 1 << 30
SLOWER = BODY % "y[i * cols + j] = x[i * step + j] * 2.0f + 0.0f;"
NOISE = {"blocks": 0, "slow": 0, "of": "t"}
"""How many of the next blocks tell nothing, or are slow every other time, and whose."""
TIMES = {GOOD: 500.0, SLOW: 5000.0, SLOWER: 515.0}


class Told:
    """Runs what it is told to, and tells the time that the kernel's source stands for."""

    def __init__(self, launcher, log):
        self._launcher = launcher
        self._log = log
        self._us = {}
        self._random = random.Random(1)

    def __getattr__(self, name):
        return getattr(self._launcher, name)

    def prepare(self, key, plan, placement):
        hashes = {compiled(source)[0]: us for source, us in TIMES.items()}
        self._us[key] = hashes[plan.kernels[0].hash]
        self._launcher.prepare(key, plan, placement)

    def hush(self):
        self._log.append("hush")

    def samples(self, keys, count, *, limit_s):
        self._log.append((*keys, count))
        for key in keys:
            self._launcher.run(key, limit_s=limit_s)
        if NOISE["slow"] > 0 and keys[0].startswith(NOISE["of"]) and count > 1:
            NOISE["slow"] -= 1
            slow = 3.0 if NOISE["slow"] % 2 == 0 else 1.0
            return [slow * self._us[keys[0]]] * count
        if NOISE["blocks"] > 0 and keys[0].startswith(NOISE["of"]):
            NOISE["blocks"] -= 1
            return [self._us[keys[0]] * self._random.uniform(-1, 1) for _ in range(count)]
        return [self._us[keys[0]] * self._random.uniform(0.999, 1.001) for _ in range(count)]

    def wall_us(self, keys, count, *, limit_s):
        self._log.append(("wall", *keys))
        return self._us[keys[0]]


class Unhurried(Told):
    """Tells made-up times of new inputs, too."""

    def fresh_us(self, keys, *, limit_s):
        self._log.append(("fresh", *keys))
        self._launcher.fresh_us(keys, limit_s=limit_s)
        return self._us[keys[0]]


class GpuLike(CpuBackend):
    """Is treated like a GPU of 32 GiB."""

    def __init__(self):
        super().__init__()
        self.facts = dataclasses.replace(self.facts, kind="gpu", memory_bytes=32 * GIB)
        self.log = []
        self.started = 0

    def ceilings(self):
        return Ceilings(10.0, 10.0, 10.0, {})

    def launcher(self, arena):
        self.started += 1
        return Told(super().launcher(arena), self.log)


class CpuTold(CpuBackend):
    """A CPU whose launchers tell made-up times."""

    def __init__(self):
        super().__init__()
        self.log = []

    def ceilings(self):
        return Ceilings(10.0, 10.0, 10.0, {})

    def launcher(self, arena):
        return Unhurried(super().launcher(arena), self.log)


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


def test_a_tie_is_timed_in_full_in_abba_order_from_place_to_place(judge, backend):
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert not passed.screened
    assert passed.timings[0].samples == 32
    counts = [entry[-1] for entry in backend.log if isinstance(entry[-1], int)]
    checked = counts.index(1)  # what the first sample of the secret block has left
    assert counts[checked + 1] == 7
    assert sorted(counts) == [1, *[7], *[8] * 7]
    blocks = [entry for entry in backend.log if entry[-1] in (1, 8)]
    sides = "".join(key[1] for key, _ in blocks)
    assert sides == "abbaabba"
    places = [key.rpartition("/")[2] for key, _ in blocks]
    assert places == ["0", "0", "1", "1", "0", "0", "1", "1"]
    # The wall clock is taken where the last block was, on its inputs.
    assert ("wall", "ta/gpu_bench/1") in backend.log
    assert backend.log[0] == "hush"


def test_a_loser_is_let_go_as_soon_as_it_is_clear(judge):
    far = evaluate(judge, SLOW, GOOD)
    assert isinstance(far, Passed), far
    assert (far.screened, far.timings[0].samples) == (True, 8)
    assert far.versus.high < 0.9
    near = evaluate(judge, SLOWER, GOOD)
    assert isinstance(near, Passed), near
    assert (near.screened, near.timings[0].samples) == (True, 16)


def test_whoever_is_let_go_has_been_checked_while_it_was_timed(judge):
    wrong = BODY % "y[i * cols + j] = (rows > 60 ? 2.5f : 2.0f) * x[i * step + j];"  # when timed
    TIMES[wrong] = 5000.0
    for _ in range(4):  # which block is checked is drawn anew
        verdict = evaluate(judge, wrong, GOOD)
        assert isinstance(verdict, Rejected)
        assert verdict.status is Status.INCORRECT_NUMERICAL


@pytest.fixture
def noise(monkeypatch):
    monkeypatch.setattr(turns, "LONG_PAUSES_S", (0.01, 0.01, 0.01))
    yield NOISE
    NOISE.update(blocks=0, slow=0, of="t")


def test_turns_of_a_busy_moment_are_taken_again(judge, noise):
    noise["blocks"] = 8
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert noise["blocks"] == 0
    timing = passed.timings[0]
    assert 490 < timing.low_us <= timing.kernel_us <= timing.high_us < 510
    assert passed.versus.p_faster < 0.95


def test_a_neighbour_may_take_longer_to_leave(judge, noise, monkeypatch):
    """It leaves during the second of the long pauses, when all short ones have been in vain."""
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if pauses.count(0.01) == 2:
            noise["blocks"] = 0

    monkeypatch.setattr(turns.time, "sleep", sleep)
    noise["blocks"] = 10**6
    passed = evaluate(judge, GOOD, GOOD)
    assert isinstance(passed, Passed), passed
    assert pauses[: len(turns.PAUSES_S)] == list(turns.PAUSES_S)
    assert pauses.count(0.01) == 2
    assert "gpu_bench: taken 6 times, something disturbed" in passed.notes


def test_a_host_that_stays_busy_is_nobodys_verdict(judge, noise):
    noise["blocks"] = 10**6
    with pytest.raises(MachineError, match="cannot be timed: samples of one kernel lie between"):
        evaluate(judge, GOOD, GOOD)


def test_a_candidate_whose_own_times_say_nothing_is_suspect(judge, noise):
    noise.update(blocks=10**6, of="ta")
    verdict = evaluate(judge, GOOD, GOOD)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.SUSPECT
    assert "while the incumbent's beside them agree" in verdict.message


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
TIMES.update({QUICK: 200.0, NEARLY: 502.5})


@pytest.fixture
def cpu(task):
    backend = CpuTold()
    made = Judge(task, backend, SEED, {"wide": 100.0, "tall": 100.0})
    yield made
    made.close()


def beside(judge, source, incumbent):
    """A candidate's verdict, and whose turn it was in which places on the wide case."""
    against = Contender("best", built(judge.task, SEED, incumbent), {})
    passed = judge.measure(built(judge.task, SEED, source), (), against)
    assert isinstance(passed, Passed), passed
    blocks = [e for e in judge.backend.log if e[-1] in (2, 4, 8, 9) and "wide" in e[0]]
    sides = "".join(entry[0][1] for entry in blocks)
    return passed, sides, [len(entry) - 1 for entry in blocks]


@pytest.mark.parametrize(("source", "places"), [(SLOW, [9, 3, 3, 3]), (QUICK, [9, 5, 5, 5])])
def test_on_a_cpu_a_sample_takes_no_more_runs_than_are_ample(cpu, source, places):
    """105 µs at the ceilings: nine placements. Runs of 200 µs need five for 0.9 ms, of 5 ms three.

    Both sides of a pair take the same number, whoever of them is timed first.
    """
    _, sides, taken = beside(cpu, source, source)
    assert sides.startswith("abbaabba")
    assert taken[:8] == [n for n in places for _ in "ab"]


@pytest.mark.parametrize(("source", "places"), [(SLOW, 1), (GOOD, 4), (QUICK, 9)])
def test_on_a_cpu_new_inputs_keep_a_kernel_busy_for_longer_than_waking_it_takes(
    cpu, source, places
):
    """Two milliseconds, if there are as many placements: of 5 ms one run, of 0.5 ms four."""
    beside(cpu, source, source)
    new = [e[1:] for e in cpu.backend.log if e[0] == "fresh" and "wide" in e[1]]
    assert [len(set(keys)) for keys in new] == [places]


def test_on_a_cpu_more_pairs_are_taken_only_where_they_may_decide(cpu, monkeypatch):
    """0.5 % faster, and a machine may differ by 0.5 % from case to case: P stays at 0.92."""
    monkeypatch.setattr(turns, "FURTHER_S", -1.0)
    _, sides, _ = beside(cpu, GOOD, NEARLY)
    assert sides == "abba" * 3
    cpu.backend.log.clear()
    monkeypatch.setattr(turns, "FURTHER_S", 60.0)
    passed, sides, _ = beside(cpu, GOOD, NEARLY)
    assert sides == "abba" * 39
    assert passed.timings[0].samples == 30 + 9 * 8 * 8
    assert 0.85 < passed.versus.p_faster < turns.CLEAR
    cpu.backend.log.clear()
    passed, sides, _ = beside(cpu, QUICK, NEARLY)
    assert sides == "abba" * 3
    assert passed.versus.p_faster > turns.CLEAR
    cpu.backend.log.clear()
    passed, sides, _ = beside(cpu, NEARLY, GOOD)
    assert sides == "abba" * 3
    assert passed.versus.p_faster < turns.HOPELESS[0]


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
    assert turns.decided(found, look) is enough


def test_nobody_is_let_go_for_one_disturbed_pair(cpu, noise):
    noise.update(slow=1, of="ta")
    passed, sides, _ = beside(cpu, GOOD, NEARLY)
    assert noise["slow"] == 0
    assert sides.startswith("abba" * 3)
    assert not passed.screened


@pytest.mark.parametrize(("cases", "each", "most"), [(1, 16, 150), (2, 8, 78), (6, 3, 33)])
def test_further_pairs_are_shared_by_the_cases(cases, each, most):
    assert PACES["cpu"].more(cases).pairs == each
    assert PACES["cpu"].pairs(cases) == most
    assert PACES["gpu"].more(cases) is None
    assert PACES["gpu"].pairs(cases) == 4


def test_a_wrong_block_is_found_whichever_it_is(cpu):
    """All blocks may be the one that is checked, the last of a tie's among them."""
    for _ in range(3):
        calls = "static std::atomic<int> calls{0}; if (i + j == 0) ++calls;"
        late = BODY % f"{calls} y[i * cols + j] = (calls > 40 ? 2.5f : 2.0f) * x[i * step + j];"
        TIMES[late] = 500.0
        against = Contender("best", built(cpu.task, SEED, NEARLY), {})
        verdict = cpu.measure(built(cpu.task, SEED, late), (), against)
        if isinstance(verdict, Rejected):
            assert verdict.status is Status.INCORRECT_NUMERICAL
            return
    raise AssertionError("a kernel that is wrong in most of its blocks passed three times")


def test_a_disturbed_set_of_samples_is_taken_again_and_said(cpu, noise):
    noise.update(slow=5, of="tb")  # four of two samples, which tell of nothing, and one of four
    passed, sides, _ = beside(cpu, GOOD, GOOD)
    assert sides.startswith("abbaabba" * 2)
    assert "wide: taken 2 times, something disturbed" in passed.notes
    assert noise["slow"] == 0
    cpu.backend.log.clear()
    noise.update(slow=10**6)
    passed, sides, _ = beside(cpu, GOOD, GOOD)
    assert sides.startswith("abbaabba" * 2)
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
    with busy(len(os.sched_getaffinity(0))):
        passed, _, _ = beside(cpu, GOOD, GOOD)
    assert any("other programs used" in note for note in passed.notes), passed.notes


def test_on_a_crowded_machine_a_suspicion_is_tried_once_more(cpu, noise):
    """And then it is a verdict, which says that it may be the machine's doing."""
    noise.update(blocks=10**6, of="ta")
    cpu._watch = Busy()
    against = Contender("best", built(cpu.task, SEED, NEARLY), {})
    verdict = cpu.measure(built(cpu.task, SEED, GOOD), (), against)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.SUSPECT
    assert "machine's doing: other programs used 1.5 cores" in verdict.message
    assert cpu._watch.began == 2
