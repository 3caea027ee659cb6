"""eStargz layers made by hand, after the format's document: gzip members for each chunk, a table of contents, a footer."""

from __future__ import annotations

import base64
import datetime as dt
import functools
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from typing import Any

from dsec.layers import stargz
from tests.oci_box import ARCH, Layout

CHUNK = 64 * 1024
_TYPES = {tarfile.DIRTYPE: "dir", tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "hardlink", tarfile.REGTYPE: "reg", tarfile.FIFOTYPE: "fifo"}


@functools.lru_cache(maxsize=8)
def convert(tar: bytes, lie: bytes = b"", chunk: int = CHUNK) -> tuple[bytes, str, str]:
    """A plain tar as an eStargz blob, the digest of its table, and that of what is compressed. ``lie``: a chunk that holds this has
    another digest than it should."""
    out = bytearray()
    entries: list[dict[str, Any]] = []
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = archive.getmembers()
    at = 0
    for member in members:
        begin = member.offset_data if member.isreg() else None
        head_end = member.offset_data
        out += gzip.compress(tar[at:head_end], 1, mtime=0)
        when = dt.datetime.fromtimestamp(int(member.mtime), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        name = member.name + ("/" if member.isdir() else "")
        entry: dict[str, Any] = {"name": name, "type": _TYPES[member.type], "modtime": when, "mode": member.mode}
        entry |= {"uid": member.uid, "gid": member.gid}
        if member.linkname:
            entry["linkName"] = member.linkname
        xattrs = {key.removeprefix("SCHILY.xattr."): value for key, value in member.pax_headers.items() if key.startswith("SCHILY.xattr.")}
        if xattrs:
            entry["xattrs"] = {key: base64.b64encode(value.encode()).decode() for key, value in xattrs.items()}
        at = head_end
        if begin is None or not member.size:
            if begin is not None:
                entry["digest"] = "sha256:" + hashlib.sha256(b"").hexdigest()
            entries.append(entry)
            continue
        entry["size"] = member.size
        for start in range(0, member.size, chunk):
            piece = tar[begin + start : begin + min(start + chunk, member.size)]
            digest = "sha256:" + hashlib.sha256(piece if not lie or lie not in piece else b"else").hexdigest()
            row = entry if start == 0 else {"name": name, "type": "chunk"}
            row |= {"offset": len(out), "chunkOffset": start, "chunkDigest": digest}
            if member.size > chunk:
                row["chunkSize"] = len(piece)
            entries.append(row)
            out += gzip.compress(piece, 1, mtime=0)
        at = begin + member.size
    out += gzip.compress(tar[at : -(-at // 512) * 512], 1, mtime=0)  # the table is the last member: the archive ends behind it
    text = json.dumps({"version": 1, "entries": entries}).encode()
    table = io.BytesIO()
    with tarfile.open(fileobj=table, mode="w") as archive:
        info = tarfile.TarInfo("stargz.index.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    offset = len(out)
    out += gzip.compress(table.getvalue(), 1, mtime=0)
    out += stargz.footer(offset)
    data = bytes(out)
    whole = hashlib.sha256(gzip.decompress(data)).hexdigest()
    return data, "sha256:" + hashlib.sha256(text).hexdigest(), f"sha256:{whole}"


def image(layout: Layout, tars: Sequence[bytes], tag: str, config: dict[str, Any] | None = None, lie: bytes = b"") -> None:
    """Add an image whose layers are eStargz, as its manifest says."""
    layers, diff_ids = [], []
    for tar in tars:
        data, digest, diff_id = convert(tar, lie if lie and lie in tar else b"")
        blob = layout.blob(data, "application/vnd.oci.image.layer.v1.tar+gzip")
        layers.append(blob | {"annotations": {stargz.TOC_DIGEST: digest}})
        diff_ids.append(diff_id)
    about = {"architecture": ARCH, "os": "linux", "config": config or {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    settings = layout.blob(json.dumps(about).encode(), "application/vnd.oci.image.config.v1+json")
    kind = "application/vnd.oci.image.manifest.v1+json"
    entry = layout.blob(json.dumps({"schemaVersion": 2, "mediaType": kind, "config": settings, "layers": layers}).encode(), kind)
    layout.listed(entry | {"platform": {"architecture": ARCH, "os": "linux"}, "annotations": {"org.opencontainers.image.ref.name": tag}})
