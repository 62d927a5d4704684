"""A page of a run that goes on: loopback only, read-only."""

from __future__ import annotations

import http.server
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from kagent_sandbox.errors import RunError

from kagent.review.page import render
from kagent.runs.store import last_seq, read_history

_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class PageServer(http.server.ThreadingHTTPServer):
    """Serves one run's page at `/` and the number of its last event at `/seq`.

    Raises:
        OSError: The port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """The page, or the number of its last event."""
        # Another site's script in the reader's browser may resolve its own name to this address.
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        page = self._pages.get(self.path)
        if host not in _HOSTS:
            self._send(403, "text/plain", f"this page is served at {self.server.url} only\n")
        elif page is None:
            self._send(404, "text/plain", f"there is only {self.server.url}\n")
        else:
            try:
                found = page(self.server.folder)
            except RunError as e:
                self._send(500, "text/plain", f"{e}\n")
            else:
                self._send(200, *found)

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its parent's name
        """Nothing: the terminal is the run's."""

    @staticmethod
    def _page(folder: Path) -> tuple[str, str]:
        store, history = read_history(folder)
        return "text/html", render(folder.name, store.manifest, history, live=True)

    @staticmethod
    def _seq(folder: Path) -> tuple[str, str]:
        return "text/plain", str(last_seq(folder))

    _pages: ClassVar[dict[str, Callable[[Path], tuple[str, str]]]] = {
        "/": lambda folder: _Handler._page(folder),
        "/seq": lambda folder: _Handler._seq(folder),
    }
