"""What the servers make of the workers' greetings: who may take part, from which checkpoint, and over what."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lsgd import __version__
from lsgd.protocol.messages import Join, Origin, worker_name
from lsgd.server.reasons import NO_REASON, Reason, Why


def origin_of(joins: Iterable[Join]) -> Origin:
    """Return the checkpoint to continue from: the most advanced one; if two runs have one, that of more workers.

    Models of the same count in two runs differ, so only one of them counts.
    """
    having = Counter(join.origin for join in joins if join.resumed > 0)
    return max(having, key=lambda origin: (origin.iterations, having[origin], origin.run), default=Origin())


def transport_of(wanted: str, joins: Sequence[Join]) -> tuple[str, tuple[int, ...]]:
    """Return what carries tensors between these workers, and the nodes inside which NCCL does instead.

    ``auto``: NCCL inside each node where each of several workers has a GPU of its own, and TCP elsewhere.
    """
    if wanted != "auto":
        return wanted, ()
    gpus: dict[int, list[str]] = {}
    for join in joins:
        gpus.setdefault(join.node, []).append(join.gpu)
    nccl_nodes = tuple(node for node, names in gpus.items() if all(names) and 1 < len(names) == len(set(names)))
    return ("nccl", ()) if nccl_nodes and len(gpus) == 1 else ("tcp", nccl_nodes)


def objection(join: Join, others: Sequence[Join], transport: str) -> Reason:
    """Return why a worker cannot take part, and what to do; no reason if it can."""
    if join.worker != (name := worker_name(join.node, join.index)):
        return Why.WRONG_NAME(index=join.index, node=join.node, worker=join.worker, name=name)
    if transport == "nccl" and (not join.gpu or any(join.gpu == other.gpu for other in others)):
        return Why.NO_GPU(worker=join.worker)
    if refused := "; ".join(refused for refused, _ in differences(join, others[:1]) if refused):
        return Why.SOFTWARE(versions=refused)
    if not others:
        return NO_REASON
    first = others[0]
    if join.model != first.model:
        return Why.MODEL(first=first.worker, theirs=join.model_summary, ours=first.model_summary)
    if _is_loopback(join.address) != _is_loopback(first.address):
        return Why.LOOPBACK(worker=join.worker, theirs=join.address, first=first.worker, ours=first.address)
    return NO_REASON


def differences(join: Join, others: Sequence[Join]) -> list[tuple[str, str]]:
    """Compare a worker's software with this server's, whose lsgd decides, and the rest of it with the ``others``'."""
    found = [different_versions({"lsgd": __version__}, "the global server", join.versions, join.node)]
    for other in others:
        versions = {name: version for name, version in other.versions.items() if name != "lsgd"}
        found.append(different_versions(versions, f"node{other.node}", join.versions, join.node))
    return found


def different_versions(ours: Mapping[str, str], where: str, theirs: Mapping[str, str], node: int) -> tuple[str, str]:
    """Compare software: (why ``node`` cannot take part or "", what to warn it of or ""); ``where``: what ours runs on.

    Another major or minor version is refused, another patch is worth a warning. A package that one of them lacks
    altogether (CUDA on a machine without it) does not count.
    """
    refused: list[str] = []
    warned: list[str] = []
    for package in sorted(ours.keys() & theirs.keys()):
        a, b = ours[package], theirs[package]
        if a and b and a != b:
            same_release = a.split(".")[:2] == b.split(".")[:2]
            (warned if same_release else refused).append(f"{package} {b} on node{node}, {a} on {where}")
    return "; ".join(refused), "; ".join(warned)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
