"""What comes from a newer release of Debian than the machine's: apt with a private set of directories, which keeps the machine's package
lists out of it. The mirror is the one that this machine's apt is configured with, and apt checks everything against Debian's keys."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from dsec.layers import aptsources

SUITE = "trixie"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
AGAIN_S = 24 * 3600  # after a failure
TIMEOUT_S = 60


class Absent(Exception):
    """It cannot be had here; the text says why."""


def mirrors() -> list[aptsources.Source]:
    """Where this machine's apt takes its own release of Debian from."""
    release = platform.freedesktop_os_release()
    if release.get("ID") != "debian":
        raise Absent(f"{release.get('PRETTY_NAME', 'this release')} is not Debian")
    suite = release.get("VERSION_CODENAME", "")
    names = {suite, "stable", "oldstable"}
    found = [source for source in aptsources.of_machine() if names & set(source.suites) and "main" in source.components]
    if not found or not Path(KEYS).exists():
        raise Absent("apt has no source of Debian's here, or not its keys")
    return found


def apt_get(place: Path, kind: str, *requests: list[str]) -> None:
    """Run apt-get update and then each of ``requests`` in ``place``, for packages (``kind`` deb) or their sources (deb-src)."""
    (place / "lists/partial").mkdir(parents=True)
    (place / "archives/partial").mkdir(parents=True)
    listed = place / "debian.sources"
    uris = " ".join(dict.fromkeys(uri for mirror in mirrors() for uri in mirror.uris))
    listed.write_text(f"Types: {kind}\nURIs: {uris}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYS}\n")
    options = {
        "Dir::Etc::sourcelist": listed,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": place / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": place,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": 1,
        "Acquire::http::Timeout": 10,
        "Acquire::https::Timeout": 10,
    }
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
    for arguments in (["update"], *requests):
        try:
            done = subprocess.run([*apt, *arguments], cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise Absent(f"apt-get {arguments[0]} takes more than {TIMEOUT_S} s") from error
        if done.returncode:
            raise Absent(f"apt-get {arguments[0]}: {' '.join(done.stderr.split())[-300:]}")
