"""Processes that end while a group is being formed: ``python -m tests.client._forming COUNT``.

Each of COUNT children forms a group with a member that never comes, and ends with exit code 7. Printed is a line for
each way in which the child can end: its name, and the children's exit codes.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from lsgd.client.groups.base import Members
from lsgd.client.groups.store import store_of
from lsgd.client.groups.torch_group import TorchGroup, torch_group
from lsgd.errors import ExchangeError
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings

from ..integration.running import until
from .bench import Switchboard, generation

WITHIN_S = 60


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


def child(end: Callable[[TorchGroup], None]) -> None:
    """Form a group of two, whose other member publishes nothing."""
    with Switchboard(Path(tempfile.mkdtemp())) as switchboard:
        membership = switchboard.member("node0/worker0", Plan(RunSettings(exchange_timeout_s=WITHIN_S)))
        formed = generation(2)
        members = Members.of(formed, membership.join.worker)
        end(torch_group(members, membership, store_of(formed, membership), backend="gloo"))


def main() -> None:
    """Try all ways."""
    for end in (cut, be_interrupted, leave_it_to_a_thread):
        children = []
        for _ in range(int(sys.argv[1])):
            if (process := os.fork()) == 0:
                signal.alarm(WITHIN_S // 2)
                child(end)
            children.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in children]
        print(f"{end.__name__}:", *codes, flush=True)


if __name__ == "__main__":
    main()
