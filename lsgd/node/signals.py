"""The launcher's signals, as a socket to wait on."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def received() -> Iterator[socket.socket]:
    """Deliver signals, including SIGCHLD, as bytes on a socket; SIGHUP stays ignored if it was."""
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
