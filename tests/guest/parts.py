"""The parts of a Debian guest: root file system, kernel, initramfs, and a disk with this checkout. Cached below `.cache/guest`.

Nothing is installed on the host: the root is a base layer made by `dsec layer bootstrap`'s own code, the kernel comes out of a
downloaded package, the initramfs is written here.
"""

from __future__ import annotations

import asyncio
import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from dsec import trees
from dsec.layers.bootstrap import bootstrap_debian, bootstrap_tiny
from dsec.layers.mounts import open_layer
from dsec.layers.store import LayerStore

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "guest"
SUITE = "bookworm"
PACKAGES = (
    "python3",
    "busybox-static",
    "crun",
    "erofs-utils",
    "iproute2",
    "kmod",
    "nftables",
    "procps",
    "mount",
    "e2fsprogs",
    "btrfs-progs",
    "xfsprogs",
    "git",
    "xz-utils",
    "zstd",
    "ca-certificates",
)
# Loaded by the initramfs, with what they depend on; all else that the tests need is built into Debian's cloud kernel.
MODULES = (
    *("virtio_blk", "erofs", "overlay", "loop", "zram", "veth"),
    *("btrfs", "xfs", "quota_v2"),
    *("nf_tables", "nft_ct", "nft_fib_inet", "nft_reject_inet", "nft_masq", "nft_chain_nat", "nft_connlimit"),
)
# Of requirements.lock, what no test inside the guest imports.
LEFT_OUT = {
    "ziglang",
    "mypy",
    "ruff",
    "uv",
    "import-linter",
    "grimp",
    "hatchling",
    "editables",
    "ast-serialize",
    "librt",
    "mypy-extensions",
    "trove-classifiers",
}
COMMAND = "/opt/command"

_INITRAMFS_INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /lower /rw /new
/bin/busybox mount -t devtmpfs dev /dev
for module in {modules}; do /bin/busybox insmod /modules/$module.ko || echo "no module $module"; done
/bin/busybox mount -t erofs -o ro /dev/vda /lower || echo "no root disk"
/bin/busybox mount -t tmpfs -o size=100% tmpfs /rw
/bin/busybox mkdir -p /rw/upper /rw/work
/bin/busybox mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work overlay /new
/bin/busybox mount -t erofs -o ro /dev/vdb /new/opt || echo "no second disk"
/bin/busybox mount -o move /dev /new/dev
exec /bin/busybox switch_root /new /opt/init
"""

_INIT = f"""#!/bin/sh
# PID 1 of the guest: cgroup v2 whole, as systemd would mount it; runs the command, says how it ended, switches off.
export PATH=/opt/site/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PYTHONUNBUFFERED=1 COLUMNS=150 NO_COLOR=1
ulimit -n 65536
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t securityfs securityfs /sys/kernel/security
mount -t bpf bpf /sys/fs/bpf
mkdir -p /dev/pts /dev/shm
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
# A real file system: EROFS cannot be mounted from a file on tmpfs, and an upper should meet what it meets on a node.
mkfs.ext4 -q -E lazy_itable_init=1,nodiscard /dev/vdc
mkdir -p /scratch /var/lib/dsec
mount -t ext4 /dev/vdc /scratch
mkdir -m 1777 /scratch/tmp
mkdir /scratch/state
mount --bind /scratch/tmp /tmp
mount --bind /scratch/state /var/lib/dsec
echo "+cpu +memory +pids" > /sys/fs/cgroup/cgroup.subtree_control
hostname guest
ip link set lo up
cp -r /opt/dsec /root/dsec
mkdir -p /usr/local/lib/python3.11/dist-packages
printf '/opt/site\\n/root/dsec\\n' > /usr/local/lib/python3.11/dist-packages/dsec.pth
cd /root/dsec
sh {COMMAND} </dev/null 2>&1
echo "DSEC-GUEST-EXIT $?"
sync
exec busybox poweroff -f
"""


async def layers() -> tuple[LayerStore, str]:
    """The store with the guest's root and the small base that tests inside use; and the root's image."""
    store = LayerStore(CACHE / "layers")
    root = await bootstrap_debian(store, SUITE, packages=PACKAGES, name="guest")
    await bootstrap_tiny(store)
    return store, (await store.mount_plan(root.digest)).source


def kernel_package() -> str | None:
    """Name of the newest cloud kernel from 6.12 on that apt knows; None where there is none (another distribution)."""
    done = subprocess.run(["apt-cache", "pkgnames", "linux-image-"], capture_output=True, text=True, check=False)
    found = []
    for name in done.stdout.split():
        match = re.fullmatch(r"linux-image-(\d+)\.(\d+)\.(\d+)\S*-cloud-amd64", name)
        if match and (number := tuple(int(part) for part in match.groups())) >= (6, 12, 0):
            found.append((number, name))
    # 6.12 is the one whose limits we state (no overlay layers by descriptor); a newer one only where it is not offered.
    stated = [item for item in found if item[0][:2] == (6, 12)]
    return max(stated or found)[1] if found else None


def kernel(package: str) -> Path:
    """The unpacked kernel package."""
    target = CACHE / package
    if (target / "done").exists():
        return target
    trees.clear(target)
    target.mkdir(parents=True)
    subprocess.run(["apt-get", "-qq", "download", package], cwd=target, check=True, stdin=subprocess.DEVNULL)
    subprocess.run(["dpkg-deb", "-x", str(next(target.glob("*.deb"))), str(target)], check=True)
    (target / "done").touch()
    return target


def module_files(unpacked: Path) -> list[tuple[str, bytes]]:
    """The modules of MODULES after what they depend on, as (name, content)."""
    paths = {path.name.split(".")[0].replace("-", "_"): path for path in unpacked.glob("lib/modules/*/kernel/**/*.ko*")}
    loaded: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in loaded or name not in paths:  # built in
            return
        data = paths[name].read_bytes()
        data = lzma.decompress(data) if paths[name].suffix == ".xz" else data
        depends = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in (depends.group(1).decode() if depends else "").split(","):
            if other:
                add(other.replace("-", "_"))
        loaded[name] = data

    for name in MODULES:
        add(name)
    return list(loaded.items())


def initramfs(unpacked: Path, busybox: bytes) -> bytes:
    """A cpio archive (newc) with busybox, the modules and an init that mounts both disks."""
    modules = module_files(unpacked)
    init = _INITRAMFS_INIT.format(modules=" ".join(name for name, _ in modules))
    entries = [("bin", stat.S_IFDIR | 0o755, b""), ("modules", stat.S_IFDIR | 0o755, b"")]
    entries += [("bin/busybox", stat.S_IFREG | 0o755, busybox), ("init", stat.S_IFREG | 0o755, init.encode())]
    entries += [(f"modules/{name}.ko", stat.S_IFREG | 0o644, data) for name, data in modules]
    return b"".join(_cpio(number, *entry) for number, entry in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1))


def _cpio(number: int, name: str, mode: int, data: bytes) -> bytes:
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


async def read_from(store: LayerStore, name: str, path: str) -> bytes:
    """One file of a layer."""
    fd = open_layer(await store.mount_plan(store.lookup(name).digest))
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
            return file.read()
    finally:
        os.close(fd)


def site_packages() -> Path:
    """Wheels of requirements.lock for Debian 12's Python 3.11, unpacked; without the build tools."""
    blocks = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().strip())
    kept = "\n".join(block for block in blocks if block.split("==")[0].lower() not in LEFT_OUT) + "\n"
    target = CACHE / f"site-{hashlib.sha256(kept.encode()).hexdigest()[:16]}"
    if not (target / "done").exists():
        trees.clear(target)
        target.mkdir(parents=True)
        (CACHE / "guest.lock").write_text(kept)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            str(target),
            "--no-deps",
            "--require-hashes",
            "--prefer-binary",
        ]
        pip += ["--python-version", "3.11", "--implementation", "cp", "-r", str(CACHE / "guest.lock")]
        subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
        (target / "done").touch()
    return target


def second_disk(stage: Path, command: str, store: LayerStore) -> Path:
    """An EROFS image that is /opt in the guest: this checkout, its packages, init, the command, a store with the small base."""
    subprocess.run([sys.executable, "-m", "dsec.backends.guest.build"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    tree = stage / "opt"
    checkout = tree / "dsec"
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in done.stdout.split("\0") if name]
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "dsec/backends/guest/bin").glob("*")]
    for name in names:
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    (tree / "init").write_text(_INIT)
    (tree / "init").chmod(0o755)
    (tree / Path(COMMAND).name).write_text(command)
    shutil.copytree(site_packages(), tree / "site", symlinks=True)
    small = LayerStore(tree / "layers")
    asyncio.run(_copy_layer(store, small, "busybox"))
    if sys.version_info[:2] == (3, 11):  # the guest's Python: it need not compile under emulation
        compiled = [str(tree / "site"), str(checkout / "dsec"), str(checkout / "libdsec"), str(checkout / "tests")]
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash", *compiled], check=False
        )
    image = stage / "opt.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", "--all-root", str(image), str(tree)], check=True, stdout=subprocess.DEVNULL)
    trees.remove(tree)
    return image


async def _copy_layer(source: LayerStore, target: LayerStore, name: str) -> None:
    info = await source.info(name)
    await target.put_image((await source.mount_plan(info.digest)).source, name, info)
