"""Make the pictures of the docs from a recorded run: docs/show.svg and docs/report.png.

    python benchmarks/pictures.py                          # the run that ships as evidence
    python benchmarks/pictures.py --run RUN --to FOLDER

show.svg is what `kagent show RUN` prints of the final race, as rich draws a terminal. report.png is
the first screen of `kagent report RUN` in a headless Chromium. Nothing is measured, and nothing is
drawn by hand.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN = "final race, on hidden cases"
COLUMNS = 122
SCREEN = (1180, 550)  # pixels
FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # fonts of another server: left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", default="softmax-ask-tell", help="the run's name")
    parser.add_argument("--to", type=Path, default=DOCS, help="folder for the pictures")
    options = parser.parse_args()
    draw_terminal(options.run, options.to / "show.svg")
    photograph_report(options.run, options.to / "report.png")


def kagent(*words: str) -> str:
    """Output of a command, with a terminal's colours."""
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "kagent", *words]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def draw_terminal(run: str, path: Path) -> None:
    """Draw what `kagent show` prints from the final race on."""
    lines = [Text.from_ansi(line) for line in kagent("show", run).splitlines()]
    begin = next((i for i, line in enumerate(lines) if line.plain == BEGIN), None)
    if begin is None:
        sys.exit(f"kagent show {run} prints no {BEGIN!r}: take a run that ended with a race")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in lines[begin:]:
        line.truncate(COLUMNS)  # rules of tables are as wide as the pipe
        console.print(line)
    path.write_text(FACES.sub("", console.export_svg(title=f"kagent show {run}")))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def photograph_report(run: str, path: Path) -> None:
    """Take a picture of the report's first screen."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("report.png needs chromium: apt-get install chromium (Debian, Ubuntu)")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        kagent("report", run, "--output", str(page))
        subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",  # root may not use it; the page is our own
                "--hide-scrollbars",
                f"--user-data-dir={folder}/profile",
                f"--window-size={SCREEN[0]},{SCREEN[1]}",
                f"--screenshot={path.resolve()}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
