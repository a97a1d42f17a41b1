"""The seccomp filter, run by a small interpreter of classic BPF: it allows the calls of its table and no other."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from nouscoder.verifier.harness import seccomp

_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NO_ARGUMENTS = {16: 0, 24: 0, 32: 0, 40: 0}
_ARCHES = {"x86_64": (0xC000003E, seccomp.X86_64), "aarch64": (0xC00000B7, seccomp.AARCH64)}


def _verdict(program: list[tuple[int, int, int, int]], number: int, arch: int) -> int:
    data, loaded, at = {0: number, 4: arch, **_NO_ARGUMENTS}, 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            loaded = data[constant]
        else:
            is_true = {0x15: loaded == constant, 0x35: loaded >= constant, 0x45: bool(loaded & constant)}[code]
            at += if_true if is_true else if_false


@pytest.mark.parametrize("machine", _ARCHES)
def test_every_number_of_a_call_has_the_verdict_of_the_table(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    arch, table = _ARCHES[machine]
    program = list(struct.iter_unpack("=HBBI", seccomp.build_filter()))
    looked_at = {"clone", "socket", "socketpair", "fcntl", "unshare", "setpriority", "statx", "prlimit64", "ioctl"}
    looked_at |= {"getsockopt", "setsockopt"}
    looked_at |= {"sched_setaffinity", "sched_setparam", "sched_setscheduler"}
    plain = {number for name, number in table.items() if name not in looked_at}
    others = {number for name, number in table.items() if name in looked_at} | {435}  # clone3 fails with ENOSYS
    for number in [*range(700), 1 << 30, (1 << 30) + table["read"], (1 << 32) - 1]:
        if number not in others:
            assert _verdict(program, number, arch) == (_ALLOW if number in plain else _EPERM), number
        assert _verdict(program, number, 0x40000003) == _KILL


def test_numbers_above_all_calls_are_refused_at_once_because_gvisor_tries_them_at_each_fork() -> None:
    arch, table = _ARCHES["x86_64"]
    program = list(struct.iter_unpack("=HBBI", seccomp.build_filter()))
    for number in (max(table.values()) + 1, 2000):
        assert _verdict(program[:6], number, arch) == _EPERM
