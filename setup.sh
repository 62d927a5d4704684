#!/bin/sh
# Creates .venv and installs kagent into it. Called by make; every failure is one line that says what to do.
#   PYTHON  interpreter to use (python3)
#   TORCH   pinned: the tested versions of constraints.txt; host: the torch and triton that PYTHON already has
set -eu

fail() {
    echo "setup: $*" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null 2>&1 ||
    fail "no $PYTHON found: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3"
"$PYTHON" -c pass || fail "$PYTHON does not run; name another one with make PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old: kagent needs 3.11 or newer; name one with make PYTHON=python3.12"
command -v g++ >/dev/null 2>&1 ||
    fail "no g++ found: install it (Debian and Ubuntu: apt-get install g++)"
"$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$PYTHON cannot create virtual environments (Debian and Ubuntu: apt-get install python3-venv)"

case "$TORCH" in
pinned)
    "$PYTHON" -m venv .venv
    set -- --constraint constraints.txt
    ;;
host)
    site=$("$PYTHON" -c 'import os, torch, triton; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) ||
        fail "TORCH=host: $PYTHON cannot import torch and triton; leave TORCH=host away to install them"
    "$PYTHON" -m venv .venv
    # A plain path file rather than --system-site-packages: it works for interpreters that are
    # virtual environments themselves, and what is installed here comes first.
    echo "$site" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/host.pth"
    set --
    ;;
*)
    fail "TORCH=$TORCH: expected pinned or host"
    ;;
esac

echo "setup: installing into .venv (about a minute) ..."
.venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$@" --editable '.[cuda,dev]' ||
    fail "pip could not install kagent's dependencies; the reason is above"
# pip would compile a file at a time, for a minute. Some files are not Python, whatever their names;
# nobody imports packages' own tests, nor pip's and Selenium's many protocols at every start.
.venv/bin/python -m compileall -q -j 0 -x '/tests/|/pip/|/devtools/' .venv/lib >/dev/null 2>&1 || true
