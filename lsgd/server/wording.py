"""The coordinator's longer sentences for people."""

from collections.abc import Collection, Iterable, Sequence

from lsgd.protocol.messages import Join, Round
from lsgd.server.links import CHECK
from lsgd.server.members import Member, Phase


def named(members: Iterable[Member], most: int = 4) -> str:
    """Return the names of the first ``most`` members in rank order, and how many more there are."""
    ordered = sorted(members, key=lambda m: m.place)
    names = ", ".join(m.worker for m in ordered[:most])
    return names + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


def joined(here: int, wanted: int, *, started: bool) -> str:
    """Say how many workers have joined; once the run has ``started``, how many there are."""
    if started:
        return f"{here} worker{'s are' if here != 1 else ' is'} in the run"
    return f"{here} of {max(here, wanted)} workers have joined"


def name_taken(worker: str, heard_s: float) -> str:
    """Say that a worker of this name is alive."""
    return (
        f"{worker} is in the run already (heard {heard_s:.1f} s ago); two workers cannot have one name: give each "
        f"machine its own --node and each worker its own LSGD_LOCAL_RANK"
    )


def name_contested(worker: str, heard_s: float) -> str:
    """Say that a worker of this name may be dead."""
    return (
        f"another process was {worker} until {heard_s:.1f} s ago; this one takes its place if it stays silent"
    )


def came_back(worker: str) -> str:
    """Say that an incarnation has left the run and cannot come back."""
    return f"this process of {worker} has left the run already, or was left out of it; start it again"


def unknown(worker: str, run: str) -> str:
    """Say that a request comes from nobody in the run."""
    return f"{worker} is not in run {run}: it was left out, or belongs to an earlier run; start it again"


def same_batches(worker: str, other: str) -> str:
    """Say that two workers draw the same data."""
    return (
        f"{worker} and {other} draw the same batches, so that one of them learns nothing of its own: take "
        f"worker.loader(dataset, ...), which gives each its shard, or seed the shuffling by rank"
    )


def given_up(waited_s: float, here: str) -> str:
    """Say that too few workers have joined in time."""
    return f"after {waited_s:g} s only {here}; start the others, or a run of fewer (--workers)"


def start_of(round: Round, first: Join, members: int) -> str:
    """Say why a round starts now."""
    if round.scope == "local":
        return f"local round {round.id}: all {members} members on node{first.node} are held, their queue is empty"
    return f"global round {round.id}: all {members} members are held"


def generation(number: int, members: int, nodes: int, backend: str, why: str) -> str:
    """Say that a generation begins."""
    workers = f"{members} worker{'s' * (members > 1)}"
    return f"generation {number}: {workers} on {nodes} node{'s' * (nodes > 1)}, over {backend}{f' ({why})' * bool(why)}"


def all_silent(holders: Collection[Member], quiet_s: float, timeout_s: float) -> str:
    """Say that nothing is heard from any worker that has the run's model."""
    return (
        f"nothing was heard for {quiet_s:.0f} s from {named(holders)}, and nobody else has the run's model: is the "
        f"network of this machine down, or a local server frozen? Waits {timeout_s:g} s for them in all"
    )


def model_lost(count: int) -> str:
    """Say that neither a worker nor a checkpoint has the run's model."""
    return (
        f"the run's model is lost after {count} iterations: the workers that had it are gone, and no worker that is "
        f"here has a checkpoint; start the run again with RESUME=1 (lsgd launch --resume) where there are checkpoints, "
        f"or let the plan begin anew by itself with restart_from_scratch = true"
    )


def gone_back(count: int, resumed: int) -> str:
    """Say that the run goes back to a checkpoint, or begins anew."""
    lost = f"the workers that had the run's model after {count} iterations are gone"
    if not resumed:
        return f"{lost}, and there is no checkpoint: IT BEGINS ANEW with a new model (restart_from_scratch)"
    return f"{lost}: it goes back to checkpoints of {resumed} iterations; {count - resumed} are made again"


def left_out(late: Collection[Member], round_id: int, patience_s: float) -> str:
    """Say that the next round starts without the members that all others have waited for."""
    are, them = ("is", "it") if len(late) == 1 else ("are", "them")
    return f"{named(late)} {are} left out of round {round_id}: the others waited {patience_s:g} s for {them}"


def cut_off(who: str, why: str, wait_s: float) -> str:
    """Say whom the run goes on without because of a broken link."""
    return f"{who} left out for {wait_s:g} s, the others go on: {why}; {CHECK}"


def phase(number: int, algorithm: str, count: int) -> str:
    """Say that a phase begins."""
    return f"phase {number}: {algorithm}, from iteration {count} on"


def all_made(count: int, limit: float, late: Collection[Member], *, resumed: bool) -> str:
    """Say that no iteration is left to grant.

    What is missing was granted to ``late``, which were left out; if the run is ``resumed``, nothing was left before.
    """
    if count < limit:
        return f"{count} of {limit:.0f} iterations are made, the last are with {named(late)}, left out since"
    if resumed:
        return (
            f"all {limit:.0f} iterations were made before it was resumed; raise iterations to go on "
            f"(LSGD_ITERATIONS, or --iterations of lsgd-server)"
        )
    return f"all {limit:.0f} iterations are made"


def resumed(count: int, members: Collection[Member]) -> str:
    """Say whose checkpoints a run goes on from."""
    others = named(m for m in members if not m.synced)
    takers = f"; taking over their model: {others}" if others else ""
    return f"goes on after {count} iterations, from checkpoints of {named(m for m in members if m.synced)}{takers}"


def start_waits(members: Collection[Member], wanted: int) -> str:
    """Say what the first round waits for."""
    if len(members) < wanted:
        return joined(len(members), wanted, started=False)
    silent = named(m for m in members if m.phase is Phase.JOINED)
    return f"the first round waits for the first request of {silent}"


def consensus_waits(members: Iterable[Member]) -> str:
    """Say what the end of the run waits for."""
    return f"the last round waits until {named(m for m in members if m.round is not None)} completed it"


def round_waits(members: Collection[Member], unfinished: Sequence[int], now: float) -> str:
    """Say what held requests wait for; an empty text if there are none. ``unfinished``: the open rounds' ids."""
    held = [m for m in members if m.held]
    if not held:
        return ""
    busy = [m for m in members if m.phase is Phase.BUSY]
    if not busy:
        paused = [m for m in members if m.phase is Phase.PAUSED]
        if paused:
            return f"the next round waits for {named(paused)}, which paused"
        late = named(m for m in members if m.phase is Phase.LATE)
        return f"the next round waits for {late}: nobody else has the run's model"
    waited_s = now - min(m.held_at for m in held)
    open_round = f" (round {unfinished[-1]} is not completed yet)" if unfinished else ""
    return f"the next round waits {waited_s:.1f} s for {named(busy)}{open_round}"
