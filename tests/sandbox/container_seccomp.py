"""A seccomp filter like those of container engines: no new namespaces, no mounts."""

import errno
import platform

from kagent_sandbox.confine import seccomp

NUMBERS = {  # x86_64, aarch64
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
}
CLONE, CLONE3 = (56, 220), (435, 435)
NAMESPACES = 0x7E020000


def deny_namespaces():
    """Bind this process and all that it starts."""
    machine = platform.machine() != "x86_64"
    program = seccomp._Program()
    program.prologue()
    for numbers in NUMBERS.values():
        program.add(seccomp._EQUAL, numbers[machine], 0, 1)
        program.refuse(errno.EPERM)
    program.add(seccomp._EQUAL, CLONE3[machine], 0, 1)
    program.refuse(errno.ENOSYS)
    program.add(seccomp._EQUAL, CLONE[machine], 0, 3)
    program.argument(0)
    program.add(seccomp._ANY_BIT, NAMESPACES, 0, 1)
    program.refuse(errno.EPERM)
    program.add(seccomp._RETURN, seccomp._ALLOW)
    seccomp._install(program.packed())
