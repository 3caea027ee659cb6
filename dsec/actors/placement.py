"""Where sandboxes go: filter, then power of k choices (k = 2) with local optimistic counts. Pure, no I/O, no clock.

Two steps as in the paper: filters that a node passes or not (each has a name, which a refusal tells), then for each sandbox k nodes
are drawn at random and the least loaded is taken (Mitzenmacher, "The power of two choices"). A Scheduler adds what it has placed
itself to the view, until the node's own heartbeats show it: with stale views alone, larger k makes herds. What other Schedulers have
placed is learnt from heartbeats, not from answers: two that see the same gap at the same time both fill it.

The whole of a slice is placed in one call. Filters are evaluated once for each distinct requirement, capacity only for nodes that were
drawn: 32,000 sandboxes over 160 nodes stay well below half a second of pure Python.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Sequence

import msgspec

from dsec.actors import capacity
from dsec.bus.messages import CreateItem, Heartbeat, NodeLoad
from dsec.errors import InvalidRequest
from dsec.model import SandboxId, SandboxSpec

# Filters in the order in which they are asked; those above the line can only change when nodes come or change.
STATIC = ("backend", "arch", "devices", "labels")
CAPACITY = ("memory", "cpus", "pids", "slots", "disk")
_NO_LIMIT = 1 << 62  # bytes of a node that does not admit by its disk
# backend, arch, devices, labels, isolation, and the node that keeps the checkpoint
Kind = tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...], str, str]
UNANSWERED_BEATS = 10  # heartbeats after which a batch without an answer is not counted any more


class Requirement(msgspec.Struct, frozen=True):
    """What placement must know of a spec. Specs with equal ``kind`` share the result of the filters."""

    kind: Kind
    need: tuple[int, int]  # memory on a node whose uppers are (0) on a disk, (1) on tmpfs
    cpus: float
    pids: int
    disk: tuple[int, int] = (0, 0)  # and disk


def requirement(spec: SandboxSpec) -> Requirement:
    r = spec.resources
    here = [capacity.demand(r, usual if spec.disk_mode == "auto" else spec.disk_mode) for usual in ("disk", "tmpfs")]
    return Requirement(
        kind=(spec.backend, spec.arch, spec.devices, tuple(sorted(spec.node_labels.items())), spec.isolation, home_of(spec)),
        need=(here[0].memory, here[1].memory),
        cpus=r.cpus,
        pids=r.pids,
        disk=(here[0].disk, here[1].disk),
    )


def home_of(spec: SandboxSpec) -> str:
    """The node that keeps the checkpoint from which the sandbox begins. Raises `InvalidRequest`."""
    if not spec.checkpoint:
        return ""
    try:
        return SandboxId.parse(spec.checkpoint).edge
    except InvalidRequest:
        raise InvalidRequest("not a checkpoint's id", field="checkpoint", value=spec.checkpoint, fix="see `dsec tree`") from None


class Unplaced(msgspec.Struct, frozen=True):
    """No node takes it: the ``filter`` that refused last. ``final``: waiting cannot help, the request is at fault."""

    index: int
    spec: int
    filter: str
    final: bool


class Sent:
    """What one call of `Picture.place` sent to one node. ``seq``: the node's count of admissions once it had answered; 0 = it has not."""

    __slots__ = ("count", "cpus", "disk", "exclusive", "memory", "n", "pids", "principal", "seq")

    def __init__(self, n: int, count: int, memory: int, cpus: float, pids: int, disk: int, principal: str, exclusive: bool) -> None:
        self.n, self.count, self.memory, self.cpus, self.pids, self.disk = n, count, memory, cpus, pids, disk
        self.principal, self.exclusive, self.seq = principal, exclusive, 0

    def within(self, load: NodeLoad) -> bool:
        """Whether ``load`` counts it."""
        return 0 < self.seq <= load.admitted


class Node:
    """What the picture knows of one Edge: its last heartbeat, the newest ledger that it has told, and what was sent there since."""

    __slots__ = ("beat", "load", "recent", "shunned")

    def __init__(self, beat: Heartbeat) -> None:
        self.beat = beat
        self.load = beat.load
        self.recent: list[Sent] = []
        self.shunned = -1  # number of the beat under which it refused for another reason than capacity

    def heard(self, beat: Heartbeat) -> None:
        self.beat = beat
        if beat.load.admitted >= self.load.admitted:
            self.load = beat.load
        # What was sent under beat n is, as a rule, in the ledger when beat n + 2 is made: n + 1 may have been on its way. A node that
        # counts its admissions tells exactly, and only an answer that never comes has to be given up.
        patience = UNANSWERED_BEATS if beat.load.admitted >= 0 else 2
        self.recent = [sent for sent in self.recent if not sent.within(beat.load) and beat.n < sent.n + patience]


class Picture:
    """The nodes as one Scheduler sees them, in columns that the placing loop can read fast."""

    def __init__(self, k: int = 2, rng: random.Random | None = None) -> None:
        self._k = k
        self._rng = rng or random.Random()
        self._nodes: dict[str, Node] = {}
        self._dirty = True
        self.names: list[str] = []

    # ------------------------------------------------------------------ what is known
    def see(self, beats: Iterable[Heartbeat], *, only: bool = True) -> None:
        """Take a view. ``only``: nodes that it does not name are gone."""
        seen = set()
        for beat in beats:
            seen.add(beat.edge)
            node = self._nodes.get(beat.edge)
            if node is None or node.beat.incarnation != beat.incarnation:
                self._nodes[beat.edge] = Node(beat)
            elif beat.n > node.beat.n:
                node.heard(beat)
        if only:
            for name in [name for name in self._nodes if name not in seen]:
                del self._nodes[name]
        self._dirty = True

    def keep(self, edges: Container[str]) -> None:
        """Nodes that are not in ``edges`` are gone."""
        for name in [name for name in self._nodes if name not in edges]:
            del self._nodes[name]
            self._dirty = True

    def forget(self, edge: str) -> None:
        """Nobody listens there: not placed upon until its next beat."""
        if (node := self._nodes.get(edge)) is not None:
            node.shunned = node.beat.n
            self._dirty = True

    def answered(self, edge: str, load: NodeLoad | None, placed: int, accepted: int) -> None:
        """The Edge answered a batch of ``placed`` with its ledger as it is now: fresher than any heartbeat. It says what fits; which of
        two nodes is the emptier one is asked of heartbeats."""
        node = self._nodes.get(edge)
        if node is None or load is None:
            return
        if load.admitted >= node.load.admitted:
            node.load = load
        for sent in node.recent:
            if not sent.seq and sent.count == placed:
                share = accepted / max(1, placed)
                sent.count, sent.memory, sent.pids = accepted, int(sent.memory * share), int(sent.pids * share)
                sent.cpus, sent.disk, sent.seq = sent.cpus * share, int(sent.disk * share), max(1, load.admitted)
                break
        self._dirty = True

    def __len__(self) -> int:
        return len(self._nodes)

    def knows(self, edge: str) -> bool:
        return edge in self._nodes

    def _columns(self) -> None:
        """Rebuild the columns; O(nodes)."""
        if not self._dirty:
            return
        self._dirty = False
        nodes = list(self._nodes.values())
        self._list = nodes
        self.names = [node.beat.edge for node in nodes]
        loads = [node.load for node in nodes]
        self._tmpfs = [1 if node.beat.tmpfs_upper else 0 for node in nodes]
        self._memory = [load.memory_free for load in loads]
        self._cpus = [load.cpus_total - load.cpus_reserved for load in loads]
        self._slots = [load.slots_free for load in loads]
        self._pids = [load.pids_free for load in loads]
        self._disk = [load.disk_free if load.disk_total else _NO_LIMIT for load in loads]
        self._per_memory = [1.0 / max(1, load.memory_total) for load in loads]
        self._per_cpu = [1.0 / max(0.01, load.cpus_total) for load in loads]
        self._per_slot = [1.0 / max(1, load.slots_total) for load in loads]
        self._score = []
        for at, node in enumerate(nodes):
            told = node.beat.load
            slots, memory, cpus = told.slots_free, told.memory_free, told.cpus_total - told.cpus_reserved
            for sent in node.recent:
                slots, memory, cpus = slots - sent.count, memory - sent.memory, cpus - sent.cpus
                if not sent.within(node.load):
                    self._slots[at] -= sent.count
                    self._memory[at] -= sent.memory
                    self._cpus[at] -= sent.cpus
                    self._pids[at] -= sent.pids
                    self._disk[at] -= sent.disk
            # Load of a node: its scarcest resource, and a little for those that wait to be started there.
            used = max(1.0 - memory * self._per_memory[at], 1.0 - cpus * self._per_cpu[at], 1.0 - slots * self._per_slot[at])
            self._score.append(used + 0.01 * told.starting / max(1, told.starting_max))

    # ------------------------------------------------------------------ filters
    def _filter(self, kind: Kind, principal: str) -> tuple[list[int], str]:
        """Nodes that may take this kind for this principal, and the filter that took the last one away."""
        backend, arch, devices, labels, isolation, home = kind
        left = list(range(len(self._list)))
        if not left:
            return [], "nodes"
        for name in ("checkpoint", "backend", "arch", "devices", "labels", "draining", "refused", "isolation"):
            kept = []
            for at in left:
                node = self._list[at]
                beat = node.beat
                if name == "checkpoint":
                    ok = home in ("", beat.edge)
                elif name == "backend":
                    ok = backend in beat.backends
                elif name == "arch":
                    ok = not arch or arch == beat.arch
                elif name == "devices":
                    ok = all(device in beat.devices for device in devices)
                elif name == "labels":
                    ok = all(beat.labels.get(key) == value for key, value in labels)
                elif name == "draining":
                    ok = not beat.draining
                elif name == "refused":
                    ok = node.shunned < beat.n
                else:
                    ok = _shares(node, principal, isolation == "user")
                if ok:
                    kept.append(at)
            if not kept:
                return [], name
            left = kept
        return left, ""

    # ------------------------------------------------------------------ placing
    def place(
        self, needs: Sequence[Requirement], items: Iterable[CreateItem], principal: str, without: frozenset[str] = frozenset()
    ) -> tuple[dict[str, list[tuple[int, int]]], list[Unplaced]]:
        """Choose a node for every sandbox of ``items``.

        Args:
            needs: the requirement of each spec that items name.
            items: runs of indices, as they stand in a `CreateRequest`.
            without: nodes that lack a layer of theirs; when no other is left the filter is called "layers".

        Returns:
            Node -> its (index, spec) pairs, and what no node takes.
        """
        self._columns()
        placed: list[list[tuple[int, int]]] = [[] for _ in self._list]
        unplaced: list[Unplaced] = []
        used: dict[int, list[float]] = {}
        by_kind: dict[Kind, list[CreateItem]] = {}
        for item in items:
            by_kind.setdefault(needs[item.spec].kind, []).append(item)
        for kind, runs in by_kind.items():
            candidates, took = self._filter(kind, principal)
            if candidates and without:
                candidates = [at for at in candidates if self.names[at] not in without]
                took = "layers"
            if not candidates:
                final = took in STATIC
                unplaced += [Unplaced(index, run.spec, took, final) for run in runs for index in range(run.first, run.first + run.count)]
                continue
            self._place_kind(needs, runs, candidates, placed, unplaced)
            if kind[4] == "user":
                for at in candidates:
                    if placed[at]:
                        used.setdefault(at, []).append(1.0)
        answer: dict[str, list[tuple[int, int]]] = {}
        for at, pairs in enumerate(placed):
            if pairs:
                node = self._list[at]
                answer[self.names[at]] = pairs
                tmpfs = self._tmpfs[at]
                memory = sum(needs[spec].need[tmpfs] for _, spec in pairs)
                cpus = sum(needs[spec].cpus for _, spec in pairs)
                pids = sum(needs[spec].pids for _, spec in pairs)
                disk = sum(needs[spec].disk[tmpfs] for _, spec in pairs)
                node.recent.append(Sent(node.beat.n, len(pairs), memory, cpus, pids, disk, principal, at in used))
        return answer, unplaced

    def _place_kind(
        self,
        needs: Sequence[Requirement],
        runs: list[CreateItem],
        candidates: list[int],
        placed: list[list[tuple[int, int]]],
        unplaced: list[Unplaced],
    ) -> None:
        memory, cpus, slots, pids, disk, score = self._memory, self._cpus, self._slots, self._pids, self._disk, self._score
        tmpfs, per_memory, per_cpu, per_slot = self._tmpfs, self._per_memory, self._per_cpu, self._per_slot
        total = sum(run.count for run in runs)
        k = min(self._k, len(candidates))
        draws = [self._rng.choices(candidates, k=total) for _ in range(k)]
        first, second = draws[0], draws[1] if k > 1 else draws[0]
        hopeless: list[tuple[int, float, int, int]] = []  # smallest demands that found no node: what needs no less is not searched again
        n = 0
        for run in runs:
            requirement = needs[run.spec]
            need, cpu, pid, room, spec = requirement.need, requirement.cpus, requirement.pids, requirement.disk, run.spec
            for index in range(run.first, run.first + run.count):
                at, other = first[n], second[n]
                if score[other] < score[at]:
                    at, other = other, at
                for draw in draws[2:]:
                    if score[draw[n]] < score[at]:
                        at, other = draw[n], at
                n += 1
                kind = tmpfs[at]
                mem = need[kind]
                if memory[at] < mem or slots[at] < 1 or cpus[at] + 1e-6 < cpu or pids[at] < pid or disk[at] < room[kind]:
                    at, kind = other, tmpfs[other]
                    mem = need[kind]
                    if memory[at] < mem or slots[at] < 1 or cpus[at] + 1e-6 < cpu or pids[at] < pid or disk[at] < room[kind]:
                        at = self._search(requirement, candidates, hopeless)
                        if at < 0:
                            refused_by, final = self._why(requirement, candidates)
                            unplaced.append(Unplaced(index, spec, refused_by, final))
                            continue
                        kind = tmpfs[at]
                        mem = need[kind]
                memory[at] -= mem
                disk[at] -= room[kind]
                cpus[at] -= cpu
                slots[at] -= 1
                pids[at] -= pid
                grows = mem * per_memory[at]
                by_cpu = cpu * per_cpu[at]
                if by_cpu > grows:
                    grows = by_cpu
                least = per_slot[at]
                score[at] += grows if grows > least else least  # noqa: FURB136 - max() costs twice as much in this loop
                placed[at].append((index, spec))

    def _search(self, want: Requirement, candidates: list[int], hopeless: list[tuple[int, float, int, int]]) -> int:
        """The least loaded node with room, when neither of the drawn ones has; -1 when there is none."""
        least, room = min(want.need), min(want.disk)
        for mem, cpu, pid, disk in hopeless:
            if least >= mem and want.cpus >= cpu and want.pids >= pid and room >= disk:
                return -1
        best, best_score = -1, 0.0
        for at in candidates:
            fits = (
                self._slots[at] >= 1
                and self._memory[at] >= want.need[self._tmpfs[at]]
                and self._cpus[at] + 1e-6 >= want.cpus
                and self._pids[at] >= want.pids
                and self._disk[at] >= want.disk[self._tmpfs[at]]
            )
            if fits and (best < 0 or self._score[at] < best_score):
                best, best_score = at, self._score[at]
        if best < 0 and len(hopeless) < 8:
            hopeless.append((max(want.need), want.cpus, want.pids, max(want.disk)))
        return best

    def _why(self, want: Requirement, candidates: list[int]) -> tuple[str, bool]:
        """Which resource refused on the nodes that came nearest, and whether even empty nodes would refuse."""
        counts = dict.fromkeys(CAPACITY, 0)
        final = True
        for at in candidates:
            load = self._list[at].beat.load
            need = want.need[self._tmpfs[at]]
            fits = not load.disk_total or load.disk_total >= want.disk[self._tmpfs[at]]
            if load.memory_total >= need and load.cpus_total >= want.cpus and fits:
                final = False
            if self._slots[at] < 1:
                counts["slots"] += 1
            elif self._memory[at] < need:
                counts["memory"] += 1
            elif self._cpus[at] < want.cpus:
                counts["cpus"] += 1
            elif self._pids[at] < want.pids:
                counts["pids"] += 1
            else:
                counts["disk"] += 1
        return max(counts, key=lambda name: counts[name]), final


def _shares(node: Node, principal: str, alone: bool) -> bool:
    """May a sandbox of ``principal`` live there? Nodes are shared unless somebody on it, or this one, asked for isolation."""
    beat = node.beat
    if beat.exclusive and beat.exclusive != principal:
        return False
    for sent in node.recent:
        if sent.principal != principal and (alone or sent.exclusive):
            return False
    return not alone or all(who == principal or not count for who, count in beat.principals.items())
