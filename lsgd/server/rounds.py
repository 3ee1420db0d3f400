"""Who leads a round, who gives state, and who takes it: pure choices from what the members have reported."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lsgd.protocol.messages import Generation, Go, Round, Stop
from lsgd.server.members import Group, Member, elect


def abridged(answer: Go | Stop, member: Member) -> Go | Stop:
    """Return an answer without the members of a generation where its worker knows them."""
    round = answer.round
    if round is None or round.generation.number != member.met:
        return answer
    generation = replace(round.generation, nodes=(), node_sizes=(), indices=())
    return replace(answer, round=replace(round, generation=generation))


def compose(
    generation: Generation,
    members: Sequence[Member],
    groups: Iterable[Group],
    *,
    id: int,
    scope: str,
    exchanges: int,
    copies: bool,
    final: bool,
    algorithm: str,
    count: int,
    checkpoint: bool,
    probe: bool,
) -> tuple[Round, Member]:
    """Return a round and its leader.

    Args:
        generation: of the members.
        members: who take part, in rank order.
        groups: theirs; the generation's others have no leader in this round.
        id: of the round.
        scope: ``local`` or ``global``.
        exchanges: global rounds before this one.
        copies: all members take the source's model, not only newcomers.
        final: the round makes the consensus.
        algorithm: its settings, as text.
        count: iterations made so far.
        checkpoint: the members save what they are.
        probe: they first see whether all of them can reach each other.
    """
    synced = [m for m in members if m.synced]
    # The state of the most advanced round is the one to go on from; of equal ones, the leader's.
    source = min(synced or members, key=lambda m: (-m.committed, m.electable_loss, m.place))
    new = [m for m in members if m is not source and (copies or not m.synced)]
    # A newcomer has no model worth following, unless it is the one that all start from.
    leader = elect(synced or [source])
    leaders = [-1] * len(generation.node_sizes)
    for group in groups:
        leaders[group.index] = elect([m for m in group.members if m.synced] or group.members).rank
    round = Round(
        id=id,
        generation=generation,
        scope=scope,
        leader=leader.rank,
        leaders=tuple(leaders),
        exchanges=exchanges,
        new=tuple(m.rank for m in new),
        source=source.rank,
        final=final,
        algorithm=algorithm if scope == "global" else "",
        count=count,
        checkpoint=checkpoint,
        probe=probe,
    )
    return round, leader
