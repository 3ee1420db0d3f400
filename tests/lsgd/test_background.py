"""Calls beside the training thread: their order, the first error, and the end of their thread."""

import gc
import threading
import weakref
from contextlib import suppress

import pytest
import torch

from lsgd.collectives.background import Background

from ..speed import scaled

CPU = torch.device("cpu")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lsgd-exchange"]


def test_calls_are_made_in_order_in_one_thread_without_gradients():
    background, made = Background(), []
    assert background.succeeded()
    background.finish()  # nothing to wait for
    for number in range(100):
        background.start(lambda n=number: made.append((n, threading.get_ident(), torch.is_grad_enabled())), CPU)
    background.finish()
    assert [number for number, _, _ in made] == list(range(100))
    assert len({thread for _, thread, _ in made}) == 1 and made[0][1] != threading.get_ident()
    assert not any(enabled for _, _, enabled in made)


def test_after_the_first_error_no_call_is_made_until_it_was_told():
    background, made = Background(), []

    def fail() -> None:
        raise ValueError("the first")

    for call in (lambda: made.append(1), fail, lambda: made.append(2), fail):
        background.start(call, CPU)
    assert not background.succeeded()
    with pytest.raises(ValueError, match="the first"):
        background.finish()
    background.start(lambda: made.append(3), CPU)
    background.finish()
    assert made == [1, 3]


def test_an_error_that_was_told_keeps_no_tensor_until_the_garbage_is_collected():
    background, held = Background(), []

    def fail() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise ValueError("the first")

    gc.disable()
    try:
        for _ in range(2):
            background.start(fail, CPU)
        with suppress(ValueError):
            background.finish()
        background.start(lambda: None, CPU)  # when it runs, the thread has let go of the calls before
        background.finish()
        assert [one() for one in held] == [None]
    finally:
        gc.enable()


def test_the_thread_ends_with_its_object():
    before = threads()

    class Owner:
        def __init__(self) -> None:
            self.background = Background()
            self.background.start(self.act, CPU)  # a call that knows the owner
            self.background.finish()

        def act(self) -> None:
            pass

    owner = Owner()
    (thread,) = set(threads()) - set(before)
    del owner
    gc.collect()
    thread.join(scaled(20.0))
    assert not thread.is_alive()


def test_it_can_be_ended_and_waited_for():
    background, go = Background(), threading.Event()
    background.start(go.wait, CPU)
    background.close(0.0)
    (thread,) = [one for one in threads() if one is background._thread]
    assert thread.is_alive()
    go.set()
    background.close(20.0)
    assert not thread.is_alive()
