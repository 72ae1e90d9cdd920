"""What becomes of an engine that dies, without engines: handles are names, and Ray is left out."""

from __future__ import annotations

import types

import pytest
import ray

from rlkit.config import EngineSpec
from rlkit.context import Owner
from rlkit.engines import crew as crew_module
from rlkit.engines import delivery, flight
from rlkit.engines.crew import Coming, Crew
from rlkit.errors import ActorDiedError, LearnerError
from rlkit.parts import Parts
from rlkit.sampler import Sampler


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


def test_a_learner_that_gave_its_weights_to_a_replacement_leaves_the_card_again(three, monkeypatch):
    crew, log = three
    owner = Owner("crew-joins")
    sampler = Sampler(crew.handles, crew.info, crew.spec, owner)
    monkeypatch.setattr(owner, "part", lambda name: types.SimpleNamespace(version=4))
    monkeypatch.setattr(owner.turns, "clear_learner", lambda: log.append("cleared"))
    monkeypatch.setattr(sampler._delivery, "send", lambda *args, **named: log.append("sent") or "statistics")
    sampler._crew.coming.append(Coming(7, Remote("new-7", log), "reply", 0.0, {"index": 7, "version": None}))
    assert sampler._welcome(4) == ""
    assert log == ["sent", "cleared"]
    assert [str(h) for h in sampler.engines] == ["old-0", "old-1", "old-2", "new-7"]


def test_a_learner_that_is_broken_does_not_keep_living_engines_from_sampling(three, monkeypatch, capsys):
    crew, log = three
    owner = Owner("crew-broken")
    sampler = Sampler(crew.handles, crew.info, crew.spec, owner)
    monkeypatch.setattr(owner, "part", lambda name: types.SimpleNamespace(version=4))

    def send(*args, **named):
        raise LearnerError("the ranks were ended")

    monkeypatch.setattr(sampler._delivery, "send", send)
    monkeypatch.setattr(owner.turns, "clear_learner", lambda: None)
    sampler._crew.coming.append(Coming(7, Remote("new-7", log), "reply", 0.0, {"index": 7, "version": None}))
    assert "the ranks were ended" in sampler._welcome(4)
    assert len(sampler.engines) == 3
    assert "The replacement of engine-7 does not join yet" in capsys.readouterr().out
    sampler._crew.handles.clear()
    with pytest.raises(ActorDiedError, match=r"policy version 4: it could not be given .*the ranks were ended"):
        sampler._relieve(4)


class Sampling:
    """``engine.generate.options(...).remote(...)`` of an engine that gives its prompts back, or is dead."""

    def __init__(self, engine):
        self.engine, self.abort = engine, Call(f"{engine}.abort", engine.log)

    def options(self, num_returns):
        return self

    def remote(self, call, prompts, sampling, seeds):
        self.engine.log.append(("generate", self.engine.name, call, list(prompts), list(seeds)))
        return ("shard", self.engine.name, call), (self.engine.name, tuple(prompts), tuple(seeds))


@pytest.fixture
def flying(three, monkeypatch):
    """``fly(dead, relieve)``: what `Flight.land` gives for seven prompts on engines of which ``dead`` are dead."""
    crew, log = three

    def equip(handle):
        handle.log = log
        handle.generate = Sampling(handle)
        return handle

    for handle in crew.handles:
        equip(handle)
    dead: set[str] = set()

    def get(reply, what):
        if reply[0] in dead:
            raise ActorDiedError(f"{reply[0]} was killed")
        return {"by": reply[0], "prompts": reply[1], "seeds": reply[2]}

    monkeypatch.setattr(flight.actors, "get", get)
    monkeypatch.setattr(flight.pool, "info_of", lambda handle, name: None if handle.name in dead else {})
    monkeypatch.setattr(flight, "note_failed", lambda replies, shards: None)
    monkeypatch.setattr(ray, "wait", lambda refs, **named: (refs, []))

    def fly(names, relieve=lambda: pytest.fail("an engine is left")):
        dead.update(names)
        made = flight.Flight(crew, list("abcdefg"), None, list(range(7)))
        return made.land(what="samples", timeout_s=10, setting="-", on_tick=None, relieve=relieve)

    fly.equip = equip
    return fly


def test_a_dead_engine_s_prompts_go_to_the_others_and_come_back_in_their_order(flying, three):
    _, replies = flying({"old-1"})
    assert [r["by"] for r in replies] == ["old-0", "old-0", "old-2", "old-2"]
    assert [p for r in replies for p in r["prompts"]] == list("abcdefg")
    assert [s for r in replies for s in r["seeds"]] == list(range(7))
    calls = [entry[2] for entry in three[1] if entry[0] == "generate"]
    assert len(set(calls[:3])) == 1
    assert calls[3] == calls[4] == f"{calls[0]}-3"  # an engine forgets a stopped call when that ends


def test_engines_that_die_together_are_each_replaced_and_lose_no_prompt(flying, three):
    _, replies = flying({"old-0", "old-1"})
    assert {r["by"] for r in replies} == {"old-2"}
    assert [p for r in replies for p in r["prompts"]] == list("abcdefg")
    assert sorted(entry[1] for entry in three[1] if entry[0] == "replace") == [0, 1]


def test_with_no_engine_left_a_new_one_is_waited_for(flying, three):
    crew, _ = three

    def relieve():
        if not crew.handles:
            crew.coming[0].info = {"index": 0, "version": 4}
            flying.equip(crew.coming[0].handle)
            crew.join(crew.coming[0])

    _, replies = flying({"old-0", "old-1", "old-2"}, relieve)
    assert {r["by"] for r in replies} == {"new-0"}
    assert [p for r in replies for p in r["prompts"]] == list("abcdefg")


def test_prompts_that_two_engines_died_with_are_given_up(flying, three):
    crew, _ = three
    del crew.handles[1:], crew.info[1:]

    def relieve():
        crew.coming[0].info = {"index": 0, "version": 4, "model": "m"}
        flying.equip(crew.coming[0].handle)
        crew.join(crew.coming[0])

    with pytest.raises(ActorDiedError, match=r"engine-0 died .* another engine had died with\. Running the run\.sampler"):
        flying({"old-0", "new-0"}, relieve)


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
