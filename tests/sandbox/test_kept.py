"""Results that are kept, and work that is done elsewhere than where it is timed."""

import pytest
from judging import BODY, HEADER, built, write_task
from kagent_sandbox import kept
from kagent_sandbox.errors import MachineError
from kagent_sandbox.judge import Judge
from kagent_sandbox.launch.base import Ceilings
from kagent_sandbox.launch.cpu_backend import CpuBackend
from kagent_sandbox.session import Disqualified
from kagent_sandbox.task import load_task
from kagent_sandbox.verdict import Rejected, Status

SEED = 11


class Case:
    name = "wide"


class Told:
    """A table whose contender takes the times that it is told to."""

    case = Case()

    def __init__(self, us, fresh_us, known_us, long_us, blocks=None):
        self.blocks = {"a": blocks or [(us, us, us)] * 3}
        self._us, self._fresh, self._known, self._long = us, fresh_us, known_us, long_us
        self.tries = 0

    def fresh_us(self, side):
        self.tries += 1
        return self._fresh, 6

    def known_us(self, side):
        return self._known

    def long_us(self, side):
        return self._long

    def calm_us(self, side):
        return self._known

    def idle_us(self, side):
        return 0.0

    def typical_us(self, side):
        return self._us


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(kept, "PAUSES_S", [0.0] * 8)


def test_who_computes_what_is_timed_is_asked_once():
    table = Told(100.0, 130.0, 120.0, 101.0)
    kept.refuse_kept_results(table, "a", "cpu")
    assert table.tries == 1


def test_new_inputs_that_take_longer_than_known_ones_are_suspect():
    with pytest.raises(Disqualified, match=r"200\.0 µs on inputs that are new, 20\.0 µs") as info:
        kept.refuse_kept_results(Told(20.0, 200.0, 22.0, 20.0), "a", "cpu")
    assert info.value.verdict.status is Status.SUSPECT


def test_threads_that_wake_slowly_on_a_busy_host_are_nobodys_fault():
    table = Told(20.0, 200.0, 195.0, 24.0)
    kept.refuse_kept_results(table, "a", "cpu")
    assert table.tries == len(kept.PAUSES_S)


def test_what_is_slow_only_on_the_clock_that_sees_it_all_is_suspect():
    with pytest.raises(Disqualified, match="the work is done elsewhere"):
        kept.refuse_kept_results(Told(20.0, 200.0, 200.0, 180.0), "a", "cpu")


def test_one_busy_moment_excuses_nobody():
    table = Told(3.0, 800.0, 25.0, 3.0)
    moments = iter([3.0, 1154.0, 3.0, 4.0, 2.0, 3.0, 3.0, 3.0])
    table.typical_us = lambda side: next(moments)
    with pytest.raises(Disqualified, match="results are kept"):
        kept.refuse_kept_results(table, "a", "cpu")


def test_a_gpu_is_asked_only_where_its_blocks_begin_slowly():
    table = Told(20.0, 200.0, 20.0, 20.0)
    kept.refuse_kept_results(table, "a", "gpu")
    assert table.tries == 0
    slow_first = Told(20.0, 200.0, 20.0, 20.0, [(200.0, 20.0, 20.0)] * 3)
    with pytest.raises(Disqualified, match="results are kept"):
        kept.refuse_kept_results(slow_first, "a", "gpu")


def test_noise_is_the_contenders_own_where_new_inputs_take_longer():
    kept.refuse_if_noise_is_its_own(Told(0.001, 300.0, 290.0, 0.1), "a", "cpu")
    with pytest.raises(Disqualified, match="results are kept"):
        kept.refuse_if_noise_is_its_own(Told(0.001, 300.0, 2.0, 0.1), "a", "cpu")


# -- the real thing --------------------------------------------------------------------------------

SLOWLY = "for (volatile int k = 0; k < 8; k = k + 1) {} y[i * cols + j] = 2.0f * x[i * step + j];"
FAST_AGAIN = {
    "where its output is there already": BODY.replace(
        "  for (int64_t i = 0;", "  if (y[0] == 2.0f * x[0]) return;\n  for (int64_t i = 0;", 1
    )
    % SLOWLY,
    "where it has seen the input": (
        HEADER + "#include <cstring>\n#include <vector>\n" + BODY
    ).replace(
        "  for (int64_t i = 0;",
        """
  static std::vector<std::vector<float>> seen;
  if (step == cols)
    for (size_t k = 0; k + 1 < seen.size(); k += 2)
      if (seen[k].size() == size_t(rows * cols) && !memcmp(seen[k].data(), x, 4 * rows * cols)) {
        memcpy(y, seen[k + 1].data(), 4 * rows * cols);
        return;
      }
  struct Keep {
    const float *x, *y; int64_t n;
    ~Keep() { seen.emplace_back(x, x + n); seen.emplace_back(y, y + n); }
  } keep{x, y, step == cols ? rows * cols : 0};
  for (int64_t i = 0;""",
        1,
    )
    % SLOWLY,
}


class Backend(CpuBackend):
    def ceilings(self):
        return Ceilings(10.0, 10.0, 10.0, {})


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    task = load_task(write_task(tmp_path_factory.mktemp("scale")))
    judge = Judge(task, Backend(), SEED, {"wide": 100.0, "tall": 100.0})
    yield judge
    judge.close()


@pytest.mark.alone
@pytest.mark.parametrize("which", FAST_AGAIN)
def test_a_kernel_that_is_fast_only_on_what_it_knows_is_suspect(judge, which):
    candidate = built(judge.task, SEED, FAST_AGAIN[which])
    errors = judge.check(candidate)
    assert not isinstance(errors, Rejected), errors
    try:
        verdict = judge.measure(candidate, errors)
    except MachineError as e:
        pytest.skip(f"too busy a machine: {e}")
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.SUSPECT
    assert "results are kept" in verdict.message
