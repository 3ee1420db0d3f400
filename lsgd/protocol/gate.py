"""Who may connect to a listener with keys, and under which name."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import zmq
from zmq.utils import z85

MAX_LIES = 256
"""Most lines about lying peers that are kept until they are reported."""


class ListenerKeys(Protocol):
    """What a listener needs: its secret key, and who may connect."""

    @property
    def secret(self) -> bytes:
        """Its secret key."""

    @property
    def trouble(self) -> str:
        """Why an older list of allowed keys is in use than that in its file; empty if it is up to date."""

    def allowed(self, public: bytes) -> str:
        """Return the name of a key that may connect now, or an empty text. Called in the authenticator's thread."""


class Gate:
    """Lets only known keys connect to a listener, each under the name of its key."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", listener: "zmq.Socket[bytes]", keys: ListenerKeys):
        from zmq.auth.thread import ThreadAuthenticator  # asyncio: for listeners with keys only

        self._keys = keys
        self._names: dict[str, bytes] = {}
        self._refusals: deque[str] = deque(maxlen=MAX_LIES)
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key, in Z85, may connect; in the authenticator's thread."""
        name = self._keys.allowed(z85.decode(key))
        if name:
            self._names[key.decode()] = name.encode()
        return bool(name)

    def admits(self, peer: bytes, part: zmq.Frame) -> bool:
        """Return whether a part of a message came from the peer that it claims to be from."""
        name = self._names.get(property_of(part, "User-Id"), b"")
        if name and peer.partition(b"#")[0] == name:
            return True
        lie = f"dropped a message from {name.decode()}, which calls itself {peer!r}"
        if lie not in self._refusals:
            self._refusals.append(lie)
        return False

    def refusals(self) -> Iterator[str]:
        """Yield a line for each lie since the last call, and one if the list of keys is unusable."""
        if trouble := self._keys.trouble:
            yield trouble
        while self._refusals:
            yield self._refusals.popleft()

    def close(self) -> None:
        """Stop the thread."""
        self._authenticator.stop()


def property_of(part: zmq.Frame, name: int | str) -> Any:
    """Return a property of the connection that a part came over; None if the peer speaks an old ZeroMQ."""
    try:
        return part.get(name)
    except zmq.ZMQError:
        return None
