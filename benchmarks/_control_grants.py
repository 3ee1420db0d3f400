"""What a worker that is made up for benchmarks.control has been granted: as client/turns.py keeps it."""

from lsgd.messages import Go


class Grants:
    """Iterations that a worker may make, and the number of its last request.

    Args:
        lookahead: iterations that it asks for ahead.
    """

    def __init__(self, lookahead: int) -> None:
        self.seq = 0
        self._lookahead = lookahead
        self._left = self._last_grant = 0
        self._ahead: Go | None = None
        self._asking = False  # for more, under the next number

    def next(self) -> bool:
        """Begin an iteration that is granted; if there is none, count on to the next request, and return False."""
        if (go := self._ahead) is not None:
            self.seq, self._left, self._last_grant = go.seq, self._left + go.iterations, go.iterations
            self._ahead, self._asking = None, False
        if self._left:
            self._left -= 1
            return True
        self.seq, self._asking = self.seq + 1, False
        return False

    def wants_more(self) -> bool:
        """Whether to ask ahead now, under the number ``seq + 1``."""
        if not self._lookahead or self._asking or self._left > self._last_grant // 2:
            return False
        self._asking = True
        return True

    def take(self, go: Go) -> bool:
        """Take in an answer; return whether the worker can begin with it, because it has nothing else to do."""
        if self._asking and go.seq == self.seq + 1:
            self._ahead = go
            return False
        if go.seq != self.seq:
            return False
        self._last_grant = go.iterations
        self._left = go.iterations - 1
        return True

    def give_back(self) -> None:
        """Let go of what is granted beyond the present iteration."""
        self._left, self._ahead = 0, None
        self.seq, self._asking = self.seq + self._asking, False
