"""Loops in threads: values, errors, interrupts, and who may print."""

import threading
import types

import pytest

from rlkit import background
from rlkit.background import Background
from rlkit.errors import DeadlineError, RunError


def begun(loop):
    made = Background(types.SimpleNamespace(name="sums", stop=lambda: None), loop)
    made.thread.start()
    return made


def test_the_value_of_the_loop():
    made = begun(lambda run: run.name)
    assert made.result(5) == "sums"
    assert made.done
    assert made.error is None
    assert repr(made) == "Background(run 'sums', done)"


@pytest.mark.parametrize("error", [ValueError("of the loop"), KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_the_loop_is_kept_and_raised(error):
    def loop(run):
        raise error

    made = begun(loop)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            made.result(5)
        assert caught.value is error
    assert type(error).__name__ in repr(made)


def test_waiting_has_a_limit_and_the_loop_goes_on():
    go = threading.Event()
    made = begun(lambda run: go.wait(10))
    with pytest.raises(DeadlineError, match=r"still going on after 0.05 s.*\.stop\(\)"):
        made.result(0.05)
    assert not made.done
    go.set()
    assert made.result(5)


def test_an_interrupt_ends_the_waiting_only(monkeypatch):
    go = threading.Event()
    made = begun(lambda run: go.wait(10))

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made._ended, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            made.result()
    assert "goes on in its thread" in caught.value.__notes__[0]
    go.set()
    assert made.result(5)


def test_nothing_is_printed_from_the_thread(capsys):
    made = begun(lambda run: background.say("a note"))
    made.result(5)
    assert made.notes == ["a note"]
    background.say("here")
    assert capsys.readouterr().out == "here\n"


def test_what_is_no_loop_is_refused():
    async def loop(run): ...

    for wrong in (loop, 7):
        with pytest.raises(RunError, match="takes a plain function of the run"):
            background.start(types.SimpleNamespace(name="sums"), wrong)
