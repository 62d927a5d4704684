"""The lineage of a run: its proposals and their verdicts. It is append-only, and pure to read.

Ids are the positions of records: candidate 7 is `lineage[7]`. A decision is taken on the lineage as
it stood when it was taken (`as_of(proposal.seen)`), so that stored verdicts replay to the same
decisions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kagent_sandbox.builder.identity import source_hash
from kagent_sandbox.data.compiled import Loop, Remark
from kagent_sandbox.data.verdict import Comparison, Passed, Rejected, Stage, Status, Verdict
from kagent_sandbox.errors import UserError

PROMOTION = 0.95
"""A new incumbent needs more than this probability of being faster; anything less is a tie."""


class Operator(StrEnum):
    """The way in which a proposal was made."""

    SEED = "seed"
    """A file of the task's folder, or a kernel from memory."""
    TUNE = "tune"
    """One parent with other values of its tunables."""
    SWEEP = "sweep"
    """A new incumbent as it is, with more configurations per case: of runs of earlier versions."""
    CROSSOVER = "crossover"
    """The ideas of two parents in one."""
    RECOMBINE = "recombine"
    """Two parents in one file that chooses between them by the call's shape."""
    STRUCTURE = "structure"
    """A parent with one structural change: another mapping to the hardware, another algorithm."""
    REWRITE = "rewrite"
    """A new file, written from the task and one technique instead of from a parent's text."""
    REPAIR = "repair"
    """A rejected proposal, mended with its error in view."""
    MIGRATE = "migrate"
    """A candidate of another run of the same task, to be judged anew."""
    TOLD = "told"
    """A kernel from outside that nobody asked for; in runs of earlier versions a rewrite."""


_SAME = re.compile(r"as candidate (\d{1,9})$")  # of a duplicate's message


def duplicate(stage: Stage, what: str, same: int) -> Rejected:
    """The verdict on a candidate that is the same as an earlier one in its `what`."""
    return Rejected(stage, Status.DUPLICATE, f"the same {what} as candidate {same}")


DUPLICATES_IN_A_ROW = 40
"""Duplicates in a row after which nothing new is to be expected."""
FREE = (Operator.SEED, Operator.SWEEP, Operator.RECOMBINE)
"""Operators that are not charged to the budget: nobody is asked for them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that wrote a proposal, and the cost of all calls for it, duplicates included."""

    model: str  # as the user named it; "ask/tell" for an answer from outside
    card: str = ""  # the techniques that the prompt named, joined by "+"
    calls: int = 1
    seconds: float = 0.0  # from the request to the end of the reply
    input_tokens: int | None = None  # None: the endpoint did not say
    output_tokens: int | None = None
    dollars: float | None = None  # None: no price is known for the model

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of the cards that the prompt named."""
        return tuple(filter(None, self.card.split("+")))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A kernel to try, and why."""

    id: int
    parents: tuple[int, ...]
    operator: Operator
    name: str  # of its structure: the seed's file, or those that it was made of
    source: str
    hypothesis: str  # the change, and why it should help
    predicted: float | None = None  # speed-up over `Lineage.base`, where one was named
    seen: int = 0  # records in the lineage when it was selected
    attempt: int = 0  # attempts at its ask before this one
    ask: int | None = None  # number of the decision that it answers; None: a seed, or not asked for
    origin: Origin | None = None  # None: a seed, or the work of the tuner
    fault: str = ""  # why a reply holds no kernel; `source` is empty then
    configs: int | None = None  # configurations of its tunables to build; None: as the run has it
    works: float | None = None  # probability of being correct that its author stated, 0 to 1

    @property
    def kernel(self) -> str:
        """Identity of the text, and the name of its file in the run's folder."""
        return kernel_id(self.source)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts from building a proposal. Hashes identify its syntax tree and all of its plans."""

    tree_hash: str
    work_hash: str
    configs: int
    build_s: float
    tuned: str = ""  # the constants that were set before the verdict: "BLOCK 1024 → 2048"
    remarks: tuple[Remark, ...] = ()  # of its compilers
    loops: tuple[Loop, ...] = ()  # of its machine code, for a GPU


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """An incumbent failed, or was wrong, when a candidate was timed beside it."""

    id: int
    verdict: Rejected


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal and its verdict. `facts` is None where it was not built."""

    proposal: Proposal
    verdict: Verdict
    facts: Facts | None = None
    withdrawals: tuple[Withdrawal, ...] = ()
    """Incumbents that were found wrong while it was timed; its verdict is beside the next one."""
    written: str = ""
    """Kernel id of the file as it was proposed, where `proposal` has it with tuned constants."""
    unit: str = ""
    """Name of the device that gave the verdict, where the run has several."""

    @property
    def id(self) -> int:
        """The proposal's id."""
        return self.proposal.id

    @property
    def score(self) -> float | None:
        """Geometric mean over the benchmark cases of baseline time / time; None if it was
        rejected.
        """
        return self.verdict.score if isinstance(self.verdict, Passed) else None

    @property
    def cost_s(self) -> float:
        """Seconds of the model, of building and of the device that it took."""
        lane = self.verdict.lane_s if isinstance(self.verdict, Passed) else 0.0
        origin = self.proposal.origin
        call = origin.seconds if origin is not None else 0.0
        return call + lane + (self.facts.build_s if self.facts else 0.0)

    @property
    def is_duplicate(self) -> bool:
        """Whether it was the same as an earlier candidate."""
        return isinstance(self.verdict, Rejected) and self.verdict.status is Status.DUPLICATE

    @property
    def duplicate_of(self) -> int | None:
        """The earlier candidate that it is the same as; None where it is no duplicate."""
        if not self.is_duplicate or not isinstance(self.verdict, Rejected):
            return None
        found = _SAME.search(self.verdict.message)
        return int(found[1]) if found is not None else None

    @property
    def counts(self) -> bool:
        """Whether it was charged to the budget. A duplicate is, where a model was asked for it:
        else a model that repeats itself would be asked for ever.
        """
        asked = self.proposal.origin is not None
        return self.proposal.operator not in FREE and (asked or not self.is_duplicate)

    @property
    def is_assumed(self) -> bool:
        """Whether its verdict is none: see `assumed`."""
        return isinstance(self.verdict, Passed) and not self.verdict.timings


def assumed(seed: Proposal) -> Candidate:
    """A seed that nobody has judged yet, as something to ask for improvements of: taken to be
    correct and as fast as torch. It has no timings, is in no store and never leaves an ask.
    """
    return Candidate(seed, Passed(timings=(), errors=(), score=1.0, score_stderr=0.0))


@dataclass(frozen=True, slots=True)
class Speed:
    """Logarithm of a candidate's speed-up over the baselines, over all cases and on each.

    Known through the chain of comparisons that were interleaved: candidate against incumbent,
    that one against the one before it, and so on to a first candidate's own times. Times of
    different moments are never compared: on a machine that is busy or throttles they drift by far
    more than what is looked for.
    """

    log: float
    cases: Mapping[str, float]
    stderr: float  # of `log`, by the last comparison

    @property
    def cautious(self) -> float:
        """Value to rank by: `log` less its standard error, so that luck in a noisy moment counts
        little.
        """
        return self.log - self.stderr


def kernel_id(source: str) -> str:
    """16 hexadecimal digits of the text's SHA-256."""
    return source_hash(source)[:16]


class Lineage:
    """All candidates of a run, in the order of their ids."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._records: list[Candidate] = []  # as they were recorded
        self._candidates: list[Candidate] = []  # as they stand: some were withdrawn since
        self._incumbents: list[int] = []  # every candidate that was promoted, in order
        self._children: Counter[int] = Counter()
        self._speeds: dict[int, Speed] = {}
        self._counted = 0
        for candidate in candidates:
            self.record(candidate)

    def record(self, candidate: Candidate) -> bool:
        """Append, after withdrawing what was found wrong; whether the candidate is the new
        incumbent.

        Raises:
            ValueError: Its id is not the next one, or it withdraws what is not the incumbent.
        """
        if candidate.id != len(self._candidates):
            raise ValueError(f"candidate {candidate.id} recorded as number {len(self)}")
        for withdrawal in candidate.withdrawals:
            self._withdraw(withdrawal)
        self._records.append(candidate)
        self._candidates.append(candidate)
        self._counted += candidate.counts
        self._children.update(set(candidate.proposal.parents))
        if isinstance(candidate.verdict, Passed):
            self._speeds[candidate.id] = self._speed(candidate.verdict)
        promoted = self._promotes(candidate)
        if promoted:
            self._incumbents.append(candidate.id)
        return promoted

    def _withdraw(self, withdrawal: Withdrawal) -> None:
        """Count the incumbent as rejected from now on. Earlier decisions stay as they were."""
        gone = withdrawal.id
        if not self._incumbents or gone != self._incumbents[-1]:
            raise ValueError(f"candidate {gone} is withdrawn, and is not the incumbent")
        self._incumbents.pop()
        del self._speeds[gone]
        self._candidates[gone] = replace(self._candidates[gone], verdict=withdrawal.verdict)
        if not self._incumbents and (left := self.incumbent_without(())) is not None:
            self._incumbents.append(left.id)

    def incumbent_without(self, gone: Collection[int]) -> Candidate | None:
        """Return the incumbent that follows once some are withdrawn: the one before them; if there
        is none, the best that was timed in full.
        """
        before = [i for i in self._incumbents if i not in gone]
        if before:
            return self[before[-1]]
        for candidate in self.passed():
            verdict = candidate.verdict
            if candidate.id not in gone and isinstance(verdict, Passed) and not verdict.screened:
                return candidate
        return None

    def as_recorded(self, candidate_id: int) -> Candidate:
        """A candidate with its first verdict, whether or not it was withdrawn since."""
        return self._records[candidate_id]

    def _promotes(self, candidate: Candidate) -> bool:
        if not isinstance(candidate.verdict, Passed):
            return False
        if not self._incumbents:
            return True
        versus = candidate.verdict.versus
        return (
            versus is not None
            and versus.against == str(self._incumbents[-1])
            and versus.p_faster > PROMOTION
        )

    def _speed(self, verdict: Passed) -> Speed:
        versus = verdict.versus
        against = versus.against if versus is not None else ""
        base = self._speeds.get(int(against)) if against.isdecimal() else None
        if versus is None or base is None:
            own = {t.case: _log((t.baseline_us or 1.0) / t.kernel_us) for t in verdict.timings}
            return Speed(_log(verdict.score), own, verdict.score_stderr)
        ratios = {case: versus.cases.get(case, versus.ratio) for case in base.cases}
        chained = {case: log + _log(ratios[case]) for case, log in base.cases.items()}
        return Speed(base.log + _log(versus.ratio), chained, stderr_of(versus))

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def __getitem__(self, candidate_id: int) -> Candidate:
        return self._candidates[candidate_id]

    def last(self, count: int) -> list[Candidate]:
        """The latest records, in order."""
        return self._candidates[-count:]

    @property
    def is_repeating(self) -> bool:
        """Whether the latest records are duplicates, so many that nothing new is to be expected."""
        latest = self.last(DUPLICATES_IN_A_ROW)
        return len(latest) == DUPLICATES_IN_A_ROW and all(c.is_duplicate for c in latest)

    def as_of(self, seen: int) -> Lineage:
        """The lineage of the first `seen` records, which later records do not change."""
        if seen != len(self):
            return Lineage(self._records[:seen])
        copy = Lineage()
        copy._records = self._records.copy()
        copy._candidates = self._candidates.copy()
        copy._incumbents = self._incumbents.copy()
        copy._children = self._children.copy()
        copy._speeds = self._speeds.copy()
        copy._counted = self._counted
        return copy

    @property
    def incumbent(self) -> Candidate | None:
        """The best so far: beats the one before it with probability over `PROMOTION`."""
        return self[self._incumbents[-1]] if self._incumbents else None

    @property
    def promotions(self) -> tuple[Candidate, ...]:
        """All incumbents in order, the current one last."""
        return tuple(self[i] for i in self._incumbents)

    @property
    def counted(self) -> int:
        """Evaluations, and a model's duplicates, charged to the budget."""
        return self._counted

    @property
    def seeds(self) -> tuple[Candidate, ...]:
        """The task's own kernels."""
        return tuple(c for c in self if c.proposal.operator is Operator.SEED)

    def speed(self, candidate_id: int) -> Speed | None:
        """Return the speed that a candidate is ranked by; None if it was rejected."""
        return self._speeds.get(candidate_id)

    def log_speed(self, candidate_id: int) -> float:
        """Logarithm of its speed-up over the baselines; -inf if it was rejected."""
        speed = self._speeds.get(candidate_id)
        return speed.log if speed else -math.inf

    def base(self, candidate_id: int) -> Candidate | None:
        """Return the base of a candidate's prediction: its first parent, or if that one was
        rejected the nearest of its own first parents that passed. None where there is none.
        """
        parents = self._candidates[candidate_id].proposal.parents
        while parents and parents[0] not in self._speeds:
            parents = self._candidates[parents[0]].proposal.parents
        return self._candidates[parents[0]] if parents else None

    def gain(self, candidate_id: int) -> float | None:
        """Speed-up over `base`, which is what a proposal predicts; None where the candidate was
        rejected, or there is no base.
        """
        base, speed = self.base(candidate_id), self._speeds.get(candidate_id)
        if base is None or speed is None:
            return None
        return math.exp(speed.log - self._speeds[base.id].log)

    def rank(self, candidate_id: int) -> float:
        """`Speed.cautious` of a candidate; -inf if it was rejected."""
        speed = self._speeds.get(candidate_id)
        return speed.cautious if speed else -math.inf

    def passed(self) -> list[Candidate]:
        """Candidates that were correct and timed, the fastest first, the earlier among equals."""
        ranked = sorted(self._speeds, key=lambda i: (-self._speeds[i].cautious, i))
        return [self[i] for i in ranked]

    def elites(self, count: int = 8) -> list[Candidate]:
        """The incumbent and then the best others that were timed in full."""
        incumbent = self.incumbent
        if incumbent is None:
            return []
        others = [
            c
            for c in self.passed()
            if c.id != incumbent.id and isinstance(c.verdict, Passed) and not c.verdict.screened
        ]
        return [incumbent, *others][:count]

    def children(self, candidate_id: int) -> int:
        """Recorded proposals that had this candidate as a parent, duplicates included."""
        return self._children[candidate_id]

    def path(self, candidate_id: int) -> list[Candidate]:
        """Return the path from a seed to this candidate, following first parents."""
        path = [self[candidate_id]]
        while path[-1].proposal.parents:
            path.append(self[path[-1].proposal.parents[0]])
        return path[::-1]

    def rejections(self) -> Counter[tuple[Stage, Status]]:
        """Count rejections by stage and status. Duplicates are among them."""
        return Counter(
            (c.verdict.stage, c.verdict.status) for c in self if isinstance(c.verdict, Rejected)
        )

    def first_rejected(self, stage: Stage, status: Status) -> tuple[int, Rejected]:
        """The first candidate that was rejected so, and its verdict. There is one."""
        return next(
            (c.id, c.verdict)
            for c in self
            if isinstance(c.verdict, Rejected)
            and (c.verdict.stage, c.verdict.status) == (stage, status)
        )


def stderr_of(versus: Comparison) -> float:
    """Standard error of log(ratio), by the interval: it holds 95 %, which are 3.92 of them."""
    return (_log(versus.high) - _log(versus.low)) / 3.92 if versus.low > 0 else 10.0


def roofline_share(verdict: Verdict) -> float:
    """Geometric mean of the share of the roofline over the benchmark cases; 0 if there is none."""
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    shares = [t.roofline_share for t in timings if t.roofline_share > 0]
    return math.exp(sum(map(math.log, shares)) / len(shares)) if shares else 0.0


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def find_candidate(lineage: Lineage, candidate_id: int) -> Candidate:
    """A candidate by id.

    Raises:
        UserError: There is none.
    """
    if not 0 <= candidate_id < len(lineage):
        have = f"0 to {len(lineage) - 1}" if len(lineage) else "none yet"
        raise UserError(f"no candidate {candidate_id}: the run has {have}")
    return lineage[candidate_id]
