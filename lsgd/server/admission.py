"""Decides whether a worker may join, with pure functions of the workers' greetings."""

from collections import Counter
from collections.abc import Iterable, Sequence

from lsgd.protocol.messages import Join, Origin, worker_name
from lsgd.server.reasons import NO_REASON, Reason, Why


def origin_of(joins: Iterable[Join]) -> Origin:
    """Return the checkpoint to continue from: the most advanced one; if two runs have one, that of more workers.

    Models of the same count in two runs differ, so only one of them counts.
    """
    having = Counter(join.origin for join in joins if join.resumed > 0)
    return max(having, key=lambda origin: (origin.iterations, having[origin], origin.run), default=Origin())


def transport_of(wanted: str, joins: Sequence[Join]) -> str:
    """Return what carries the tensors of a generation of these workers: ``tcp`` or ``nccl``.

    Args:
        wanted: the run's setting; ``auto`` is NCCL if each worker has a GPU of its own, else TCP.
        joins: their greetings.
    """
    if wanted != "auto":
        return wanted
    gpus = [join.gpu for join in joins]
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "tcp"


def objection(join: Join, others: Sequence[Join], transport: str) -> Reason:
    """Return why a worker cannot take part, and what to do; no reason if it can.

    Args:
        join: its greeting.
        others: the greetings of the other workers in the run.
        transport: the run's setting.
    """
    if join.worker != (name := worker_name(join.node, join.index)):
        return Why.WRONG_NAME(index=join.index, node=join.node, worker=join.worker, name=name)
    if transport == "nccl" and (not join.gpu or any(join.gpu == other.gpu for other in others)):
        return Why.NO_GPU(worker=join.worker)
    if not others:
        return NO_REASON
    first = others[0]
    refused, _ = different_versions(first, join)
    if refused:
        return Why.SOFTWARE(versions=refused)
    if join.model != first.model:
        return Why.MODEL(first=first.worker, theirs=join.model_summary, ours=first.model_summary)
    if _is_loopback(join.address) != _is_loopback(first.address):
        return Why.LOOPBACK(worker=join.worker, theirs=join.address, first=first.worker, ours=first.address)
    return NO_REASON


def different_versions(ours: Join, theirs: Join) -> tuple[str, str]:
    """Compare two workers' software: (why the second cannot take part or "", what to warn it of or "").

    Another major or minor version is refused, another patch is worth a warning. A package that one of them lacks
    altogether (CUDA on a machine without it) does not count.
    """
    refused: list[str] = []
    warned: list[str] = []
    for package in sorted(ours.versions.keys() & theirs.versions.keys()):
        a, b = ours.versions[package], theirs.versions[package]
        if a and b and a != b:
            same_release = a.split(".")[:2] == b.split(".")[:2]
            (warned if same_release else refused).append(f"{package} {b} on node{theirs.node}, {a} on node{ours.node}")
    return "; ".join(refused), "; ".join(warned)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
