"""Which kernel drives a run."""

import os
import subprocess
import sys

import psutil

from rlkit.lease import Driver


def test_this_driver_is_the_same_on_every_call_and_alive():
    driver = Driver.this()
    assert driver == Driver.this()
    assert driver.pid == os.getpid()
    assert not driver.is_dead_for_sure()
    assert Driver(**driver.as_dict()) == driver


def test_a_process_that_ended_is_dead_for_sure():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = Driver("x", Driver.this().host, child.pid, psutil.Process(child.pid).create_time())
    assert not gone.is_dead_for_sure()
    child.kill()
    child.wait()
    assert gone.is_dead_for_sure()


def test_a_reused_process_id_is_another_process():
    here = Driver.this()
    assert Driver("x", here.host, here.pid, here.started - 100).is_dead_for_sure()


def test_nothing_is_known_of_a_process_on_another_machine():
    assert not Driver("x", "elsewhere/boot", 2**22 - 1, 0.0).is_dead_for_sure()
