"""The candidate's seccomp filter: an allow-list in classic BPF, built without a library.

Refused calls fail with EPERM, so that programs that probe for calls continue. clone3 fails with ENOSYS, so that glibc
falls back to clone, whose flags the filter checks. Calls of another architecture (i386, x32) kill the process. statx
does not tell the unique number of a mount, by which a run could count the runs before it. Nor do ioctl and
getsockopt tell the unique numbers of namespaces and sockets, or give a pidfd, whose inode counts the host's processes.

Of the calls in the tables, mount, umount2 and unshare (of a network namespace only) are there because init needs them
under the same filter; without capabilities they give EPERM. So is pidfd_open, which a second filter refuses to
candidates (init/process.c). tests/calls_of_languages.py lists what each language calls.
Excluded on purpose: all other mount and namespace calls (pivot_root, setns, fsopen, ...), access to other
processes (ptrace, process_vm_*, pidfd_getfd, kcmp), kernel interfaces that programs do not need (bpf, perf_event_open,
io_uring_*, userfaultfd, keyctl, fanotify, modules, kexec), System V and POSIX message objects, which outlive a process
(shmget, msgget, semget, mq_open), memfd_create (its files are not limited), vmsplice and tee (pages in pipes are no
process's: one of 4 KiB holds its large page of 2 MiB), personality, clone3, whose flags a filter
cannot read (glibc then uses clone), inotify, which would see other sandboxes and the host open the files of the root,
and sync and syncfs, which write the host's disks.
"""

from __future__ import annotations

import errno
import platform
import struct

_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NUMBER, _ARCH, _ARG0_LOW, _ARG1_LOW, _ARG2_LOW, _ARG3_LOW = 0, 4, 16, 24, 32, 40
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080  # every CLONE_NEW* flag
_PIDFD_FLAG = 0x1000  # CLONE_PIDFD
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6. A namespace does not isolate others, such as vsock
_PROTOCOLS = (0, 6, 17)  # the family's default, TCP and UDP; not MPTCP and UDP-Lite, which no program needs
_PRIO_PROCESS = 0
_STATX_MNT_ID_UNIQUE = 0x4000
_SOL_SOCKET = 1
_COUNTED_OPTIONS = (57, 71, 76, 77)  # SO_COOKIE, SO_NETNS_COOKIE, SO_PASSPIDFD, SO_PEERPIDFD
_NAMESPACE_IDS = (0x8008B705, 0x8008B70D, 0x8010B70A, 0x8010B70B, 0x8010B70C)  # NS_MNT_GET_ID, NS_GET_ID, NS_MNT_GET_*
_SHARED_FILE_COMMANDS = (1024, 1026)  # F_SETLEASE and F_NOTIFY, which act on what others do with a file
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (entry.partition("=") for entry in text.split())}


X86_64 = _table(
    """
    read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12
    rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20
    access=21 pipe=22 select=23 sched_yield=24 mremap=25 msync=26 mincore=27 madvise=28 dup=32 dup2=33 pause=34
    nanosleep=35 getitimer=36 alarm=37 setitimer=38 getpid=39 sendfile=40 socket=41 connect=42 accept=43
    sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 shutdown=48 bind=49 listen=50 getsockname=51 getpeername=52
    socketpair=53 setsockopt=54 getsockopt=55 clone=56 fork=57 vfork=58 execve=59 exit=60 wait4=61 kill=62
    uname=63 fcntl=72 flock=73 fsync=74 fdatasync=75 truncate=76 ftruncate=77 getdents=78 getcwd=79
    getdents64=217 chdir=80 fchdir=81 rename=82 mkdir=83 rmdir=84 creat=85 link=86 unlink=87 symlink=88
    readlink=89 chmod=90 fchmod=91 chown=92 fchown=93 lchown=94 umask=95 gettimeofday=96 getrlimit=97
    getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 setuid=105 setgid=106 geteuid=107 getegid=108
    setpgid=109 getppid=110 getpgrp=111 setsid=112 setreuid=113 setregid=114 getgroups=115 setresuid=117
    getresuid=118 setresgid=119 getresgid=120 getpgid=121 setfsuid=122 setfsgid=123 getsid=124 capget=125
    capset=126 mount=165 umount2=166 rt_sigpending=127 rt_sigtimedwait=128 rt_sigqueueinfo=129 rt_sigsuspend=130
    sigaltstack=131 utime=132 mknod=133 statfs=137 fstatfs=138 getpriority=140 setpriority=141
    sched_setparam=142 sched_getparam=143 sched_setscheduler=144
    sched_getscheduler=145 sched_get_priority_max=146 sched_get_priority_min=147
    sched_rr_get_interval=148 mlock=149 munlock=150 prctl=157 arch_prctl=158 setrlimit=160 gettid=186
    readahead=187 getxattr=191 lgetxattr=192 fgetxattr=193 listxattr=194 llistxattr=195 flistxattr=196 tkill=200
    time=201 futex=202 sched_setaffinity=203 sched_getaffinity=204 epoll_create=213 epoll_ctl=233 epoll_wait=232
    set_tid_address=218 restart_syscall=219 fadvise64=221 timer_create=222 timer_settime=223 timer_gettime=224
    timer_getoverrun=225 timer_delete=226 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231
    tgkill=234 utimes=235 waitid=247 openat=257
    mkdirat=258 mknodat=259 fchownat=260 futimesat=261 newfstatat=262 unlinkat=263 renameat=264 linkat=265
    symlinkat=266 readlinkat=267 fchmodat=268 faccessat=269 pselect6=270 ppoll=271 set_robust_list=273
    get_robust_list=274 splice=275 sync_file_range=277 utimensat=280 epoll_pwait=281
    signalfd=282 timerfd_create=283 eventfd=284 fallocate=285 timerfd_settime=286 timerfd_gettime=287
    accept4=288 signalfd4=289 eventfd2=290 epoll_create1=291 dup3=292 pipe2=293 preadv=295
    pwritev=296 rt_tgsigqueueinfo=297 recvmmsg=299 prlimit64=302 sendmmsg=307 getcpu=309
    renameat2=316 getrandom=318 execveat=322 membarrier=324 mlock2=325 copy_file_range=326 preadv2=327
    pwritev2=328 unshare=272 statx=332 rseq=334 pidfd_open=434 close_range=436 openat2=437
    faccessat2=439 epoll_pwait2=441 futex_waitv=449 sched_getattr=315
    """
)

AARCH64 = _table(
    """
    read=63 write=64 close=57 fstat=80 lseek=62 mmap=222 mprotect=226 munmap=215 brk=214 rt_sigaction=134
    rt_sigprocmask=135 rt_sigreturn=139 ioctl=29 pread64=67 pwrite64=68 readv=65 writev=66 sched_yield=124
    mremap=216 msync=227 mincore=232 madvise=233 dup=23 nanosleep=101 getitimer=102 setitimer=103 getpid=172
    sendfile=71 socket=198 connect=203 accept=202 sendto=206 recvfrom=207 sendmsg=211 recvmsg=212 shutdown=210
    bind=200 listen=201 getsockname=204 getpeername=205 socketpair=199 setsockopt=208 getsockopt=209 clone=220
    execve=221 exit=93 wait4=260 kill=129 uname=160 fcntl=25 flock=32 fsync=82 fdatasync=83 truncate=45
    ftruncate=46 getcwd=17 getdents64=61 chdir=49 fchdir=50 fchmod=52 fchown=55 umask=166 gettimeofday=169
    getrlimit=163 getrusage=165 sysinfo=179 times=153 getuid=174 getgid=176 setuid=146 setgid=144 geteuid=175
    getegid=177 setpgid=154 getppid=173 setsid=157 setreuid=145 setregid=143 getgroups=158 setresuid=147
    getresuid=148 setresgid=149 getresgid=150 getpgid=155 setfsuid=151 setfsgid=152 getsid=156 capget=90
    capset=91 mount=40 umount2=39 rt_sigpending=136 rt_sigtimedwait=137 rt_sigqueueinfo=138 rt_sigsuspend=133
    sigaltstack=132 statfs=43 fstatfs=44 getpriority=141 setpriority=140 sched_getparam=121 sched_setparam=118
    sched_getscheduler=120 sched_setscheduler=119
    sched_get_priority_max=125 sched_get_priority_min=126 sched_rr_get_interval=127
    mlock=228 munlock=229 prctl=167 setrlimit=164 gettid=178 readahead=213 getxattr=8 lgetxattr=9
    fgetxattr=10 listxattr=11 llistxattr=12 flistxattr=13 tkill=130 futex=98 sched_setaffinity=122
    sched_getaffinity=123 epoll_ctl=21 set_tid_address=96 restart_syscall=128 fadvise64=223 timer_create=107
    timer_settime=110 timer_gettime=108 timer_getoverrun=109 timer_delete=111 clock_gettime=113 clock_getres=114
    clock_nanosleep=115 exit_group=94 tgkill=131 waitid=95 openat=56
    mkdirat=34 mknodat=33 fchownat=54 newfstatat=79 unlinkat=35 renameat=38 linkat=37 symlinkat=36 readlinkat=78
    fchmodat=53 faccessat=48 pselect6=72 ppoll=73 set_robust_list=99 get_robust_list=100 splice=76
    sync_file_range=84 utimensat=88 epoll_pwait=22 timerfd_create=85 fallocate=47 timerfd_settime=86
    timerfd_gettime=87 accept4=242 signalfd4=74 eventfd2=19 epoll_create1=20 dup3=24 pipe2=59
    preadv=69 pwritev=70 rt_tgsigqueueinfo=240 recvmmsg=243 prlimit64=261 sendmmsg=269 getcpu=168
    renameat2=276 getrandom=278 execveat=281 membarrier=283 mlock2=284 copy_file_range=285 preadv2=286
    pwritev2=287 unshare=97 statx=291 rseq=293 pidfd_open=434 close_range=436 openat2=437
    faccessat2=439 epoll_pwait2=441 futex_waitv=449 sched_getattr=275
    """
)


def _refuse(number: int) -> Instruction:
    return (_RET, 0, 0, _ERRNO | number)


def _ranges(numbers: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _search(ranges: list[tuple[int, int]]) -> list[Instruction]:
    """Allow the numbers in the ranges. A binary search among their bounds: about 8 instructions a call.

    A number is allowed if it has reached an odd number of bounds. All paths end at one of the last two instructions.
    """
    bounds = [bound for first, last in ranges for bound in (first, last + 1)]
    return [*_reached(bounds, 0, len(bounds), 0), (_RET, 0, 0, _ALLOW), _refuse(errno.EPERM)]


def _reached(bounds: list[int], low: int, high: int, num_after: int) -> list[Instruction]:
    """Count the reached ones of bounds[low:high]. `num_after` instructions follow before the last two."""
    if low == high:
        return []
    middle = (low + high) // 2
    above = _reached(bounds, middle + 1, high, num_after)
    below = _reached(bounds, low, middle, len(above) + num_after)
    end = len(below) + len(above) + num_after  # to `allow`; `refuse` is behind it
    if_reached = len(below) if above else end + middle % 2
    if_not = 0 if below else end + 1 - middle % 2
    return [(_JGE, if_reached, if_not, bounds[middle]), *below, *above]


def build_filter(*, notifies: bool = False) -> bytes:
    """The filter for this machine. With `notifies`, init is told before a socket is made.

    Raises OSError when there is no table for its architecture.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp table for {machine}")
    table = X86_64 if machine == "x86_64" else AARCH64
    checked: list[tuple[tuple[str, ...], list[Instruction]]] = [
        (("clone",), _clone()),
        (("socket", "socketpair"), _sockets(notifies)),
        (("fcntl",), _fcntl()),
        (
            ("ioctl",),
            [(_LD_ABS, 0, 0, _ARG1_LOW), *_when(_NAMESPACE_IDS, [_refuse(errno.ENOTTY)]), (_RET, 0, 0, _ALLOW)],
        ),
        (("getsockopt", "setsockopt"), _options()),
        (("unshare",), _unshare()),
        (("setpriority",), _priority()),
        (("statx",), _statx()),
        (("prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler"), _not_of_init()),
    ]
    plain = set(table.values()) - {table[name] for names, _ in checked for name in names}
    program: list[Instruction] = [
        (_LD_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RET, 0, 0, _KILL),
        (_LD_ABS, 0, 0, _NUMBER),
        # gVisor tries 2001 numbers at each fork, most of them above all calls.
        *((_JGE, 0, 1, max(*table.values(), _CLONE3) + 1), _refuse(errno.EPERM)),
        *_when((_CLONE3,), [_refuse(errno.ENOSYS)]),
    ]
    for names, block in checked:
        program += _when(tuple(table[name] for name in names), block)
    program += _search(_ranges(plain))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _when(values: tuple[int, ...], block: list[Instruction]) -> list[Instruction]:
    """Run `block`, each path of which returns, when what was loaded is one of the values."""
    *others, last = values
    jumps: list[Instruction] = [(_JEQ, len(others) - i, 0, value) for i, value in enumerate(others)]
    return [*jumps, (_JEQ, 0, len(block), last), *block]


def _clone() -> list[Instruction]:
    """No new namespace, and no pidfd."""
    return [
        (_LD_ABS, 0, 0, _ARG0_LOW),
        (_JSET, 0, 1, _NAMESPACE_FLAGS | _PIDFD_FLAG),
        _refuse(errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]


def _sockets(notifies: bool) -> list[Instruction]:
    """Known families and protocols. With `notifies`, init hears of each socket."""
    is_protocol: list[Instruction] = [(_LD_ABS, 0, 0, _ARG2_LOW)]
    is_protocol += [(_JEQ, len(_PROTOCOLS) - i, 0, protocol) for i, protocol in enumerate(_PROTOCOLS)]
    is_protocol += [_refuse(errno.EPROTONOSUPPORT), (_RET, 0, 0, _NOTIFY if notifies else _ALLOW)]
    return [(_LD_ABS, 0, 0, _ARG0_LOW), *_when(_FAMILIES, is_protocol), _refuse(errno.EAFNOSUPPORT)]


def _options() -> list[Instruction]:
    """No option that tells a number counted since the host's start."""
    refused = [(_LD_ABS, 0, 0, _ARG2_LOW), *_when(_COUNTED_OPTIONS, [_refuse(errno.ENOPROTOOPT)]), (_RET, 0, 0, _ALLOW)]
    return [(_LD_ABS, 0, 0, _ARG1_LOW), *_when((_SOL_SOCKET,), refused), (_RET, 0, 0, _ALLOW)]


def _fcntl() -> list[Instruction]:
    """No command that acts on what others do with a file."""
    refused = _when(_SHARED_FILE_COMMANDS, [_refuse(errno.EPERM)])
    return [(_LD_ABS, 0, 0, _ARG1_LOW), *refused, (_RET, 0, 0, _ALLOW)]


def _unshare() -> list[Instruction]:
    """Only a new network namespace: init makes one before a run that needs it. Candidates have no right to."""
    return [(_LD_ABS, 0, 0, _ARG0_LOW), *_when((_NEW_NETWORK,), [(_RET, 0, 0, _ALLOW)]), _refuse(errno.EPERM)]


def _priority() -> list[Instruction]:
    """Only of one process, and not of process 1, from which the next run would inherit it. gVisor asks for no right."""
    of_others = [(_LD_ABS, 0, 0, _ARG0_LOW), (_JEQ, 1, 0, _PRIO_PROCESS), _refuse(errno.EPERM)]
    return [*of_others, (_LD_ABS, 0, 0, _ARG1_LOW), *_when((1,), [_refuse(errno.EPERM)]), (_RET, 0, 0, _ALLOW)]


def _statx() -> list[Instruction]:
    """Without the unique number of a mount: the kernel counts all that were ever made."""
    asked = [(_LD_ABS, 0, 0, _ARG3_LOW), (_JSET, 0, 1, _STATX_MNT_ID_UNIQUE)]
    return [*asked, _refuse(errno.EINVAL), (_RET, 0, 0, _ALLOW)]


def _not_of_init() -> list[Instruction]:
    """Not on process 1. Without root, candidates have the user of init, and could change its limits."""
    return [(_LD_ABS, 0, 0, _ARG0_LOW), *_when((1,), [_refuse(errno.EPERM)]), (_RET, 0, 0, _ALLOW)]
