"""Shared parts of all commands: the application, its consoles, and the handling of errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import pydantic
import typer
from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.data.language import ANY, LANGUAGES
from kagent_sandbox.errors import KagentError, UserError
from rich.text import Text
from typer.core import TyperGroup

from kagent import resources
from kagent.config.devices import use_device
from kagent.config.faults import problem_of, with_value
from kagent.config.settings import OptionError, load_config
from kagent.fleet.fleet import LOCAL
from kagent.ui.terminal import STDERR, Terminal

NOT_FASTER = 3  # exit code of a run whose final race found TIE or SLOWER
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it

EVOLVE, LOOK, EXPORT = "Evolve", "Look at runs", "Export"
MODELS = "Whole models"
DRIVE, TRUST = "Drive from outside", "Trust"
_PANELS = (EVOLVE, LOOK, EXPORT, MODELS, DRIVE, TRUST)
"""Groups of commands, in the order in which --help shows them."""
_FIRST = ("evolve", "runs", "show")
"""Commands that stand first in their group."""


class _Grouped(TyperGroup):
    """Commands by group."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of --help."""

        def place(name: str) -> tuple[int, int]:
            panel = getattr(self.commands[name], "rich_help_panel", TRUST)
            first = _FIRST.index(name) if name in _FIRST else len(_FIRST)
            return _PANELS.index(panel), first

        return sorted(super().list_commands(ctx), key=place)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it says of a value that does not fit names the value. After Ctrl-C
        a command without words of its own ends with these.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            err.print("kagent: interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except typer.BadParameter as e:
            if isinstance(cause := e.__cause__, pydantic.ValidationError):  # Typer from 0.26 on
                first = cause.errors()[0]
                e.message = with_value(problem_of(first), first["input"])
            raise


app = typer.Typer(
    cls=_Grouped,
    help="Evolve GPU kernels and keep only the speed-ups that can be proved.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Tables need room, and a pipe has no width of its own.
out = Terminal(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)
err = Terminal(file=STDERR, stderr=True, highlight=False, markup=False, soft_wrap=True)

if TYPE_CHECKING:
    from kagent.fleet.slurm import Continuation

    LangName: TypeAlias = str
else:
    LangName = Literal[(*LANGUAGES, ANY)]  # what --lang takes


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"kagent {resources.version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of kagent itself."""


def write_slurm_script(what: str, again: Continuation) -> None:
    """Write this very command as a batch script, and say how to submit it.

    Args:
        what: What it is about, for the name of the file.
        again: How it goes on in a job that is queued again.

    Raises:
        UserError: The file is there already, or cannot be written.
    """
    from kagent.fleet.slurm import write_script

    path = Path(f"kagent-{what}.sbatch")
    try:
        write_script(sys.argv[1:], again, path)
    except OSError as e:
        hint = "move it away first" if isinstance(e, FileExistsError) else "use another folder"
        raise UserError(f"{path}: {e.strerror}: {hint}") from None
    out.print(f"wrote {path}: look at its #SBATCH lines, then submit it with: sbatch {path}")


def complete_task(incomplete: str) -> list[str]:
    """Names of tasks, for a shell."""
    from kagent.tasks import task_names

    return [name for name in task_names() if name.startswith(incomplete)]


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, the last one first, for a shell."""
    from kagent.runs.manifest import list_runs

    given = next((v for k, v in ctx.params.items() if k in ("runs", "folder")), None)
    with contextlib.suppress(KagentError, OSError):
        where = load_config(runs=given if isinstance(given, Path) else None).runs
        names = [folder.name for folder in list_runs(where)][::-1]
        return [name for name in (*names, "latest") if names and name.startswith(incomplete)]
    return []


def complete_run_or_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs and of tasks, for a shell."""
    return [*complete_task(incomplete), *complete_run(ctx, incomplete)]


RunArgument = Annotated[
    str, typer.Argument(help="A run's name, path, or 'latest'.", autocompletion=complete_run)
]
TASK = typer.Option(
    "--task", help="A task's name, or its folder's path.", autocompletion=complete_task
)
TaskOption = Annotated[str, TASK]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def _use_device(name: str | None) -> str | None:
    use_device(name)
    return name


DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda:N|UUID",
        help="Device to use (the first GPU, else the CPU); kagent devices lists them.",
        envvar="KAGENT_DEVICE",
        callback=_use_device,
        is_eager=True,  # before anything asks whether there is a GPU
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="local|ray|ray://HOST|slurm",
        help="Where to build and judge: docs/clusters.md (local).",
    ),
]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE|cpu", help="GPU of the cluster to judge on, as Ray labels it: H100."
    ),
]
LangOption = Annotated[
    LangName | None,
    typer.Option(help="Language of the seeds: any = those for this machine's GPU, else CPU."),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(help="Model to ask, as NAME or NAME=WEIGHT; may be repeated."),
]
JobsOption = Annotated[int | None, typer.Option(help="Builds at once (all cores).", min=1)]
IsolationOption = Annotated[
    Literal["auto", "T0", "T1", "T2", "T3"] | None,
    typer.Option(help="Tier of isolation to require; T0 accepts none (the highest that works)."),
]
FreshOption = Annotated[
    bool | None,
    typer.Option("--fresh", help="Measure baselines again (else once a day).", show_default=False),
]
MemoryOption = Annotated[
    bool | None,
    typer.Option(
        "--memory/--no-memory",
        help="Start from kernels of earlier runs of related tasks, and keep this run's (on).",
        show_default=False,
    ),
]
RunsOption = Annotated[Path | None, typer.Option("--runs", help="Folder of run folders (runs/).")]


def _end_as_by_ctrl_c(number: int, _frame: object) -> None:
    """Handle a signal that asks the program to end: what runs is ended, and what is recorded is
    kept.
    """
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
        os.write(2, f"kagent: {name}: ending as after Ctrl-C\n".encode())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    """Run the command line; every error is one clear text and a non-zero exit."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # a first process of a container ignores others
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end_as_by_ctrl_c)
    try:
        app(standalone_mode=True)
    except KagentError as e:
        text = e.on_command_line if isinstance(e, OptionError) else str(e)
        err.print(Text(f"kagent: {text}", style="red"))
        sys.exit(e.exit_code)
    finally:
        # All is said and stored: another Ctrl-C would only show how the interpreter ends.
        signal.signal(signal.SIGINT, lambda *_: None)


def isolate(flag: str | None) -> None:
    """Confine what this command starts as its flag says, or else the configuration.

    Raises:
        UserError: An option does not fit.
    """
    ask_for(load_config(isolation=flag).isolation)


def runs_to_list(folder: Path | None) -> Path:
    """The folder whose runs a command lists. The default one need not be there yet.

    Args:
        folder: As `--runs` takes it.

    Raises:
        UserError: It is no folder.
    """
    where = load_config(runs=folder).runs
    if where.exists() and not where.is_dir():
        raise UserError(f"{where}: a file, where a folder of runs was expected")
    if folder is not None and not where.exists():
        raise UserError(f"{where}: no such folder: --runs names a folder of runs")
    return where


def refuse_device(device: str | None, where: str) -> None:
    """Make sure that no device of this machine is chosen for work that is elsewhere.

    Args:
        device: As `--device` takes it.
        where: As `--on` takes it.

    Raises:
        UserError: One is.
    """
    if device is not None and where != LOCAL:
        raise UserError(
            f"--device {device} (or KAGENT_DEVICE) chooses a device of this machine, and --on "
            f"{where} judges elsewhere: leave it out; --accelerator chooses among those of a "
            "cluster"
        )


def print_json(value: object) -> None:
    """JSON on stdout, for programs."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, a line each elsewhere; on stderr, so that stdout stays clean."""
    if quiet:
        yield lambda _text: None
    elif err.is_terminal:
        with err.status("starting") as spinner:
            yield lambda text: spinner.update(Text(text))
    else:
        yield lambda text: err.print(text)
