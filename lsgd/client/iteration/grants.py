"""A worker's grants, and the numbers of its requests."""

from lsgd.protocol.messages import Go


class Grants:
    """The iterations granted to a worker: by one request after another, and by one request ahead.

    Args:
        lookahead: whether the worker may ask for more before it has run all; the servers decide how many it gets.

    Attributes:
        seq: number of the last request that was not ahead; 0 before the first.
    """

    def __init__(self, lookahead: int) -> None:
        self.seq = 0
        self._lookahead = lookahead
        self._left = 0  # iterations after the current one
        self._last_grant = 0
        self._unanswered = False  # the last request has no answer yet
        self._asking = False  # ahead, under the next number
        self._ahead: Go | None = None  # the answer to that, until needed

    def next(self) -> bool:
        """Begin a granted iteration; if there is none, go to the next request's number, and return False.

        An unanswered request keeps its number.
        """
        if (go := self._ahead) is not None:
            self.seq, self._left, self._last_grant = go.seq, self._left + go.iterations, go.iterations
            self._ahead, self._asking = None, False
        if self._left:
            self._left -= 1
            return True
        self.seq += not self._unanswered
        self._unanswered, self._asking = True, False
        return False

    def wants_more(self) -> bool:
        """Whether to ask for more now, under the number ``seq + 1``."""
        if not self._lookahead or self._asking or self._left > self._last_grant // 2:
            return False
        self._asking = True
        return True

    def take(self, go: Go) -> bool:
        """Accept an answer; return whether it answers the last request, so that an iteration begins."""
        if self._asking and go.seq == self.seq + 1:
            self._ahead = go
            return False
        if go.seq != self.seq:
            return False
        self._unanswered = False
        self._last_grant, self._left = go.iterations, go.iterations - 1
        return True

    def give_back(self) -> None:
        """Give up what is granted beyond the current iteration, and the request ahead."""
        self._left, self._ahead = 0, None
        self.seq, self._asking = self.seq + self._asking, False

    def withdraw(self) -> None:
        """Give up all grants and the last request: the next request gets a new number."""
        self.give_back()
        self._unanswered = False
