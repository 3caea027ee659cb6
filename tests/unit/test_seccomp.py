"""The compiled filter answers what the table says, for every call, on every architecture."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.security import seccomp
from dsec.security.seccomp import ALLOW, ARCHES, ENOSYS, EPERM, KILL

PROFILE = seccomp.profile("default")
NATIVE = {"x86_64": ("x86_64", "i386"), "aarch64": ("aarch64",)}


def expected(name: str) -> int:
    """What the table says for a call with all arguments 0."""
    if name in PROFILE.denied or name == "socket":
        return EPERM
    return ENOSYS if name in seccomp.NOT_FILTERABLE else ALLOW


@pytest.mark.parametrize("machine", sorted(NATIVE))
def test_every_call_of_the_table(machine: str) -> None:
    """The program and the table agree on all calls, and unknown numbers are answered as an older kernel would."""
    program = seccomp.compiled(PROFILE, machine)
    for arch in NATIVE[machine]:
        column = ARCHES.index(arch)
        known = {row[column]: name for name, row in seccomp.numbers().items() if row[column] >= 0}
        for number in range(700):
            want = expected(known[number]) if number in known else ENOSYS
            assert seccomp.run(program, arch, number) == want, (arch, number, known.get(number))
        for number in (2**31 - 1, 2**31, 2**32 - 1, 0x40000000, 0x40000000 + 59):
            assert seccomp.run(program, arch, number) == ENOSYS


def test_foreign_architectures_are_killed() -> None:
    """A call of an architecture that the machine does not have kills the process."""
    assert seccomp.run(seccomp.compiled(PROFILE, "x86_64"), "aarch64", 64) == KILL
    assert seccomp.run(seccomp.compiled(PROFILE, "aarch64"), "x86_64", 1) == KILL


def test_the_program_is_a_tree() -> None:
    """No call takes more than 24 instructions, and the whole is small."""
    program = seccomp.compiled(PROFILE, "x86_64")
    assert len(program) // 8 < 1000
    longest = 0
    for number in range(500):
        at = steps = 0
        while True:
            op, jt, jf, k = struct.unpack_from("=HBBI", program, at * 8)
            steps += 1
            at += 1
            if op == 0x06:
                break
            if op == 0x05:
                at += k
            elif op == 0x15:
                at += jt if k == 0xC000003E and steps == 2 else jf
            elif op == 0x35:
                at += jt if number >= k else jf
            elif op == 0x45:
                at += jf
        longest = max(longest, steps)
    assert longest <= 24


def test_arguments() -> None:
    """Flags, families and requests are told apart by their low 32 bits, whatever stands above."""
    program = seccomp.compiled(PROFILE, "x86_64")
    numbers = {name: row[0] for name, row in seccomp.numbers().items()}
    high = 0xDEADBEEF00000000

    def answer(name: str, *args: int) -> int:
        return seccomp.run(program, "x86_64", numbers[name], args)

    assert answer("clone", 0x11) == ALLOW  # fork
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer("clone", flag | 0x11) == EPERM
    for family, want in ((1, ALLOW), (2, ALLOW), (10, ALLOW), (16, ALLOW), (17, EPERM), (38, EPERM), (40, EPERM), (0, EPERM)):
        assert answer("socket", family) == answer("socket", family | high) == want
    for request in (0xC0C0586D, 0xC0B0586D, 0x40285881, 0xC028660F, 0x5412, 0x541C):
        assert answer("ioctl", 3, request) == answer("ioctl", 3, request | high) == EPERM
    for request in (0x5401, 0x5413, 0x5421, 0x80086601, 0x40049409):
        assert answer("ioctl", 3, request) == ALLOW
    assert answer("personality", 0xFFFFFFFF) == ALLOW
    assert answer("personality", 0x10) == EPERM


@given(st.sampled_from(ARCHES[:2]), st.integers(0, 2**32 - 1), st.tuples(*[st.integers(0, 2**64 - 1)] * 6))
def test_every_call_has_an_answer(arch: str, number: int, args: tuple[int, ...]) -> None:
    """Whatever is called, the program ends with one of its answers."""
    assert seccomp.run(seccomp.compiled(PROFILE, "x86_64"), arch, number, args) in {ALLOW, EPERM, ENOSYS}


def test_denied_names_exist() -> None:
    """Every denied or special name is a call of the table: a misspelt one would be allowed."""
    assert PROFILE.denied | set(seccomp.NOT_FILTERABLE) <= set(seccomp.numbers())


def test_rules_for_runc_say_the_same() -> None:
    """The rules allow no call that the program denies."""
    rules = seccomp.to_oci(PROFILE)
    allowed = {name for rule in rules["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert not allowed & PROFILE.denied
    assert not allowed & set(seccomp.NOT_FILTERABLE)
    assert {"read", "execve", "ptrace"} <= allowed


def test_digest_is_stable() -> None:
    """The same profile compiles to the same program."""
    seccomp.compiled.cache_clear()
    first = seccomp.digest(PROFILE, "x86_64")
    seccomp.compiled.cache_clear()
    assert seccomp.digest(PROFILE, "x86_64") == first
