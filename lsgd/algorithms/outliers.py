"""Members whose changes do not fit to those of the others: broken memory, wrong data, a sign error."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

FEWEST = 3
"""With fewer members nobody can say which one is wrong."""

LENGTH_TIMES = 10.0
"""A change is an outlier if it is more than so many times as long as usual, for one of so many steps."""

USUAL_DECAY = 0.99
"""Factor in each round of what is usual: once a task is learned, the median change says little of what is too long."""

AGREEMENT, CLEAR = 0.2, 0.1
"""So is one that agrees less with the others than this share of the median agreement, if that is clear."""

STRIKES, PATIENCE = 3, 32
"""A member is left out that was an outlier so often in a row, or once by its length; and with so many it gives up."""

SUMS = 6
"""Numbers that each member sends in a round: see :meth:`Outliers.judge`."""


class Outliers:
    """Who is left out of the mean change, decided alike on all members from what each has measured.

    A member's agreement is the cosine of its change and of the sum that the others have sent in the round. Where
    members train on like data, agreements are much alike in a round, and lie between 0.15 and 0.98 in the tasks of
    benchmarks/convergence. A flipped sign makes its member's negative, and noise makes it 0. Lengths of changes differ
    by less than a factor of two there. Once all samples are learned, most changes are next to nothing and one hard
    sample makes a long one. So a length is compared with the greatest median of the last rounds. A member that has made
    more steps than most may have a change as many times as long. EDiT (arXiv 2412.07210, section 3.3) has the rule for
    lengths, with a member's own history in place of the others'.

    Each time that a member is an outlier it gets a strike, and each time that it is none it loses one. After three
    strikes it is left out, until it has none. The round that has found it changes nothing: all train on, and the next
    exchange has both changes.

    Args:
        usual: what :attr:`usual` was in rounds before, perhaps among other members.

    Attributes:
        left_out: ranks whose changes do not count in the next round.
        usual: usual length of a change, the greatest median one, of which each later round forgets a hundredth.
    """

    def __init__(self, usual: float = 0.0) -> None:
        self.left_out: set[int] = set()
        self.usual = usual
        self._strikes: dict[int, int] = {}

    def judge(self, sums: Sequence[Sequence[float]], kinds: Sequence[int] = ()) -> Mapping[int, str]:
        """Give strikes after a round, and return who is left out for the first time, with the reason.

        Args:
            sums: for each rank the squared length of its change, that of the mean, the product of its change and the
                sum that the others have sent, that sum's squared length, the length that it knows as usual (newcomers:
                0), and its steps since the last change. A member without a change has zeros, which say nothing.
            kinds: for each rank a number, the same for those whose agreements can be compared; by default all can.
        """
        found = {}
        outliers = self._outliers(sums, kinds or [0] * len(sums))
        for rank in range(len(sums)):
            least, reason = outliers.get(rank, (0, ""))
            change = 1 if rank in outliers else -1
            now = self._strikes[rank] = max(least, self._strikes.get(rank, 0) + change)
            if now >= STRIKES and rank not in self.left_out:
                found[rank] = reason
                self.left_out.add(rank)
            elif not now:
                self.left_out.discard(rank)
        return found

    def gives_up(self, rank: int) -> bool:
        """Whether a member has too many strikes."""
        return self._strikes.get(rank, 0) >= PATIENCE

    def _outliers(self, sums: Sequence[Sequence[float]], kinds: Sequence[int]) -> Mapping[int, tuple[int, str]]:
        """Note what is usual, and return the least strikes that each outlier has after this, and why.

        If they are not a minority, nobody is one.
        """
        lengths = {rank: math.sqrt(own) for rank, (own, *_) in enumerate(sums) if own > 0}
        judges = [rank for rank in lengths if rank not in self.left_out]
        # One that is left out already makes three with two others.
        if min(len(lengths), len(judges) + 1) < FEWEST or not all(math.isfinite(x) for each in sums for x in each):
            return {}
        agreements = {rank: _agreement(sums[rank]) for rank in lengths}
        known = statistics.median([usual for *_, usual, _ in sums if usual > 0] or [0.0])
        self.usual = max(USUAL_DECAY * known, statistics.median(lengths[rank] for rank in judges))
        steps = max(1.0, statistics.median(sums[rank][-1] for rank in judges))
        told = {kind: [agreements[rank] for rank in judges if kinds[rank] == kind] for kind in kinds}
        numbers = Counter(kinds[rank] for rank in lengths)
        clear = {kind: statistics.median(each) for kind, each in told.items() if each and numbers[kind] >= FEWEST}
        found = {}
        for rank in lengths:
            agreement = clear.get(kinds[rank], 0.0)
            usual = self.usual * max(1.0, sums[rank][-1] / steps)
            if lengths[rank] > LENGTH_TIMES * usual:
                found[rank] = STRIKES, f"its length is {lengths[rank] / usual:.2g} times the usual one"
            elif agreement > CLEAR and agreements[rank] < AGREEMENT * agreement:
                found[rank] = 1, f"its cosine with the others' is {agreements[rank]:.2f}, and usual is {agreement:.2f}"
        return found if 2 * len(found) < len(lengths) else {}


def _agreement(sums: Sequence[float]) -> float:
    """Return the cosine of a member's change and the sum of the others'."""
    own, _, product, others, *_ = sums
    return product / math.sqrt(own * others) if others > 0 else 0.0
