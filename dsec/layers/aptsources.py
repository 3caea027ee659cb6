"""Which Debian mirrors a bootstrap uses: those that this machine's own apt is configured with. Pure parsing, small readers at the end.

No mirror is named in this project. Where the machine has no source for the wanted suite (an Ubuntu host, another release),
mmdebstrap's own default is used.
"""

from __future__ import annotations

import glob
import os
import re

import msgspec

from dsec.layers import tools

_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)")
_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")
# What of the machine's apt configuration a download cannot do without. It stays out of the base.
_NEEDED = re.compile(
    r'Acquire::(?:[A-Za-z]+::)?(?:Proxy|Proxy-Auto-Detect|Check-Valid-Until|Check-Date|CAInfo|Verify-Peer|Verify-Host)\b.* "[^"]+";'
)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One archive: what a deb822 stanza or a one-line entry says."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


def parse_deb822(text: str) -> list[Source]:
    """The enabled binary stanzas of a ``.sources`` file."""
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and last:
                fields[last] += "\n" + line.strip()
            elif ":" in line:
                last, _, value = line.partition(":")
                last = last.strip().lower()
                fields[last] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        found.append(
            Source(
                uris=tuple(fields.get("uris", "").split()),
                suites=tuple(fields.get("suites", "").split()),
                components=tuple(fields.get("components", "").split()),
                signed_by=fields.get("signed-by", ""),
            )
        )
    return found


def parse_one_line(text: str) -> list[Source]:
    """The ``deb`` lines of a ``.list`` file."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.split("#")[0].strip())
        if match is None:
            continue
        options = dict(part.split("=", 1) for part in (match["options"] or "").split() if "=" in part)
        found.append(
            Source(
                uris=(match["uri"],),
                suites=(match["suite"],),
                components=tuple(match["components"].split()),
                signed_by=options.get("signed-by", ""),
            )
        )
    return found


def for_suite(sources: list[Source], suite: str) -> list[Source]:
    """The sources of a release with its updates and security suites; empty when its main suite is not among them."""
    wanted = {suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates"}
    found = []
    for source in sources:
        suites = tuple(name for name in source.suites if name in wanted)
        if suites:
            found.append(msgspec.structs.replace(source, suites=suites))
    return found if any(suite in source.suites for source in found) else []


def render(sources: list[Source], *, credentials: bool) -> str:
    """A ``.sources`` file. Without ``credentials`` user and password are taken out of the addresses (what a base may show)."""
    stanzas = []
    for source in sources:
        uris = " ".join(source.uris if credentials else (_USERINFO.sub("", uri) for uri in source.uris))
        lines = ["Types: deb", f"URIs: {uris}", f"Suites: {' '.join(source.suites)}", f"Components: {' '.join(source.components)}"]
        if source.signed_by:
            lines.append("Signed-By: " + "\n ".join(source.signed_by.splitlines()))
        stanzas.append("\n".join(lines) + "\n")
    return "\n".join(stanzas)


def of_machine(etc: str = "/etc/apt") -> list[Source]:
    """Every enabled source of this machine; blocking."""
    found: list[Source] = []
    for path in [os.path.join(etc, "sources.list"), *sorted(glob.glob(os.path.join(etc, "sources.list.d", "*")))]:
        if not path.endswith((".list", ".sources")) or not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        found += parse_deb822(text) if path.endswith(".sources") else parse_one_line(text)
    return found


async def download_options() -> list[str]:
    """This machine's proxy and certificate settings of apt, as configuration lines."""
    dump = await tools.run([tools.find("apt-config", "apt"), "dump"])
    return [line for line in dump.splitlines() if _NEEDED.fullmatch(line)]
