"""Processes that end while a group is being formed: ``python -m tests.client._forming COUNT``.

Each of COUNT children forms a group with a member that never comes, and ends with exit code 7. Printed is a line for
each way in which the member can fail to come, and the child can end: its name, and the children's exit codes.
"""

import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from lsgd.client.groups.form import form
from lsgd.client.groups.gloo import NONCE_NBYTES
from lsgd.client.groups.torch_group import TorchGroup
from lsgd.errors import ExchangeError
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Put

from ..integration.running import until
from .bench import Switchboard, generation

WITHIN_S = 60


def published(host: str, port: int, numbers: tuple[int, ...] = (0, 1)) -> bytes:
    """Return what a member publishes whose Gloo listens there: its nonce, then Gloo's own."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    numbers_nbytes = struct.pack(f"={len(numbers)}q", *numbers)
    return bytes(NONCE_NBYTES) + struct.pack("=Q1sQ", 1, b"h", 136) + address.ljust(136, b"\0") + numbers_nbytes


@contextmanager
def unreachable() -> Iterator[int]:
    """Yield a port of this machine that leaves those who connect without an answer: its queue is full.

    It is one of those that Gloo takes for smaller than others, so that the other side connects.
    """
    with ExitStack() as stack:
        for port in range(0x8000, 0x10000, 0x100):
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            listener.listen(0)
            for _ in range(3):
                caller = stack.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(("127.0.0.1", port))
            yield port
            return


def cut(group: TorchGroup) -> None:
    """End as a worker does whose generation is over."""
    threading.Timer(0.3, group.cut).start()
    try:
        group.all_reduce(torch.ones(1)).wait()
    except ExchangeError:
        sys.exit(7)


def be_interrupted(group: TorchGroup) -> None:
    """End as a worker does that handles a signal."""
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    group.all_reduce(torch.ones(1)).wait()


def leave_it_to_a_thread(group: TorchGroup) -> None:
    """End while another thread exchanges, as that of the gradient methods does."""
    threading.Thread(target=lambda: group.all_reduce(torch.ones(1)), daemon=True).start()
    until(lambda: any(t.name == "lsgd-build" for t in threading.enumerate()), "the group is being formed")
    sys.exit(7)


def child(end: Callable[[TorchGroup], None], absent: bytes | None) -> None:
    """Form a group of two, whose other member has published ``absent``, or nothing."""
    with Switchboard(Path(tempfile.mkdtemp())) as switchboard:
        membership = switchboard.member("node0/worker0", Plan(RunSettings(exchange_timeout_s=WITHIN_S)))
        if absent is not None:
            membership.channel.send(Put("node0/worker1", 9, 1, "world/0/1", absent))
        end(form(generation(2), membership))


def main() -> None:
    """Try all ways."""

    def attempt(name: str, end: Callable[[TorchGroup], None], absent: bytes | None) -> None:
        children = []
        for _ in range(int(sys.argv[1])):
            if (process := os.fork()) == 0:
                signal.alarm(WITHIN_S // 2)
                child(end, absent)
            children.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in children]
        print(f"{name}:", *codes, flush=True)

    # Gloo takes this address for larger than any other: the other side is to connect.
    elsewhere = published("255.0.0.1", 65535)
    attempt("nothing published", cut, None)
    attempt("nothing published, interrupted", be_interrupted, None)
    attempt("nothing published, in a thread", leave_it_to_a_thread, None)
    attempt("does not connect", cut, elsewhere)
    attempt("does not connect, interrupted", be_interrupted, elsewhere)
    with unreachable() as port:
        attempt("cannot be reached", cut, published("127.0.0.1", port))


if __name__ == "__main__":
    main()
