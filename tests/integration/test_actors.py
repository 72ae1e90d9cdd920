"""Actors of a run on a real Ray: names, waiting with limits, errors that keep their type, ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from rlkit import actors
from rlkit.errors import ActorDiedError, DeadlineError, ModelError, RewardError, RunError


def worker_class():
    import ray

    class Worker:
        """Defined in a function, so that Ray sends it by value."""

        def __init__(self, fail: Exception | None = None):
            if fail is not None:
                raise fail
            self.stopped = False

        def echo(self, value):
            return value

        def env(self, name):
            return os.environ.get(name)

        def busy(self, seconds):
            """Until the time is up, or the stop flag is set; says which."""
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if self.stopped:
                    return "stopped"
                time.sleep(0.02)
            return "done"

        def fail(self, error):
            raise error

        def die(self):
            os._exit(7)

        @ray.method(concurrency_group="control")
        def stop(self):
            self.stopped = True
            return True

    return Worker


def spawn(owner, name="worker", **options):
    return actors.spawn(worker_class(), name, owner.namespace, **options)


def wait(*refs, **options):
    return actors.wait(list(refs), **{"what": "the test", "timeout_s": 60, "setting": "a_timeout_s"} | options)


@pytest.fixture
def worker(owner):
    made = spawn(owner)
    wait(made.echo.remote(0))
    return made


def test_an_actor_is_found_by_name_until_it_is_ended(owner, worker):
    assert actors.names(owner.namespace) == ["worker"]
    assert actors.runs()[owner.name] == ["worker"]
    found = actors.find("worker", owner.namespace)
    assert wait(found.echo.remote(3)) == [3]
    assert actors.find("nobody", owner.namespace) is None
    actors.end([worker])
    assert actors.find("worker", owner.namespace) is None
    assert actors.names(owner.namespace) == []
    assert owner.name not in actors.runs()


def test_a_name_is_free_again_after_the_end(owner, worker):
    actors.end([worker])
    again = spawn(owner)
    assert wait(again.echo.remote("new")) == ["new"]


def test_a_busy_actor_can_be_ended(owner, worker):
    busy = worker.busy.remote(60)
    start = time.monotonic()
    actors.end([worker])
    assert time.monotonic() - start < 10
    with pytest.raises(ActorDiedError, match="died during the test: worker"):
        wait(busy)


def test_a_second_actor_of_the_same_name_is_refused(owner, worker):
    with pytest.raises(RunError, match=r"'worker' is alive already in 'rlkit-test-.*rlkit kill"):
        spawn(owner)


def test_environment_variables_reach_the_process(owner):
    made = spawn(owner, env={"RLKIT_TEST_VALUE": "x y"})
    assert wait(made.env.remote("RLKIT_TEST_VALUE")) == ["x y"]


def test_control_methods_are_answered_while_another_runs(worker):
    busy = worker.busy.remote(30)
    time.sleep(0.3)
    start = time.monotonic()
    assert wait(worker.stop.remote()) == [True]
    assert wait(busy) == ["stopped"]
    assert time.monotonic() - start < 5


def test_values_come_in_order_and_ticks_tell_what_is_done(owner, worker):
    other = spawn(owner, "other")
    wait(other.echo.remote(0))
    seen = []
    slow, fast = worker.busy.remote(1.0), other.echo.remote("fast")
    assert wait(slow, fast, on_tick=lambda done: seen.append(len(done))) == ["done", "fast"]
    assert seen == sorted(seen)
    assert 1 in seen
    assert seen[-1] == 2


def test_a_deadline_names_what_was_waited_for_and_the_setting(worker):
    with pytest.raises(DeadlineError, match=r"Waited 0\.5 s for the test: 0 of 1 parts were done\..*raise a_timeout_s"):
        wait(worker.busy.remote(3), timeout_s=0.5)


def test_an_error_of_ours_keeps_its_type_and_message(worker):
    with pytest.raises(RewardError, match=r"^prompt p3: the reward is NaN$"):
        wait(worker.fail.remote(RewardError("prompt p3: the reward is NaN")))


def test_an_error_of_others_is_a_ray_error_of_that_type(worker):
    with pytest.raises(ZeroDivisionError):
        wait(worker.fail.remote(ZeroDivisionError("no")))


def test_a_failed_part_is_raised_before_the_others_are_done(owner, worker):
    other = spawn(owner, "other")
    wait(other.echo.remote(0))
    start = time.monotonic()
    with pytest.raises(RewardError):
        wait(worker.busy.remote(20), other.fail.remote(RewardError("bad")))
    assert time.monotonic() - start < 10


def test_a_constructor_s_error_of_ours_keeps_its_type_and_message(owner):
    made = spawn(owner, fail=ModelError("No model at /x.\nLooked for config.json."))
    with pytest.raises(ModelError, match=r"^No model at /x\.\nLooked for config\.json\.$"):
        wait(made.echo.remote(1))


def test_another_constructor_s_error_is_told_in_a_line(owner):
    made = spawn(owner, fail=ZeroDivisionError("no"))
    with pytest.raises(ActorDiedError, match=r"could not start for the test: ZeroDivisionError: no$"):
        wait(made.echo.remote(1))


def test_a_process_that_dies_is_named(worker):
    with pytest.raises(ActorDiedError, match=r"A process died during the test: worker \(pid \d+"):
        wait(worker.die.remote())


def test_an_interrupt_sets_the_stop_flag_and_goes_on(worker):
    busy = worker.busy.remote(60)
    threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
    called = []

    def stop():
        called.append(True)
        worker.stop.remote()

    with pytest.raises(KeyboardInterrupt):
        wait(busy, on_interrupt=stop)
    assert called == [True]
    assert wait(busy) == ["stopped"]
