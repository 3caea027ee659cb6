"""What the Watcher concludes from heartbeats and from their absence."""

from __future__ import annotations

from typing import Any

from dsec.actors.cluster import Cluster
from dsec.bus.messages import Heartbeat, NodeLoad


def beat(edge: str, n: int = 1, incarnation: str = "i.1", **more: Any) -> Heartbeat:
    return Heartbeat(edge=edge, incarnation=incarnation, n=n, load=NodeLoad(), **more)


def cluster(*edges: str) -> Cluster:
    made = Cluster(lost_after=30, vanish_share=0.3, forget=3600)
    for edge in edges:
        made.hear(beat(edge), 0.0)
    return made


def test_membership_changes_are_told_at_once() -> None:
    """A new node, a new incarnation and draining are news; a plain beat is not."""
    c = cluster()
    assert c.hear(beat("a"), 0.0)
    assert not c.hear(beat("a", 2), 1.0)
    assert c.hear(beat("a", 3, draining=True), 2.0)
    assert c.hear(beat("a", 1, "i.2"), 3.0)
    assert not c.hear(beat("a", 1, "i.2"), 4.0)


def test_one_silent_node_is_a_candidate_and_lost_only_by_its_fence() -> None:
    """Silence alone changes nothing in the view."""
    c = cluster("a", "b", "c", "d")
    for edge in "bcd":
        c.hear(beat(edge, 2), 29.0)
    silent, vanished = c.silent(30.0)
    assert [seen.edge for seen in silent] == ["a"]
    assert not vanished
    assert c.view("w", 30.0).lost == ()
    assert c.lose("a", "i.1", 30.0)
    view = c.view("w", 31.0)
    assert view.lost == ("a",)
    assert {node.edge for node in view.nodes} == {"b", "c", "d"}
    assert view.ages_ms["b"] == 2000


def test_many_that_vanish_together_are_not_lost() -> None:
    """More than 30 % at once: the fault is more likely here."""
    c = cluster(*"abcdefghij")
    for edge in "abcdef":
        c.hear(beat(edge, 2), 29.0)
    assert c.silent(31.0) == ([], True)
    for edge in "ghi":
        c.hear(beat(edge, 2), 32.0)
    silent, vanished = c.silent(33.0)
    assert [seen.edge for seen in silent] == ["j"]
    assert not vanished


def test_a_node_alone_is_never_lost() -> None:
    """Nobody else shows that the bus works."""
    assert cluster("a").silent(1000.0) == ([], True)


def test_a_fenced_incarnation_is_not_heard_any_more() -> None:
    """It must come back as a new one."""
    c = cluster("a", "b")
    c.lose("a", "i.1", 50.0)
    assert not c.hear(beat("a", 9), 51.0)
    assert "a" not in c.nodes
    assert c.hear(beat("a", 1, "i.2"), 52.0)
    assert c.view("w", 52.0).lost == ()


def test_a_node_record_makes_a_node_expected() -> None:
    """After the Watcher's restart a node that never beats again is still found silent."""
    c = cluster("b", "c")
    c.expect("a", "i.7", 0.0)
    for edge in "bc":
        c.hear(beat(edge, 2), 29.0)
    assert "a" not in {node.edge for node in c.view("w", 1.0).nodes}
    assert [(seen.edge, seen.incarnation) for seen in c.silent(30.0)[0]] == [("a", "i.7")]


def test_goodbye_is_no_loss() -> None:
    """A node that left in order is neither there nor lost."""
    c = cluster("a", "b")
    assert c.leave("a", "i.1")
    assert not c.leave("a", "i.1")
    assert c.view("w", 1.0).lost == ()
