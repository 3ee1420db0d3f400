"""Process groups over Gloo whose members prove to each other who they are.

Gloo accepts whoever connects first and sends a small number. So each member publishes a nonce with its address in the
store, which strangers cannot read. Once connected, each pair of members exchanges proofs that only a reader of both
nonces can compute. Nothing else is sent before that.
"""

import datetime
import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore

from lsgd.client.groups.connections import Connections, Endpoint, Forming, endpoint
from lsgd.collectives.pipeline import UNDER_WAY

Meeting = TCPStore
"""A key-value store for members without a global server, as in ``lsgd doctor``: others connect to one process."""

NONCE_NBYTES = 16
PROOF_NBYTES = 32


def gloo_group(
    store: Store,
    name: str,
    rank: int,
    names: Sequence[str],
    address: str,
    timeout_s: float,
    connections: Connections,
) -> dist.ProcessGroup:
    """Return a process group over Gloo on the interface of ``address``; its members meet in ``store`` under its name.

    Args:
        store: where they meet; whoever can read it can take a member's place.
        name: of the group, unique in the store.
        rank: of this member.
        names: of all members, in order, for errors.
        address: of this machine, to which the others connect.
        timeout_s: deadline of the group's operations.
        connections: keeps track of the connections.

    Raises:
        ConnectionAbortedError: the connections were cut.
        RuntimeError: a member did not come, or another process has taken its place.
    """
    introductions = Introductions(store, name, rank)
    group = dist.ProcessGroup(introductions, rank, len(names))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._threads = UNDER_WAY  # each carries one collective
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    gloo = connections.form(introductions.forming, lambda: ProcessGroupGloo(introductions, rank, len(names), options))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    _prove(group, introductions.nonces, rank, names)
    return group


class Introductions(Store):
    """A store in which the members of a Gloo group publish their addresses, each with a nonce, through another store.

    Args:
        store: the other store.
        name: of the group, and the prefix of its keys.
        rank: of this member.

    Attributes:
        nonces: of the members, by rank.
        forming: their addresses.
    """

    def __init__(self, store: Store, name: str, rank: int) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._rank = rank
        self.nonces = {rank: secrets.token_bytes(NONCE_NBYTES)}
        self.forming = Forming()

    def set(self, key: str, value: str | bytes) -> None:
        """Publish this member's address."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.forming.own, self.forming.numbers = listens_on(data)
        self._store.set(f"{self._name}/{key}", self.nonces[self._rank] + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a member's address, and return it."""
        data = self._store.get(f"{self._name}/{key}")
        nonce, address = data[:NONCE_NBYTES], data[NONCE_NBYTES:]
        rank = int(key.rpartition("/")[2])
        if rank != self._rank:
            self.nonces[rank] = nonce
            self.forming.peers.add(listens_on(address)[0])
        return address

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all ``keys`` are there."""
        for key in keys:
            self._store.get(f"{self._name}/{key}")


def listens_on(published: bytes) -> tuple[Endpoint, Sequence[int]]:
    """Return where a member's Gloo listens, and the number that each other member sends there first, by rank.

    Gloo publishes the length and text of the host's name, the length and bytes of a C structure that begins with a
    ``sockaddr_storage``, and the numbers, all in the machine's byte order.

    Raises:
        RuntimeError: this release of Gloo publishes something else.
    """
    try:
        (length,) = struct.unpack_from("=Q", published)
        (size,) = struct.unpack_from("=Q", published, 8 + length)
        address = published[16 + length :]
        if len(address) < size:
            raise ValueError("it ends too early")
        return endpoint(address[:size]), [number for (number,) in struct.iter_unpack("=q", address[size:])]
    except (struct.error, ValueError, OverflowError) as error:
        raise RuntimeError(
            f"Gloo of torch {torch.__version__} publishes an address in an unknown form: {error}"
        ) from None


def proof(nonces: Mapping[int, bytes], sender: int, receiver: int) -> bytes:
    """Return the proof to ``receiver`` that ``sender`` has read both nonces; different for each group and direction."""
    return hashlib.blake2b(
        nonces[sender] + nonces[receiver] + struct.pack("=qq", sender, receiver), digest_size=PROOF_NBYTES
    ).digest()


def _prove(group: dist.ProcessGroup, nonces: Mapping[int, bytes], rank: int, names: Sequence[str]) -> None:
    """Prove to each other member who this one is, and check its proof."""
    others = [r for r in range(len(names)) if r != rank]
    received = {r: torch.empty(PROOF_NBYTES, dtype=torch.uint8) for r in others}
    receiving = {r: group.recv([received[r]], r, 0) for r in others}
    own = {r: torch.frombuffer(bytearray(proof(nonces, rank, r)), dtype=torch.uint8) for r in others}
    sending = [group.send([own[r]], r, 0) for r in others]
    for r in others:
        try:
            receiving[r].wait()
        except RuntimeError as error:
            raise RuntimeError(f"{names[r]} has not proved its identity: {str(error).splitlines()[0]}") from None
        if not hmac.compare_digest(bytes(received[r].tolist()), proof(nonces, r, rank)):
            raise RuntimeError(
                f"another process has taken the place of {names[r]}: its proof is wrong; let only the run's machines "
                f"reach each other's ports (docs/guides/security.md)"
            )
    for work in sending:
        work.wait()
