"""What the package knows of itself."""

import subprocess
import sys

HIDE = """
import importlib.metadata, sys
discover = importlib.metadata.Distribution.discover
importlib.metadata.Distribution.discover = classmethod(
    lambda cls, **k: (d for d in discover(**k) if d.metadata["Name"] != "kagent")
)
"""
SHOW = """
import sys
from kagent.cli import main
sys.argv[1:] = ["--version"]
main()
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_version_is_shown():
    done = run(SHOW)
    assert done.returncode == 0
    assert done.stdout.startswith("kagent ")


def test_a_package_that_is_not_installed_says_how_to_install_it():
    done = run(HIDE + SHOW)
    assert done.returncode != 0
    assert "is not installed: run pip install -e" in done.stderr
    assert "Traceback" not in done.stderr
