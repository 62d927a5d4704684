"""Trial calls: `kagent doctor` and the models that are set, and `kagent evolve` before a run."""

import json
import socket

import pytest
from commands import run
from kagent import doctor
from kagent.doctor import Level
from kagent.evolve import session
from kagent_sandbox.errors import MachineError
from llm_server import GOOD, KEY, chunk, plain, sse


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAGENT_API_KEY", KEY)


@pytest.fixture
def answering(httpserver):
    """Makes the server answer calls, and gives its address."""

    def answer(**how):
        expected = httpserver.expect_request("/v1/chat/completions", method="POST")
        if "json" in how:
            expected.respond_with_json(how["json"], status=how.get("status", 200))
        else:
            expected.respond_with_data(how["data"], content_type="text/event-stream")
        return httpserver.url_for("/v1")

    return answer


def one(**flags):
    [found] = doctor._models(flags)
    assert KEY not in found.text
    return found


def test_a_model_that_works(answering):
    found = one(model=["tiny"], base_url=answering(data=GOOD))
    assert (found.level, found.name) == (Level.OK, "model tiny")
    assert found.text.startswith("localhost:")
    assert ": replied in " in found.text
    assert "; 11 + 7 tokens; no price is known (input_price and output_price" in found.text
    assert "does not take" not in found.text


def test_a_price_is_told(answering, tmp_path):
    url = answering(data=GOOD)
    table = f"base_url = '{url}'\n[[models]]\nname = 'tiny'\ninput_price = 1\noutput_price = 10\n"
    (tmp_path / "kagent.toml").write_text(table)
    assert "11 + 7 tokens; $0.000081" in one().text


def test_what_is_not_reported_is_told(answering):
    found = one(model=["tiny"], base_url=answering(data=sse(chunk("yes"), chunk(finish="length"))))
    assert "cut at the token limit; reports no token counts" in found.text


def test_what_is_not_taken_is_told(httpserver):
    def answer(request):
        from werkzeug import Response

        sent = json.loads(request.data)
        refused = [name for name in ("temperature", "stream_options") if name in sent]
        if refused:
            error = {"error": {"message": f"{refused[0]} is unsupported", "param": refused[0]}}
            return Response(json.dumps(error), 400, content_type="application/json")
        return Response(json.dumps(plain()), 200, content_type="application/json")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(answer)
    found = one(model=["tiny"], base_url=httpserver.url_for("/v1"), temperature=0.3)
    assert found.level is Level.OK
    assert "does not take, and is not sent: temperature, stream_options" in found.text


def test_a_model_that_fails_is_one_line(answering):
    url = answering(json={"error": {"message": f"wrong key {KEY}"}}, status=401)
    found = one(model=["tiny"], base_url=url)
    assert found.level is Level.BROKEN
    assert "refused the key (401: wrong key [key]); check KAGENT_API_KEY" in found.text
    assert "\n" not in found.text


def test_every_model_is_tried(answering):
    url = answering(data=GOOD)
    found = doctor._models({"model": ["a=2", "b"], "base_url": url})
    assert [f.name for f in found] == ["model a", "model b"]


def test_a_configuration_that_makes_no_sense(monkeypatch):
    monkeypatch.delenv("KAGENT_API_KEY")
    found = one(model=["tiny"])
    assert (found.level, found.name) == (Level.BROKEN, "configuration")
    assert "tiny at api.openai.com has no key: set KAGENT_API_KEY" in found.text
    assert one(proposer="model").level is Level.BROKEN


def test_the_command(answering, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # not this machine's own selftest
    for part in ("_compilers", "_isolation", "_gpu"):
        nothing = doctor.Finding(Level.OK, part, "")
        found = [nothing] if part == "_compilers" else nothing
        monkeypatch.setattr(doctor, part, lambda *_, found=found: found)
    url = answering(data=GOOD)
    done = run(monkeypatch, capsys, "doctor", "--model", "tiny", "--base-url", url, "--json")
    assert done.code == 0
    assert json.loads(done.out)[-1]["name"] == "model tiny"
    assert run(monkeypatch, capsys, "doctor").code == 0
    refused = run(monkeypatch, capsys, "doctor", "--model", "t", "--base-url", f"{url}/nowhere")
    assert refused.code == 5
    assert "model t at localhost:" in refused.out


@pytest.fixture
def evolving(monkeypatch, capsys, tmp_path):
    """`kagent evolve` with a model at an address, and whether anything was opened to measure."""
    opened = []

    def open_machine(*_given, **_named):
        opened.append(True)
        raise MachineError("the machine is opened")

    monkeypatch.setattr(session, "open_machine", open_machine)

    def evolve(url):
        words = ("evolve", "softmax", "--lang", "cpp", "--model", "tiny", "--base-url", url)
        done = run(monkeypatch, capsys, *words, "--runs", tmp_path / "runs")
        return done, bool(opened)

    return evolve


UNKNOWN = {"error": {"message": "The model 'tiny' does not exist", "code": "model_not_found"}}


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, {"error": {"message": "wrong key"}}, "refused the key (401: wrong key); check"),
        (404, UNKNOWN, "does not know the model (404: The model 'tiny' does not exist); check"),
        (200, {"hello": "world"}, "which is no chat completion; check the base URL"),
    ],
)
def test_a_model_that_cannot_be_asked_ends_a_run_before_anything_is_measured(
    answering, evolving, status, body, told
):
    done, opened = evolving(answering(json=body, status=status))
    assert (done.code, opened) == (1, False)
    assert told in done.err
    assert done.err.count("\n") == 1


def test_a_dead_endpoint_ends_a_run_before_anything_is_measured(evolving):
    with socket.socket() as unused:  # bound, and nobody listens there
        unused.bind(("127.0.0.1", 0))
        done, opened = evolving(f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
    assert (done.code, opened) == (1, False)
    assert "refused the connection, asked once; start the server" in done.err


@pytest.mark.parametrize("how", [{"data": GOOD}, {"json": {"error": "loading"}, "status": 503}])
def test_a_model_that_is_there_lets_a_run_begin_though_it_is_busy(answering, evolving, how):
    done, opened = evolving(answering(**how))
    assert opened
    assert "asking tiny at localhost:" in done.out
    assert ("(the run begins all the same)" in done.out) == ("status" in how)
