"""Errors of kernels.

KernelError
├── KernelUnavailable   this machine cannot compile or run it: the text says what to install
│   ├── ToolkitMissing  a part of the CUDA toolkit is not installed
│   └── HeadersMissing  the source includes headers of an optional package
├── CompileError        the compiler refused its source
└── LaunchError         the device refused the launch
"""

from __future__ import annotations

import re

from .text import printable

MAX_MESSAGE_CHARS = 2000
NOT_THERE = "No such file or directory"
TOOLKIT = (
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-crt",
    "nvidia-cuda-cccl",
)
"""Packages that compile and launch CUDA sources: NVRTC, its headers, the driver's bindings."""
_OUT_OF_REACH = re.compile(
    r": (?:Permission denied|Operation not permitted|Not a directory|Is a directory"
    r"|Too many levels of symbolic links|File name too long)$",
    re.MULTILINE,
)


class KernelError(Exception):
    """Base of all of them."""


class KernelUnavailable(KernelError):  # noqa: N818
    """A compiler, its headers or a driver is missing here. The kernel may be fine elsewhere."""


class ToolkitMissing(KernelUnavailable):
    """A part of the CUDA toolkit is not installed. `what` is the text without the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: install it with `pip install {' '.join(TOOLKIT)}`")
        self.what = what


class HeadersMissing(KernelUnavailable):
    """The source includes headers of an optional package, which is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(f"{what}: install them with `pip install {package}`")


class CompileError(KernelError):
    """A kernel did not compile. The text is the first real error, its line and that line's text.

    A file that the compiler cannot read is not there: its author learns nothing of what is.

    `over_limit` says that the compiler, or the device, had too little of something.
    """

    def __init__(self, kernel: str, message: str, *, over_limit: bool = False) -> None:
        text = _OUT_OF_REACH.sub(f": {NOT_THERE}", printable(message.expandtabs(4)))
        if len(text) > MAX_MESSAGE_CHARS:
            text = text[:MAX_MESSAGE_CHARS] + " [cut]"
        super().__init__(f"kernel {kernel}: {text}")
        self.kernel = kernel
        self.over_limit = over_limit


class LaunchError(KernelError):
    """The driver refused to load or to launch a kernel. `name` is its error's, CUDA_ERROR_..."""

    def __init__(self, name: str, text: str, doing: str) -> None:
        super().__init__(f"{name} ({text}) {doing}")
        self.name = name
        self.text = text
        self.doing = doing
