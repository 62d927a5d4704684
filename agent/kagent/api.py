"""Python interface of kagent: `kagent ask`, `tell`, `judge` and `merge` as methods of a run, and
`kagent new` as `Task.of`.

Every method does the same as the command of its name. docs/agents.md has more examples.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kagent_sandbox.errors import UserError

from kagent.arguments import is_whole, require, require_flags
from kagent.asktell import answers, judging, merging, open_asks
from kagent.asktell.judging import Bench, JudgeResult
from kagent.asktell.merging import Merged
from kagent.asktell.open_asks import OpenAsk
from kagent.asktell.open_run import new_run, ready
from kagent.asktell.precheck import precheck
from kagent.asktell.results import Best, Result, best_of, result_of
from kagent.asktell.state import read_state
from kagent.config.settings import load_config
from kagent.evolve.remembering import remember_run
from kagent.evolve.stored_run import task_of_run
from kagent.runs.events import Event, Observer, Stop, progress_to
from kagent.runs.history import History
from kagent.runs.manifest import Manifest, find_run, read_manifest
from kagent.runs.store import RunStore, read_history

__all__ = ["Best", "OpenAsk", "Result", "Run", "Task"]

_ID = "a candidate's id, a whole number from 0 on, or None"
_OBSERVER = "a function that takes an event (kagent.runs.events), or None"


@dataclass(frozen=True, slots=True)
class Task:
    """A task that was made of PyTorch code.

    Attributes:
        folder: Its folder. `kagent.Run` takes it.
        signature: Signature of the function that kernels define.
        dims: The dimensions that vary, with their sizes in the example.
        notes: What was changed or left out, a line each.
        holes: Wrong results that would pass all check cases, a line each.
    """

    folder: Path
    signature: str
    dims: Mapping[str, int]
    notes: tuple[str, ...]
    holes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        example_inputs: object,
        *,
        vary: Mapping[str, str] | None = None,
        to: str | Path | None = None,
        name: str | None = None,
        backward: bool = False,
    ) -> Self:
        """Make a task of a function or module, as `kagent new` does.

        Args:
            function: A function over tensors, an nn.Module (its parameters and buffers become
                arguments), or the class of one that needs no arguments.
            example_inputs: Arguments of a call: a tensor, a tuple or list, a dict by name, or a
                function without parameters that returns such.
            vary: Names of the dimensions that vary, as in {"x:0": "B"}. By default all do that can.
            to: Folder of the task; by default ./NAME.
            name: Name of the task; by default that of the function.
            backward: Whether the task is the function's gradient.

        Returns:
            The task, checked.

        Raises:
            UserError: The function cannot become a task, or the folder is there already or cannot
                be written.
            TaskError: The task has a fault.

        Example:
            Make the task ./softcap, whose two sizes both vary, and see what it is:

                import torch
                import kagent

                def softcap(x):
                    return 30 * torch.tanh(x / 30)

                sizes = {"x:0": "M", "x:1": "N"}
                task = kagent.Task.of(softcap, torch.randn(1024, 512), vary=sizes)
                print(task.signature, task.dims)  # "M" is 1024 and "N" 512 in the example
        """
        from torch import Tensor

        from kagent.authoring.draft.rooms import parse_vary
        from kagent.authoring.new_task import make_task
        from kagent.authoring.tracing.operation import make_operation

        inputs = "a tensor, a tuple, list or dict of arguments, or a function that returns such"
        fits = isinstance(example_inputs, Tensor | tuple | list | Mapping)
        require(fits or callable(example_inputs), "example_inputs", example_inputs, inputs)
        given = {} if vary is None else vary
        words = (*given, *given.values()) if isinstance(given, Mapping) else (given,)
        texts = all(isinstance(word, str) for word in words)
        require(texts, "vary", vary, 'names of dimensions, as in {"x:0": "B"}, or None')
        require(to is None or isinstance(to, str | Path), "to", to, "the path of a folder, or None")
        require(name is None or isinstance(name, str), "name", name, "a task's name, or None")
        require_flags(backward=backward)
        axes = parse_vary(f"{where}={dim}" for where, dim in given.items())
        operation = make_operation(function, example_inputs, name=name, backward=backward)
        made = make_task(operation, Path(to or operation.name), vary=axes)
        return cls(made.folder, made.task.signature, made.trace.dims, made.notes, made.holes)


class Run:
    """A run that is answered from outside.

    The run's folder holds all of its state, so a program may end and another one continue. The
    first answer that is evaluated starts a builder and a judge. They stay open until `close` or the
    end of the `with` block. Settings that are not given come from KAGENT_* and kagent.toml.

    Example:
        Ask for two prompts, answer them with a model, and print the best kernel:

            import kagent

            with kagent.Run("softmax", target="cpu") as run:
                for ask in run.ask(2):
                    result = run.tell(ask, my_model(ask.prompt))
                    print(result)
                print(run.best)

        Tell a kernel that nobody asked for, without timing it:

            with kagent.Run.open("latest") as run:
                print(run.tell(None, open("mine.py").read(), queue=True))
    """

    def __init__(
        self,
        task: str | Path,
        *,
        target: str | None = None,
        lang: str | None = None,
        seed: int | None = None,
        memory: bool | None = None,
        runs: str | Path | None = None,
        prompts: str | Path | None = None,
        jobs: int | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Make a new run.

        Args:
            task: A task's name, or its folder.
            target: "sm_90a", ..., "cpu"; by default this machine's GPU, else its CPU.
            lang: Of the seeds: a language's name, such as "triton", or "any" (the default).
            seed: Of all random decisions.
            memory: Whether it starts from kernels of earlier runs, too, and is kept for later ones
                (yes).
            runs: Folder that the run's folder is made in.
            prompts: Folder of prompt templates and cards of your own.
            jobs: Number of builds at once.
            observe: Function that receives every event (`kagent.runs.events`).

        Raises:
            UserError: There is no such task or target, an option does not fit, or the folder of
                runs can be neither written nor made.
            RunError: The run's folder cannot be written.
        """
        fits = isinstance(task, Path) or (isinstance(task, str) and task)
        require(fits, "task", task, "a task's name or folder: kagent tasks lists the names")
        known = target is None or isinstance(target, str)
        require(known, "target", target, '"cpu", "sm_90a", ..., or None for this machine\'s device')
        require(observe is None or callable(observe), "observe", observe, _OBSERVER)
        config = load_config(
            lang=lang, seed=seed, memory=memory, runs=runs, prompts=prompts, jobs=jobs
        )
        self._begin(new_run(str(task), config, target), prompts, jobs, observe, config.memory)

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        runs: str | Path | None = None,
        prompts: str | Path | None = None,
        jobs: int | None = None,
        observe: Observer | None = None,
    ) -> Self:
        """Open a run that exists.

        Args:
            run: Its name, its path, or "latest".
            runs: Folder of run folders.
            prompts: Folder of prompt templates and cards of your own.
            jobs: Number of builds at once.
            observe: Function that receives every event (`kagent.runs.events`).

        Returns:
            The run. No process is started.

        Raises:
            RunError: There is no such run, or its folder is damaged.

        Example:
            Print what the newest run has found so far:

                import kagent

                run = kagent.Run.open("latest")
                print(run.best or "nothing has passed yet")
        """
        fits = isinstance(run, Path) or (isinstance(run, str) and run)
        require(fits, "run", run, 'a run\'s name or path, or "latest": kagent runs lists them')
        require(observe is None or callable(observe), "observe", observe, _OBSERVER)
        folder = find_run(load_config(runs=runs).runs, str(run))
        read_manifest(folder)
        opened = cls.__new__(cls)
        opened._begin(folder, prompts, jobs, observe)  # noqa: SLF001 - its own class
        return opened

    def _begin(
        self,
        folder: Path,
        prompts: str | Path | None,
        jobs: int | None,
        observe: Observer | None,
        memory: bool | None = None,
    ) -> None:
        self.folder = folder
        self._config = load_config(prompts=prompts, jobs=jobs, memory=memory)
        self._observe = observe or _nobody
        self._bench: Bench | None = None
        self._open = contextlib.ExitStack()
        weakref.finalize(self, self._open.close)  # also where nobody calls `close`

    # -- asking and telling ----------------------------------------------------------------------

    def ask(self, count: int = 1) -> list[OpenAsk]:
        """Ask for the next prompts. They are files in the run's folder too.

        Args:
            count: Number of prompts.

        Returns:
            One `OpenAsk` per prompt. It stays open until it is answered.

        Raises:
            UserError: Nothing is left to improve, or the run has a proposer of its own.
            RunError: The run cannot be read or written.
        """
        require(is_whole(count, 1), "count", count, "a whole number above 0")
        return open_asks.ask(self.folder, count, self._config)

    def open_asks(self) -> list[OpenAsk]:
        """List the asks without an answer, also those of an earlier program.

        Returns:
            The open asks, in the order of their numbers.

        Raises:
            RunError: The run cannot be read.
        """
        with RunStore.open(self.folder, write=False) as store:
            return open_asks.open_asks(store, read_state(store.history()))

    def tell(
        self,
        ask: OpenAsk | int | None,
        text: str,
        *,
        queue: bool = False,
        parent: int | None = None,
        by: str | None = None,
        kernel: bool = False,
    ) -> Result:
        """Take an answer: a model's whole reply, or the text of a kernel file.

        Args:
            ask: The ask that the text answers, or its number. None for a kernel that nobody asked
                for.
            text: The answer.
            queue: Accept the answer, build it, and interpret it where possible. `judge` judges it
                later, perhaps on another machine.
            parent: Id of the candidate that an unasked kernel descends from. The default is the
                best.
            by: Name of the model or person who answered, for reports and exported libraries.
            kernel: Whether the text is a kernel file whatever it looks like: one without the task's
                function is then built, and refused. By default a text is one if it defines the
                function, and else a reply.

        Returns:
            The result. A bad kernel is a result, not an error: see `Result.verdict`.

        Raises:
            UserError: There is no such ask, or no device to evaluate on.
            RunError: The run cannot be read or written.
            MachineError: This machine failed. The answer is kept and waits for `judge`.

        Example:
            Answer the first open ask of the newest run with a file:

                import kagent

                with kagent.Run.open("latest") as run:
                    ask = run.open_asks()[0]
                    print(run.tell(ask, open("reply.md").read()).verdict)
        """
        number = ask.id if isinstance(ask, OpenAsk) else ask
        asks = "an OpenAsk, its number, or None for a kernel that nobody asked for"
        require(number is None or is_whole(number), "ask", ask, asks)
        texts = "the text of a reply or of a kernel file: read a file first"
        require(isinstance(text, str), "text", text, texts)
        require(parent is None or is_whole(parent), "parent", parent, _ID)
        require(by is None or isinstance(by, str), "by", by, "a model's or person's name, or None")
        require_flags(queue=queue, kernel=kernel)
        if isinstance(ask, OpenAsk) and ask.path.parent.parent != self.folder:
            raise UserError(f"{ask.path}: a prompt of another run, not of {self.folder}")
        return judging.apart_from_loops(lambda: self._tell(number, text, queue, parent, by, kernel))

    def _tell(
        self,
        number: int | None,
        text: str,
        queue: bool,
        parent: int | None,
        by: str | None,
        kernel: bool,
    ) -> Result:
        with RunStore.open(self.folder) as store:
            task = task_of_run(self.folder, store.manifest)
            ready(store, task)
            if not queue:
                judging.can_judge(store.manifest, self.folder, self._config)
            state = read_state(store.history())
            label = f"{number:04}" if number is not None else "told"
            entry = task.entry
            given = answers.given(text, label, store, state, entry, ask=number, kernel=kernel)
            given = answers.answered_by(given, by)
            (accepted,) = answers.accept(store, task, [given], self._config.budget, parent)
            if queue and not accepted.again:
                state, jobs = read_state(store.history()), self._config.jobs
                for _ in precheck(store, task, state, [accepted.id], jobs, _silent):
                    pass
            elif not queue:
                self._judge(store, deadline_s=None, race=False)
            return result_of(accepted, store.history())

    # -- judging ---------------------------------------------------------------------------------

    def judge(self, *, deadline_s: float | None = None, race: bool = False) -> JudgeResult:
        """Judge waiting candidates: seeds, and answers that were queued.

        Args:
            deadline_s: Seconds after which the call returns. The rest waits for the next call.
            race: Whether the finalists race on hidden cases at the end.

        Returns:
            The candidates that were judged now, and the race.

        Raises:
            UserError: This machine lacks the device.
            RunError: The run belongs to another device, or cannot be written.
            MachineError: The machine failed; verdicts until then are kept.

        Example:
            Judge for ten minutes at most, and let the finalists race:

                import kagent

                with kagent.Run.open("latest") as run:
                    done = run.judge(deadline_s=600, race=True)
                print(f"{len(done.recorded)} judged, {done.left} left")
        """
        seconds = is_whole(deadline_s) or isinstance(deadline_s, float)
        fits = deadline_s is None or (seconds and 0 < deadline_s < math.inf)
        require(fits, "deadline_s", deadline_s, "a number of seconds above 0, or None")
        require_flags(race=race)
        begun_s = time.monotonic()
        limit = None if deadline_s is None else judging.deadline_of(begun_s, deadline_s)

        def work() -> JudgeResult:
            with RunStore.open(self.folder) as store:
                return self._judge(store, deadline_s=limit, race=race)

        return judging.apart_from_loops(work)

    def _judge(self, store: RunStore, *, deadline_s: float | None, race: bool) -> JudgeResult:
        judging.can_judge(store.manifest, self.folder, self._config)
        history = store.history()
        if not judging.has_work(history, race=race):
            return JudgeResult(self.folder, None, history, ())
        task = task_of_run(self.folder, store.manifest)
        if self._bench is None:
            say = progress_to(self._observe)
            opening = judging.open_bench(task, store.manifest, self._config, say, store.folder)
            self._bench = self._open.enter_context(opening)
        stop: Stop | None = None
        try:
            judged = judging.judge(
                store,
                task,
                self._bench,
                self._observe,
                self._config.budget,
                deadline_s=deadline_s,
                race=race,
            )
            stop = judged.stop
        finally:
            if stop in (None, Stop.TIME, Stop.INTERRUPTED):
                self.close()  # it may be at work still: the next time begins with a new one
        remember_run(store, task, self._config, progress_to(self._observe))
        if stop is Stop.INTERRUPTED:
            raise KeyboardInterrupt
        return judged

    def merge(self, copy: str | Path) -> Merged:
        """Bring verdicts home from a copy of the run's folder that was judged elsewhere.

        Args:
            copy: Folder of the copy.

        Returns:
            The ids of candidates with a verdict now, and of those that are new.

        Raises:
            UserError: The folder is no copy of this run.
            RunError: The two contradict each other; nothing was changed.

        Example:
            Take the verdicts of a copy that was judged on a machine with a GPU:

                import kagent

                merged = kagent.Run.open("latest").merge("copy")
                print(f"{len(merged.verdicts)} verdicts came home")
        """
        paths = "the path of a folder, a copy of this run's"
        require(isinstance(copy, str | Path), "copy", copy, paths)
        return merging.merge(self.folder, Path(copy))

    # -- reading ---------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """The run's task, target, device and seed."""
        return read_history(self.folder)[0].manifest

    @property
    def history(self) -> History:
        """All events of the run, and the lineage."""
        return read_history(self.folder)[1]

    @property
    def best(self) -> Best | None:
        """The fastest correct candidate; None while nothing has passed."""
        return best_of(*read_history(self.folder))

    def close(self) -> None:
        """End the builder and the judge, if they were started. The run can still be used."""
        self._bench = None
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kagent.Run {self.folder}>"


def _nobody(_: Event) -> None:
    """Ignore an event."""


def _silent(_: str) -> None:
    """Ignore a line of progress."""
