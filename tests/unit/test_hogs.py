"""Who gives way among best-effort sandboxes: the rule alone, on books of CPU time that a test writes."""

from __future__ import annotations

import pytest

from dsec.qos.hogs import ALLOWANCE, CALM, LOOKS, PART, PERIOD, WORTH, Hogs, hog_level


class Books:
    """Groups and the CPU time that they use: ``rates`` in cores, for as long as `pass_time` lets pass."""

    def __init__(self, **rates: float) -> None:
        self.rates = rates
        self.used = dict.fromkeys(rates, 0.0)
        self.yielding: dict[str, bool] = {}
        self.reads = 0
        self.now = 100.0
        self.spared: set[str] = set()
        self.requests: dict[str, float] = {}  # a second
        self.likely: list[str] = []
        self.hogs = self.watcher()

    def watcher(self) -> Hogs:
        return Hogs(self, lambda: list(self.rates), lambda: self.likely, self.asked)

    def asked(self, name: str) -> int | None:
        if name in self.spared or name not in self.rates:
            return None
        return round((self.now - 100.0) * self.requests.get(name, 0))

    def cpu_ns(self, name: str) -> int:
        self.reads += 1
        if not name:
            return int(sum(self.used.values()) * 1e9)
        if name not in self.rates:
            raise FileNotFoundError(name)
        return int(self.used[name] * 1e9)

    def yields(self, name: str) -> bool:
        return self.yielding.get(name, False)

    def give_way(self, name: str, on: bool) -> None:
        if name not in self.rates:
            raise FileNotFoundError(name)
        self.yielding[name] = on

    def pass_time(self, seconds: float) -> set[str]:
        """Look as often as it is done in that time; who gives way then."""
        for _ in range(round(seconds / PERIOD)):
            self.now += PERIOD
            for name, rate in self.rates.items():
                self.used[name] = self.used.get(name, 0.0) + rate * PERIOD
            self.hogs.look(self.now)
        assert {name for name, on in self.yielding.items() if on} >= self.hogs.demoted()
        return {name for name, on in self.yielding.items() if on}


def test_hogs_give_way_and_the_quiet_keep_their_weight() -> None:
    """Ten bombs are found beside one who works now and then and many who sleep."""
    books = Books(**{f"bomb{at}": 0.19 for at in range(10)}, works=0.03, **{f"sleeps{at}": 0.0 for at in range(100)})
    assert books.pass_time(3.0) == {f"bomb{at}" for at in range(10)}


def test_what_a_client_asks_for_is_its_own() -> None:
    """Short commands in a row keep their weight though they use more than each bomb; a few requests do not save a bomb, nor do its own
    wishes."""
    rates = {f"bomb{at}": 0.1 for at in range(17)}
    books = Books(**rates, commands=0.4, bombed=0.3)
    books.requests = {"commands": 300.0, "bombed": 10.0}
    assert 300 * ALLOWANCE > 0.4
    assert books.pass_time(10.0) == {*rates, "bombed"}
    books.requests.clear()
    assert "commands" in books.pass_time(3.0)


def test_a_short_command_is_no_hog() -> None:
    """One look that finds somebody busy demotes nobody."""
    books = Books(builds=0.0, works=0.02)
    books.pass_time(2.0)
    books.rates["builds"] = 1.0
    books.pass_time(PERIOD * LOOKS)  # the first of them only begins to watch it
    books.rates["builds"] = 0.0
    assert books.pass_time(2.0) == set()


def test_who_has_calmed_down_has_its_weight_again() -> None:
    """After `CALM` seconds of little, and no earlier; a hog that rests for a moment stays one."""
    books = Books(bomb=1.0, other=0.9)
    assert books.pass_time(3.0) == {"bomb", "other"}
    books.rates["bomb"] = 0.0
    assert books.pass_time(CALM - 1) == {"bomb", "other"}
    books.rates["bomb"] = 1.0
    books.pass_time(1.0)
    books.rates["bomb"] = 0.01
    assert books.pass_time(CALM - 1) == {"bomb", "other"}
    assert books.pass_time(2.0) == {"other"}
    books.rates["other"] = 0.0
    assert books.pass_time(CALM + 1) == set()


def test_all_who_compute_alike_are_alike() -> None:
    """Where a thousand compute, each too little to be seen alone, none of them is left with more weight than the others."""
    books = Books(**{f"each{at}": 0.002 for at in range(1000)})
    assert books.pass_time(30.0) == set(books.rates)


def test_hogs_that_are_starved_stay_hogs() -> None:
    """What latency-sensitive sandboxes leave them is little, which is not calm; the latency-sensitive never give way."""
    books = Books(bomb=0.5, other=0.5, sensitive=0.9)
    books.spared.add("sensitive")
    assert books.pass_time(3.0) == {"bomb", "other"}
    books.rates.update(bomb=0.002, other=0.003, sensitive=1.99)
    assert books.pass_time(60.0) == {"bomb", "other"}


def test_quiet_times_cost_one_read_a_look() -> None:
    """Nobody is looked at alone while all together use little, nor once the known hogs explain what is used."""
    books = Books(**{f"each{at}": 0.0001 for at in range(2000)})
    assert sum(books.rates.values()) < WORTH
    books.pass_time(10.0)
    assert books.reads == round(10.0 / PERIOD)
    books = Books(bomb=1.0, **{f"sleeps{at}": 0.0 for at in range(2000)})
    assert books.pass_time(10.0) == {"bomb"}
    books.reads = 0
    books.pass_time(10.0)
    assert books.reads == 2 * round(10.0 / PERIOD)


@pytest.mark.parametrize(("likely", "most"), [([], 2000 / PART), (["bomb"], 0)])
def test_who_is_in_touch_is_looked_at_first(likely: list[str], most: float) -> None:
    """A hog among thousands is found in turn, and at once where it has lately been told to do something; no look reads them all."""
    books = Books(**{f"sleeps{at}": 0.0 for at in range(2000)}, bomb=1.0)
    books.likely = likely
    looks, found = 0, False
    while not found:
        books.reads = 0
        found = "bomb" in books.pass_time(PERIOD)
        looks += 1
        assert books.reads <= 1 + 3 * PART
    assert looks <= 2 + LOOKS + most


def test_a_new_edge_restores_what_the_last_one_left() -> None:
    """A sandbox that an earlier Edge left giving way is known to do so, and has its weight again when it is calm."""
    books = Books(bomb=1.0, other=0.9)
    books.pass_time(3.0)
    books.hogs = books.watcher()
    books.rates["bomb"] = 0.0
    for name in books.rates:
        books.hogs.adopted(name)
    assert books.pass_time(1.0) == {"bomb", "other"} == books.hogs.demoted()
    assert books.pass_time(CALM + 1) == {"other"}


def test_a_sandbox_that_goes_is_forgotten() -> None:
    """A hog that is stopped between two readings is no error, and nothing of it is kept."""
    books = Books(bomb=1.0, other=1.0)
    books.pass_time(3.0)
    del books.rates["bomb"]
    books.pass_time(2.0)
    assert books.hogs.demoted() == {"other"}


def test_the_level_is_the_hogs_own() -> None:
    """Many who do a little do not lower it; who sleeps does not count."""
    assert hog_level([0.2] * 10) == pytest.approx(0.1)
    assert hog_level([0.2] * 10 + [0.001] * 1000 + [0.0] * 9000) > 0.06
    assert hog_level([]) == hog_level([0.0]) == 0.0
