"""What becomes of an engine that dies, without engines: handles are names, and Ray is left out."""

from __future__ import annotations

import types

import pytest

from rlkit.config import EngineSpec
from rlkit.context import Owner
from rlkit.engines import crew as crew_module
from rlkit.engines import delivery
from rlkit.engines.crew import Coming, Crew
from rlkit.errors import ActorDiedError
from rlkit.parts import Parts


class Call:
    """A method of a remote engine."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def remote(self, *args):
        self.log.append((self.name, *args))
        return f"{self.name} reply"


class Remote:
    def __init__(self, name, log):
        self.name = name
        self.start, self.load_weights = Call(f"{name}.start", log), Call(f"{name}.load", log)

    def __repr__(self):
        return self.name


@pytest.fixture
def three(monkeypatch):
    """Engines 0 to 2 at policy version 4, with a log of what was asked of them and of what replaced them."""
    log = []
    monkeypatch.setattr(crew_module.actors, "end", lambda handles: log.append(("end", *map(str, handles))))
    monkeypatch.setattr(
        crew_module.pool,
        "replace",
        lambda model, spec, index, space, version: log.append(("replace", index, version)) or Remote(f"new-{index}", log),
    )
    handles = [Remote(f"old-{i}", log) for i in range(3)]
    info = [{"index": i, "model": "m", "version": 4, "gpus": []} for i in range(3)]
    return Crew(handles, info, EngineSpec(), Owner("crew-test")), log


def test_a_dead_engine_leaves_and_its_replacement_comes_back_to_its_place(three, capsys):
    crew, log = three
    gone = crew.handles[1]
    crew.lose(gone, "killed", "its 3 prompts are sampled again by 2 others")
    assert ([str(h) for h in crew.handles], [i["index"] for i in crew.info]) == (["old-0", "old-2"], [0, 2])
    assert log == [("end", "old-1"), ("replace", 1, None), ("new-1.start",)]
    assert capsys.readouterr().out == "engine-1 died: its 3 prompts are sampled again by 2 others; its replacement is starting. (killed)\n"
    crew.lose(gone, "killed", "again")  # a second call of it fails too: nothing more happens
    assert len(log) == 3
    (one,) = crew.coming
    one.info = {"index": 1, "version": 4}
    crew.join(one)
    assert ([str(h) for h in crew.handles], crew.coming) == (["old-0", "new-1", "old-2"], [])


def test_weights_of_version_0_are_those_that_an_engine_starts_with(three):
    crew, log = three
    crew.info[2]["version"] = 0
    crew.lose(crew.handles[2], "killed", "nothing")
    assert log[1] == ("replace", 2, 0)


def test_a_replacement_that_dies_on_its_way_is_not_replaced(three, capsys):
    crew, log = three
    made = Remote("new-7", log)
    crew.coming.append(Coming(7, made, "reply", 0.0))
    crew.lose(made, "killed", "nothing")
    assert (crew.coming, log) == ([], [("end", "new-7")])
    assert "The replacement of engine-7 could not be used" in capsys.readouterr().out


def test_a_sync_goes_on_with_the_engines_that_live(three, monkeypatch):
    crew, log = three
    dead = {"old-1.load reply"}

    def wait(refs, **named):
        if dead & set(refs):
            raise ActorDiedError("old-1 was killed")
        return [{"version": 5, "checked": 9, "load": 0.1, "verify": 0.2} for _ in refs]

    monkeypatch.setattr(delivery.actors, "wait", wait)
    monkeypatch.setattr(delivery, "_died", lambda ref: ref in dead)
    manifest = types.SimpleNamespace(version=5, bytes=10, transport="object_store")
    learner = types.SimpleNamespace(publish_weights=lambda dtype: manifest)
    for info in crew.info:
        info["dtype"] = "float32"
    stats = delivery.Delivery(crew).send(learner, crew.handles, crew.info)
    assert (stats.version, stats.engines, stats.checked) == (5, 2, 9)
    assert [(i["index"], i["version"]) for i in crew.info] == [(0, 5), (2, 5)]
    assert ("replace", 1, None) in log
    assert delivery.Delivery(crew).send(learner, crew.handles, crew.info, only=4) is None  # the learner is at another version
    assert [i["version"] for i in crew.info] == [5, 5]


def test_a_run_keeps_what_happened_in_its_log(capsys):
    kept = []
    run = Parts("crew-log", 0, None)
    run.ledger = types.SimpleNamespace(check=lambda: None, append=kept.append)
    run.step = 3
    run.event("engine", "engine-1 died", name="engine-1", why="killed", moved="its 3 prompts", seconds=0.5)
    run.note("hello")
    assert kept == [
        {
            "kind": "engine",
            "text": "engine-1 died",
            "step": 3,
            "name": "engine-1",
            "why": "killed",
            "moved": "its 3 prompts",
            "seconds": 0.5,
        },
        {"kind": "note", "text": "hello"},
    ]
    assert capsys.readouterr().out == "engine-1 died\nhello\n"
