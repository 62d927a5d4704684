"""What the judge says of each of some candidate files beside a seed, as `kagent evolve` would.

    python benchmarks/attacks.py SEED FILE... [--task softmax]

Each file is built, checked and timed beside the seed. One line each: how it ended, and where.
"""

import argparse
import time
from pathlib import Path

from kagent.config.settings import load_config
from kagent.evolve.open_machine import request_maker
from kagent.tasks import find_task
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.language import language_of_source
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Rejected, Verdict
from kagent_sandbox.judge.client import JudgeClient

SECRET = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--task", default="softmax")
    options = parser.parse_args()
    task = find_task(options.task)
    kind = language_of_source(options.files[0].read_text()).kind
    cases = task.cases(kind)
    wanted = [*cases.check, *draw_hidden(task, kind, "check", SECRET), *cases.bench]
    with Builder(load_config().jobs) as builder, JudgeClient(task.folder, kind, SECRET) as judge:
        request = request_maker(task, judge.facts, wanted, 1)
        judge.baselines(print)
        judge.ceilings()
        print(judge.noise().text)
        incumbent: Built | None = None
        for file in options.files:
            began = time.monotonic()
            built = builder.build(request(file.read_text()))
            verdict: Verdict | None = None
            if isinstance(built, Rejected):
                verdict = built
            else:
                errors = judge.check(built)
                if isinstance(errors, Rejected):
                    verdict = errors
                else:
                    verdict = judge.measure(built, errors, incumbent, "seed")
                    incumbent = incumbent or built
            print(f"{file.stem}: {ended(verdict)} ({time.monotonic() - began:.1f} s)", flush=True)


def ended(verdict: Verdict) -> str:
    """One line."""
    if isinstance(verdict, Rejected):
        return f"{verdict.stage} {verdict.status} {verdict.case}: {verdict.message[:160]}"
    versus = verdict.versus
    times = ", ".join(f"{t.case} {t.kernel_us:.1f} µs" for t in verdict.timings)
    if versus is None:
        return f"passed; {times}"
    return (
        f"passed, {versus.ratio:.3f}× the seed ({versus.low:.3f}–{versus.high:.3f}), "
        f"P(faster) {versus.p_faster:.2f}; {times}"
    )


if __name__ == "__main__":
    main()
