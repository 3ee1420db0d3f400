"""A thread for exchanges that overlap the forward and backward passes."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from lsgd.lazy import torch

_Call: TypeAlias = "tuple[Callable[[], float], Future[float] | None, Future[float]]"


class Background:
    """Makes calls in order in one thread, and on one CUDA stream if there is a GPU. A failed call cancels later ones.

    The thread starts with the first call and ends with this object. It is a daemon, so an exchange that hangs until
    its deadline does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._last: Future[float] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], None], device: torch.device) -> None:
        """Run ``call`` after earlier calls, and after what is already queued on the current stream of ``device``."""
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream, before, done = self._stream, self._last, Future[float]()
        ready = torch.cuda.current_stream(device).record_event() if stream else None

        def run() -> float:  # without a reference to this object, which the thread would keep alive
            with torch.no_grad(), torch.cuda.stream(stream):  # None changes nothing
                if stream is not None and ready is not None:
                    stream.wait_event(ready)
                began_at = time.perf_counter()
                call()
                return time.perf_counter() - began_at

        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="lsgd-exchange", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        self._last = done
        self._calls.put((run, before, done))

    def succeeded(self) -> bool:
        """Wait for all calls and return whether none has raised. :meth:`finish` is still due."""
        return self._last is None or self._last.exception() is None

    def finish(self) -> float:
        """Wait for all calls, and make the current stream wait for theirs; raise the first call's error.

        Returns the seconds that the last call took; what it has left to a GPU is not in them.
        """
        self.succeeded()
        last, self._last = self._last, None
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        try:
            return last.result() if last is not None else 0.0
        finally:
            del last  # an error whose frames refer to itself would hold their tensors

    def close(self, within_s: float) -> None:
        """End the thread after all calls, and wait up to ``within_s`` seconds for that."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(within_s)


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (queued := calls.get()) is not None:
        run, before, done = queued
        took_s, failure = 0.0, None
        try:
            if before is not None:
                before.result()
            took_s = run()
        except BaseException as error:
            failure = error
        del queued, run, before  # with what they refer to, before anybody goes on: this thread may not run for a while
        if failure is None:
            done.set_result(took_s)
        else:
            done.set_exception(failure)
        del done, failure
