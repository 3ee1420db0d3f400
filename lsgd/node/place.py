"""Where a launcher is: which node of how many, and node 0's address."""

import ipaddress
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from lsgd.errors import ConfigError
from lsgd.node.screen import LAUNCHER
from lsgd.protocol.ports import hold, hold_or_any, port_of
from lsgd.protocol.routes import address_towards, addresses_of


@dataclass(frozen=True)
class Place:
    """Index of this node, number of nodes, address or host name of node 0, and who set them if not the user."""

    node: int
    nodes: int
    address: str
    starter: str = field(default="", compare=False)


@dataclass(frozen=True)
class _Starter:
    """A program that starts launchers, and the names of its variables for the place.

    ``address`` is that of node 0, or of all nodes, node 0 first; ``index`` is that of this process among those started
    on this node (empty: it starts one).
    """

    name: str
    node: str
    nodes: str
    address: str
    index: str = ""


_STARTERS = (
    _Starter("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    _Starter("torchrun", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"),
    _Starter("Kubeflow", "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    _Starter("the cluster", "NODE_RANK", "NNODES", "MASTER_ADDR"),
    _Starter("Kubernetes", "JOB_COMPLETION_INDEX", "NNODES", "MASTER_ADDR"),  # of an Indexed Job, which sets the first
)

NAME_WITHIN_S = 60.0
"""How long to wait for node 0's name to resolve: some clusters announce it when the node has started."""


def find_place(node: int | None, nodes: int | None, address: str | None, environ: Mapping[str, str]) -> Place:
    """Return the place from the arguments; without ``node``, from Slurm, SkyPilot, torchrun or Kubeflow.

    Raises:
        ConfigError: something is missing or impossible.
    """
    starter = ""
    if node is None:
        starters = [one for one in _STARTERS if environ.get(one.node) and (nodes or environ.get(one.nodes))]
        if "SLURM_STEP_ID" in environ:
            starter = "Slurm"
            node, nodes, address = _ask_slurm(nodes, address, environ)
        elif starters:
            starter = starters[0].name
            node, nodes, address = _read(starters[0], nodes, address, environ)
        elif nodes in (None, 1):
            node = 0
        else:
            raise ConfigError(
                f"cannot tell which of the {nodes} nodes this is; pass --node {_indices(nodes)} "
                f"(bash scripts/train.sh 0; srun, SkyPilot, torchrun and Kubeflow set it too)"
            )
    nodes = 1 if nodes is None else nodes
    if not 0 <= node < nodes:
        raise ConfigError(
            f"there is no node {node} among {nodes}: indices go from 0 to {nodes - 1}; "
            "NUM_GROUPS (--nodes) is the number of nodes"
        )
    if nodes > 1 and not address:
        raise ConfigError(
            "every node needs the address of node 0: set IP_ADDR (--address), for example IP_ADDR=10.0.0.1"
        )
    if address and ("://" in address or re.fullmatch(r"[^:]*:[0-9]+", address)):
        raise ConfigError(
            f"{address!r} is more than an address: give node 0's host name or address alone, as IP_ADDR=10.0.0.1 "
            "(--address), and the port beside it, as PORT=27400 (--port)"
        )
    return Place(node, nodes, address or "127.0.0.1", starter)


def _indices(nodes: int) -> str:
    """Return the indices of this many nodes: ``0, 1 or 2``."""
    if nodes > 3:
        return f"0 to {nodes - 1}"
    return f"{', '.join(map(str, range(nodes - 1)))} or {nodes - 1}"


def _ask_slurm(nodes: int | None, address: str | None, environ: Mapping[str, str]) -> tuple[int, int, str | None]:
    """Return this node's index, the number of nodes, and the first host's name; given values take precedence."""
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError("srun started more than one launcher on this node: srun --ntasks-per-node=1")
    node = int(environ.get("SLURM_NODEID") or environ["SLURM_PROCID"])
    nodes = nodes or int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_JOB_NUM_NODES"])
    if address or nodes == 1:
        return node, nodes, address
    hosts = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    command = ["scontrol", "show", "hostnames", hosts]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol cannot name the first of {hosts} ({error}); set IP_ADDR (--address)") from None
    return node, nodes, done.stdout.split()[0]


def _read(
    starter: _Starter, nodes: int | None, address: str | None, environ: Mapping[str, str]
) -> tuple[int, int | None, str | None]:
    """Return this node's index, the number of nodes, and node 0's address; given values take precedence."""
    if environ.get(starter.index, "0") != "0":
        raise ConfigError(
            f"{starter.name} started more than one launcher on this node, which starts the workers itself: "
            f"{starter.name} --nproc-per-node 1"
        )
    addresses = environ.get(starter.address, "").split()
    nodes = nodes or _number(starter, starter.nodes, environ)
    return _number(starter, starter.node, environ), nodes, address or (addresses[0] if addresses else None)


def _number(starter: _Starter, variable: str, environ: Mapping[str, str]) -> int:
    value = environ.get(variable, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{variable} of {starter.name} is {value!r}, not an integer; pass "
            f"--node, --nodes and --address, or unset {starter.node}"
        )
    return int(value)


def resolve(address: str, nodes: int, within_s: float = 0.0) -> str:
    """Return the numeric form of node 0's address; wait up to ``within_s`` for it to resolve.

    Raises:
        ConfigError: it does not resolve, or it resolves to this machine's loopback, which other nodes cannot reach.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            found = addresses_of(address)
            break
        except OSError as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                waited = f" (for {within_s:g} s)" if within_s else ""
                trouble = f"the address of node 0, {address!r}, is not known here{waited}: {error.strerror}"
                raise ConfigError(trouble) from None
        if left_s > within_s - 0.5:
            print(f"{LAUNCHER}waits {within_s:g} s for {address!r} to be known here", flush=True)
        time.sleep(0.5)
    ip = min(found, key=lambda info: info[0] != socket.AF_INET)[4][0]
    assert isinstance(ip, str)
    if nodes > 1 and ipaddress.ip_address(ip).is_loopback and address not in (ip, "localhost"):
        raise ConfigError(
            f"the host name of node 0, {address!r}, is {ip} on this machine, which other nodes cannot reach; "
            "give the address of its network interface: IP_ADDR=... (--address; ip -brief address lists them)"
        )
    return ip


def place_to_serve(place: Place, network: str, held: ExitStack) -> str:
    """Return where this node could serve the run instead of node 0, whose server is at ``network``; empty: nowhere.

    ``held`` holds the port there. A scheduler that has started the launchers starts those that are gone again, so there
    nobody else serves.
    """
    if place.nodes == 1 or place.starter:
        return ""
    if place.node == 0:
        return network
    host, _, port = network.removeprefix("tcp://").rpartition(":")
    try:
        ip, beside = address_towards(host.strip("[]")), host.strip("[]")
        own = hold(ip) if ip == beside else hold_or_any(ip, int(port))  # node 0's may not be taken yet
    except (OSError, ConfigError):
        return ""
    free = port_of(held.enter_context(own))
    return f"tcp://[{ip}]:{free}" if ":" in ip else f"tcp://{ip}:{free}"
