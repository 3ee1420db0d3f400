"""What a worker has been granted, and the numbers of its requests."""

from lsgd.protocol.messages import Go


class Grants:
    """The iterations that a worker may make, one request after another and one asked for ahead.

    Args:
        lookahead: whether it may ask for more before it has made all; how many it gets is the servers' decision.

    Attributes:
        seq: number of the last request but those for more; 0 before the first.
    """

    def __init__(self, lookahead: int) -> None:
        self.seq = 0
        self._lookahead = lookahead
        self._left = 0  # iterations beyond the one that is being made
        self._last_grant = 0
        self._unanswered = False  # the last request has no answer yet
        self._asking = False  # for more, under the next number
        self._ahead: Go | None = None  # the answer to that, until it is needed

    def next(self) -> bool:
        """Begin an iteration that is granted; if there is none, count on to the next request, and return False.

        A request without an answer keeps its number.
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
        """Take in an answer; return whether it is that to the last request, with which an iteration begins."""
        if self._asking and go.seq == self.seq + 1:
            self._ahead = go
            return False
        if go.seq != self.seq:
            return False
        self._unanswered = False
        self._last_grant, self._left = go.iterations, go.iterations - 1
        return True

    def give_back(self) -> None:
        """Let go of what is granted beyond the present iteration, and of what is asked for ahead of it."""
        self._left, self._ahead = 0, None
        self.seq, self._asking = self.seq + self._asking, False

    def withdraw(self) -> None:
        """Let go of all, and of what the last request asks for: the next is another one."""
        self.give_back()
        self._unanswered = False
