"""Sandboxes as Docker containers, for nodes whose tools and habits are Docker's: `docker ps`, its events, its logs of who started what.

Docker is asked to create and start a container of an empty image with the runtime ``dsec`` (wrapper/oci.c), which builds the very
sandbox that the container backend builds, from the same plan: our layers, cgroups, namespaces, seccomp program and agent. What
differs is whose child it is (the shim's), and that Docker lists it, stops it and tells how it ended. So this backend is the
container backend with another driver, and with a container to remove at the end.

The daemon must be on this machine, 20.10 or newer, not rootless, and know the runtime; `open` refuses with the reason and the fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiodocker
import aiofiles
import aiohttp
import structlog

from dsec.backends import orphans
from dsec.backends.base import LaunchPlan
from dsec.backends.container import ContainerBackend, Options
from dsec.backends.driver import LAUNCH_TIMEOUT, Driver, Place, Site
from dsec.backends.instance import ContainerInstance
from dsec.backends.layer_mounts import Layers
from dsec.backends.network import TOP
from dsec.backends.oci import OciDriver
from dsec.backends.plan import memory_bytes
from dsec.config import DockerConfig
from dsec.errors import NodeError, Unsupported
from dsec.layers.http_words import words
from dsec.model import Exit

log = structlog.get_logger("dsec.docker")

API = (1, 41)  # Docker 20.10
IMAGE = "dsec-empty:1"  # Docker wants an image; the sandbox's root is ours
LABEL = "dsec.ulid"
LABEL_STATE = "dsec.state"  # whose it is: this Edge's state directory
WRAPPER = "dsec-oci version 1"  # what `<runtime> --version` begins with
END_TIMEOUT = 5.0  # seconds until Docker says how a container ended that has ended


def container_name(ulid: str) -> str:
    return f"dsec-{ulid}"


class Engine:
    """The daemon; every failure is a typed error that says what was asked of it."""

    def __init__(self, config: DockerConfig) -> None:
        self.config = config
        if not config.host.startswith("unix:///"):
            raise Unsupported(
                "the Docker backend needs a daemon on this machine", field="docker.host", value=config.host, fix="use unix:///path"
            )
        self._client: aiodocker.Docker | None = None
        self._image = asyncio.Lock()

    @property
    def client(self) -> aiodocker.Docker:
        if self._client is None:
            self._client = aiodocker.Docker(url=self.config.host)
        return self._client

    @asynccontextmanager
    async def asked(self, what: str, sandbox: str = "", timeout: float = LAUNCH_TIMEOUT) -> AsyncIterator[aiodocker.Docker]:
        """Around every request. Raises `NodeError` (reason ``docker``)."""
        try:
            async with asyncio.timeout(timeout):
                yield self.client
        except aiodocker.DockerError as error:
            raise NodeError(f"docker: cannot {what}: {error.message}", sandbox=sandbox, reason="docker") from error
        except TimeoutError as error:
            raise NodeError(f"docker: cannot {what}: no answer within {timeout:g} s", sandbox=sandbox, reason="docker") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NodeError(f"docker: cannot {what}: {words(error)}", sandbox=sandbox, reason="docker") from error

    async def look(self) -> str:
        """What the daemon is, for people. Raises `Unsupported` where it cannot serve."""

        def unfit(text: str, fix: str) -> Unsupported:
            return Unsupported(text, fix=fix, field="docker.host", value=self.config.host, reason="docker")

        try:
            async with self.asked("ask for its version", timeout=10):
                version = await self.client.version()
                info = await self.client.system.info()
        except NodeError as error:
            raise unfit(f"no Docker daemon answers: {error.message}", "start dockerd, or set docker.host") from error
        if tuple(int(part) for part in str(version["ApiVersion"]).split(".")) < API:
            raise unfit(f"Docker {version['Version']} is too old", "install Docker 20.10 or newer")
        if any("rootless" in option for option in info.get("SecurityOptions") or ()):
            raise unfit("a rootless daemon cannot make cgroups and mounts for sandboxes", "use the system's dockerd")
        known = info.get("Runtimes") or {}
        if self.config.runtime not in known:
            path = await asyncio.to_thread(wrapper)
            raise Unsupported(
                f"the daemon has no runtime {self.config.runtime!r}",
                field="docker.runtime",
                value=self.config.runtime,
                fix=f'start dockerd with --add-runtime {self.config.runtime}={path}, or add it to "runtimes" in /etc/docker/daemon.json',
                reason="docker",
            )
        await asyncio.to_thread(_check_wrapper, self.config.runtime, str(known[self.config.runtime].get("path", "")))
        return f"Docker {version['Version']}"

    async def ensure_image(self) -> None:
        async with self._image:
            with contextlib.suppress(NodeError):
                async with self.asked("look for its empty image"):
                    await self.client.images.inspect(IMAGE)
                    return
            async with self.asked("load an empty image"):
                async for _ in self.client.images.import_image(_empty_image(), stream=True):
                    pass

    async def forget_image(self) -> None:
        """Where nobody else on this node uses it."""
        with contextlib.suppress(NodeError):
            async with self.asked("remove its empty image", timeout=10):
                await self.client.images.delete(IMAGE)

    async def run(self, name: str, request: dict[str, Any], sandbox: str) -> int:
        """Create and start; the pid of its init on the node."""
        await self.ensure_image()
        async with self.asked("create a container", sandbox):
            container = await self.client.containers.create(request, name=name)
        async with self.asked("start a container", sandbox):
            await container.start()
            pid = int((await container.show())["State"]["Pid"])
        if not pid:
            raise NodeError("docker: the container ended at once", sandbox=sandbox, reason="docker")
        return pid

    async def remove(self, name: str) -> None:
        """Idempotent; waits for a removal that is under way."""
        for last in (False, True):
            try:
                async with asyncio.timeout(LAUNCH_TIMEOUT):
                    await self.client.containers.container(name).delete(force=True, v=True)
                    return
            except aiodocker.DockerError as error:
                if error.status == 404:
                    return
                if last or error.status != 409:  # 409: somebody else is removing it
                    raise NodeError(f"docker: cannot remove {name}: {error.message}", reason="docker") from error
                await asyncio.sleep(0.2)
            except TimeoutError as error:
                text = f"docker: cannot remove {name}: no answer within {LAUNCH_TIMEOUT:g} s"
                raise NodeError(text, reason="docker") from error
            except (aiohttp.ClientError, OSError) as error:
                raise NodeError(f"docker: cannot remove {name}: {words(error)}", reason="docker") from error

    async def ended(self, name: str) -> dict[str, Any]:
        """How a container ended, as the holder would put it; empty where Docker does not know."""
        try:
            async with self.asked("ask how a container ended", timeout=END_TIMEOUT):
                code = int((await self.client.containers.container(name).wait())["StatusCode"])
        except NodeError:
            return {}
        return {"code": None, "signal": code - 128} if code > 128 else {"code": code, "signal": None}

    async def names(self, state: str) -> set[str]:
        """Ulids of every container of this state directory, in any state."""
        async with self.asked("list containers"):
            found = await self.client.containers.list(all=True, filters=json.dumps({"label": [f"{LABEL_STATE}={state}"]}))
        return {str(container["Labels"][LABEL]) for container in found}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class DockerDriver(OciDriver):
    """Implements `dsec.backends.driver.Driver`."""

    def __init__(self, site: Site, wanted: str, engine: Engine, state: str) -> None:
        super().__init__(site, wanted)
        self.engine = engine
        self._state = state

    async def start(self, plan: LaunchPlan, place: Place) -> int:
        lowers = [layer.digest for layer in plan.lowers]
        lent = await self.site.holder.request("lend", ulid=plan.ulid, lowers=lowers, runtime=self.keep)
        top = self.site.network.as_layer(plan)
        assert place.listener is not None
        numbers = (lent["pid"], os.getpid(), place.listener.fileno(), lent["program"], int(top), len(lent["layers"]), *lent["layers"])
        words = [f"{plan.state_dir}/{TOP}"] if top else []
        words += [lent["launcher"], "-r", self.site.root, *self.options(plan, place.groups.joins), "--", self.keep]
        if self._is_crun:
            words += ["--cgroup-manager", "disabled"]
        text = " ".join(map(str, numbers)) + "\n" + "".join(f"{word}\0" for word in words)
        async with aiofiles.open(f"{plan.state_dir}/docker.launch", "w", opener=_private) as file:
            await file.write(text)
        pid = await self.engine.run(container_name(plan.ulid), self._request(plan), plan.id)
        await self.site.holder.request("adopt", ulid=plan.ulid, pid=pid)
        return pid

    def _request(self, plan: LaunchPlan) -> dict[str, Any]:
        """What Docker is asked for. Root, namespaces and limits are the plan's; the limits are named for Docker's tools."""
        cpus = plan.resources.cpus
        return {
            "Image": IMAGE,
            "Cmd": ["/.dsec/aether"],
            "Env": [f"DSEC_BOX={plan.state_dir}"],
            "Hostname": plan.hostname,
            "NetworkDisabled": True,  # else Docker waits for a hook that reports the network namespace
            "Labels": {LABEL: plan.ulid, LABEL_STATE: self._state, "dsec.id": plan.id, "dsec.image": plan.lowers[-1].name},
            "HostConfig": {
                "Runtime": self.engine.config.runtime,
                "NetworkMode": "none",
                "IpcMode": "none",
                "UsernsMode": "host",  # a daemon with userns-remap: the user namespace is ours
                "LogConfig": {"Type": "none"},
                "Memory": memory_bytes(plan),
                "PidsLimit": plan.resources.pids,
                **({"NanoCpus": int(cpus * 1e9)} if 0.01 <= cpus <= (os.cpu_count() or 1) else {}),
            },
        }


class DockerBackend(ContainerBackend):
    """Implements `dsec.backends.base.Backend`."""

    kind = "docker"

    def __init__(self, options: Options, layers: Layers, config: DockerConfig) -> None:
        super().__init__(options, layers)
        self.engine = Engine(config)

    async def open(self) -> None:
        try:
            what = await self.engine.look()
            await super().open()
        except BaseException:
            await self.engine.close()
            raise
        log.info("docker.ready", engine=what, runtime=self.driver.keep)

    def _heir(self) -> list[str]:
        return orphans.command(self.kind, self.options, self.engine.config)

    def _make_driver(self) -> Driver:
        return DockerDriver(self.site, self.options.runtime, self.engine, self.options.state_dir)

    async def _release(self, ulid: str) -> None:
        # The processes first: Docker cannot kill frozen ones. Its container before ours are forgotten: a start that is under way fails.
        await self._in(self._breakers, self._cgroups.kill, ulid)
        await self.engine.remove(container_name(ulid))
        await super()._release(ulid)

    async def _tell(self, instance: ContainerInstance, status: Mapping[str, Any]) -> None:
        ulid = instance.plan.ulid
        told = {"code": None, "signal": 9} if ulid in self._releases else await self.engine.ended(container_name(ulid))
        await super()._tell(instance, {**status, **told})

    async def last_exit(self, ulid: str) -> Exit | None:
        found = await super().last_exit(ulid)
        if found is not None and found.exit_code is None and found.signal is None and ulid not in self._unserved:
            known = (await self._holder.request("find", ulid=ulid))["found"]
            return self._exit(ulid, known | await self.engine.ended(container_name(ulid)))
        return found

    async def _named_elsewhere(self) -> set[str]:
        return await self.engine.names(self.options.state_dir)

    async def close(self) -> None:
        await super().close()
        await self.engine.close()

    async def shutdown(self) -> None:
        await self.engine.forget_image()
        await super().shutdown()


def wrapper() -> str:
    """The path of the runtime that Docker must be told of; built when it is not there."""
    from dsec.backends.guest import build

    return str(build.ensure(program="oci"))


def _check_wrapper(name: str, path: str) -> None:
    """Raises `Unsupported` unless the registered program is ours."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    if not said.startswith(WRAPPER + "\n"):
        raise Unsupported(
            f"the daemon's runtime {name!r} is {path or 'another program'}, which is not DSec's of this version",
            field="docker.runtime",
            value=name,
            fix=f"start dockerd with --add-runtime {name}={wrapper()}",
            reason="docker",
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _empty_image() -> bytes:
    """An image of one empty layer, as `docker save` writes it."""
    from hashlib import sha256

    def pack(files: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    layer = pack({})
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config = {
        "architecture": arch,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    return pack({"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(config).encode(), "layer.tar": layer})
