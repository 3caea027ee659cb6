"""`dsec layer build` on real containers: a project's Dockerfile is built, cached and run."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerConfig, LayerStore
from dsec.trees import clear
from tests.fixtures_backend import build_small_base

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]

SMALL: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64}
DOCKERFILE = """\
# A project with a package, tests and a user of its own.
ARG FLAVOUR=plain
FROM small
ARG VERSION=1.0
ENV APP=/srv/app \\
    GREETING="hello world"
LABEL maintainer=nobody
WORKDIR $APP
COPY requirements.txt setup.py ./
COPY --chown=user:user src/ src
COPY --chmod=755 tools/*.sh /usr/local/bin/
RUN echo "version = '$VERSION'" > src/version.py && rm setup.py
RUN ["python3", "-m", "compileall", "-q", "src"]
EXPOSE 80
USER user
RUN cd src && python3 -c 'import app; app.check()' && id -u > /tmp/not-kept && touch mine
ENV PYTHONPATH=$APP/src
WORKDIR data
ENTRYPOINT ["python3", "-m", "app"]
CMD ["--all"]
"""


STAGES = """\
# A command line tool with the library that it needs: tested and packed in one stage, run in another.
ARG BASE=small
FROM $BASE AS source
WORKDIR /src
COPY greet.py test_greet.py ./
COPY vendor/ .

FROM source AS build
RUN python3 -m unittest -q
RUN mkdir /out /out/doc && python3 -m zipapp . -m greet:main -o /out/greet.pyz
RUN echo one > /out/doc/one.txt && echo two > /out/doc/two.txt && ln -s one.txt /out/doc/link && ln -s /out/doc /out/also
RUN chown 1000:1000 /out/doc/two.txt && chmod 600 /out/doc/two.txt

FROM small AS never
RUN exit 1

FROM small
ENV LANG=C.UTF-8
COPY --from=build --chown=user:user --chmod=755 /out/greet.pyz bin/greet.pyz
COPY --from=build /out/also/ /usr/share/greet
COPY --from=1 /out/doc/*.txt /txt/
COPY --from=small /etc/group /etc/group.bak
WORKDIR /home/user
USER user
ENTRYPOINT ["python3", "/bin/greet.pyz"]
CMD ["--name", "everybody"]
"""
GREET = """\
import click

@click.command()
@click.option("--name", default="you")
def main(name):
    click.echo(f"Hello, {name}!")
"""
TEST_GREET = """\
import unittest
from click.testing import CliRunner
import greet

class Greets(unittest.TestCase):
    def test_name(self):
        self.assertEqual(CliRunner().invoke(greet.main, ["--name", "x"]).output, "Hello, x!\\n")
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        await asyncio.to_thread(build_small_base, place / "base")
        cluster = Cluster(place / "up", edges=(f"t{secrets.token_hex(4)}",), overrides={"edge": {"sweep_ms": 200}})
        config = LayerConfig(env={"BASE": "yes", "PATH": "/usr/local/bin:/usr/bin:/bin"})
        await import_dir(LayerStore(cluster.layer_store), place / "base", "small", config=config)
        async with cluster:
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project."""
    root = tmp_path / "project"
    for folder in ("src/app", "tools", "src/__pycache__"):
        (root / folder).mkdir(parents=True)
    (root / "Dockerfile").write_text(DOCKERFILE)
    (root / ".dockerignore").write_text("**/__pycache__\n*.log\n!keep.log\n")
    (root / "requirements.txt").write_text("")
    (root / "setup.py").write_text("")
    (root / "src/app/__init__.py").write_text("def check():\n    import version\n    assert version.version == '2.0'\n")
    (root / "src/app/__main__.py").write_text("import app, sys\napp.check()\nprint('ran', *sys.argv[1:])\n")
    (root / "src/__pycache__/old.pyc").write_text("old")
    (root / "src/app/data").symlink_to("../nowhere")
    (root / "tools/tool.sh").write_text("#!/bin/sh\necho $GREETING $BASE\n")
    return root


async def build(cluster: Cluster, project: Path, *more: str) -> tuple[int, str, str]:
    command = ("--url", cluster.url, "layer", "build", str(project), "-t", "mine/app:1", "-m", "128MiB", "--disk", "64MiB", *more)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec.cli", *command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_dockerfile_is_built_cached_and_run(cluster: Cluster, project: Path) -> None:
    """Its steps run in order as they say, the image starts with what it says, and a second build carries out what changed alone."""
    code, out, err = await build(cluster, project, "--build-arg", "VERSION=2.0")
    assert code == 0, err
    assert out.startswith("mine/app:1  sha256:")
    assert "(cached)" not in err
    async with libdsec.connect(cluster.url) as client, client.sandbox("mine/app:1", **SMALL) as sandbox:
        script = "id -un; pwd; tool.sh; python3 -m app x; stat -c '%U %a' ../src/app ../src/version.py ../src/mine; ls /tmp .. ../src"
        result = await sandbox.exec(script)
        assert result.stdout.text.splitlines() == [
            *("user", "/srv/app/data", "hello world yes", "ran x"),
            *("user 755", "root 644", "user 644", "..:", "data", "requirements.txt", "src", "", "../src:"),
            *("__pycache__", "app", "mine", "version.py", "", "/tmp:"),
        ], result.stdout.text + result.stderr.text
        reading = ["python3", "-c", "import os; print(os.readlink('../src/app/data'))"]
        assert (await sandbox.exec(reading)).stdout.text == "../nowhere\n"
    command = ("--url", cluster.url, "run", "-m", "96MiB", "--disk", "64MiB", "mine/app:1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec.cli", *command), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    assert (await process.communicate())[0] == b"ran --all\n"
    code, again, err = await build(cluster, project, "--build-arg", "VERSION=2.0", "--json")
    assert code == 0, err
    assert json.loads(again)["digest"] in out
    (project / "tools/tool.sh").write_text("#!/bin/sh\necho other\n")
    _, out_other, err = await build(cluster, project, "--build-arg", "VERSION=2.0")
    assert 0 < err.count("(cached)") < err.count("\n[")
    assert out_other != out
    info = await LayerStore(cluster.layer_store).info("mine/app:1")
    assert (info.config.entrypoint, info.config.cmd) == (("python3", "-m", "app"), ("--all",))
    async with libdsec.connect(cluster.url) as client:
        assert await client.list() == []


async def test_a_real_project_of_several_stages(cluster: Cluster, tmp_path: Path) -> None:
    """A tool is tested and packed with its library in one stage and runs from another; owners, modes, links and patterns of COPY --from
    hold; a stage that nothing needs is not built; the second build carries out nothing."""
    import click

    root = tmp_path / "greet"
    root.mkdir()
    (root / "Dockerfile").write_text(STAGES)
    (root / "greet.py").write_text(GREET)
    (root / "test_greet.py").write_text(TEST_GREET)
    shutil.copytree(Path(click.__file__).parent, root / "vendor/click", ignore=shutil.ignore_patterns("__pycache__"))
    code, out, err = await build(cluster, root)
    assert code == 0, err
    assert "(cached)" not in err
    assert "exit 1" not in err
    async with libdsec.connect(cluster.url) as client:
        async with client.sandbox("mine/app:1", **SMALL) as sandbox:
            script = "id -un; pwd; python3 /bin/greet.pyz; cd /; stat -c '%U %a' bin/greet.pyz usr/share/greet/two.txt; ls txt src out"
            result = await sandbox.exec(script)
            assert result.stdout.text.splitlines() == [
                "user",
                "/home/user",
                "Hello, you!",
                "user 755",
                "user 600",
                "txt:",
                "one.txt",
                "two.txt",
            ]
            assert await sandbox.files.readlink("/usr/share/greet/link") == "one.txt"
            assert (await sandbox.exec("cat /etc/group.bak")).stdout.text.startswith("root:")
        assert await client.list() == []
    command = ("--url", cluster.url, "run", "-m", "96MiB", "--disk", "64MiB", "mine/app:1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec.cli", *command), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    assert (await process.communicate())[0] == b"Hello, everybody!\n"
    code, again, err = await build(cluster, root)
    assert (code, again) == (0, out)
    assert err.count("(cached)") == err.count("\n[")
    (root / "test_greet.py").write_text(TEST_GREET.replace("Hello, x", "Bye, x"))
    code, _, err = await build(cluster, root)
    assert code != 0
    assert "AssertionError" in err
    code, _, err = await build(cluster, root, "--target", "source")
    assert code == 0, err
    assert "unittest" not in err


async def test_a_build_that_fails_says_where(cluster: Cluster, project: Path) -> None:
    """A step that fails ends the build with its line and output, and no sandbox stays."""
    code, _, err = await build(cluster, project)
    assert code != 0
    assert "AssertionError" in err
    assert "line 16" in err
    (project / "Dockerfile").write_text("FROM small\nCOPY nothing /\n")
    code, _, err = await build(cluster, project)
    assert code != 0
    assert "nothing to copy" in err
    async with libdsec.connect(cluster.url) as client:
        assert await client.list() == []
