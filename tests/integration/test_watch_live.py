"""Watching and controlling a run on a real Ray: from its own kernel, from a second one, over the deaths of kernel, recorder and cluster."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
from clusters import kernel_env

import rlkit as rl
from rlkit import actors
from rlkit.config import as_plain
from rlkit.errors import RunError

HERE = os.path.dirname(__file__)
PHASE_S = 0.15
_names = itertools.count()


@pytest.fixture(scope="module")
def cluster(local_cluster, tmp_path_factory):
    return local_cluster(storage=str(tmp_path_factory.mktemp("watched")))


@pytest.fixture
def run(cluster):
    made = rl.Run(f"w-{next(_names)}", cluster, monitor=False)
    yield made
    if made._background is not None:
        made._background.stop()
        made._background.result(30)
    made.close()
    assert made.ps() == []


def loop_of(n):
    """A loop whose steps have a phase and no parts."""

    def loop(run):
        done = []
        for step in run.steps(n, progress=False):
            with run.phase("rollout"):
                time.sleep(PHASE_S)
            run.log(step, reward=float(step))
            done.append(step)
        return done

    return loop


def until(source, true, limit_s=30.0):
    """Poll until ``true(state)``; (the last changes, all events meanwhile)."""
    events, deadline = [], time.monotonic() + limit_s
    while True:
        changes = source.poll()
        events += changes.events
        if true(changes.state):
            return changes, events
        assert time.monotonic() < deadline, changes.state
        time.sleep(0.02)


def test_a_loop_in_a_thread_is_watched_paused_stepped_and_stopped(run):
    source = rl.watch.source(run)
    handle = run.start(loop_of(1000))
    changes, _ = until(source, lambda s: s.phase == "rollout" and s.step == 1)
    state = changes.state
    assert (state.live, state.looping, state.total, state.control, changes.stale) == (True, True, 1000, "run", None)
    assert state.waiting_for == "the engines to sample"
    assert abs(state.now - state.phase_since) < 5
    assert state.driver.startswith(f"process {os.getpid()} on ")
    assert source.control("pause") == "pausing"
    changes, _ = until(source, lambda s: s.control == "paused")
    at = changes.state.committed
    time.sleep(4 * PHASE_S)
    assert until(source, lambda s: True)[0].state.committed == at
    run.single_step()
    changes, _ = until(source, lambda s: s.control == "paused" and s.committed > at)
    assert changes.state.committed == at + 1
    run.resume()
    until(source, lambda s: s.committed > at + 2)
    assert run.stop() == "stopping"
    done = handle.result(30)
    assert done == list(range(len(done)))
    assert until(source, lambda s: s.control == "stopped")[0].state.looping is False
    with pytest.raises(RunError, match="No loop over run"):
        source.control("stop")
    assert handle.stop() is None  # has ended: nothing happens


def test_every_event_comes_once_to_each_of_two_sources(run):
    first, seen = rl.watch.source(run), []
    handle = run.start(loop_of(5))
    while not handle.done:
        seen += first.poll().events
    seen += first.poll().events
    late = rl.watch.source(run.name).poll().events  # a source that comes later has the whole history
    disk = rl.watch.source(run.folder).poll().events
    assert seen == late == disk
    assert [e["step"] for e in late if e["kind"] == "step"] == [0, 1, 2, 3, 4]


def test_an_async_loop_leaves_the_kernel_free(run):
    async def main():
        seen = []

        async def loop():
            async for step in run.steps(100, progress=False):
                run.log(step)
                seen.append(step)
                await asyncio.sleep(0.01)

        going = asyncio.create_task(loop())
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(RunError, match="driven by an async loop of this kernel already"):
            next(iter(run.steps(100, progress=False)))
        run.pause()
        await asyncio.sleep(1.0)
        at = len(seen)
        await asyncio.sleep(0.5)
        assert len(seen) == at
        run.stop()
        await going
        return seen

    seen = asyncio.run(main())
    assert seen == list(range(len(seen)))
    assert len(seen) < 100


def test_a_plain_for_is_paused_from_elsewhere_and_interrupted_there(run):
    source, done = rl.watch.source(run), []

    def elsewhere():
        until(source, lambda s: s.committed >= 1)
        source.control("pause")
        until(source, lambda s: s.control == "paused")
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=elsewhere)
    other.start()

    def cell():
        for step in run.steps(1000, progress=False):
            time.sleep(0.05)
            run.log(step)
            done.append(step)

    with pytest.raises(KeyboardInterrupt):
        cell()
    other.join()
    assert until(source, lambda s: not s.looping)[0].state.control == "run"
    for step in run.steps(len(done) + 1, progress=False):  # the cell is run again
        done.append(step)
    assert done == list(range(len(done)))


def test_a_run_whose_folder_was_deleted_says_so_and_is_ended_by_close(cluster):
    run = rl.Run(f"w-{next(_names)}", cluster)
    steps = iter(run.steps(3, progress=False))
    run.log(next(steps), reward=1.0)
    shutil.rmtree(run.folder)
    with pytest.raises(RunError, match="was deleted while the run is alive"):
        next(steps)
    assert not run.folder.exists()
    with pytest.raises(RunError, match="was deleted while the run is alive"):
        run.close()
    assert run.ps() == []
    again = rl.Run(run.name, cluster)
    assert again is not run
    assert again.committed == -1
    again.close()


def test_a_run_that_was_closed_has_no_loop_to_stop(cluster):
    run = rl.Run(f"w-{next(_names)}", cluster, monitor=False)
    run.close()
    with pytest.raises(RunError, match="was closed: there is no loop to stop"):
        run.stop()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("mine", 10**400, "a number that a float holds"),
     ("t", 1.0, "'t' is a column that every step has"),
     ("policy_version", 1, "give the metric another name"),
     ("mine", "much", "a metric is a number"), ("mine", [1.0], "a metric is a number"), ("mine", None, "a metric is a number")],
)  # fmt: skip
def test_metrics_that_the_log_cannot_take_are_refused_and_the_step_goes_on(run, name, value, words):
    for step in run.steps(1, progress=False):
        with pytest.raises(RunError, match=words):
            run.log(step, **{name: value})
        run.log(step, fine=float("inf"), also=True)
    assert run.metrics.loc[0, ["fine", "also"]].isna().tolist() == [True, False]


def test_two_loops_over_a_run_are_refused(run):
    go = threading.Event()

    def loop(run):
        for step in run.steps(2, progress=False):
            go.wait(20)
            run.log(step)

    handle = run.start(loop)
    until(rl.watch.source(run), lambda s: s.step == 0)
    with pytest.raises(RunError, match="goes on in a thread already"):
        run.start(loop)
    with pytest.raises(RunError, match="driven by a loop in thread"):
        list(run.steps(2, progress=False))
    with pytest.raises(RunError, match=r"before run.close\(\)"):
        run.close()
    go.set()
    handle.result(30)
    assert run.committed == 1
    outer = iter(run.steps(4, progress=False))
    next(outer)
    next(iter(run.steps(4, progress=False)))
    with pytest.raises(RunError, match="started inside this one"):
        next(outer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_ends_a_loop_in_a_thread_is_raised_by_result_and_the_next_one_goes_on(run, error, capsys):
    def loop(run):
        for step in run.steps(3, progress=True):
            run.note(f"in step {step}")
            if step == 1:
                raise error("here")
            run.log(step)

    handle = run.start(loop)
    with pytest.raises(error, match="here"):
        handle.result(30)
    assert handle.notes == ["in step 0", "in step 1"]
    assert run.start(loop_of(3)).result(30) == [1, 2]
    assert capsys.readouterr() == ("", "")  # nothing was printed from the threads
    state = until(rl.watch.source(run), lambda s: not s.looping)[0].state
    assert (state.phase, state.control) == (None, "run")


def test_a_loop_that_is_stopped_before_its_first_step_does_none(run):
    go = threading.Event()

    def loop(run):
        go.wait(20)
        return loop_of(5)(run)

    handle = run.start(loop)
    handle.stop()
    go.set()
    assert handle.result(30) == []


def test_a_checkpoint_that_is_asked_for_is_written_at_the_next_boundary(cluster):
    run = rl.Run("w-checkpoint", cluster)
    run.learner("tiny", lr=1e-3)
    source = rl.watch.source(run)
    handle = run.start(loop_of(1000))
    until(source, lambda s: s.committed >= 0)
    assert run.checkpoint_soon() == "run"
    events = []
    deadline = time.monotonic() + 60
    while not any(e["kind"] == "checkpoint" for e in events):
        events += source.poll().events
        assert time.monotonic() < deadline
    run.stop()
    handle.result(30)
    assert source.poll().state.checkpoint_asked is False
    run.close()
    changes = source.poll()
    assert (changes.stale, changes.state.live, changes.state.control) == (None, False, "stopped")
    assert [e["kind"] for e in rl.watch.source(run.folder).poll().events][-1] == "close"


def test_an_error_inside_a_phase_ends_the_phase_for_whoever_watches(run):
    source = rl.watch.source(run)

    def cell():
        with run.phase("update"):
            until(source, lambda s: s.phase == "update")
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        cell()
    until(source, lambda s: s.phase is None)


def test_monitor_samples_reach_the_folder_and_end_with_the_run(cluster):
    run = rl.Run("w-monitored", cluster)
    run.start_monitors()
    run.start_monitors()  # changes nothing
    assert sum(name.startswith("monitor-") for name in run.ps()) == len(cluster.nodes)
    source, samples, deadline = rl.watch.source(run), [], time.monotonic() + 60
    while len(samples) < 3:
        samples += source.poll().monitor
        assert time.monotonic() < deadline
        time.sleep(0.1)
    one = samples[-1]
    assert 0 <= one["cpu"] <= 100
    assert 0 < one["memory"] < one["memory_total"]
    assert 0 <= one["object_store"] < one["object_store_total"]
    assert one["gpus"] == []
    assert one["note"].startswith("no NVML: ")
    assert all(b["t"] > a["t"] for a, b in itertools.pairwise(samples))
    held = ray.put(b"x" * 50_000_000)
    while (found := [s for s in source.poll().monitor if s["object_store"] > 4e7]) == []:
        assert time.monotonic() < deadline + 30
        time.sleep(0.2)
    assert found[0]["object_store"] < 2e8
    del held
    run.close()
    assert run.ps() == []
    assert len(rl.watch.source(run.folder).poll().monitor) >= 3


def test_a_cluster_is_watched_without_a_run_and_fifty_sources_leave_nothing(cluster, run):
    threads = threading.active_count()
    source = rl.watch.source(cluster)
    deadline = time.monotonic() + 60
    while not (found := source.poll().monitor):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found[0]["memory"] > 0
    handles = list(source._feed._monitors)
    with pytest.raises(RunError, match="is a cluster"):
        source.control("stop")
    with pytest.raises(RunError, match="is a cluster"):
        source.samples(0)
    source.close()
    actors.end(handles)  # returns once they are gone
    for _ in range(50):
        one = rl.watch.source(run)
        one.poll()
        one.close()
    assert threading.active_count() <= threads
    assert run.ps() == ["recorder"]


def test_a_recorder_that_is_killed_and_replaced_repeats_nothing(cluster):
    run = rl.Run("w-recorder", cluster, monitor=False)
    source = rl.watch.source(run)
    run.start(loop_of(2)).result(30)
    seen = source.poll().events
    actors.end([run.ledger.recorder])
    deadline = time.monotonic() + 20
    while (changes := source.poll()).stale is None:
        assert time.monotonic() < deadline
        seen += changes.events
    assert changes.stale < 20
    assert changes.state.live is False
    with pytest.raises(RunError, match="cannot be reached"):
        source.control("stop")
    run = rl.Run("w-recorder", cluster, monitor=False)
    run.start(loop_of(4)).result(30)
    while (changes := source.poll()).state.committed < 3 or changes.stale is not None:  # the folder is read before the recorder is found
        seen += changes.events
        assert time.monotonic() < deadline + 20
    seen += changes.events
    assert [e["step"] for e in seen if e["kind"] == "step"] == [0, 1, 2, 3]
    run.close()


def test_a_run_that_is_started_afresh_while_it_is_watched(cluster):
    run = rl.Run("w-afresh", cluster, monitor=False)
    source = rl.watch.source(run)
    run.start(loop_of(3)).result(30)
    source.poll()
    run = rl.Run("w-afresh", cluster, resume=False, monitor=False)
    run.start(loop_of(1)).result(30)
    events, restarted, deadline = [], False, time.monotonic() + 20
    while not restarted or not any(e["kind"] == "step" for e in events):
        changes = source.poll()
        events, restarted = events + changes.events, restarted or changes.restarted
        assert time.monotonic() < deadline
    at = next(i for i, e in enumerate(events) if e["kind"] == "rewind" and e["step"] == -1)
    assert [e["step"] for e in events[at:] if e["kind"] == "step"] == [0]
    run.close()


def test_no_such_run(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"No run 'nowhere' is alive.*Nor is there one on disk at .*runs/nowhere"):
        rl.watch.source("nowhere")


@pytest.mark.slow
def test_a_run_of_another_kernel_is_watched_past_its_death(cluster):
    spec = as_plain(cluster.spec)
    options = {"name": "w-other", "home": os.environ["RLKIT_HOME"], "cluster": spec, "steps": 3, "close": False, "signal": "kill"}
    options["traps"] = {"2": ["update", "during"]}
    other = subprocess.Popen([sys.executable, f"{HERE}/driver.py", json.dumps(options)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 200
    while "w-other" not in cluster.ps():
        assert time.monotonic() < deadline
        assert other.poll() is None, other.stdout.read().decode()
        time.sleep(0.3)
    source = rl.watch.source("w-other")
    changes, events = until(source, lambda s: s.committed >= 0, 200)
    assert changes.state.driver.startswith(f"process {other.pid} on ")
    assert source.control("pause") == "pausing"  # a control of one kernel, a loop of another
    events += until(source, lambda s: s.control == "paused", 60)[1]
    source.control("resume")
    assert other.wait(120) == -signal.SIGKILL
    assert len(source.samples(0)) == 16
    _, more = until(source, lambda s: s.driver is None, 60)  # its lease runs out
    events += more
    assert [e["step"] for e in events if e["kind"] == "step"] == [0, 1]
    before = len(events)
    monitored = source.poll().monitor
    time.sleep(3)
    assert source.poll().monitor or monitored  # the monitor needs no kernel
    run = rl.attach("w-other", cluster)
    assert len(run.events) == before
    assert [e["kind"] for e in rl.watch.source(run).poll().events] == [e["kind"] for e in events]
    run.close()
    assert run.ps() == []


ENDED = """
import json, os, sys, time
import psutil
import rlkit as rl
from rlkit import localhead

spec = rl.ClusterSpec(name="mortal", num_cpus=4, num_gpus=0, object_store_gib=0.2, dashboard=False, storage=sys.argv[1])
cluster = rl.connect(spec)
run = rl.Run("mortal", cluster)
source, of_cluster, open_all_along = rl.watch.source(run), rl.watch.source(cluster), rl.watch.source(run)
for step in run.steps(2, progress=False):
    pass
source.poll(), of_cluster.poll()
(head,) = localhead.living()
for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
    process.kill()
ages, took = [], 0.0
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    begun = time.monotonic()
    changes, other = source.poll(), of_cluster.poll()
    took = max(took, time.monotonic() - begun)
    ages.append((changes.stale, other.stale))
    time.sleep(0.3)
try:
    source.control("stop")
except rl.errors.RunError as error:
    refused = str(error)
source.close(), of_cluster.close()
open_all_along.poll()
os.chdir(run.folder.parent.parent)
named = rl.watch.source("mortal").poll()  # its recorder is gone, its folder is not
assert [e["step"] for e in named.events if e["kind"] == "step"] == [0, 1], named
out = {"ages": ages[-1], "took": took, "refused": refused, "committed": changes.state.committed}
if sys.argv[3] == "again":
    cluster = rl.connect(spec)
    try:
        run.log(2)
    except rl.errors.ClusterError as error:
        out["old"] = str(error)
    run = rl.Run("mortal", cluster)
    out["again"] = rl.watch.source(run).poll().state.committed
    for _ in range(20):
        more = open_all_along.poll()
        if more.state.live:
            break
        time.sleep(0.5)
    out["live"] = more.state.live
    run.close()
    cluster.shutdown()
print(json.dumps(out))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "then"),
    [(6, "again"), (75, "end")],  # by default Ray ends a process a minute after its cluster
)
def test_a_kernel_outlives_the_cluster_that_it_watches(tmp_path, seconds, then):
    command = [sys.executable, "-c", ENDED, str(tmp_path / "runs"), str(seconds), then]
    done = subprocess.run(command, env=kernel_env(tmp_path), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert all(seconds - 3 < age < seconds + 3 for age in out["ages"])
    assert out["took"] < 2
    assert "cannot be reached" in out["refused"]
    assert out["committed"] == out.get("again", 1) == 1
    assert then == "end" or out["live"]
    assert then == "end" or "call rlkit.connect again, and rlkit.Run for a run on it" in out["old"]
