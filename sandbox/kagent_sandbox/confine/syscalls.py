"""System calls that confined processes may make, by what they are for.

Everything else is refused: an allow-list does not have to know about the next io_uring. Numbers are
`name:x86_64:aarch64`, from the kernel's headers; `-` where an architecture lacks the call. Calls
whose arguments matter (clone, prctl, socketpair, ...) are listed here for their numbers and decided
in `seccomp`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    rows = (word.split(":") for word in text.split())
    return {n: (None if x == "-" else int(x), None if a == "-" else int(a)) for n, x, a in rows}


FILES = _table("""
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69
    pwritev:296:70 open:2:- openat:257:56 openat2:437:437 creat:85:- close:3:57
    close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 fcntl:72:25 flock:73:32 fsync:74:82
    fdatasync:75:83 ftruncate:77:46 fallocate:285:47 lseek:8:62 stat:4:- fstat:5:80
    lstat:6:- newfstatat:262:79 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439
    readlink:89:- readlinkat:267:78 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:-
    mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38
    renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 chmod:90:-
    fchmod:91:52 fchmodat:268:53 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
    umask:95:166 getdents:78:- getdents64:217:61 statfs:137:43 fstatfs:138:44 sendfile:40:71
    copy_file_range:326:285 fadvise64:221:223 readahead:187:213 ioctl:16:29 sync_file_range:277:84
""")
"""Landlock decides which paths."""

MEMORY = _table("""
    mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 brk:12:214 mlock:149:228
    munlock:150:229 mlock2:325:284 msync:26:227 mincore:27:232 mbind:237:235 get_mempolicy:239:236
    set_mempolicy:238:237 membarrier:324:283
""")

PROCESSES = _table("""
    exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 getpid:39:172 getppid:110:173
    gettid:186:178 getpgid:121:155 getpgrp:111:- getsid:124:156 setsid:112:157 setpgid:109:154
    getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158
    getresuid:118:148 getresgid:120:150 set_tid_address:218:96 set_robust_list:273:99
    get_robust_list:274:100 rseq:334:293 arch_prctl:158:- getrlimit:97:163 setrlimit:160:164
    getrusage:98:165 uname:63:160 sysinfo:99:179 getcpu:309:168 getrandom:318:278
    sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
    sched_get_priority_max:146:125 sched_get_priority_min:147:126 getpriority:140:141
    capget:125:90 landlock_create_ruleset:444:444 landlock_add_rule:445:445
    landlock_restrict_self:446:446
""")
"""Calls on the process itself."""

SIGNALS = _table("""
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigpending:127:136 rt_sigtimedwait:128:137
    rt_sigsuspend:130:133 rt_sigreturn:15:139 sigaltstack:131:132 kill:62:129 tkill:200:130
    tgkill:234:131 pause:34:- restart_syscall:219:128 pidfd_open:434:434 pidfd_send_signal:424:424
""")
"""Landlock's scope decides whom they reach."""

TIME = _table("""
    clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101
    gettimeofday:96:169 time:201:- times:100:153 getitimer:36:102 setitimer:38:103 alarm:37:-
    timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
    timer_delete:226:111 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
""")

WAITING = _table("""
    futex:202:98 futex_waitv:449:449 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
    epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22
    epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 signalfd4:289:74 pipe:22:- pipe2:293:59
    recvmsg:47:212 sendto:44:206 recvfrom:45:207 recvmmsg:299:243
    shutdown:48:210 getsockopt:55:209 setsockopt:54:208 getsockname:51:204 getpeername:52:205
""")
"""Pipes and inherited sockets; no call here makes a socket or connects one. Nor sends descriptors:
an open file on its way through a socket is in no table of any process, so nobody could weigh it.
"""

SPECIAL = _table("""
    clone:56:220 clone3:435:435 fork:57:- vfork:58:- execve:59:221 execveat:322:281 prctl:157:167
    prlimit64:302:261 seccomp:317:277 socketpair:53:199 sched_setaffinity:203:122
    memfd_create:319:279
""")
"""Decided by arguments, or allowed to some presets only."""

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH value by `platform.machine()`."""

_ALL = FILES | MEMORY | PROCESSES | SIGNALS | TIME | WAITING | SPECIAL


def number(name: str) -> int | None:
    """Number of a call on this machine, None where it does not exist.

    Raises:
        KeyError: The call is in no table, or the machine is neither x86-64 nor 64-bit ARM.
    """
    return _ALL[name][list(ARCHITECTURES).index(platform.machine())]
