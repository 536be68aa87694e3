"""What can go wrong in an engine process; each is called in it before its engine is made."""

import faulthandler
import time

from perilune.engine.core import EngineCore

NUM_GOOD_STEPS = 3


def _after_some_steps(fault):
    step, num_steps = EngineCore.step, 0

    def faulty(core):
        nonlocal num_steps
        num_steps += 1
        if num_steps > NUM_GOOD_STEPS:
            fault()
        return step(core)

    EngineCore.step = faulty


def nothing():
    pass


def raising_steps():
    def fault():
        raise RuntimeError("out of cheese")

    _after_some_steps(fault)


def crashing_steps():
    _after_some_steps(faulthandler._sigsegv)


def slow_steps():
    _after_some_steps(lambda: time.sleep(0.05))


def hanging_step():
    EngineCore.step = lambda core: time.sleep(3600)
