"""`python -m kagent`."""

from kagent.cli import main

main()
