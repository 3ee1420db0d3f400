"""Which machines of the local network have a run, or look for one: by multicast DNS (RFC 6762), as printers are found.

Nothing here is secret, and nothing is believed: who a machine is shows when the two have paired.
"""

import enum
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from zeroconf import Error, IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from lsgd.pairing.about import addresses
from lsgd.protocol.sockets import Wakeup

SERVICE = "_lsgd._tcp.local."
ASK_WITHIN_MS = 1500
MAX_SEEN = 256


class Kind(enum.Enum):
    """What a machine does."""

    LOOKS = "looks"
    WAITS = "waits"
    """It begins a run, and waits for others."""
    RUNS = "runs"
    MEMBER = "member"
    """It has joined another machine's run."""


@dataclass(frozen=True)
class Advert:
    """What a machine says to its network.

    Args:
        identity: of the machine.
        name: its host name.
        kind: what it does.
        port: where a machine that wants to join dials it.
        run: name of its run.
        script: file name of what it trains with.
        about: its workers, GPUs and versions, in words.
        addresses: where it may be reached; filled in by who sees it.
    """

    identity: str
    name: str
    kind: Kind
    port: int
    run: str = ""
    script: str = ""
    about: str = ""
    addresses: tuple[str, ...] = ()

    def properties(self) -> dict[str, str]:
        """Return what is sent."""
        words = {
            "name": self.name,
            "kind": self.kind.value,
            "run": self.run,
            "script": self.script,
            "about": self.about,
        }
        return {key: word[:120] for key, word in words.items()}

    @classmethod
    def of(cls, info: ServiceInfo) -> "Advert | None":
        """Return what another machine has said; None: it is unusable."""
        said = {key: _words(value) for key, value in info.decoded_properties.items()}
        try:
            kind = Kind(said.get("kind", ""))
        except ValueError:
            return None
        identity = info.name.removesuffix(f".{SERVICE}")[:64]
        where = tuple(info.parsed_addresses(IPVersion.V4Only))
        words = said.get("name", ""), kind, info.port or 0, said.get("run", ""), said.get("script", "")
        return cls(identity, *words, said.get("about", ""), where)


def _words(value: str | None) -> str:
    return "".join(character for character in value or "" if character.isprintable())[:120]


class Discovery(ServiceListener):
    """Sees the machines of the local network, and shows this one to them.

    Attributes:
        trouble: why it cannot, such as a network without multicast; empty if it can.
        wakeup: is set when something has changed.
    """

    def __init__(self) -> None:
        self.trouble = ""
        self.wakeup = Wakeup()
        self._seen: dict[str, Advert] = {}
        self._lock = threading.Lock()
        self._shown: ServiceInfo | None = None
        self._zeroconf: Zeroconf | None = None
        try:
            self._zeroconf = Zeroconf(ip_version=IPVersion.V4Only)
            self._browser = ServiceBrowser(self._zeroconf, SERVICE, self)
        except (OSError, Error, RuntimeError) as error:
            self.trouble = str(error) or type(error).__name__

    @property
    def seen(self) -> Mapping[str, Advert]:
        """The machines by identity, this one too."""
        with self._lock:
            return dict(self._seen)

    def show(self, advert: Advert) -> None:
        """Show this machine to the network, or change what it shows."""
        if self._zeroconf is None:
            return
        own = [socket.inet_aton(address) for address in addresses()]
        name, port, said = f"{advert.identity}.{SERVICE}", advert.port, advert.properties()
        info = ServiceInfo(SERVICE, name, port, properties=said, addresses=own, server=f"lsgd-{advert.identity}.local.")
        try:
            if self._shown is None:
                self._zeroconf.register_service(info, cooperating_responders=True)
            else:
                self._zeroconf.update_service(info)
            self._shown = info
        except (OSError, Error, RuntimeError) as error:
            self.trouble = str(error) or type(error).__name__

    def close(self) -> None:
        """Say that this machine is gone, and end the threads."""
        if self._zeroconf is not None:
            with suppress(OSError, Error, RuntimeError):
                self._zeroconf.close()

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Note a machine; called by zeroconf."""
        info = zc.get_service_info(type_, name, ASK_WITHIN_MS)
        advert = Advert.of(info) if info else None
        with self._lock:
            if advert and (advert.identity in self._seen or len(self._seen) < MAX_SEEN):
                self._seen[advert.identity] = advert
        self.wakeup.set()

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Note what a machine has changed; called by zeroconf."""
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Forget a machine; called by zeroconf."""
        with self._lock:
            self._seen.pop(name.removesuffix(f".{SERVICE}"), None)
        self.wakeup.set()
