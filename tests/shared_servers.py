"""Fork-servers that many tests share: one takes seconds to start, a child of it milliseconds."""

import sys

import warm_python
from kagent_sandbox.data.language import PLUGINS
from kagent_sandbox.errors import ChildDied
from kagent_sandbox.process import forkserver
from kagent_sandbox.process.environment import for_confined

USERS = (
    "kagent_sandbox.builder.client",
    "kagent_sandbox.device.cpu.backend",
    "kagent_sandbox.judge.interpreter",
    "kagent_sandbox.replay.library_tests",
    "kagent_sandbox.replay.replayer",
)
"""Modules whose fork-servers may be shared."""

_running = {}


class SharedServer(forkserver.ForkServer):
    """A fork-server that is another one's process where that was started in the same way.

    Children are its own; closing it ends these alone.
    """

    def start(self):
        inherited = for_confined()
        confinement, env = repr(self._confinement), sorted(self._env.items())
        how = (self._handler, self._preload, confinement, env, self._prefix)
        key = repr((how, inherited, sys.path, PLUGINS))
        found = _running.get(key)
        if found is None or found._process.poll() is not None:
            found = _running[key] = forkserver.ForkServer(
                self._handler,
                preload=self._preload,
                confinement=self._confinement,
                env=self._env,
                folder_prefix=self._prefix,
            )
            found.start()
        self._shared = found
        self._process, self._channel, self._root = found._process, found._channel, found._root
        self._lock = found._lock

    def _wait_ready(self):
        if self._process is None:
            raise ChildDied("this fork-server is closed")
        return self._shared._wait_ready()

    def _end(self):
        for child in list(self._children):
            child.close()
        self._process = None


def close_all():
    """End the processes, and the templates of `warm_python`: some tests look what is left below."""
    while _running:
        _running.popitem()[1].close()
    warm_python.close_all()
