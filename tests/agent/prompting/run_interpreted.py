"""Runs Triton code of cards in Triton's interpreter; prints the errors as JSON.

TRITON_INTERPRET=1 python run_interpreted.py fusion.triton.py ...
"""

import json
import sys
import tempfile
from pathlib import Path

from card_snippets import error_of, snippets
from kagent_sandbox.judge.interpreter_worker import OnCpu, pretend_gpu, repair


def main(names):
    repair()
    pretend_gpu({"name": "H100", "units": 4, "capability": [9, 0], "shared_bytes": 232448})
    errors = {}
    with tempfile.TemporaryDirectory() as folder, OnCpu():
        for snippet in snippets():
            if snippet.name in names:
                errors[snippet.name] = error_of(snippet, "cpu", Path(folder))
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1:])
