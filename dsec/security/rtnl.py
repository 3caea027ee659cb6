"""What is not done for each sandbox: links and routes of the node are read and tidied by pyroute2. Everything blocks: call it in a thread.

pyroute2 costs 9 MiB and 0.2 s when it is first imported, so that happens inside these functions: an Edge that never had an open sandbox
does not pay. A sandbox's own wiring goes past it, by dsec/security/netlink.py: the same messages took 4.5 ms through pyroute2 (one
socket, batched by `IPBatch`) where they take 0.9 ms there, and a create waits for them.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator
from ipaddress import ip_network
from typing import TYPE_CHECKING

from dsec.errors import Unsupported
from dsec.security.netlink import RTPROT_DSEC
from dsec.security.network import Block, Network

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_LO = "lo"
_BITS = {socket.AF_INET: 32, socket.AF_INET6: 128}
_RT_TABLE_LOCAL, _RT_SCOPE_HOST = 255, 254


@contextlib.contextmanager
def _kernel() -> Iterator[IPRoute]:
    """A socket of the network namespace that the calling thread is in. The kernel's refusals are `OSError`."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as kernel:
            yield kernel
    except NetlinkError as error:
        raise OSError(error.code, str(error)) from error


@contextlib.contextmanager
def _gone_is_fine(yes: bool = True) -> Iterator[None]:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except NetlinkError as error:
        if not yes or error.code not in (errno.ENODEV, errno.ESRCH, errno.ENOENT):
            raise


def taken(prefix: str) -> tuple[list[tuple[Network, str]], int]:
    """Every network that this node has a route or an address in, with who has it, less what is this Edge's own (interfaces that begin with
    ``prefix``); and the MTU of the way out. Raises `OSError`."""
    found: list[tuple[Network, str]] = []
    mtus: list[int] = []
    with _kernel() as kernel:
        links = {link["index"]: link for link in kernel.get_links()}
        routes = list(kernel.get_routes())
    for route in routes:
        link = links.get(route.get_attr("RTA_OIF"))
        name = link.get_attr("IFLA_IFNAME") if link is not None else ""
        if route["family"] not in _BITS or (name and name.startswith(prefix)):
            continue
        to = route.get_attr("RTA_DST")
        if to is not None:
            found.append((ip_network((to, route["dst_len"]), strict=False), f"dev {name}" if name else "no device"))
        elif route["dst_len"] == 0 and link is not None:
            mtus.append(link.get_attr("IFLA_MTU"))
    return found, min([*mtus, 65_000]) if mtus else 1500


def own_gateway(block: Block, *, delete: bool = False) -> None:
    """The resolver's address becomes one of the node's, by a local route and without an interface. Raises `OSError`."""
    with _kernel() as kernel:
        route = {
            "dst": f"{block.gateway4}/32",
            "oif": socket.if_nametoindex(_LO),
            "table": _RT_TABLE_LOCAL,
            "type": "local",
            "scope": _RT_SCOPE_HOST,
            "proto": RTPROT_DSEC,
        }
        with _gone_is_fine(delete):
            kernel.route("del" if delete else "replace", **route)


def links(prefix: str, edge: str) -> dict[str, str]:
    """The Edge's interfaces: name -> ulid by what the kernel remembers of each ("" where it remembers nothing: half made).

    Raises `Unsupported` when another Edge's begin with the same prefix."""
    if not any(name.startswith(prefix) for _, name in socket.if_nameindex()):
        return {}  # nothing to ask pyroute2 about
    with _kernel() as kernel:
        everything = [(link.get_attr("IFLA_IFNAME"), link.get_attr("IFLA_IFALIAS") or "") for link in kernel.get_links()]
    found: dict[str, str] = {}
    for name, alias in everything:
        about = alias.split(" ")
        if not name.startswith(prefix):
            continue
        if len(about) == 3 and about[0] == "dsec" and about[1] != edge:
            raise Unsupported(
                f"interfaces of another Edge ({about[1]}) begin with {prefix} too",
                field="edge.name",
                value=edge,
                fix="give this Edge another name",
                reason="network",
            )
        found[name] = about[2] if len(about) == 3 else ""
    return found


def delete_links(names: Iterable[str]) -> None:
    """Removes interfaces, those that are gone already among them. Raises `OSError`."""
    there = {name: index for index, name in socket.if_nameindex()}
    if doomed := [there[name] for name in names if name in there]:
        with _kernel() as kernel:
            for index in doomed:
                with _gone_is_fine():
                    kernel.link("del", index=index)
