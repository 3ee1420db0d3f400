"""What a worker has been granted, request by request."""

from lsgd.client.iteration.grants import GrantedIterations
from lsgd.protocol.messages import Go


def go(seq: int, iterations: int = 1) -> Go:
    return Go(seq, None, 0.0, iterations)


def granted(lookahead: int = 1, iterations: int = 1) -> GrantedIterations:
    """Return what a worker has whose first request was answered: it makes the first of ``iterations``."""
    grants = GrantedIterations(lookahead)
    assert not grants.next() and grants.seq == 1
    assert grants.take(go(1, iterations))
    return grants


def test_one_request_for_each_iteration_without_lookahead() -> None:
    grants = granted(lookahead=0)
    assert not grants.wants_more()
    assert not grants.next() and grants.seq == 2


def test_a_request_without_an_answer_keeps_its_number_and_one_withdrawn_does_not() -> None:
    grants = granted()
    assert [grants.next(), grants.next()] == [False, False] and grants.seq == 2
    grants.withdraw()
    assert not grants.next() and grants.seq == 3
    assert not grants.take(go(2))  # it answers what was withdrawn
    assert grants.take(go(3))


def test_more_is_asked_for_once_and_begun_with_when_it_is_there() -> None:
    grants = granted()
    assert grants.wants_more() and not grants.wants_more()
    assert not grants.take(go(2))  # not what the present iteration waits for
    assert grants.next() and grants.seq == 2
    assert grants.wants_more()
    assert not grants.next() and grants.seq == 3  # asked for ahead, and not answered yet: the same number


def test_more_is_asked_for_when_half_of_the_last_grant_is_left() -> None:
    grants = granted(lookahead=16, iterations=5)
    wanted = []
    for _ in range(4):
        wanted.append(grants.wants_more())
        assert grants.next()
    assert wanted == [False, False, True, False]


def test_what_is_given_back_is_not_made_and_its_number_not_used_again() -> None:
    grants = granted(lookahead=16, iterations=2)
    assert not grants.take(go(3))  # never asked for
    assert grants.wants_more()
    grants.take(go(2, 4))
    grants.give_back()
    assert not grants.next() and grants.seq == 3
    assert not grants.take(go(2, 4))
