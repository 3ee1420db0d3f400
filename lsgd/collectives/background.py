"""Work beside the training thread: exchanges that run during forward and backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lsgd.lazy import torch


class Background:
    """One call at a time in a thread of its own, and on a CUDA stream of its own where there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def busy(self) -> bool:
        """Whether a call was started and not yet waited for."""
        return self._thread is not None

    def start(self, call: Callable[[], None], device: torch.device) -> None:
        """Start ``call``, after what the current stream of ``device`` has been given so far."""
        assert self._thread is None, "the last call has not been waited for"
        self._error = None
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream):  # does nothing with None
                    call()
            except Exception as error:
                self._error = error

        # A daemon: an exchange that hangs until its deadline does not keep a process from ending.
        self._thread = threading.Thread(target=run, name="lsgd-exchange", daemon=True)
        self._thread.start()

    def succeeded(self) -> bool:
        """Wait for the call; return whether it raised nothing. :meth:`finish` is still due."""
        assert self._thread is not None, "nothing was started"
        self._thread.join()
        return self._error is None

    def finish(self) -> None:
        """Wait for the call, and make the current stream wait for its stream; raise what it raised."""
        assert self._thread is not None, "nothing was started"
        self._thread.join()
        self._thread = None
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if self._error is not None:
            raise self._error
