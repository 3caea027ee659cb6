"""An S3 server in a process of its own, on a free port of loopback: moto's, which keeps buckets in memory and speaks the real protocol.

python -m tests.s3_box        # prints its URL; ends with its standard input
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

REGION = "eu-central-1"


class S3:
    """A running server. ``key`` and ``secret`` are taken by anybody's rule until `lock` was called."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key, self.secret = "AKIATEST", "test-secret"

    def environ(self, **more: str) -> dict[str, str]:
        """What a client's environment says."""
        keys = {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}
        return keys | {"AWS_REGION": REGION, "AWS_ENDPOINT": self.url} | more

    def bucket(self) -> str:
        """A new, empty bucket's name."""
        name = f"layers-{secrets.token_hex(6)}"
        self.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        return name

    def client(self, service: str) -> Any:
        """Amazon's own client."""
        import boto3

        keys = {"aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        return boto3.client(service, region_name=REGION, endpoint_url=self.url, **keys)

    def lock(self) -> None:
        """From now on signatures are checked: one user alone may do anything."""
        iam = self.client("iam")
        iam.create_user(UserName="node")
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
        iam.put_user_policy(UserName="node", PolicyName="all", PolicyDocument=json.dumps(policy))
        made = iam.create_access_key(UserName="node")["AccessKey"]
        self.key, self.secret = made["AccessKeyId"], made["SecretAccessKey"]
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def server() -> Iterator[S3]:
    """A server that lives as long as the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.s3_box"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url = process.stdout.readline().strip()
        assert url, "the S3 server did not start"
        yield S3(url)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(30)


@contextlib.contextmanager
def cutting(url: str, after: int) -> Iterator[str]:
    """A relay to ``url`` that breaks each connection off when ``after`` bytes have gone up through all of them together."""
    host, _, port = url.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    passed = 0
    lock = threading.Lock()
    open_ones: list[socket.socket] = []

    def up(client: socket.socket, target: socket.socket) -> None:
        nonlocal passed
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                with lock:
                    passed += len(data)
                    if passed > after:
                        break
                target.sendall(data)
        for one in (client, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def down(client: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := target.recv(65536):
                client.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                target = socket.create_connection((host, int(port)))
                open_ones.extend((client, target))
                for work in (up, down):
                    threading.Thread(target=work, args=(client, target), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in open_ones:
            one.close()


def main() -> None:
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    served = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
