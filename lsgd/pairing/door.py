"""The host's side: a port at which other machines ask to join the run."""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError, ProtocolError
from lsgd.pairing.about import About, differences
from lsgd.pairing.code import OwnCode
from lsgd.pairing.peers import Peer, Peers
from lsgd.pairing.record import Run
from lsgd.pairing.session import AskForCode, Effect, End, Heard, Hello, Paired, Session, State, WrongCode
from lsgd.pairing.wire import Wire
from lsgd.protocol.keys import KeyRing, default_folder, is_local, node_name
from lsgd.protocol.ports import everywhere

MAX_LINKS = 16
"""Most connections at once of machines that have not proved themselves; beyond that, the oldest is cut."""

MAX_LINES, MAX_STRANGERS = 6, 50
"""How many lines a stranger can cause, by its address, and how many strangers."""

BACKLOG = 16


class Door:
    """Listens at a port, and lets machines in that know the code, or that have paired before.

    Args:
        run: the run that they join.
        folder: its folder on this machine.
        about: this machine.
        begun: whether nobody is waiting here for a code to be typed, because the run goes on.
        say: prints a line.

    Attributes:
        run: with the address of its server, once somebody has come.
        port: where it listens.
        came: what the machines that have joined are, by identity.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        about: About,
        peers: Peers,
        code: OwnCode,
        port: int,
        say: Callable[[str], None],
        *,
        begun: bool,
    ) -> None:
        self.run = run
        self.came: dict[str, About] = {}
        self._folder = folder
        self._about = about
        self._peers = peers
        self.code = code
        self._say = say
        self._begun = begun
        self._wires: list[Wire] = []
        self._talks: dict[Wire, About] = {}
        self._remarks = Counter[str]()
        self._listener = _listening(port)
        self.port = int(self._listener.getsockname()[1])

    @property
    def sources(self) -> Sequence[Any]:
        """What to wait for."""
        return [self._listener, *self._wires]

    @property
    def guests(self) -> int:
        """How many machines are in a conversation."""
        return sum(wire.session.other is not None for wire in self._wires)

    @property
    def has_sent(self) -> bool:
        """Whether all that it has said is sent."""
        return all(wire.has_sent for wire in self._wires)

    def turn(self, now: float) -> None:
        """Accept who has come, and continue each conversation."""
        while link := self._accept():
            own = Hello(self._peers.identity, self._about.name, Path(self._about.script).name)
            try:
                wire = Wire(link, Session(own, self.code, self._peers.secret_of, now, hosts=True), now)
            except OSError:  # it has gone already
                link.close()
                continue
            self._wires.append(wire)
            unproved = [wire for wire in self._wires if wire.session.state is not State.PAIRED]
            if len(unproved) > MAX_LINKS:
                self._drop(unproved[0], now)
        for wire in list(self._wires):
            for effect in wire.turn(now):
                self._follow(wire, effect, now)
            if wire.is_done:
                self._drop(wire, now)

    def type(self, code: str, now: float) -> None:
        """Try a code that a person has typed here: that of the machine which is waiting."""
        waiting = [wire for wire in self._wires if wire.session.state is State.CHOOSING]
        if len(waiting) == 1:
            waiting[0].do(waiting[0].session.type(code, now), now)
        elif waiting:
            self._say("several machines are waiting for a code: type this one's there")
        else:
            self._say("no machine is waiting for a code yet")

    def close(self, now: float) -> None:
        """Stop listening, and hang up."""
        for wire in list(self._wires):
            self._drop(wire, now)
        self._listener.close()

    def _accept(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except OSError:  # nobody is there, or no descriptor is left
            return None

    def _drop(self, wire: Wire, now: float) -> None:
        wire.close(now)
        self._wires.remove(wire)
        self._talks.pop(wire, None)

    def _follow(self, wire: Wire, effect: Effect, now: float) -> None:
        other = wire.session.other
        who = f"{other.name} ({wire.address})" if other else wire.address
        match effect:
            case AskForCode(wrong=True):
                self._say(f"that is not the code of {who}")
            case AskForCode():
                here = "type there" if self._begun else "type its code here, or there"
                self._remark(wire.address, f"{who} wants to join: {here}: {self.code.words}")
            case WrongCode(left=left):
                self._say(wrong_code(who, left))
            case Paired(lasting=lasting) if lasting and other:
                self._peers.keep(Peer(other.identity, other.name, lasting))
            case Heard(message=message) if other:
                try:
                    self._hear(wire, other, message, now)
                except (ProtocolError, ConfigError) as error:
                    self._say(f"{who} cannot join: {error}")
                    wire.say({"is": "refused", "why": str(error)}, now)
            case End(why=why) if why:
                self._remark(wire.address, f"{who} does not join: {why}")

    def _remark(self, address: str, line: str) -> None:
        """Print a line that a stranger can cause, as long as there are not too many."""
        if address in self._remarks or len(self._remarks) < MAX_STRANGERS:
            self._remarks[address] += 1
            if self._remarks[address] <= MAX_LINES:
                self._say(line + "; no more lines of it follow" * (self._remarks[address] == MAX_LINES))

    def _hear(self, wire: Wire, other: Hello, message: dict[str, Any], now: float) -> None:
        """Answer a machine that has proved itself."""
        match message.get("is"):
            case "applies":
                self._talks[wire] = About.read(message.get("about"))
                wire.say(self._grant(other, wire.own_address), now)
            case "takes" if wire in self._talks:
                guest = self._talks.pop(wire)
                self.run.write(self._folder)
                self.came[other.identity] = guest
                self._say(f"{other.name} joins as node {self.run.members[other.identity]}: {guest.in_words}")
                for line in (line for lines in differences(self._about, guest) for line in lines):
                    self._say(f"  but {line}")
                wire.say({"is": "welcome"}, now)
            case "leaves":
                self._talks.pop(wire, None)
                self._say(f"{other.name} does not join: {str(message.get('why'))[:400]}")
            case _:
                raise ProtocolError("it says what it may not say")

    def _grant(self, other: Hello, own_address: str) -> dict[str, Any]:
        """Return what a machine needs to join: its place, and the token for that."""
        self.run = replace(self.run.with_member(other.identity), address=self.run.address or own_address)
        node, token = self.run.members[other.identity], ""
        if not is_local(f"tcp://{self.run.address}:{self.run.port}"):
            token = KeyRing.make(default_folder(), [node_name(node)]).token(node_name(node))
        shared = {name: getattr(self.run, name) for name in ("name", "address", "port", "workers", "resumed")}
        nodes = max(self.run.nodes, node + 1)
        about = self._about.message()
        return {"is": "grants", "node": node, "nodes": nodes, "token": token, "about": about, **shared}


def wrong_code(who: str, left: int) -> str:
    """Return what to say of a wrong code that somebody has typed on another machine."""
    return f"on {who} a wrong code was typed; {left or 'no'} {'try is' if left == 1 else 'tries are'} left"


def _listening(port: int) -> socket.socket:
    """Return a socket that listens at a port, or at any free one.

    Raises:
        ConfigError: no port can be had.
    """
    host = everywhere()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port, 0):
        try:
            listener = socket.create_server((host, number), family=family, backlog=BACKLOG, dualstack_ipv6=":" in host)
        except OSError as error:
            why = error.strerror
            continue
        listener.setblocking(False)
        return listener
    raise ConfigError(f"no port can be opened for other machines: {why}")
