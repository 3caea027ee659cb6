"""What a Watcher knows of the cluster, from heartbeats alone. Pure; times are monotonic seconds of the Watcher.

Silence is not death. A node is lost only when a fence record for (edge, incarnation) has been written, and the Watcher asks for one
only when few nodes fall silent: when more than a share of them vanish together, the fault is more likely here or in the network, and
none is declared lost.
"""

from __future__ import annotations

import msgspec

from dsec.bus.messages import ClusterView, Heartbeat


class Seen(msgspec.Struct):
    """A node: its last heartbeat (None = expected from its node record, not heard yet) and when it came."""

    edge: str
    incarnation: str
    at: float
    beat: Heartbeat | None = None


class Cluster:
    """The nodes. ``lost_after`` seconds of silence make a node a candidate; ``vanish_share`` bounds how many may be at one time."""

    def __init__(self, *, lost_after: float, vanish_share: float, forget: float) -> None:
        self._lost_after = lost_after
        self._share = vanish_share
        self._forget = forget
        self.nodes: dict[str, Seen] = {}
        self.fenced: dict[str, tuple[str, float]] = {}  # edge -> fenced incarnation, when
        self._n = 0

    def expect(self, edge: str, incarnation: str, now: float) -> None:
        """A node record says that it should be there; its silence is counted from now."""
        if edge not in self.nodes:
            self.nodes[edge] = Seen(edge=edge, incarnation=incarnation, at=now)

    def hear(self, beat: Heartbeat, now: float) -> bool:
        """A heartbeat came. True when membership or readiness changed, so that the view should go out at once.

        Beats of a fenced incarnation are ignored: that node must reap and come back as a new one.
        """
        if self.behind_fence(beat):
            return False
        self.fenced.pop(beat.edge, None)
        seen = self.nodes.get(beat.edge)
        if seen is None or seen.beat is None or seen.incarnation != beat.incarnation:
            self.nodes[beat.edge] = Seen(edge=beat.edge, incarnation=beat.incarnation, at=now, beat=beat)
            return True
        if beat.n <= seen.beat.n:
            return False
        changed = seen.beat.draining != beat.draining or seen.beat.backends != beat.backends or now - seen.at > self._lost_after
        seen.beat, seen.at = beat, now
        return changed

    def behind_fence(self, beat: Heartbeat) -> bool:
        """It was declared lost, and does not know it."""
        fenced = self.fenced.get(beat.edge)
        return fenced is not None and fenced[0] == beat.incarnation

    def leave(self, edge: str, incarnation: str) -> bool:
        """It said goodbye: it is neither there nor lost."""
        seen = self.nodes.get(edge)
        if seen is None or seen.incarnation != incarnation:
            return False
        del self.nodes[edge]
        return True

    def silent(self, now: float) -> tuple[list[Seen], bool]:
        """(nodes to be fenced, whether so many are silent that none is).

        One silent node of several is always a candidate, however small the cluster; a single node alone never is: nobody else shows
        that the bus works.
        """
        quiet = [seen for seen in self.nodes.values() if now - seen.at >= self._lost_after]
        if not quiet:
            return [], False
        allowed = max(1, int(self._share * len(self.nodes)))
        if len(quiet) > allowed or len(quiet) == len(self.nodes):
            return [], True
        return quiet, False

    def lose(self, edge: str, incarnation: str, now: float) -> bool:
        """Its fence record is written. False when another incarnation has come in the meantime."""
        seen = self.nodes.get(edge)
        if seen is not None and seen.incarnation != incarnation:
            return False
        self.nodes.pop(edge, None)
        self.fenced[edge] = (incarnation, now)
        return True

    def forget_old(self, now: float) -> None:
        for edge in [edge for edge, (_, at) in self.fenced.items() if now - at > self._forget]:
            del self.fenced[edge]

    def view(self, watcher: str, now: float) -> ClusterView:
        """The view for Schedulers and people; nodes that were only expected are named apart."""
        self._n += 1
        return ClusterView(
            watcher=watcher,
            n=self._n,
            nodes=tuple(seen.beat for seen in self.nodes.values() if seen.beat is not None),
            ages_ms={seen.edge: int((now - seen.at) * 1000) for seen in self.nodes.values()},
            lost=tuple(self.fenced),
            expected=tuple(seen.edge for seen in self.nodes.values() if seen.beat is None),
        )
