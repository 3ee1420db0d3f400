"""What a node has for each stage of its run: a local server, and where it serves the run, the servers."""

import secrets
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lsgd import run_folder
from lsgd.errors import ConfigError, ProtocolError
from lsgd.node.candidates import Candidates, Knock, dial
from lsgd.node.commands import LaunchSettings, observer_commands, server_commands
from lsgd.node.local_server import LocalServer
from lsgd.node.node import Stage
from lsgd.node.panel import Panel
from lsgd.node.place import place_to_serve
from lsgd.node.process import Command, Role
from lsgd.node.screen import LAUNCHER, Screen, show
from lsgd.protocol.credentials import place_of
from lsgd.protocol.keys import KeyRing, adopted_folder, node_name
from lsgd.protocol.messages import Endpoint
from lsgd.protocol.ports import hold, hold_or_any, port_of
from lsgd.protocol.sockets import ConnectorKeys, Listener, keys_for
from lsgd.run_folder import JOURNAL
from lsgd.server.journal import Journal, taken_over
from lsgd.watch import results


@dataclass(frozen=True)
class Serving:
    """Where and how this node serves the run.

    Args:
        journal: file of the global server's journal, in the folder for its results.
        relay_port: that of the relay beside it; 0: there is none.
        access: arguments about keys.
        first: arguments of the global server in the launch's first stage.
        plan: file with the plan as used.
        environ: variables of the servers.
    """

    address: str
    journal: Path
    relay_port: int
    access: Sequence[str]
    first: Sequence[str]
    plan: Path
    environ: Mapping[str, str]

    def servers(self, *more: str) -> dict[str, list[str]]:
        """Return the arguments, by name, of the global server, with some ``more``, and of the relay."""
        arguments = ["--global", "--launched", "--listen", self.address, "--journal", str(self.journal)]
        arguments += ["--results", str(self.journal.parent), *self.access, *more]
        if not self.relay_port:
            return {"global": arguments}
        relay = f"{self.address.rpartition(':')[0]}:{self.relay_port}"
        return {
            "global": [*arguments, "--relay-address", relay],
            "relay": ["--relay", "--listen", relay, *self.access],
        }


class Stages:
    """Makes what a node has for each stage of its run: :meth:`begin` for the first one, :meth:`next` for others.

    The node that served a stage to its end serves the next one, and the others look for it where they followed it.

    Args:
        serving: how this node serves; None: another one does.
        held: holds the ports of this node's servers.
        listener: socket where the workers connect.
        say, note: print a line, and a detail, of this node.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        network: str,
        keys: ConnectorKeys | None,
        serving: Serving | None,
        environ: Mapping[str, str],
        held: ExitStack,
        listener: Listener,
        screen: Screen,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._settings, self._network, self._keys, self._environ = settings, network, keys, environ
        self._serving, self._held = serving, held
        self._listener, self._screen, self._say, self._note = listener, screen, say, note
        self._offer, self._knock = place_to_serve(settings.place, network, held), Knock()
        self._local: LocalServer | None = None

    def close(self) -> None:
        """End the connections."""
        if self._local is not None:
            self._local.following.close()
        self._knock.close()

    def begin(self, places: Sequence[Endpoint]) -> Stage:
        """Return what this node has for its first stage; ``places``: where the run is served, and may be later."""
        servers = self._serving.servers(*self._serving.first) if self._serving else {}
        return self._stage(servers, places, self._settings.workers)

    def next(self, workers: int) -> Stage:
        """Return what this node has for the next stage, for which the present one makes way.

        Raises:
            ConfigError: the results of the present one cannot be moved.
        """
        former, folder, servers = self._former, self._settings.run_dir, dict[str, list[str]]()
        if former.allegiance.state.serves and self._serving:
            show_result(results.finish(folder, 0, "", former.of_run.outcome, draws=False))
            results.put_aside(folder, former.stage)
            place = ["--run", former.next_run, str(self._settings.place.node)]
            more = ["--nodes", str(former.of_run.nodes), "--workers", "0", "--plan", str(self._serving.plan)]
            servers = self._serving.servers(*place, *more)
        self._knock.close()
        former.following.close()
        return self._stage(servers, former.following.places, workers, former)

    @property
    def _former(self) -> LocalServer:
        assert self._local is not None
        return self._local

    def _stage(
        self,
        servers: Mapping[str, Sequence[str]],
        places: Sequence[Endpoint],
        workers: int,
        former: LocalServer | None = None,
    ) -> Stage:
        settings, keys = self._settings, self._keys
        node, incarnation = settings.place.node, secrets.randbits(63)
        connect = partial(dial, f"{node_name(node)}#{incarnation}".encode(), keys)
        own = Endpoint(node, self._offer, keys.public if keys else b"") if self._offer else None
        server = self._local = LocalServer(
            *(node, incarnation, self._listener, connect(places[0]), workers),
            say=(lambda words: None) if node == 0 else self._say,  # the global server's lines are here
            complain=self._say,
            note=(lambda words: None) if node == 0 else self._note,
            place=self._offer,
            serves=bool(servers),
            candidates=Candidates(node, connect, self._knock, own, places),
            when_moved=partial(run_folder.moved, settings.run_dir, node),
            stages=True,
            former=former,
        )
        commands = list[Command]()
        if self._serving:
            commands = [*server_commands(settings, servers, self._serving.environ)]
        if servers or not former:
            commands += observer_commands(settings, self._network, self._environ)
        panel = Panel(self._screen, self._served_at)
        if former:
            commands = [replace(command, appends=True) for command in commands if command.role is not Role.PAGE]
        return Stage(server, commands, panel, self._take_over)

    def _served_at(self) -> tuple[str, ConnectorKeys | None]:
        """Return where the run is served now, and this node's keys for it."""
        place, *_ = self._former.following.places
        return place.address, keys_for(self._keys, place.key)

    def _take_over(self) -> Sequence[Command]:
        """Return the servers with which this node serves the run, from its copy of the journal, where it offered to.

        Raises:
            ConfigError: the place is taken, or the journal or the keys cannot be written.
        """
        settings, following, keys = self._settings, self._former.following, self._keys
        copy, node, folder = following.copy, settings.place.node, settings.run_dir
        path = folder / f"node{node}-{JOURNAL}"
        host, port = place_of(self._offer)
        self._held.enter_context(hold(host, port))  # again, in case somebody listens there after all
        try:
            state, rounds = copy.load()
            for old in folder.glob(f"{path.name}*"):
                old.unlink()
            with closing(Journal(path)) as journal:
                journal.save(taken_over(state, following.next_terms()), rounds)
        except (OSError, sqlite3.Error, ProtocolError) as error:
            raise ConfigError(f"the journal {path} cannot be written: {error}") from None
        access = ["--insecure"] if settings.insecure else []
        if keys is not None:
            ring = KeyRing.adopt(adopted_folder(folder, node), keys.secret, copy.allowed, copy.certificate)
            access = ["--keys", str(ring.folder)]
        relay_port = port_of(self._held.enter_context(hold_or_any(host, port + 1))) if following.relay[0] else 0
        used = folder / f"node{node}-plan.toml"
        others = {name: value for name, value in self._environ.items() if not name.startswith("LSGD_")}  # no plan's
        self._serving = Serving(self._offer, path, relay_port, access, (), used, others)
        commands = server_commands(settings, self._serving.servers("--continue", "--save-plan", str(used)), others)
        return [replace(command, restart_arguments=(), appends=True) for command in commands]


def show_result(lines: Sequence[str]) -> None:
    """Show the lines about what a run has left."""
    show("".join(f"{LAUNCHER}{line}\n" for line in lines), sys.stdout)
