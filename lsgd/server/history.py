"""What the coordinator remembers of its rounds, for status, result files and curves."""

import math
from collections.abc import Sequence

from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.messages import Round
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Member

MAX_ELECTIONS = 4096
"""How many of the last rounds the history keeps."""

FIRST_LINES, LINES_EVERY_S = 20, 1.0
"""So many rounds have a line of their own in the log; later ones at most one for each interval."""

MAX_LOSSES = 64
"""Of how many workers, in rank order, a round of the history keeps the loss; the leader's is always there."""


def election(order: Round, leader: Member, members: Sequence[Member], seconds: float) -> RoundOrdered:
    """Return the history's entry for a round that is being ordered."""
    losses = {m.worker: m.loss for m in members[:MAX_LOSSES]} | {leader.worker: leader.loss}
    node = leader.join.node if order.scope == "local" else -1
    return RoundOrdered(order.id, order.scope, node, leader.worker, order.count, seconds, losses)


def line(entry: RoundOrdered, *, final: bool, leads: bool) -> Reason:
    """Return the line that tells people of a round, and of its leader if anybody takes over what one leads with."""
    where = f" of node{entry.node}" if entry.scope == "local" else " makes the consensus" if final else ""
    loss = entry.losses[entry.worker]
    if loss is not None and not math.isfinite(loss):
        known = "nobody has a finite loss"
    else:
        known = "no loss yet" if loss is None else f"loss {loss:.4g}"
    who = f"leader {entry.worker} ({known})" if leads else f"{known} ({entry.worker})" if loss is not None else known
    return Why.ROUND(scope=entry.scope, id=entry.round, where=where, who=who, count=entry.count)
