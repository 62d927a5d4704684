"""`kagent serve` and `kagent pool`: judge and model for other search systems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import (
    DRIVE,
    INTERRUPTED,
    DeviceOption,
    IsolationOption,
    JobsOption,
    LangName,
    RunsOption,
    app,
    isolate,
    out,
)
from kagent.config.settings import load_config


@app.command(rich_help_panel=DRIVE)
def serve(
    task: Annotated[str, typer.Argument(help="A task, by name or folder.")],
    socket: Annotated[
        Path, typer.Option(help="Socket that programs are sent to.", show_default=True)
    ] = Path("judge.sock"),
    lang: Annotated[
        LangName | None, typer.Option(help="Of the seeds that are judged first (any).")
    ] = None,
    _device: DeviceOption = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    runs: RunsOption = None,
) -> None:
    """Judge programs of another search system, in a run of its own."""
    from kagent.api import Run
    from kagent.integrations.judge_client import VARIABLE
    from kagent.integrations.judge_server import listening
    from kagent.integrations.judge_server import serve as serve_run

    isolate(isolation)
    with (
        listening(socket) as listener,  # first: without a socket there is no use for a run
        Run(task, lang=lang, memory=False, runs=runs, jobs=jobs) as run,
    ):
        out.print(f"{VARIABLE}={socket.absolute()}", markup=False, soft_wrap=True)
        out.print(f"programs are kept in {run.folder}", markup=False, soft_wrap=True)
        try:
            serve_run(run, listener, lambda text: out.print(text, markup=False))
        except KeyboardInterrupt:
            out.print(f"next: kagent judge {run.folder.name} --race", markup=False)
            raise typer.Exit(INTERRUPTED) from None


@app.command(rich_help_panel=DRIVE)
def pool(
    source: Annotated[str, typer.Argument(help="An answered run, or a file of replies.")],
    port: Annotated[int, typer.Option(help="On 127.0.0.1.", min=0, max=65535)] = 8000,
    runs: RunsOption = None,
) -> None:
    """Answer calls of a model from recorded replies, as an endpoint on this machine."""
    from kagent.integrations.reply_pool import endpoint, pool_of_run, read_pool
    from kagent.runs.manifest import find_run

    path = Path(source)
    is_file = path.is_file()
    known = (
        read_pool(path) if is_file else pool_of_run(find_run(load_config(runs=runs).runs, source))
    )
    if not known.replies:
        raise UserError(f"{source}: holds no replies")
    try:
        server = endpoint(known, port)
    except OSError as e:
        raise UserError(f"port {port}: {e.strerror} (--port 0 takes any free one)") from None
    with server:
        replies = f"{len(known.replies)} replies"
        out.print(f"{replies} at http://127.0.0.1:{server.server_port}/v1", markup=False)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print(f"{known.calls} calls, {known.misses} found no reply", markup=False)
            raise typer.Exit(INTERRUPTED) from None
