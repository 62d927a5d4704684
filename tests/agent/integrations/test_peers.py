"""OpenEvolve's and ShinkaEvolve's own loops, with kagent's judge as evaluator and recorded replies
as model. Both packages are really run, in a Python of their own:

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install openevolve==0.4.0 shinka-evolve==0.0.7
    KAGENT_TEST_PEERS=/tmp/peers/bin/python .venv/bin/python -m pytest tests/agent/integrations

The judge behind the socket is a stand-in: which programs arrive, and what of a verdict arrives
there, is the point.
"""

import contextlib
import os
import subprocess
import threading
from pathlib import Path

import kagent
import kagent_sandbox
import pytest
from kagent.asktell.results import Result
from kagent.integrations import judge_server
from kagent.integrations.judge_client import JudgeError, judge
from kagent.integrations.reply_pool import ReplyPool, endpoint
from kagent_sandbox.data.verdict import CaseTiming, Passed, Rejected, Stage, Status

PYTHON = os.environ.get("KAGENT_TEST_PEERS", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="KAGENT_TEST_PEERS names no Python with openevolve and shinka-evolve"
)
ROOTS = [str(Path(p.__file__).parents[1]) for p in (kagent, kagent_sandbox)]


def program(number):
    return f"# EVOLVE-BLOCK-START\ndef f(x):\n    return {number}\n# EVOLVE-BLOCK-END\n"


class StandIn:
    """A run in which `return N` is N times as fast as torch, and `return 3` is wrong."""

    def __init__(self):
        self.judged = []

    def tell(self, ask, text, *, kernel):
        if text == "stop":
            raise KeyboardInterrupt
        number = int(text.split("return ")[1].split()[0])
        self.judged.append(number)
        if number == 3:
            verdict = Rejected(Stage.CHECK, Status.INCORRECT_NUMERICAL, "3 is off", "odd")
            return Result(len(self.judged), None, False, "", verdict, None, None, False)
        timing = CaseTiming("wide", 10.0 / number, 9.0, 11.0, 100, 0.5, 1.0, 1.0)
        verdict = Passed((timing,), (), float(number), 0.1)
        return Result(len(self.judged), None, False, "", verdict, float(number), None, True)


@contextlib.contextmanager
def served(path, run):
    def serve():
        with pytest.raises(KeyboardInterrupt):
            judge_server.serve(run, path, lambda _: None)

    thread = threading.Thread(target=serve)
    thread.start()
    while not path.is_socket():
        assert thread.is_alive()
    try:
        yield
    finally:
        with pytest.raises(JudgeError):
            judge("stop", str(path))
        thread.join(10)


@contextlib.contextmanager
def pooled(pool):
    with endpoint(pool) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def reply(number):
    name = f"<NAME>\nof_{number}\n</NAME>\n<DESCRIPTION>\nIt is {number}.\n</DESCRIPTION>\n"
    return f"{name}<CODE>\n```python\n{program(number)}```\n</CODE>\n"


def searched(tmp_path, script):
    """Run a system's loop on replies 2, 3 and 4; the programs that were judged, and its output."""
    (tmp_path / "initial.py").write_text(program(1))
    (tmp_path / "drive.py").write_text(script)
    run, pool = StandIn(), ReplyPool([("", reply(n)) for n in (2, 3, 4)])
    with served(tmp_path / "judge.sock", run), pooled(pool) as url:
        done = subprocess.run(
            [PYTHON, "drive.py", url],
            cwd=tmp_path,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("KAGENT_")},
                "PYTHONPATH": os.pathsep.join(ROOTS),
                "KAGENT_JUDGE": str(tmp_path / "judge.sock"),
                "OPENAI_API_KEY": "none",
                "LOCAL_OPENAI_API_KEY": "none",
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run.judged, done.stdout, pool


SHINKA = """
import sqlite3
import sys
from pathlib import Path

import kagent.integrations
from shinka.core import EvolutionConfig, ShinkaEvolveRunner
from shinka.database import DatabaseConfig
from shinka.launch import LocalJobConfig

program = Path(kagent.integrations.__file__).with_name("shinka.py")
ShinkaEvolveRunner(
    evo_config=EvolutionConfig(
        task_sys_msg="Make it faster.",
        patch_types=["full"],
        patch_type_probs=[1.0],
        num_generations=4,
        llm_models=[f"local/recorded@{sys.argv[1]}"],
        llm_kwargs={"temperatures": [0.0], "max_tokens": 1000},
        llm_dynamic_selection=None,
        embedding_model=None,
        meta_rec_interval=None,
        init_program_path="initial.py",
        results_dir="results",
        use_text_feedback=True,
    ),
    job_config=LocalJobConfig(eval_program_path=str(program)),
    db_config=DatabaseConfig(db_path="programs.sqlite", num_islands=1),
    max_evaluation_jobs=1,
    max_proposal_jobs=1,
    verbose=False,
).run()
(path,) = Path(".").rglob("programs.sqlite")
with sqlite3.connect(path) as db:
    for row in db.execute("SELECT combined_score, correct, text_feedback FROM programs"):
        print("PROGRAM", *row)
"""


@pytest.mark.timeout(240)
def test_shinkas_loop_is_judged_and_gets_scores_and_words(tmp_path):
    judged, said, pool = searched(tmp_path, SHINKA)
    assert judged[0] == 1
    assert set(judged) == {1, 2, 3, 4}
    assert pool.calls >= 3
    assert "PROGRAM 4.0 1" in said
    assert "PROGRAM 0.0 0 INCORRECT_NUMERICAL (check) in odd: 3 is off" in said


OPENEVOLVE = """
import asyncio
import sys
from pathlib import Path

from openevolve import OpenEvolve
from openevolve.config import load_config

Path("evaluator.py").write_text("from kagent.integrations.openevolve import evaluate\\n")
Path("config.yaml").write_text(f'''
max_iterations: 3
diff_based_evolution: false
llm:
  api_base: {sys.argv[1]}
  api_key: none
  models: [{{name: recorded, weight: 1.0}}]
evaluator: {{parallel_evaluations: 1, cascade_evaluation: false}}
''')
config = load_config("config.yaml")
search = OpenEvolve("initial.py", "evaluator.py", config=config, output_dir="out")
asyncio.run(search.run())
for program in search.database.programs.values():
    print("PROGRAM", program.metrics["combined_score"], program.metrics["correct"])
"""


@pytest.mark.timeout(240)
def test_openevolves_loop_is_judged_and_gets_scores(tmp_path):
    judged, said, _ = searched(tmp_path, OPENEVOLVE)
    assert judged[0] == 1
    assert set(judged) == {1, 2, 3, 4}
    assert "PROGRAM 4.0 1.0" in said
    assert "PROGRAM 0.0 0.0" in said
