"""`--on slurm`: a batch script that starts a Ray cluster in its allocation and works on it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

SLURM = "slurm"

_SCRIPT = """\
#!/bin/bash
# Submit it with: sbatch {name}
# A preempted or timed-out job is queued again, and goes on: verdicts are in the folder.
#SBATCH --job-name=kagent
#SBATCH --output=%x-%j.log
#SBATCH --nodes=2                 # one judge for each GPU of a run; builders take the other cores
#SBATCH --ntasks-per-node=1       # one Ray node on each
#SBATCH --gpus-per-node=1         # leave it out where kernels run on the CPU
#SBATCH --cpus-per-task=8
#SBATCH --exclusive               # nobody else may use the cores and GPUs that times depend on
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120       # two minutes to let go of the work in flight

set -u
cd {folder}

# Workers at Ray's nice value of 15 would leave builders, which give way by 10, no lower value.
export RAY_worker_niceness=0
# Every request between the nodes carries a token, which only this user can read.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$PWD/.kagent-ray-token-$SLURM_JOB_ID"
(umask 077; {python} -c 'import secrets; print(secrets.token_hex(32))' > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
resume=()
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then resume=({resume}); fi

# The same command on every node: it starts Ray there, runs kagent on the first node once all are
# up, and stops Ray at the end. Keys of models are not passed to the nodes but by the environment
# that sbatch is called with.
srun --export=ALL {ray} symmetric-run --address "$head:6379" --min-nodes "$SLURM_NNODES" -- \\
    {command} "${{resume[@]}}" &
trap 'kill -TERM $!' TERM           # as Ctrl-C: what is recorded is kept
wait $!; status=$?
wait $! 2>/dev/null                 # after a signal the first wait returns before kagent has ended
exit $status
"""


def write_script(words: Sequence[str], resume: Sequence[str], path: Path) -> None:
    """Write the script of a command.

    Args:
        words: The command's own words, without kagent: `--on slurm` becomes `--on ray`.
        resume: What is added when the job is queued again.
        path: The script.

    Raises:
        FileExistsError: It is there already: it may have been edited.
    """
    command = [sys.executable, "-m", "kagent", *on_ray(words)]
    text = _SCRIPT.format(
        name=path.name,
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        ray=shlex.quote(str(Path(sys.executable).with_name("ray"))),
        command=shlex.join(command),
        resume=shlex.join(resume),
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
