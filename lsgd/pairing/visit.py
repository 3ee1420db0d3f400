"""The guest's side: dials a machine, proves itself there, and takes the place that it gets."""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lsgd.errors import ConfigError, ProtocolError
from lsgd.pairing.about import About, differences
from lsgd.pairing.code import OwnCode
from lsgd.pairing.door import wrong_code
from lsgd.pairing.peers import Peer, Peers
from lsgd.pairing.record import checked_name
from lsgd.pairing.session import AskForCode, Effect, End, Heard, Hello, Paired, Session, WrongCode
from lsgd.pairing.wire import Wire

DIAL_WITHIN_S = 3.0


@dataclass(frozen=True)
class Grant:
    """A place in another machine's run."""

    node: int
    nodes: int
    token: str
    name: str
    address: str
    port: int
    workers: int
    resumed: bool
    about: About

    @classmethod
    def read(cls, message: dict[str, Any]) -> "Grant":
        """Return the grant in a message.

        Raises:
            ProtocolError: it has none.
            ConfigError: the run has an impossible name.
        """
        kinds = {"node": int, "nodes": int, "token": str, "name": str, "address": str, "port": int}
        kinds |= {"workers": int, "resumed": bool}
        if message.get("is") == "refused":
            raise ConfigError(f"it refuses this machine: {message.get('why')}")
        if message.get("is") != "grants" or any(type(message.get(key)) is not kind for key, kind in kinds.items()):
            raise ProtocolError("it says what it may not say")
        checked_name(message["name"])
        if not 0 < message["node"] < message["nodes"] or not 0 < message["port"] < 1 << 16:
            raise ProtocolError("it grants no place")
        return cls(**{key: message[key] for key in kinds}, about=About.read(message.get("about")))


class Visit:
    """A visit of a machine.

    Args:
        places: where it may be reached.
        code: what this machine shows.
        typed: a code that was given beforehand; empty: none.
        hint: what to say beside the question for a code, if nobody can type one here.
        differs: whether to join with another script, too.

    Attributes:
        grant: the place; None: it has none yet.
        failed: why it will not have one; empty: nothing has failed.
        reached: whether the machine has answered.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        about: About,
        peers: Peers,
        code: OwnCode,
        say: Callable[[str], None],
        now: float,
        *,
        typed: str = "",
        hint: str = "",
        differs: bool = False,
    ) -> None:
        self.grant: Grant | None = None
        self.failed = ""
        self.reached = False
        self._places = places
        self._about = about
        self._peers = peers
        self._code = code
        self._say = say
        self._typed = typed
        self._hint = hint
        self._differs = differs
        self._offer: Grant | None = None
        self._wire = self._dial(now)

    @property
    def sources(self) -> Sequence[Any]:
        """What to wait for."""
        return [self._wire] if self._wire else []

    @property
    def is_lost(self) -> bool:
        """Whether the machine cannot be reached, or has gone."""
        return self._wire is None and not self.grant and not self.failed

    def turn(self, now: float) -> None:
        """Continue."""
        if self._wire is None:
            return
        for effect in self._wire.turn(now):
            try:
                self._follow(self._wire, effect, now)
            except (ConfigError, ProtocolError) as error:
                self._leave(self._wire, str(error), now)
        if self._wire.is_done or ((self.failed or self.grant) and self._wire.has_sent):
            self.close(now)

    def type(self, code: str, now: float) -> None:
        """Try a code that a person has typed here."""
        if self._wire:
            self._wire.do(self._wire.session.type(code, now), now)

    def close(self, now: float) -> None:
        """Hang up."""
        if self._wire:
            self._wire.close(now)
            self._wire = None

    def _dial(self, now: float) -> Wire | None:
        for place in self._places:
            with suppress(OSError):
                link = socket.create_connection(place, DIAL_WITHIN_S)
                own = Hello(self._peers.identity, self._about.name)
                return Wire(link, Session(own, self._code, self._peers.secret_of, now, hosts=False), now)
        return None

    def _follow(self, wire: Wire, effect: Effect, now: float) -> None:
        other = wire.session.other
        self.reached = self.reached or other is not None
        who = f"{other.name} ({wire.address})" if other else wire.address
        match effect:
            case AskForCode(wrong=False) if self._typed:
                code, self._typed = self._typed, ""
                self.type(code, now)
            case AskForCode(wrong=True) if self._hint:
                self.failed = f"the code is not that of {who}"
            case AskForCode(wrong=wrong):
                trains = f", which trains {other.script}" if other and other.script else ""
                begins = f"that is not the code of {who}" if wrong else f"found {who}{trains}"
                self._say(f"{begins}: type its code here, or there: {self._code.words}{self._hint}")
            case WrongCode(left=left):
                self._say(wrong_code(who, left))
            case Paired(lasting=lasting) if other:
                if lasting:
                    self._peers.keep(Peer(other.identity, other.name, lasting))
                wire.say({"is": "applies", "about": self._about.message()}, now)
            case Heard(message=message) if self._offer is None:
                self._consider(wire, Grant.read(message), now)
            case Heard(message=message):
                if message.get("is") != "welcome":
                    raise ProtocolError("it says what it may not say")
                self.grant = self._offer
            case End(why=why) if why:
                self.failed = f"{who}: {why}"

    def _consider(self, wire: Wire, grant: Grant, now: float) -> None:
        """Take the place, unless the machines would train different things."""
        wrong, noted = differences(self._about, grant.about)
        for line in noted:
            self._say(line)
        if wrong and not self._differs:
            raise ConfigError("; ".join(wrong) + "; or join all the same: --anyway")
        self._offer = grant
        wire.say({"is": "takes"}, now)

    def _leave(self, wire: Wire, why: str, now: float) -> None:
        self.failed = why
        if wire.session.other and wire.ended is None and self._wire:
            with suppress(AssertionError):
                wire.say({"is": "leaves", "why": why}, now)
