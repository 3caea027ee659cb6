"""The world outside of a test's node: HTTP and DNS servers in a network namespace of their own. Run as a program; ends with its input.

    unshare -n python outside.py DIRECTORY      prints "made", waits for a line (its interface is moved here meanwhile), prints "serving"

HTTP on port 80 serves DIRECTORY; /whoami answers with the client's address. DNS on port 53 knows `ZONE`.
"""

from __future__ import annotations

import http.server
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

NODE4, OUTSIDE4, FAR4 = "198.18.0.1", "198.18.0.2", "203.0.113.10"
NODE6, OUTSIDE6, FAR6 = "2001:db8:1::1", "2001:db8:1::2", "2001:db8:ffff::10"
METADATA = "169.254.169.254"
A, AAAA, TXT = 1, 28, 16
ZONE = {
    ("www.outside.test", A): socket.inet_pton(socket.AF_INET, FAR4),
    ("www.outside.test", AAAA): socket.inet_pton(socket.AF_INET6, FAR6),
    ("large.outside.test", TXT): b"".join(bytes([250]) + bytes([65 + n]) * 250 for n in range(8)),
}


def reply(query: bytes, limit: int) -> bytes:
    """An answer from `ZONE`, NXDOMAIN for what is not in it, and only the TC bit for what does not fit."""
    at, labels = 12, []
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode().lower())
        at += size + 1
    kind = struct.unpack_from(">H", query, at + 1)[0]
    name, asked = ".".join(labels), query[12 : at + 5]
    data = ZONE.get((name, kind))
    known = any(entry == name for entry, _ in ZONE)
    header = query[:2] + struct.pack(">HHHHH", 0x8580 | (0 if known else 3), 1, 1 if data else 0, 0, 0)
    answer = b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 5, len(data)) + data if data else b""
    whole = header + asked + answer
    return whole if len(whole) <= limit else query[:2] + struct.pack(">HHHHH", 0x8780, 1, 0, 0, 0) + asked


def serve_dns_udp(address: str, family: int) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 53))
        while True:
            query, peer = sock.recvfrom(4096)
            sock.sendto(reply(query, 512), peer)


def serve_dns_tcp(address: str, family: int) -> None:
    with socket.create_server((address, 53), family=family) as server:
        while True:
            sock, _ = server.accept()
            with sock, sock.makefile("rb") as stream:
                while head := stream.read(2):
                    answer = reply(stream.read(int.from_bytes(head, "big")), 65_535)
                    sock.sendall(len(answer).to_bytes(2, "big") + answer)


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/whoami":
            super().do_GET()
            return
        body = self.client_address[0].removeprefix("::ffff:").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def main() -> None:
    os.chdir(Path(sys.argv[1]))
    print("made", flush=True)
    sys.stdin.readline()
    for command in (
        "ip link set lo up",
        f"ip addr add {OUTSIDE4}/24 dev up1",
        f"ip addr add {OUTSIDE6}/64 dev up1 nodad",
        "ip link set up1 up",
        f"ip addr add {FAR4}/32 dev lo",
        f"ip addr add {FAR6}/128 dev lo nodad",
        f"ip addr add {METADATA}/32 dev lo",
    ):
        subprocess.run(command.split(), check=True)
    for serve in (serve_dns_udp, serve_dns_tcp):
        for address, family in ((OUTSIDE4, socket.AF_INET), (OUTSIDE6, socket.AF_INET6)):
            threading.Thread(target=serve, args=(address, family), daemon=True).start()
    threading.Thread(target=Server(("::", 80), Handler).serve_forever, daemon=True).start()
    print("serving", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
