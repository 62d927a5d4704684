"""A whole run on a Ray cluster of two nodes, on this machine, with each part killed once."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel
from evolve_process import command
from kagent.campaign.record import Campaign
from kagent.export.reading import read_library
from kagent.runs.manifest import list_runs
from kagent.runs.store import read_history
from kagent.suite.record import ProblemState, read_record
from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.process_tree import kill_tree

pytestmark = [
    pytest.mark.skipif(
        not find_spec("ray"), reason="Ray is not installed: pip install 'kagent[ray]'"
    ),
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("uncompiled", "orphans_come_here"),
]

RAY = Path(sys.executable).with_name("ray")
WORKERS = ("ray::JudgeWorker", "ray::BuildWorker", "ray::ExportWorker")


class Cluster:
    """Nodes of a Ray cluster, each with its processes below one of this process's."""

    def __init__(self, port, client_port):
        self.address = f"127.0.0.1:{port}"
        self.client_address = f"ray://127.0.0.1:{client_port}"
        self.nodes = []
        self.judge_nodes = []

    def add(self, cpus, *more):
        words = ["start", "--block", "--num-cpus", cpus, "--object-store-memory", 80 << 20]
        words += ["--include-log-monitor", "false", *more]  # it reads files all the time
        for _ in range(3):  # Ray gives a node 30 s to start, which a busy machine takes longer for
            process = subprocess.Popen(
                [RAY, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            said = []
            for line in process.stdout:
                said.append(line)
                if "Ray runtime started" in line:
                    self.nodes.append(process)
                    return process
            end(process)
        raise AssertionError("".join(said))

    def have_judge_nodes(self, count):
        """Nodes with room for a judge: so many are up, those of tests before among them."""
        for _ in range(count - len(self.judge_nodes)):
            self.judge_nodes.append(self.add(2, "--address", self.address))

    def lose_judge_node(self):
        end(self.judge_nodes.pop())

    def close(self):
        for process in self.nodes:
            end(process)


def end(process):
    """Kill a node: everything that runs on it."""
    kill_tree(process.pid)
    process.wait()
    process.stdout.close()


def tls(folder):
    """Environment in which all requests are encrypted, by a certificate that signs itself."""
    from ray.util import get_node_ip_address

    cert, key = folder / "cert.pem", folder / "key.pem"
    addresses = {"127.0.0.1", get_node_ip_address()}
    names = ",".join(["DNS:localhost", *(f"IP:{a}" for a in sorted(addresses))])
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kagent"]
    words += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(words, check=True, capture_output=True)
    files = {"SERVER_CERT": cert, "SERVER_KEY": key, "CA_CERT": cert}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{n}": str(p) for n, p in files.items()}}


@pytest.fixture(scope="module")
def cluster(uncompiled, measured_once):
    """A head with a CPU, which is for a builder. Requests carry a token, and are encrypted."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="kr") as folder,
        socket.create_server(("127.0.0.1", 0)) as free,
        socket.create_server(("127.0.0.1", 0)) as free_too,
    ):
        port, client_port = (s.getsockname()[1] for s in (free, free_too))
        free.close()
        free_too.close()
        token = Path(folder) / "token"
        token.write_text("0123456789abcdef" * 4)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        for name, value in tls(Path(folder)).items():
            patch.setenv(name, value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("on_nodes")))
        patch.setenv("RAY_health_check_period_ms", "500")  # a lost node is missed after 5 of them
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # kagent's actors have their own
        made = Cluster(port, client_port)
        try:
            alone = ["--include-dashboard", "false", "--no-monitor", "--temp-dir", folder]
            # Builders leave the CPUs of other nodes to judges that are started again.
            alone += ["--ray-client-server-port", client_port]
            made.add(1, "--head", "--port", port, "--labels", "kagent-role=builder", *alone)
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("double")
    small = re.sub(r"  { name = \"(odd|long)\".*\n", "", TASK)
    (folder / "task.toml").write_text(small)
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "cpp_parallel.py").write_text(kernel(PARALLEL + PLAIN))
    return folder


def start(task, runs, *more):
    words = ["evolve", task, "--lang", "cpp", "--runs", runs, "--on", "ray", "--no-early-stop"]
    return subprocess.Popen(
        [sys.executable, "-m", "kagent", *map(str, [*words, *more])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(process, seen):
    said = []
    for line in process.stdout:
        said.append(line)
        if re.search(seen, line):
            return
    raise AssertionError("".join(said) + process.stderr.read())


def wait_for_verdicts(folder, count, process, said):
    """Until the campaign's run has so many."""
    while process.poll() is None:
        found = [read_history(r)[1].lineage for r in list_runs(folder / "runs")]
        if found and len(found[0]) >= count:
            return
        time.sleep(0.3)
    raise AssertionError(said.read_text())


def workers():
    """Process ids of judges and of kagent's workers, by what they are."""
    found = {}
    for pid in process_tree.descendants(os.getpid()):
        words = command(pid)
        for name in (*WORKERS, "kagent_sandbox.judge.server"):
            if name in words and not process_tree.ended(pid):
                found[name] = pid
    return found


def kill(name):
    deadline = time.monotonic() + 120.0
    while name not in (found := workers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(found[name], signal.SIGKILL)


def assert_no_worker_is_left():
    deadline = time.monotonic() + 60.0
    while (left := workers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def test_a_campaign_survives_its_workers_its_judge_a_node_and_its_command(cluster, task, tmp_path):
    cluster.have_judge_nodes(1)
    folder = tmp_path / "c"
    words = ["campaign", task, "--lang", "cpp", "--device", "cpu", "--on", "ray", "--to", folder]
    words = [sys.executable, "-m", "kagent", *map(str, words)]
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = subprocess.Popen([*words, "--budget", "6"], stdout=file, stderr=file)
    try:
        wait_for_verdicts(folder, 1, process, said)
        for name in ("ray::BuildWorker", "kagent_sandbox.judge.server", "ray::JudgeWorker"):
            kill(name)
        wait_for_verdicts(folder, 2, process, said)
        cluster.lose_judge_node()
        cluster.have_judge_nodes(1)
        wait_for_verdicts(folder, 3, process, said)
    finally:
        process.kill()  # alone: what it has started finds out
        process.wait()
    assert_no_worker_is_left()
    (run,) = list_runs(folder / "runs")
    store, history = read_history(run)
    before = [c.id for c in history.lineage]
    assert before[:3] == [0, 1, 2]
    environment = store.manifest.environment
    assert environment["isolation"] >= "T1"
    assert all(environment["canaries"].values())
    assert set(environment["places"]) == {"judge", "builder 0"}

    # The budget is a smaller one now, so that the next slice is the last one.
    more = ["--resume", "--budget", "3"]
    again = subprocess.run([*words, *more], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again
    history = read_history(run)[1]
    assert history.lineage.counted == 3
    assert [c.id for c in history.lineage] == list(range(len(history.lineage)))
    assert [c.id for c in history.lineage][: len(before)] == before
    for candidate in history.lineage:  # nobody is blamed for what was done to the machines
        assert "lost" not in getattr(candidate.verdict, "message", "")
    campaign = read_record(folder, Campaign)
    (problem,) = campaign.problems
    progress = campaign.of(problem)
    assert (progress.state, progress.reason) == (ProblemState.DONE, "")
    assert [c.run for c in campaign.runs] == [run.name]
    assert {r.name for r in list_runs(folder / "runs")} == {run.name, progress.run}
    store, history = read_history(folder / "runs" / progress.run)
    assert history.race.winner is not None
    assert set(store.manifest.environment["places"]) == {"judge", "builder 0"}
    assert_no_worker_is_left()

    words = ["export", folder / "runs" / progress.run, "--to", tmp_path / "lib", "--on", "ray"]
    words = [sys.executable, "-m", "kagent", *map(str, words), "--allow-slower"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "measuring on" in done.stderr
    library = read_library(tmp_path / "lib").library
    assert [o.task for o in library.operators] == ["double"]
    assert_no_worker_is_left()


def test_two_judges_share_a_run_and_one_of_them_may_be_lost(cluster, task, tmp_path):
    """All nodes are on one host, so their judges take turns. Either may be lost, also the first:
    the third node is for it. The agent is no part of the cluster here.
    """
    cluster.have_judge_nodes(3)
    where = ["--on", cluster.client_address]
    process = start(task, tmp_path / "runs", "--budget", 3, "--judges", 2, *where)
    try:
        wait_until(process, r"judges, too|does not judge")
        cluster.lose_judge_node()
        said = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, 3), said
    (run,) = list_runs(tmp_path / "runs")
    store, history = read_history(run)
    assert history.lineage.counted == 3
    assert history.race is not None
    assert set(store.manifest.environment["places"]) >= {"judge", "judge 1", "builder 0"}
    (event,) = [e for e in history.events if e.kind == "units"]
    home, others = event.data["home"], event.data["others"]
    names = {home, *(o["unit"] for o in others if not o["why_not"])}
    passed = [c for c in history.lineage if isinstance(c.verdict, Passed)]
    assert {c.unit for c in passed} <= names
    assert len(others) == 1
    assert_no_worker_is_left()


def test_a_wrong_token_is_refused_in_a_line(cluster, task, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "2")  # of 20, a second each: it says no at once
    process = start(task, tmp_path / "runs", "--budget", 1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    assert "no Ray cluster at" in err
    assert "Traceback" not in err


def test_the_cluster_speaks_to_holders_of_a_certificate_alone(cluster):
    host, port = cluster.address.split(":")
    answers = []
    for holds in (False, True):
        context = ssl.create_default_context(cafile=os.environ["RAY_TLS_CA_CERT"])
        context.set_alpn_protocols(["h2"])
        if holds:
            own = [os.environ[f"RAY_TLS_SERVER_{n}"] for n in ("CERT", "KEY")]
            context.load_cert_chain(*own)
        with (
            socket.create_connection((host, int(port)), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname=host) as channel,
        ):
            try:
                answers.append(channel.recv(9)[3:4])
            except OSError:  # it hangs up in one way or another
                answers.append(b"")
    assert answers == [b"", b"\x04"]  # a gRPC server's first frame has its settings
