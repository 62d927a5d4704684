"""An OpenAI-compatible endpoint on this machine that answers from recorded replies, so that search
systems are compared on what they make of the same model's answers.

Replies come from a run that was answered, or from a file of lines {"parent": TEXT, "reply": TEXT}.
A prompt gets the first unused reply to a parent whose text is in it, else the first unused one of a
line without a parent. Each is given once. A call that finds none is answered with status 404, and
counted: it is no answer of a model.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kagent_sandbox.errors import UserError

from kagent.runs.store import read_history


@dataclass
class ReplyPool:
    """Replies, each for a parent's text; an empty text is any parent's."""

    replies: list[tuple[str, str]]
    calls: int = 0
    misses: int = 0
    _used: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, prompt: str) -> str | None:
        """The next reply for a prompt; None where none is left."""
        with self._lock:
            self.calls += 1
            unused = [i for i in range(len(self.replies)) if i not in self._used]
            fitting = [i for i in unused if (parent := self.replies[i][0]) and parent in prompt]
            anyone = [i for i in unused if not self.replies[i][0]]
            chosen = next(iter([*fitting, *anyone]), None)
            if chosen is None:
                self.misses += 1
                return None
            self._used.add(chosen)
            return self.replies[chosen][1]


def read_pool(path: Path) -> ReplyPool:
    """Read a file of replies.

    Raises:
        UserError: A line is none, or the file cannot be read.
    """
    replies = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: {e}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            parent, reply = entry.get("parent", ""), entry["reply"]
        except (ValueError, KeyError, AttributeError, RecursionError):
            parent = reply = None
        if not (isinstance(parent, str) and isinstance(reply, str)):
            raise UserError(f'{path}: line {number}: expected {{"parent": TEXT, "reply": TEXT}}')
        replies.append((parent, reply))
    return ReplyPool(replies)


def pool_of_run(folder: Path) -> ReplyPool:
    """Replies of a run that answered prompts, each with its parent's text.

    Raises:
        RunError: It cannot be read.
    """
    store, history = read_history(folder)
    replies = []
    for candidate in history.lineage:
        proposal = candidate.proposal
        path = store.reply_path(history, proposal)
        if path is None:
            continue
        text = path.read_text(encoding="utf-8")
        parents = [history.lineage[i].proposal.source for i in proposal.parents[:1]]
        replies.append((parents[0].strip() if parents else "", text))
    return ReplyPool(replies)


def endpoint(pool: ReplyPool, port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, not started yet; port 0 is any free one."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

        def do_POST(self) -> None:
            if "Origin" in self.headers:  # any site's script may post here, and take a reply away
                self._send(403, {"error": {"message": "this endpoint is not for web pages"}})
                return
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = "\n".join(str(m["content"]) for m in request["messages"])
            except (ValueError, KeyError, TypeError, RecursionError):
                self._send(400, {"error": {"message": "expected a chat completion's request"}})
                return
            reply = pool.reply(prompt)
            if reply is None:
                self._send(404, {"error": {"message": "no recorded reply is left for this prompt"}})
                return
            self._send(200, _completion(str(request.get("model", "recorded")), prompt, reply))

        def _send(self, status: int, data: dict[str, Any]) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def _completion(model: str, prompt: str, reply: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply}
    usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(reply) // 4}
    return {
        "id": "recorded",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }
