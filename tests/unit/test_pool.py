"""The killable pool with real processes: hangs, crashes, memory, cancellation, the death of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest

from rlkit.rewards.pool import Cancelled, KillablePool, Task, cancel_when


def task(fn) -> Task:
    return Task.of(cloudpickle.dumps(fn))


def gone(pid: int) -> bool:
    """No such process, or only its exit status is left."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def pool():
    made = KillablePool(2)
    yield made
    made.close()


def statuses(outcomes) -> list[str]:
    return [o.status for o in outcomes]


def test_values_come_back_in_order_and_nothing_starts_early():
    pool = KillablePool(2)
    assert pool.pids() == []
    try:
        out = pool.run(task(lambda x: x * x), range(100), 30)
        assert [o.value for o in out] == [x * x for x in range(100)]
        assert 1 <= len(pool.pids()) <= 2
        before = pool.pids()
        pool.run(task(lambda x: -x), range(3), 30)
        assert pool.pids() == before  # processes are kept
    finally:
        pool.close()
    assert pool.pids() == []
    assert all(gone(pid) for pid in before)


def test_no_items(pool):
    assert pool.run(task(lambda x: x), [], 1) == []


def test_a_hang_costs_its_own_time_only(pool):
    def work(x):
        while x == 7:
            pass
        return x

    pool.run(task(work), [1, 2], 30)  # warm
    start = time.monotonic()
    out = pool.run(task(work), range(20), 1.0)
    assert time.monotonic() - start < 5
    assert statuses(out) == ["ok"] * 7 + ["timeout"] + ["ok"] * 12
    assert [o.value for i, o in enumerate(out) if i != 7] == [x for x in range(20) if x != 7]


def test_a_hang_in_c_code_that_holds_the_interpreter(pool):
    out = pool.run(task(lambda x: 9**9**9 if x == 1 else x), range(3), 1.0)
    assert statuses(out) == ["ok", "timeout", "ok"]


def test_an_exception_is_the_items_own(pool):
    def work(x):
        return 1 / (x - 2)

    out = pool.run(task(work), range(4), 30)
    assert statuses(out) == ["ok", "ok", "error", "ok"]
    kind, message, tail = out[2].value
    assert (kind, message) == ("ZeroDivisionError", "division by zero")
    assert "in work" in tail


def test_exit_and_recursion_are_errors(pool):
    def deep(n):
        return deep(n + 1)

    assert pool.run(task(lambda x: sys.exit(3)), [0], 30)[0].value[:2] == ("SystemExit", "3")
    assert pool.run(task(deep), [0], 30)[0].value[0] == "RecursionError"


def test_a_crash_is_blamed_on_its_item(pool):
    def work(x):
        if x == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        return x

    out = pool.run(task(work), range(12), 30)
    assert [i for i, o in enumerate(out) if o.status != "ok"] == [5]
    assert (out[5].status, out[5].value) == ("died", "signal 11")
    assert pool.run(task(lambda x: os._exit(4)), [0], 30)[0].value == "exit status 4"


def test_memory_is_bounded():
    pool = KillablePool(1, memory_limit=512 * 2**20)
    try:
        out = pool.run(task(lambda n: len(bytearray(n))), [1000, 2**30, 1000], 30)
        assert statuses(out) == ["ok", "memory", "ok"]
        assert pool.started == 2  # the process that ran out of memory was replaced
    finally:
        pool.close()


def test_a_task_that_cannot_be_loaded(pool):
    out = pool.run(Task.named("no_such_module", "f"), [1], 30)
    assert out[0].status == "unloadable"
    assert out[0].value[0] == "ModuleNotFoundError"


def test_named_task_runs_by_reference(pool):
    assert pool.run(Task.named("os.path", "basename"), ["/a/b"], 30)[0].value == "b"


def test_printing_does_not_disturb(pool):
    assert pool.run(task(lambda x: print("noise", flush=True) or x), [1], 30)[0].value == 1


def test_large_items(pool):
    assert pool.run(task(len), ["x" * 5_000_000] * 3, 30)[2].value == 5_000_000


def test_stop_at_failure_ends_the_call(pool):
    def work(x):
        if x == 0:
            raise ValueError("first")
        time.sleep(20)

    start = time.monotonic()
    out = pool.run(task(work), range(4), 30, stop_at_failure=True)
    assert time.monotonic() - start < 10
    assert out[0].status == "error"
    assert out[3] is None
    assert pool.run(task(lambda x: x), [1], 30)[0].value == 1


def test_cancel_from_another_thread(pool):
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    start = time.monotonic()
    with pytest.raises(Cancelled), cancel_when(stop.is_set):
        pool.run(task(lambda x: time.sleep(60)), range(4), 100)
    assert time.monotonic() - start < 5
    assert pool.pids() == []
    assert pool.run(task(lambda x: x), [1], 30)[0].value == 1


def test_works_from_several_threads(pool):
    found: dict[int, list[int]] = {}

    def use(k):
        found[k] = [o.value for o in pool.run(task(lambda x: x + 1), range(k), 30)]

    threads = [threading.Thread(target=use, args=(k,)) for k in (3, 5, 8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {k: list(range(1, k + 1)) for k in (3, 5, 8)}


PARENT = """
import time, cloudpickle
from rlkit.rewards.pool import KillablePool, Task
import threading
pool = KillablePool(2)
pool.run(Task.of(cloudpickle.dumps(lambda x: time.sleep(0.2))), [1, 2], 30)
print(*pool.pids(), flush=True)
pool.run(Task.of(cloudpickle.dumps(lambda x: {work})), [1, 2], 1000)
"""


@pytest.mark.parametrize("work", ["time.sleep(1000)", "9**9**9"], ids=["asleep", "holding the interpreter"])
def test_kill_of_the_parent_leaves_no_child(work):
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(work=work)], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(p) for p in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)
        assert not any(gone(p) for p in pids)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: all(gone(p) for p in pids)), f"still alive: {[p for p in pids if not gone(p)]}"


def test_the_cpu_clock_counts_computing_and_still_ends_a_sleeper():
    pool = KillablePool(2, cpu_clock=True)
    try:
        assert statuses(pool.run(task(lambda x: time.sleep(0.6)), [1], 0.3)) == ["ok"]  # it waited, it did not compute
        start = time.monotonic()
        assert statuses(pool.run(task(lambda x: time.sleep(60)), [1], 0.3)) == ["timeout"]
        assert time.monotonic() - start < 5
        assert statuses(pool.run(task(lambda x: 9**9**9), [1], 0.3)) == ["timeout"]
    finally:
        pool.close()
