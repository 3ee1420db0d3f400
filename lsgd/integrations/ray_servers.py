"""The servers of a run on a Ray cluster, as actors; torch is not needed."""

import os
import secrets
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lsgd.errors import ConfigError
from lsgd.integrations.ray_seats import RayWorker, Seats
from lsgd.node.candidates import Candidates, Knock, dial
from lsgd.node.local_server import LocalServer
from lsgd.plan.plan import Plan
from lsgd.protocol.keys import OPERATOR, KeyRing, is_local, node_name, parse_token
from lsgd.protocol.ports import hold, port_of
from lsgd.protocol.socket_folder import SOCKET_NAME, socket_folder
from lsgd.protocol.sockets import Connector, Listener
from lsgd.run_folder import CHECKPOINTS, JOURNAL, claimed
from lsgd.server.daemon import CRASHED, Ending, complain, say
from lsgd.server.serve import serve_global
from lsgd.watch import results

END_WITHIN_S = 60.0
"""How long a run may take for its last round and for saving, when Ray stops or resizes the group of its workers."""


class Servers:
    """The servers of a run with these workers: the global one on the node of this process, a local one on each node.

    Args:
        plan: plan of the run.
        keys: folder of keys, for servers that others can reach.
        workers: Ray's workers, all new.

    Attributes:
        main: actor of the global server.

    Raises:
        ConfigError: the keys or the run folder cannot be made.
    """

    def __init__(self, plan: Plan, keys: Path, workers: Sequence[RayWorker]) -> None:
        self._run_dir, self._world_size = Path(workers[0].run_dir), workers[0].workers
        self._seats = Seats()
        self._local: dict[int, Any] = {}  # the server of each node, by its number
        self._resumes = any(worker.saved for worker in workers)
        here = ray.util.get_node_ip_address()
        self._held = hold(here)  # for the global server, which Ray may start again
        self._address = f"tcp://{here}:{port_of(self._held)}"
        self._keys = None if is_local(self._address) else keys
        if self._keys:
            KeyRing.make(self._keys, [OPERATOR])
        for old in self._run_dir.glob(f"{JOURNAL}*"):  # of the workers before these
            old.unlink()
        results.clear(self._run_dir, resume=self._resumes)
        most = min(plan.run.workers or self._world_size, self._world_size)
        plan = replace(plan, run=replace(plan.run, workers=most, failover="off"))  # Ray starts the server again
        serve = partial(_serve_global, plan, self._address, self._keys, self._run_dir)
        self.main = _actor("lsgd global server", serve, ray.get_runtime_context().get_node_id())

    def seat(self, workers: Sequence[RayWorker]) -> list[dict[str, str]]:
        """Return the variables of each new worker.

        Raises:
            ConfigError: a server cannot be started.
        """
        seats = [self._seats.assign(worker) for worker in workers]
        for node_id, node in self._seats.nodes.items():
            if node not in self._local:
                self._local[node] = self._start(node, node_id)
        _, *found = ray.get([server.address.remote() for server in (self.main, *self._local.values())])
        addresses = dict(zip(self._local, found, strict=True))
        return [self._variables(worker, *seat, addresses[seat[0]]) for worker, seat in zip(workers, seats, strict=True)]

    def stop(self) -> None:
        """Stop the run, if it is not over: the workers complete a last round, and save. Then end the servers."""
        with suppress(ray.exceptions.RayError):
            ray.get(self.main.stop.remote(END_WITHIN_S))
        for actor in (self.main, *self._local.values()):
            ray.kill(actor)
        self._held.close()

    def _start(self, node: int, node_id: str) -> Any:
        token = ""
        if self._keys:
            token = KeyRing.make(self._keys, [node_name(node)]).token(node_name(node))
        serve = partial(_serve_local, node, secrets.token_hex(4), self._address, token)
        return _actor(f"lsgd node{node}", serve, node_id)

    def _variables(self, worker: RayWorker, node: int, index: int, replaces: bool, address: str) -> dict[str, str]:
        variables = {
            "LSGD_LOCAL": address,
            "LSGD_NODE": str(node),
            "LSGD_LOCAL_RANK": str(index),
            "LSGD_RANK": str(worker.rank),
            "LSGD_WORKERS": str(self._world_size),
            "LSGD_RUN_DIR": worker.run_dir,
        }
        if self._resumes or (replaces and worker.saved):
            variables["LSGD_RESUME"] = str(self._run_dir / CHECKPOINTS)
            variables |= {"LSGD_RESTARTED": "1"} if replaces else {}
        return variables


class Server:
    """A server, in a thread of an actor. If it fails in its own code, the actor ends, and Ray starts it again.

    Args:
        name: what Ray shows before its lines.
        serve: serves until an Ending begins; gets that, and what to call with its address.
    """

    def __init__(self, name: str, serve: Callable[[Ending, Callable[[str], None]], None]) -> None:
        self._name, self._serve, self._ending = name, serve, Ending()
        self._address, self._failure, self._over = "", "", False
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lsgd-server", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return self._name

    def address(self) -> str:
        """Return the address once it listens there; raise ConfigError if it cannot."""
        self._listens.wait()
        if self._failure:
            raise ConfigError(self._failure)
        return self._address

    def over(self) -> bool:
        """Whether it has ended in order."""
        return self._over

    def stop(self, within_s: float) -> None:
        """End its run, and wait for that."""
        self._ending.ask("word from Ray")
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            self._serve(self._ending, self._listen)
            self._over = True
        except ConfigError as error:
            self._failure = str(error)
            complain(self._failure)
        except Exception:
            complain(f"this is a mistake in lsgd, please report it:\n{traceback.format_exc().rstrip()}")
            os._exit(CRASHED)
        finally:
            self._listens.set()

    def _listen(self, address: str) -> None:
        self._address = address
        self._listens.set()


def _actor(name: str, serve: Callable[..., None], node_id: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(Server).options(**options).remote(name, serve)


def _serve_global(
    plan: Plan, address: str, keys: Path | None, run_dir: Path, ending: Ending, listens: Callable[[str], None]
) -> None:
    journal, ring = run_dir / JOURNAL, KeyRing(keys) if keys else None
    with claimed(run_dir, 0, address):
        listens(address)
        files, continues = (run_dir / "plan.toml", journal, run_dir), journal.exists()
        status = serve_global(plan, address, ring, *files, ending, continues=continues, launched=True)
        for line in results.finish(run_dir, status):
            say(line)


def _serve_local(
    node: int, folder: str, above: str, token: str, ending: Ending, listens: Callable[[str], None]
) -> None:
    keys = parse_token(token, f"the token of node{node}") if token else None
    incarnation = secrets.randbits(63)
    name = f"{node_name(node)}#{incarnation}".encode()
    with (
        Listener(f"ipc://{socket_folder(folder) / SOCKET_NAME}") as listener,
        Connector(above, name, keys) as link,
    ):
        listens(listener.address)
        candidates = Candidates(node, partial(dial, name, keys), Knock())  # nowhere: Ray starts the servers again
        LocalServer(node, incarnation, listener, link, say=lambda text: None, candidates=candidates).run(ending)
