"""A relay like a run's, for the time that ``lsgd doctor`` tests the links."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

from lsgd.client.groups.routes import RelayedRoute
from lsgd.protocol.credentials import Ticket, secret_of_relay, secret_of_run
from lsgd.protocol.keys import KeyRing

STARTS_WITHIN_S = 10.0
_RUN = b"doctor"


@dataclass(frozen=True)
class RelayAccess:
    """What the nodes need to use it: its address (empty: it does not run), and the secret of its only run."""

    address: str
    secret: bytes

    def published(self) -> str:
        """Return the text for the other nodes."""
        return json.dumps([self.address, self.secret.hex()])

    @staticmethod
    def of(published: bytes) -> "RelayAccess":
        """Return what node 0 has published."""
        address, secret = json.loads(published)
        return RelayAccess(address, bytes.fromhex(secret))

    def route(self, me: int, source: int, target: int, nonce: bytes) -> RelayedRoute:
        """Return the route of node ``me``, one of the two, between two nodes."""
        return RelayedRoute(self.address, Ticket(_RUN, 1, source, target, of_target=target == me), self.secret, nonce)


@contextmanager
def running_relay(address: str) -> Iterator[RelayAccess]:
    """Run a relay at an address, with its own keys, inside the context."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        ring = KeyRing.make(keys, [])
        command = [sys.executable, "-P", "-m", "lsgd.server", "--relay", "--listen", address, "--keys", str(keys)]
        with subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL) as it:
            try:
                assert it.stdout
                ready, _, _ = select.select([it.stdout], [], [], STARTS_WITHIN_S)
                runs = ready and os.read(it.stdout.fileno(), 4096)
                yield RelayAccess(address if runs else "", secret_of_run(secret_of_relay(ring.secret), _RUN))
            finally:
                it.kill()
