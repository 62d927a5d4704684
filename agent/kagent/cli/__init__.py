"""The `kagent` command. All printing of the program happens here and in `kagent.ui`."""

import gc
import os
import sys

from kagent_sandbox.errors import MachineError, UserError

if sys.platform != "linux":  # before modules are imported that only Linux has
    sys.stderr.write(
        f"kagent: it needs Linux (Landlock, seccomp, memfd), and this is {sys.platform}: use a "
        "Linux machine, a container or WSL 2\n"
    )
    sys.exit(MachineError.exit_code)

# Before torch is loaded: it would warn at each call of an example at sizes such as 1.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Collections would walk all that was imported, again and again: a quarter of the start's CPU time.
collects = gc.isenabled()
gc.disable()
try:
    from kagent.cli import (  # noqa: F401 - they register their commands
        asktell,
        calibrate,
        campaign,
        candidates,
        devices,
        evolve,
        export,
        hotspots,
        import_,
        memory,
        new,
        patch,
        prompt,
        review,
        runs,
        selftest,
        serve,
        suite,
    )
    from kagent.cli.app import app, main
except UserError as e:  # KAGENT_LANGUAGES names what cannot be imported
    sys.stderr.write(f"kagent: {e}\n")
    sys.exit(e.exit_code)
except KeyboardInterrupt:
    sys.stderr.write("kagent: interrupted\n")
    sys.exit(130)
finally:
    if collects:
        gc.freeze()  # what was imported stays
        gc.enable()

__all__ = ["app", "main"]
