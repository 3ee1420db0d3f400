"""What the commands ``up``, ``peers`` and ``door`` do, once their options are read."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError
from lsgd.node import gpus
from lsgd.node.commands import LaunchSettings
from lsgd.node.place import Place
from lsgd.pairing.about import About, of_this_machine
from lsgd.pairing.code import OwnCode, new_code
from lsgd.pairing.discovery import Advert, Discovery, Kind
from lsgd.pairing.door import Door
from lsgd.pairing.peers import Peer, Peers
from lsgd.pairing.record import Run, checked_name
from lsgd.pairing.rules import LOOK_S
from lsgd.pairing.up import DOOR_PORT, TURN_S, Hosts, Joins, Up, Wishes
from lsgd.protocol.keys import TOKEN_VARIABLE
from lsgd.protocol.sockets import wait_for
from lsgd.run_folder import CHECKPOINTS
from lsgd.run_folder import runs as runs_with_checkpoints
from lsgd.server.daemon import Signals, say

RUNS = Path("runs")


def find_place(
    wishes: Wishes, device: str, workers: int | None, plan: Path | None, tell: Callable[[str], None]
) -> LaunchSettings:
    """Return what this machine runs: its part of a run that it begins, resumes or joins.

    Raises:
        ConfigError: it has none; the message has the line to type.
    """
    if wishes.name:
        checked_name(wishes.name)
    devices = gpus.choose(device, workers)
    if devices.warning:
        tell(devices.warning)
    about = of_this_machine(wishes.command, devices.names)
    found = Up(wishes, about, RUNS, tell).run()
    if isinstance(found, Joins) and found.grant.workers and not workers:
        devices = gpus.choose(device, found.grant.workers)
        about = of_this_machine(wishes.command, devices.names)
    place, port, folder, resumes = _part(found)
    tell(f"node {place.node} of {place.nodes}, with {about.in_words}; logs and results in {folder}")
    door = ["--about", json.dumps(about.message()), "--run", str(folder), "--joined" if place.node else "--open"]
    names, command = devices.names, wishes.command
    return LaunchSettings(place, port, names, plan, folder, command, resume=resumes, door=tuple(door))


def _part(found: Hosts | Joins) -> tuple[Place, int, Path, bool]:
    """Return place, port, run folder, and whether it is resumed."""
    if isinstance(found, Hosts):
        return Place(0, found.run.nodes, found.run.address), found.run.port, found.folder, found.resumes
    grant = found.grant
    folder = (RUNS / grant.name).absolute()
    if grant.token:
        os.environ[TOKEN_VARIABLE] = grant.token
    resumes = grant.resumed and bool(runs_with_checkpoints(folder / CHECKPOINTS))
    return Place(grant.node, grant.nodes, grant.address), grant.port, folder, resumes


def forget(name: str) -> list[str]:
    """Forget the machines of this name; return what to print.

    Raises:
        ConfigError: there are none.
    """
    peers = Peers()
    known = peers.known().values()
    found = [peer for peer in known if name in (peer.name, peer.identity)]
    if not found:
        raise ConfigError(f"no machine {name!r} is known here; known are: {_names(known) or 'none'}")
    for peer in found:
        peers.forget(peer)
    return [f"{peer.name} is forgotten; its tokens of runs stay valid (`lsgd keygen --help`)" for peer in found]


def look() -> tuple[list[str], list[str]]:
    """Look at this network; return a line for each machine, and remarks."""
    peers, discovery = Peers(), Discovery()
    known, signals = peers.known(), Signals()
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until and not signals.received:
        wait_for(TURN_S, signals.wakeup)
    seen = discovery.seen
    discovery.close()
    signals.restore()
    names = {**{identity: "paired" for identity in known}, peers.identity: "this machine"}
    lines = [_line(seen[identity], names.get(identity, "new")) for identity in sorted(seen)]
    remarks = []
    if not seen:
        why = f" ({discovery.trouble})" if discovery.trouble else ""
        remarks.append(f"no machine of this network runs lsgd up now{why}; in another network: lsgd up --at HOST")
    if away := _names(peer for peer in known.values() if peer.identity not in seen):
        remarks.append(f"paired, and not seen now: {away}")
    return lines, remarks


def _line(advert: Advert, pairing: str) -> str:
    run = f"{advert.kind.value} {advert.run} {advert.script}".strip()
    return f"{advert.name:16}  {', '.join(advert.addresses):16}  {pairing:12}  {advert.about}; {run}"


def _names(peers: Iterable[Peer]) -> str:
    return ", ".join(sorted(peer.name for peer in peers))


def keep_door(folder: Path, about: About, *, joined: bool) -> None:
    """Let other machines join a run while it goes on, or only show this one, until a signal comes."""
    signals, discovery, peers = Signals(), Discovery(), Peers()
    run = Run.read(folder)
    code = OwnCode(new_code())
    door = None if joined or run is None else Door(run, folder, about, peers, code, DOOR_PORT, say, begun=True)
    kind, port = (Kind.RUNS, door.port) if door else (Kind.MEMBER, 0)
    script = Path(about.script).name
    discovery.show(Advert(peers.identity, about.name, kind, port, folder.name, script, about.in_words))
    is_said = False
    while not signals.received:
        sources: Sequence[Any] = door.sources if door else ()
        wait_for(TURN_S if door else 60.0, signals.wakeup, *sources)
        if door:
            door.turn(time.monotonic())
        if code.is_spent and not is_said:
            is_said = True
            say("three wrong codes were typed: in this run only machines that have paired before can join")
    if door:
        door.close(time.monotonic())
    discovery.close()
