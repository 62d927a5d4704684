"""A real server program with a tiny model of random weights: garbage replies and all.

Opt-in, since the program is large. In an environment of its own:

    python3 -m venv /tmp/serving && /tmp/serving/bin/pip install 'transformers[serving]' torch
    KAGENT_TEST_SERVER=/tmp/serving/bin/python .venv/bin/python -m pytest tests/agent/model -k real

Nothing is downloaded: the model is made here and saved to disk.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from kagent.llm.chat import ModelError
from kagent.llm.endpoint import Endpoint
from kagent.llm.ping import try_models
from kagent.llm.reply import Answer, read_reply
from kagent.runs.ask import Prompt
from kagent_sandbox.data.verdict import Rejected
from llm_server import model_at

PYTHON = os.environ.get("KAGENT_TEST_SERVER", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KAGENT_TEST_SERVER names no Python with transformers"),
    pytest.mark.timeout(400),
]

MAKE_MODEL = r"""
import sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
special = ["<s>", "</s>"]
trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
made.train_from_iterator(["Hypothesis: x\n```python\ndef softmax(x):\n```\n"], trainer)
tokens = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
tokens.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
tokens.save_pretrained(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=65536,
    bos_token_id=0, eos_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Name and address of a model that is being served."""
    folder = tmp_path_factory.mktemp("served")
    name = str(folder / "tiny")
    subprocess.run([PYTHON, "-c", MAKE_MODEL, name], check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(PYTHON).parent / "transformers")
    words = [program, "serve", name, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    log = folder / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            words, stdout=file, stderr=file, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield name, f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(url, server, log):
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text())


def asked(served, count=1, **changes):
    """What calls in flight together came to."""
    name, url = served

    async def run():
        endpoint = Endpoint(model_at(url, **{"name": name, "api_key": None, **changes}))
        prompt = Prompt("You write kernels.", "Write a softmax.")
        calls = [endpoint.complete(prompt) for _ in range(count)]
        try:
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await endpoint.close()

    return asyncio.run(run())


def test_replies_are_garbage_and_are_read(served):
    for reply in asked(served, 4, reply_tokens=64, temperature=0.7, reply_s=120.0):
        assert reply.output_tokens == 64
        assert reply.input_tokens > 0
        assert reply.truncated
        assert reply.dollars is not None  # at the price that the test states
        read = read_reply(reply.text, "softmax", truncated=reply.truncated)
        assert isinstance(read, Rejected | Answer)


def test_another_model_is_an_error(served):
    [error] = asked(served, name="no/such-model")
    assert isinstance(error, ModelError)
    assert "no/such-model" in str(error)


def test_a_reply_that_takes_too_long_is_an_error(served):
    [error] = asked(served, reply_tokens=30_000, reply_s=1.0)
    assert isinstance(error, ModelError)
    assert "within 1 s" in str(error)


def test_the_doctor_calls_it(served):
    name, url = served
    [trial] = try_models([model_at(url, name=name, api_key=None, prices=None, reply_tokens=32)])
    assert "replied in" in trial.text
    assert "no price is known" in trial.text


def test_a_run_keeps_what_it_answers(served, tmp_path):
    name, url = served
    words = ["evolve", "softmax", "--lang", "cpp", "--budget", "3", "--model", name]
    done = subprocess.run(
        [sys.executable, "-m", "kagent", *words, "--base-url", url],
        cwd=tmp_path,
        env={**os.environ, "KAGENT_REPLY_TOKENS": "64"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr  # 3: not FASTER
    assert "3 evaluated" in done.stdout
    shown = subprocess.run(
        [sys.executable, "-m", "kagent", "show", "latest", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "NO_KERNEL" in json.dumps(json.loads(shown.stdout))
