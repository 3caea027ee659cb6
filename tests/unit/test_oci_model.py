"""Names and documents of images, without a registry."""

from __future__ import annotations

import json

import pytest

from dsec.errors import InvalidRequest, NotFound, Unsupported
from dsec.layers import oci_model
from dsec.layers.index import check_name

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest", "shown"),
    [
        ("python", "docker.io", "library/python", "latest", "", "python:latest"),
        ("python:3.12", "docker.io", "library/python", "3.12", "", "python:3.12"),
        ("org/x:1", "docker.io", "org/x", "1", "", "org/x:1"),
        ("docker.io/library/python:3.12", "docker.io", "library/python", "3.12", "", "python:3.12"),
        ("ghcr.io/o/i@" + DIGEST, "ghcr.io", "o/i", "", DIGEST, f"ghcr.io/o/i@{DIGEST}"),
        ("localhost:5000/x:y", "localhost:5000", "x", "y", "", "localhost:5000/x:y"),
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000", "a/b", "latest", "", "127.0.0.1:5000/a/b:latest"),
        (f"python:3@{DIGEST}", "docker.io", "library/python", "3", DIGEST, f"python:3@{DIGEST}"),
    ],
)
def test_references(text: str, registry: str, repository: str, tag: str, digest: str, shown: str) -> None:
    """Docker's short forms mean what they mean to Docker, and every full name is a layer's name."""
    found = oci_model.parse(text)
    assert (found.registry, found.repository, found.tag, found.digest) == (registry, repository, tag, digest)
    assert str(found) == shown
    assert oci_model.parse(str(found)) == found
    assert check_name(shown) == shown


@pytest.mark.parametrize("text", ["", "UPPER:x", "a/../b:1", "a:b:c", "x@sha256:12", "x:", "-x:1", "a b:1", "host:port/x:1", "a//b:1"])
def test_what_is_no_reference(text: str) -> None:
    """Anything else is refused with the field that was wrong."""
    with pytest.raises(InvalidRequest) as caught:
        oci_model.parse(text)
    assert caught.value.field == "image"


@pytest.mark.parametrize(
    ("name", "image"),
    [
        *(("python:3.12", True), ("ghcr.io/o/i", True), (f"x@{DIGEST}", True), ("localhost/x", True)),
        *(("debian-12", False), ("repo@main", False), (DIGEST, False), ("mine/first", False), ("sha256:abcdef012345", False)),
        ("Bad:Name/x", False),
    ],
)
def test_which_names_are_images(name: str, image: bool) -> None:
    """A name with a tag, a digest or a registry may be pulled; a plain one is a layer's, and a typing error stays one."""
    assert oci_model.looks_like_image(name) is image


def entry(architecture: str, system: str = "linux", fill: str = "b") -> dict[str, object]:
    return {"digest": "sha256:" + fill * 64, "size": 2, "platform": {"architecture": architecture, "os": system}}


def test_the_platform_is_chosen() -> None:
    """Of an index the entry for Linux and this architecture counts; attestations and others are passed over."""
    rows = [entry("unknown", "unknown"), entry("arm64"), entry("amd64", "windows"), entry("amd64", fill="c")]
    index = oci_model.read_manifest(json.dumps({"schemaVersion": 2, "manifests": rows}).encode())
    assert oci_model.choose(index, "x86_64").digest == "sha256:" + "c" * 64
    with pytest.raises(NotFound) as caught:
        oci_model.choose(index, "riscv64")
    assert "linux/arm64" in caught.value.value


def test_manifests_that_cannot_be_used() -> None:
    """Schema 1, artifacts, foreign layers, hashes other than sha256 and nonsense are refused by type."""
    with pytest.raises(Unsupported):
        oci_model.read_manifest(b'{"schemaVersion": 1, "fsLayers": []}')
    for text in (b"", b"[]", b'{"schemaVersion": 2}', b'{"schemaVersion": 2, "manifests": [{"digest": "md5:00", "size": 1}]}'):
        with pytest.raises(InvalidRequest):
            oci_model.read_manifest(text)
    for more in ({"mediaType": "application/vnd.example+json"}, {"urls": ["https://example.org/x"]}):
        layer = {"digest": DIGEST, "size": 1, "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"} | more
        text = json.dumps({"schemaVersion": 2, "config": {"digest": DIGEST, "size": 1}, "layers": [layer]}).encode()
        with pytest.raises(Unsupported):
            oci_model.check_layers(oci_model.read_manifest(text))


def test_an_images_configuration() -> None:
    """ENV, WORKDIR, USER, ENTRYPOINT and CMD become the layer's; names that no shell can hold are left out with a note."""
    config = {"Env": ["A=1", "B=x=y", "bad-name=1"], "WorkingDir": "app", "User": "1000:1000", "Entrypoint": ["/e"], "Cmd": ["c", "d"]}
    found, notes = oci_model.layer_config(oci_model.read_config(json.dumps({"config": config}).encode()))
    assert found.env == {"A": "1", "B": "x=y"}
    assert (found.workdir, found.user, found.entrypoint, found.cmd) == ("/app", "1000:1000", ("/e",), ("c", "d"))
    assert len(notes) == 1
    empty, _ = oci_model.layer_config(oci_model.read_config(b'{"config": {"Env": null, "Entrypoint": null}}'))
    assert empty.env == {}
