"""`--on slurm`: a batch script that starts a Ray cluster in its allocation and works on it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SLURM = "slurm"

_TIMES_AGAIN = 20
_SCRIPT = """\
#!/bin/bash
# Submit it with: sbatch {name}
# A job that is preempted, loses a node or comes to the end of its time is queued again, and goes
# on: verdicts are in the folder.
#SBATCH --job-name=kagent
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append        # a job that is queued again keeps what it wrote before
#SBATCH --nodes=2                 # one judge for each GPU of a run; builders take the other cores
#SBATCH --ntasks-per-node=1       # one Ray node on each
#SBATCH --gpus-per-node=1         # leave it out where kernels run on the CPU
#SBATCH --cpus-per-task=8
#SBATCH --exclusive               # nobody else may use the cores and GPUs that times depend on
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180       # three minutes before the end, to let go of the work in flight

set -u
cd {folder}

export PATH={programs}:"$PATH"              # symmetric-run calls ray by its name
# Since Slurm 22.05 srun gives each task one core, unless it is told.
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}"
# Workers at Ray's nice value of 15 would leave builders, which give way by 10, no lower value.
export RAY_worker_niceness=0
# Every request between the nodes carries a token, which only this user can read.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$PWD/.kagent-ray-token-$SLURM_JOB_ID"
(umask 077; {python} -c 'import secrets; print(secrets.token_hex(32))' > "$RAY_AUTH_TOKEN_PATH")
pid="$PWD/.kagent-pid-$SLURM_JOB_ID"
clean() {{ rm -f "$RAY_AUTH_TOKEN_PATH" "$pid"; }}
trap clean EXIT

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
more=({own})
begun=({begun})
if [ -e "${{begun[0]}}" ]; then more+=({resume}); fi  # it was queued again

# The same command on every node: it starts Ray there, runs kagent on the first node once all are
# up, and stops Ray at the end. Keys of models are not passed to the nodes but by the environment
# that sbatch is called with.
srun --export=ALL --kill-on-bad-exit=1 ray symmetric-run \\
    --address "$head:6379" --min-nodes "$SLURM_NNODES" -- \\
    bash -c 'echo $$ > "$0"; exec "$@"' "$pid" \\
    {command} "${{more[@]}}" &
# Both signals end kagent as Ctrl-C does: what is recorded is kept. They go to kagent alone, which
# ends before Ray: srun would pass them on to Ray's own processes, too.
late=no
stop() {{ kill -TERM "$(cat "$pid" 2>/dev/null || echo $!)"; }}
trap 'late=yes; stop' USR1
trap 'late=no; stop' TERM  # somebody cancels the job
wait $!; status=$?
while kill -0 $! 2>/dev/null; do wait $!; status=$?; done  # a signal ends the first wait
# Slurm does not queue a job again whose time is over. {times} times are enough for any search, and
# an end to one that gets nowhere.
if [ $late = yes ] && [ $status != 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {times} ]; then
    clean  # Slurm may end this script before it does so itself
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


@dataclass(frozen=True)
class Continuation:
    """The way in which a job that is queued again goes on. Paths may use variables of the shell.

    Attributes:
        own: Words that the command gets every time.
        begun: Path, or pattern, of a file that is there once there is something to go on with.
        resume: Words that the command gets then.
    """

    own: Sequence[str] = ()
    begun: str = ""
    resume: Sequence[str] = ()


def run_continues(runs: Path) -> Continuation:
    """A run in a folder that is this job's alone: "latest" there is no other job's run."""
    folder = f"{shlex.quote(str(runs))}/slurm-$SLURM_JOB_ID"
    return Continuation(("--runs", folder), f"{folder}/*/run.json", ("--resume", "latest"))


def campaign_continues(folder: Path) -> Continuation:
    """A campaign in the folder that its command names."""
    return Continuation((), shlex.quote(str(folder / "campaign.json")), ("--resume",))


def write_script(words: Sequence[str], again: Continuation, path: Path) -> None:
    """Write the script of a command.

    Args:
        words: The command's own words, without kagent: `--on slurm` becomes `--on ray`.
        again: How it goes on if the job is queued again.
        path: The script.

    Raises:
        FileExistsError: It is there already: it may have been edited.
    """
    command = [sys.executable, "-m", "kagent", *on_ray(words)]
    text = _SCRIPT.format(
        name=path.name,
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        command=shlex.join(command),
        own=" ".join(again.own),
        begun=again.begun or "''",
        resume=" ".join(again.resume),
        times=_TIMES_AGAIN,
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def on_ray(words: Sequence[str]) -> list[str]:
    """A command's words for the cluster that the script starts."""
    found: list[str] = []
    for word in words:
        value = word == SLURM and found[-1:] == ["--on"]
        found.append("ray" if value else "--on=ray" if word == f"--on={SLURM}" else word)
    return found
