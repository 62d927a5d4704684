"""A disk of one's own for temporary files, in namespaces that need no privileges."""

import os
import subprocess

import pytest

MOUNT = 'mount -t tmpfs -o "$0" none "$TMPDIR" && exec "$@"'


def on_own_disk(options, folder, *words):
    """A command at T1 whose temporary files are on a disk that is mounted with these options."""
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", MOUNT, options, *words],
        env={**os.environ, "TMPDIR": str(folder), "KAGENT_ISOLATION": "T1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def require_own_disk(folder):
    """Skip the test where there can be none."""
    try:
        possible = on_own_disk("size=1m", folder, "true").returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("no disk of one's own without privileges here")
