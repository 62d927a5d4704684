"""Seeds for a task without writing one: Inductor's kernels for its `eager`, made into candidates.

No GPU and no language model takes part. What is written is checked as `kagent check` does it, and
kept only if it is right.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.builder.policy import allows
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import KagentError, TaskError, UserError
from kagent_sandbox.process.ask_once import TookTooLong, ask_once

from kagent.candidate_file import check_file
from kagent.runs.files import write_file
from kagent.tasks import refusal_file

NAMES: dict[Kind, tuple[str, ...]] = {
    "gpu": ("triton_inductor.py", "triton_library.py"),
    "cpu": ("cpp_inductor.py",),
}
"""Files that seeds are written to, in the task's folder. The second one for a GPU, of a task that
allows products of matrices, leaves them to torch, which is faster at some sizes; the first one has
them in the same kernel as what follows.
"""
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
LIMIT_S = 600.0
"""CPU time that Inductor may take."""
_WORKER = ("-m", "kagent.authoring.inductor.worker")
VECTOR_MATH = "\nVECTOR_MATH = 1\n"
"""Line of a C++ seed whose results a check may refuse: with 0 functions err by less, and take
longer."""


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """Outcome of making the seed for one kind of device.

    Attributes:
        kind: "gpu" or "cpu".
        path: The file that was written; None if there is none.
        reason: Why there is none; of a file that was kept, what is not known of it.
        results: Number of results that were found right.
    """

    kind: Kind
    path: Path | None
    reason: str = ""
    results: int = 0


def write_seeds(
    folder: Path,
    kinds: Sequence[Kind] = ("cpu", "gpu"),
    *,
    jobs: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> list[SeedOutcome]:
    """Write Triton and C++ seeds into a task's folder, if they can be had and are right. The reason
    for none is kept there, for `kagent.tasks.refusal_of`.

    Args:
        folder: The task's folder. Earlier seeds of this origin in it are replaced.
        kinds: Kinds of device to write seeds for, in this order. The one for a CPU is there in
            seconds; to interpret the other one may take minutes.
        jobs: Number of builds at once.
        say: Is told what is being done.

    Returns:
        The outcomes of each kind's seeds that were written; of a kind that has none, why.

    Raises:
        TaskError: The task has a fault.
        MachineError: This machine lacks what a check needs.
    """
    allow = load_task(folder).allow
    products = any(allows(allow, name) for name in _PRODUCTS)
    found = []
    for kind in kinds:
        for name in NAMES[kind]:
            (folder / name).unlink(missing_ok=True)
        wanted = NAMES[kind] if products else NAMES[kind][:1]
        outcomes = [_write(folder, kind, name, jobs, say) for name in wanted]
        refusal = refusal_file(folder, kind)
        written = [o for o in outcomes if o.path is not None]
        if written:
            refusal.unlink(missing_ok=True)
        else:
            write_file(refusal, outcomes[0].reason + "\n")
        found += written or outcomes[:1]
    return found


def _write(
    folder: Path, kind: Kind, name: str, jobs: int, say: Callable[[str], None]
) -> SeedOutcome:
    path, first = folder / name, folder / NAMES[kind][0]
    library = path != first
    products = ", with torch's products" if library else ""
    say(f"tracing {folder.name} for a {'GPU' if kind == 'gpu' else 'CPU'}{products}")
    found = _generate(folder, kind, library=library)
    if "source" not in found:
        return SeedOutcome(kind, None, found["reason"])
    if library and first.is_file() and found["source"] == first.read_text(encoding="utf-8"):
        return SeedOutcome(kind, None, f"it is {first.name}")
    exact = found["source"].replace(VECTOR_MATH, VECTOR_MATH.replace("1", "0"), 1)
    for source in dict.fromkeys((found["source"], exact)):
        outcome = _checked(folder, kind, path, source, jobs, say)
        if outcome.path is not None:
            break
    return outcome


def _checked(
    folder: Path, kind: Kind, path: Path, source: str, jobs: int, say: Callable[[str], None]
) -> SeedOutcome:
    """The outcome of a source, which is written to a path if it is right."""
    with tempfile.TemporaryDirectory(prefix="kagent_seed_") as aside:
        draft = Path(aside, path.name)
        draft.write_text(source, encoding="utf-8")
        try:
            checked = check_file(load_task(folder), draft, jobs=jobs, say=say)
        except TaskError:
            raise
        except UserError as e:  # built, and all cases are too large for an interpreter
            results, reason = 0, str(e).partition(": ")[2]
        else:
            if isinstance(checked.verdict, Rejected):
                where = f" in {checked.verdict.case}" if checked.verdict.case else ""
                text = checked.verdict.message.splitlines()[0]
                return SeedOutcome(kind, None, f"{checked.verdict.status.value}{where}: {text}")
            results = len(checked.verdict)
            reason = (
                f"too large to interpret: {', '.join(checked.skipped)}" if checked.skipped else ""
            )
    write_file(path, source)
    return SeedOutcome(kind, path, reason, results)


def _generate(folder: Path, kind: Kind, *, library: bool = False) -> dict[str, str]:
    """A seed's `source`, or the `reason` for none."""
    request = {"task": str(folder.resolve()), "kind": kind, "library": library}
    try:
        done = ask_once(_WORKER, request, limit_s=LIMIT_S)
    except TookTooLong as e:
        return {"reason": f"Inductor {e}"}
    try:
        answer: dict[str, str] = json.loads(done.out)
    except ValueError:
        return {"reason": f"the process that traces ended with status {done.status}: {done.tail}"}
    if "error" in answer:
        raise KagentError(answer["error"])
    return answer
