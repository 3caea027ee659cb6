"""`dsec layer pull`: images of registries, of OCI layouts and of `docker save` as layers of this node."""

from __future__ import annotations

import os

import click

from dsec.commands.common import Settings, common
from dsec.commands.layer_common import open_store, show_ref, stored, told


@click.command("pull")
@click.argument("image", metavar="IMAGE|DIR|TAR")
@click.option("--name", default="", help="Name of the layer. [default: the image's; of a directory or tar, that of the file]")
@click.option("--tag", default="", help="Which image of a directory or tar that holds several.")
@click.option("--limit", default="3GiB", show_default=True, help="Larger images stay one layer for each of their own.")
@stored
@common
def pull(settings: Settings, image: str, name: str, tag: str, limit: str, config: str | None, store: str | None) -> None:
    """Make a layer of a container image: python:3.12, ghcr.io/org/image@sha256:…, an oci-layout directory, a tar of `docker save`.

    Environment, working directory, user and command of the image are kept. Credentials are those of `docker login`.
    """
    from dsec.layers import oci
    from dsec.layers.pull import pull as pull_image
    from libdsec.spec import size

    target = open_store(config, store)
    most = size(limit, "limit")
    if image.startswith((".", "/")) or os.path.isfile(image) or os.path.isdir(image):
        stem = os.path.basename(os.path.abspath(image)).removesuffix(".tar")
        ref = told(settings, lambda tell: oci.import_image(target, image, name or stem, tag=tag, limit=most, progress=tell))
    else:
        ref = told(settings, lambda tell: pull_image(target, image, name, limit=most, progress=tell))
    show_ref(settings, ref.name, ref.digest)
