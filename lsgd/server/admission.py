"""Whether a worker may join: pure functions of the workers' greetings."""

from collections import Counter
from collections.abc import Iterable

from lsgd.protocol.messages import Join, Origin, worker_name


def origin_of(joins: Iterable[Join]) -> Origin:
    """Return the checkpoint to go on from: of the most iterations; of the same in two runs, that of most workers.

    Models of the same count in two runs differ, so that only one of them counts.
    """
    having = Counter(join.origin for join in joins if join.resumed > 0)
    return max(having, key=lambda origin: (origin.iterations, having[origin], origin.run), default=Origin())


def objection(join: Join, first: Join | None) -> str:
    """Return why a worker cannot take part, and what to do; an empty text if it can.

    Args:
        join: its greeting.
        first: the greeting of any worker in the run, None where there is none.
    """
    if join.worker != (name := worker_name(join.node, join.index)):
        return f"it is the worker {join.index} of node{join.node} and calls itself {join.worker}, not {name}"
    if first is None:
        return ""
    refused, _ = different_versions(first, join)
    if refused:
        return f"its software differs: {refused}; install the same release on both"
    if join.model != first.model:
        return (
            f"its model differs from {first.worker}'s: {join.model_summary} against {first.model_summary}; "
            f"build the same model on every worker"
        )
    if _is_loopback(join.address) != _is_loopback(first.address):
        return (
            f"{join.worker} can be reached at {join.address} and {first.worker} at {first.address}: one of them is on "
            f"the loopback interface; connect every node's local server by the global server's real address"
        )
    return ""


def different_versions(ours: Join, theirs: Join) -> tuple[str, str]:
    """Compare two workers' software: (why the second cannot take part or "", what it should be warned of or "").

    Another major or minor version cannot take part, another patch is worth a warning. What one of them lacks
    altogether (CUDA on a machine without it) does not count.
    """
    refused: list[str] = []
    warned: list[str] = []
    for package in sorted(ours.versions.keys() & theirs.versions.keys()):
        a, b = ours.versions[package], theirs.versions[package]
        if a and b and a != b:
            same_release = a.split(".")[:2] == b.split(".")[:2]
            (warned if same_release else refused).append(
                f"{package} {b} on node{theirs.node}, {a} on node{ours.node}"
            )
    return "; ".join(refused), "; ".join(warned)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
