"""Which driver serves a node: the one that was asked for, or what it falls back to and why."""

from __future__ import annotations

from dsec.backends.driver import Driver, Site
from dsec.backends.native import NativeDriver, trouble
from dsec.backends.oci import OciDriver

NAMES = ("native", "crun", "runc")


def make_driver(site: Site, wanted: str, runtime: str) -> Driver:
    """The driver called ``wanted``; ``runtime`` is the name or path of the OCI runtime (a path goes before ``wanted``).

    Raises `Unsupported` when that runtime is not there.
    """
    if wanted == "native":
        return NativeDriver(site)
    return OciDriver(site, runtime if "/" in runtime else wanted)


def settle(driver: Driver, site: Site, runtime: str) -> tuple[Driver, str]:
    """Once the holder has said what its kernel can: ``driver``, or the OCI runtime and why. Raises `Unsupported` where there is none."""
    if isinstance(driver, NativeDriver) and (why := trouble(site)):
        return OciDriver(site, runtime), why
    return driver, ""
