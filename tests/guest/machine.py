"""Boots the Debian guest under QEMU and runs one command in it: ``python -m tests.guest.machine 'python3 -m dsec.doctor'``."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.guest import parts

APPEND = "console=ttyS0 nokaslr quiet loglevel=3 reboot=t panic=-1 mitigations=off swiotlb=noforce"
MEMORY_MIB = 3072
SCRATCH_MIB = 8192  # sparse


def missing() -> str | None:
    """Why the guest cannot be booted here, or None."""
    from dsec import doctor

    for name in ("qemu", "mmdebstrap", "mkfs_erofs", "erofs_file"):
        if sentence := doctor.reason(name):
            return sentence
    if os.uname().machine != "x86_64":
        return "the guest is built for x86_64"
    if os.geteuid() != 0:
        return "making a Debian root needs root"
    if parts.kernel_package() is None:
        return "apt offers no Debian cloud kernel (linux-image-6.12.*-cloud-amd64)"
    return None


def run(command: str, *, timeout: float, echo: Callable[[str], None] = print, append: str = "") -> tuple[int, str]:
    """Boots, runs `command` with /bin/sh in the checkout as root, powers off; (its exit code, its output).

    Raises `TimeoutError` after `timeout` seconds (QEMU is killed), `RuntimeError` when the guest ends without a verdict.
    """
    begin = time.monotonic()
    store, root = asyncio.run(parts.layers())
    unpacked = parts.kernel(parts.kernel_package() or "")
    busybox = asyncio.run(parts.read_from(store, "busybox", "bin/busybox"))
    with tempfile.TemporaryDirectory(prefix="dsec-guest-") as folder:
        stage = Path(folder)
        disk = parts.second_disk(stage, command, store)
        (stage / "initrd").write_bytes(parts.initramfs(unpacked, busybox))
        echo(f"guest: parts ready after {time.monotonic() - begin:.0f} s")
        vmlinuz = next(unpacked.glob("boot/vmlinuz-*"))
        with (stage / "scratch").open("wb") as scratch:
            scratch.truncate(SCRATCH_MIB << 20)
        line = _qemu(vmlinuz, stage / "initrd", [Path(root), disk], append)
        line += ["-drive", f"file={stage / 'scratch'},if=none,id=s,format=raw,cache=unsafe", "-device", "virtio-blk-pci,drive=s"]
        return _watch(line, timeout, echo)


def _qemu(vmlinuz: Path, initrd: Path, disks: list[Path], append: str) -> list[str]:
    line = ["qemu-system-x86_64", "-M", "q35", "-bios", "/usr/share/qemu/qboot.rom"]
    # A KVM that shows no vmx or svm does not run stock kernels: TCG then.
    flags = Path("/proc/cpuinfo").read_text()
    if os.access("/dev/kvm", os.R_OK | os.W_OK) and re.search(r"\b(vmx|svm)\b", flags):
        line += ["-accel", "kvm", "-cpu", "host"]
    else:
        line += ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
    line += ["-m", str(MEMORY_MIB), "-smp", "2", "-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]
    line += ["-kernel", str(vmlinuz), "-initrd", str(initrd), "-append", f"{APPEND} {append}".strip()]
    for number, disk in enumerate(disks):
        line += ["-drive", f"file={disk},if=none,id=d{number},format=raw,readonly=on", "-device", f"virtio-blk-pci,drive=d{number}"]
    return line


def _watch(line: list[str], timeout: float, echo: Callable[[str], None]) -> tuple[int, str]:
    begin = time.monotonic()
    output: list[str] = []
    verdict: int | None = None
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as qemu:
        assert qemu.stdout is not None
        os.set_blocking(qemu.stdout.fileno(), False)
        rest = b""
        try:
            while True:
                piece = qemu.stdout.read()
                if piece:
                    *lines, rest = (rest + piece).split(b"\n")
                    for raw in lines:
                        text = raw.decode(errors="replace").rstrip("\r")
                        output.append(text)
                        echo(f"[{time.monotonic() - begin:6.1f}] {text}")
                        if match := re.search(r"DSEC-GUEST-EXIT (\d+)", text):
                            verdict = int(match.group(1))
                elif qemu.poll() is not None:
                    break
                elif time.monotonic() - begin > timeout:
                    raise TimeoutError(f"the guest took longer than {timeout} s:\n" + "\n".join(output[-40:]))
                else:
                    time.sleep(0.05)
        finally:
            if qemu.poll() is None:
                qemu.kill()
    text = "\n".join(output)
    if verdict is None:
        raise RuntimeError("the guest ended without a verdict:\n" + text[-4000:])
    return verdict, text


def main(arguments: list[str]) -> int:
    """Runs one command in the guest; its exit code."""
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    return run(" ".join(arguments), timeout=1800)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
