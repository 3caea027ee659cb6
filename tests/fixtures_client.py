"""A cluster for the tests of clients: real nats-server, Scheduler, Watcher, and an Edge with the fake backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

import libdsec
from libdsec import Client


@pytest.fixture(scope="session")
def fake_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a cluster by `dsec up`, whose launches take 5 ms. One for the whole run: use a project of your own."""
    place = tmp_path_factory.mktemp("up")
    ready = place / "ready.json"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
    environ |= {"DSEC_FAKE__LAUNCH_MS": "5", "DSEC_EDGE__SWEEP_MS": "100", "DSEC_EDGE__UNCLAIMED_MS": "1000"}
    command = [sys.executable, "-m", "dsec.cli", "up", "--backend", "fake", "--port", "0", "--state-dir", str(place / "state")]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--ready-file", str(ready)], env=environ, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 40
            while not (ready.exists() and ready.read_text().endswith("\n")):
                assert process.poll() is None, (place / "log").read_text()
                assert time.monotonic() < until, (place / "log").read_text()
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"]
        finally:
            process.terminate()
            try:
                assert process.wait(30) == 0, (place / "log").read_text()
            finally:
                process.kill()


@pytest_asyncio.fixture
async def dsec(fake_cluster: str, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client with a project of the test's own."""
    async with libdsec.connect(fake_cluster, project=f"t/{abs(hash(request.node.name))}", lease_ttl=2) as client:
        yield client
        # Whatever a test leaves running on purpose ends here.
        await client.stop(everything=True)
