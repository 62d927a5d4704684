"""Machine code of built kernels as text, by the vendors' own tools, in a confined process.

The tools parse bytes that a candidate made: they get a private folder and nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.data.language import Language, language
from kagent_sandbox.errors import ChildDied, ToolchainError
from kagent_sandbox.process.channel import ChannelError, Message
from kagent_sandbox.process.context import Context
from kagent_sandbox.process.forkserver import ForkServer

MAX_TEXT_BYTES = 8 << 20
_LIMIT_S = 60.0


def disassemble(binaries: Mapping[str, tuple[str, bytes]]) -> dict[str, str]:
    """Text of each binary, by name: SASS of a cubin, host assembly of a shared object. Each comes
    with its language.

    Raises:
        ToolchainError: nvdisasm or objdump is not to be found.
        ChildDied: The tool's process was lost.
    """
    found: dict[str, str] = {}
    with ForkServer(f"{__name__}:handle", confinement=builder_confinement()) as server:
        for name, (written_in, binary) in binaries.items():
            command = tool_command(language(written_in))
            found[name] = text_in(server, command, name, binary)
    return found


def text_in(server: ForkServer, command: Sequence[str], name: str, binary: bytes) -> str:
    """Text of one binary, from a child of a server whose handler leads to `handle`.

    Args:
        server: The server.
        command: The tool: see `tool_command`.
        name: The binary's name in an error.
        binary: The binary.

    Raises:
        ChildDied: The tool's process was lost.
    """
    with server.spawn(wall_limit_s=_LIMIT_S) as child:
        try:
            child.channel.send({"command": command}, [binary])
            answer = child.channel.recv(_LIMIT_S, max_bytes=2 * MAX_TEXT_BYTES)
        except ChannelError:
            exit_ = child.wait(5.0) or child.kill()
            text = f"{Path(command[0]).name} of {name}: {exit_.describe()}"
            raise ChildDied(text) from None
        return answer.blobs[0].decode("utf-8", "replace") if answer.blobs else ""


def tool_command(written_in: Language) -> list[str]:
    """The tool that prints a language's binaries, and its options.

    Raises:
        ToolchainError: It is not to be found.
    """
    if written_in.kind == "cpu":
        return [_tool("objdump"), "--disassemble", "--demangle", "--no-show-raw-insn"]
    return [_tool("nvdisasm"), "--print-code"]


def _tool(name: str) -> str:
    """Path of a tool: the host's, or the one in triton's wheel.

    Raises:
        ToolchainError: There is none.
    """
    path = shutil.which(name)
    if path is not None:
        return path
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if bundled.is_file():
        return str(bundled)
    package = "binutils" if name == "objdump" else "the CUDA toolkit, or a triton wheel"
    raise ToolchainError(f"{name} is not to be found: install {package}")


def handle(ctx: Context) -> None:
    """Disassemble in the confined child: one binary in, one text out."""
    asked = ctx.channel.recv(10.0)
    run_tool(ctx, asked)


def run_tool(ctx: Context, asked: Message) -> None:
    """Answer a request of `text_in`, in the confined child."""
    command = cast("Sequence[str]", cast("dict[str, object]", asked.obj)["command"])
    (ctx.tmp / "binary").write_bytes(asked.blobs[0])
    done = subprocess.Popen([*command, "binary"], stdout=subprocess.PIPE, cwd=ctx.tmp)
    assert done.stdout is not None
    ctx.channel.send({"done": True}, [done.stdout.read(MAX_TEXT_BYTES)])
    done.kill()
    done.wait()
