"""``lsgd up``: looks for other machines, and joins their run, or begins one that they can join."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError
from lsgd.pairing.about import About, addresses
from lsgd.pairing.code import OwnCode, new_code, parse_code
from lsgd.pairing.discovery import Advert, Discovery, Kind
from lsgd.pairing.door import Door
from lsgd.pairing.peers import Peers
from lsgd.pairing.record import Run, died
from lsgd.pairing.rules import Begin, Choose, Dial, Facts, Look, Resume, next_step
from lsgd.pairing.typed import Typed
from lsgd.pairing.visit import Grant, Visit
from lsgd.protocol.ports import DEFAULT_PORT
from lsgd.protocol.sockets import wait_for

DOOR_PORT = DEFAULT_PORT + 2
"""TCP port where other machines ask to join; the one before it is the relay's."""

TURN_S = 0.1
SAY_EVERY_S = 10.0
REDIAL_S = 1.0
REACH_WITHIN_S = {True: 60.0, False: 15.0}
"""How long a machine is dialed: one whose address the user gave, and one that was seen, whose message may be old."""


@dataclass(frozen=True)
class Wishes:
    """What the user has asked for.

    Args:
        command: what each worker runs.
        at: address of the machine to join; empty: look for one.
        code: a code given beforehand.
        new: whether to begin a run, whoever is there.
        name: of the run.
        nodes: how many machines it begins with.
        port: of the global server.
        workers: how many workers each machine gets, if the user said so; else 0.
        differs: whether to join with another script, too.
    """

    command: tuple[str, ...]
    at: str
    code: str
    new: bool
    name: str
    nodes: int
    port: int
    workers: int
    differs: bool


@dataclass(frozen=True)
class Hosts:
    """This machine is node 0 of a run, in a folder."""

    run: Run
    folder: Path
    resumes: bool


@dataclass(frozen=True)
class Joins:
    """This machine has a place in another one's run."""

    grant: Grant
    at: str


@dataclass
class Call:
    """A machine that is dialed until it answers, and visited then.

    Args:
        dial: which one.
        since: since when it is silent.
        tried_at: when it was dialed last.
        visit: None: the last try was in vain.
    """

    dial: Dial
    since: float
    tried_at: float = float("-inf")
    visit: Visit | None = None

    @property
    def sources(self) -> Sequence[Any]:
        """What to wait for."""
        return self.visit.sources if self.visit else []

    def type(self, code: str, now: float) -> None:
        """Try a code that a person has typed here."""
        if self.visit:
            self.visit.type(code, now)

    def close(self, now: float) -> None:
        """Hang up."""
        if self.visit:
            self.visit.close(now)


class Up:
    """Looks for other machines until this one has a place in a run.

    Args:
        runs: the folder of all runs.
        say: prints a line.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        wishes: Wishes,
        about: About,
        runs: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wishes = wishes
        self._about = about
        self._runs = runs
        self._say = say
        self._clock = clock
        self._peers = Peers()
        self._known = frozenset(self._peers.known())
        self._code = OwnCode(parse_code(wishes.code) if wishes.code else new_code())
        self._typed = Typed()
        self._began = self._said_at = clock()
        self._died = None if wishes.new or wishes.at else died(runs, wishes.command, wishes.name)
        self._discovery = None if self._died else Discovery()
        self._does: Door | Call | None = None
        """Waits for others, or calls one of them; None: it looks."""
        self._unreachable: set[str] = set()

    def run(self) -> Hosts | Joins:
        """Return the place, once there is one.

        Raises:
            ConfigError: there will be none; the message has the line to type.
        """
        try:
            if self._discovery:
                self._discovery.show(self._advert(Kind.LOOKS))
            while True:
                now = self._clock()
                if found := self._turn(now):
                    return found
                wait_for(TURN_S, *self._sources())
        finally:
            if self._does:
                self._does.close(self._clock())
            if self._discovery:
                self._discovery.close()

    def _sources(self) -> Sequence[Any]:
        sources: list[Any] = [self._typed] if self._typed.can else []
        sources += self._does.sources if self._does else []
        if self._discovery:
            self._discovery.wakeup.clear()
            sources.append(self._discovery.wakeup)
        return sources

    def _turn(self, now: float) -> Hosts | Joins | None:
        for line in self._typed.lines():
            self._type(line, now)
        if isinstance(self._does, Call):
            return self._go_on(self._does, now)
        if self._does and (hosts := self._wait(self._does, now)):
            return hosts
        match next_step(self._facts(now)):
            case Resume(folder=folder):
                return self._resume(folder)
            case Begin() if self._does is None:
                self._begin(now)
            case Dial() as dial:
                self._call(dial, now)
            case Choose(among=among):
                raise ConfigError(_choice(among))
            case Look() | Begin():
                pass
        return None

    def _facts(self, now: float) -> Facts:
        door = self._does if isinstance(self._does, Door) else None
        return Facts(
            self._peers.identity,
            now - self._began,
            self._wishes.at,
            self._wishes.new,
            self._died,
            tuple(self._discovery.seen.values()) if self._discovery else (),
            self._known,
            frozenset(self._unreachable),
            door is not None,
            door.guests + len(door.came) if door else 0,
        )

    def _advert(self, kind: Kind, port: int = 0, run: str = "") -> Advert:
        script = Path(self._about.script).name
        return Advert(self._peers.identity, self._about.name, kind, port, run, script, self._about.in_words)

    def _type(self, line: str, now: float) -> None:
        try:
            code = parse_code(line)
        except ConfigError as error:
            self._say(str(error))
            return
        if self._does and self._does.sources:
            self._does.type(code, now)
        else:
            self._say("no machine is waiting for a code yet")

    def _begin(self, now: float) -> None:
        """Open the door, and say what the others have to type."""
        wishes = self._wishes
        name = wishes.name or time.strftime("%Y%m%d-%H%M%S")
        run = Run(name, wishes.command, wishes.nodes, "", wishes.port, wishes.workers)
        folder = (self._runs / name).absolute()
        door = Door(run, folder, self._about, self._peers, self._code, DOOR_PORT, self._say, begun=False)
        self._does = door
        if self._discovery:
            self._discovery.show(self._advert(Kind.WAITS, door.port, name))
        place = next(iter(addresses()), "ADDRESS") + f":{door.port}" * (door.port != DOOR_PORT)
        multicast = self._discovery is not None and not self._discovery.trouble
        line = f" -- {self._about.command}"
        if multicast:
            self._say(f"nobody else is here yet; type on another machine of this network: lsgd up{line}")
        else:
            self._say(f"this network has no multicast ({self._discovery.trouble if self._discovery else ''})")
        self._say(f"{'or in another network' if multicast else 'type on another machine'}: lsgd up --at {place}{line}")
        self._say(f"the code of this machine: {self._code.words}")
        self._said_at = now

    def _wait(self, door: Door, now: float) -> Hosts | None:
        """Wait for the others; return this machine's place once all have come."""
        door.turn(now)
        if door.code.is_spent and door.has_sent:
            raise ConfigError("three wrong codes were typed on other machines; to try again with a new one: lsgd up")
        if len(door.came) >= self._wishes.nodes - 1 and door.has_sent:
            return Hosts(door.run, self._runs.absolute() / door.run.name, False)
        if not door.guests and now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            missing = self._wishes.nodes - 1 - len(door.came)
            many = "another machine" if missing == 1 else f"{missing} other machines"
            alone = f"; to train on this one alone: lsgd launch -- {self._about.command}"
            self._say(f"waits for {many}, for {now - self._began:.0f} s so far{alone}")
        return None

    def _call(self, dial: Dial, now: float) -> None:
        """Go to another machine; who has begun here leaves the own door for that."""
        if self._does:
            self._does.close(now)
            if self._discovery:
                self._discovery.show(self._advert(Kind.LOOKS))
        self._does = Call(dial, now)

    def _resume(self, folder: Path) -> Hosts:
        run = Run.read(folder)
        assert run is not None
        self._say(f"resumes the run {run.name}, which died; to begin another one: lsgd up --new ...")
        run = replace(run, resumed=True)
        run.write(folder)
        return Hosts(run, folder.absolute(), True)

    def _go_on(self, call: Call, now: float) -> Joins | None:
        """Continue the visit of a machine; dial it again if it is lost."""
        if call.visit:
            call.visit.turn(now)
            if call.visit.grant:
                return Joins(call.visit.grant, _where(call.dial)[0][0])
            if call.visit.failed:
                raise ConfigError(call.visit.failed)
            if not call.visit.is_lost:
                call.since = now
                return None
            call.visit = None
        silent_s, limit_s = now - call.since, REACH_WITHIN_S[bool(call.dial.at)]
        if silent_s >= limit_s:
            self._give_up(call.dial, limit_s)
            self._does, self._began = None, now
            return None
        if now - self._said_at >= SAY_EVERY_S and silent_s >= 1.0:
            self._said_at = now
            self._say(f"waits for {call.dial.who} to answer, for {silent_s:.0f} s so far, {limit_s:g} at most")
        if now - call.tried_at >= REDIAL_S:
            call.tried_at = now
            call.visit = Visit(
                _where(call.dial),
                self._about,
                self._peers,
                self._code,
                self._say,
                now,
                typed=self._code.words if self._wishes.code else "",
                hint="" if self._typed.can else " (nobody can type here: give it by --code 'ITS CODE')",
                differs=self._wishes.differs,
            )
        return None

    def _give_up(self, dial: Dial, limit_s: float) -> None:
        """Leave a machine that was seen out.

        Raises:
            ConfigError: the user has named it.
        """
        trouble = f"{dial.who} does not answer for {limit_s:g} s"
        if dial.advert is None:
            raise ConfigError(
                f"{trouble} at port {_where(dial)[0][1]}; type `lsgd up -- ...` there first, and open this port, "
                f"and {DEFAULT_PORT} and {DEFAULT_PORT + 1}, in its firewall"
            )
        self._say(f"{trouble}, so it is left out")
        self._unreachable.add(dial.advert.identity)


def _choice(among: Sequence[Advert]) -> str:
    lines = ["several machines have a run here; name one of them, or begin another run with --new:"]
    for one in among:
        at = f"{one.addresses[0] if one.addresses else one.name}:{one.port}"
        lines.append(f"  lsgd up --at {at} ...    {one.name}: {one.script}, {one.about}")
    return "\n".join(lines)


def _where(dial: Dial) -> list[tuple[str, int]]:
    """Return the places of a machine, those that only look like it left out."""
    if dial.advert:
        own = addresses()
        found = [address for address in dial.advert.addresses if address not in own] or list(dial.advert.addresses)
        return [(address, dial.advert.port) for address in found]
    host, port = parse_place(dial.at)
    return [(host, port)]


def parse_place(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST[:PORT]``.

    Raises:
        ConfigError: it is something else.
    """
    host, mark, port = text.rpartition(":")
    if not mark or (":" in host and not text.startswith("[")):  # an address of IPv6
        return text.strip("[]"), DOOR_PORT
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"--at {text} is no HOST or HOST:PORT, such as 192.0.2.1")
    return host.strip("[]"), int(port)
