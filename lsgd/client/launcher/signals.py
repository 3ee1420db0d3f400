"""Signals as something to wait on beside the output of processes."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected() -> Iterator[socket.socket]:
    """Collect signals, those of children that end too, as bytes on a socket; one ignored from the start stays so."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()
