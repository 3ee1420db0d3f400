"""A message goes one way through the servers: its facts enter the state, rules decide, effects carry it out."""

from .visits import request_that_starts_a_round


def test_a_request_that_starts_a_round_hardly_ever_returns_to_a_file() -> None:
    order = request_that_starts_a_round("00", "01")
    assert len(order) <= 22, order
    assert len(order) - len(set(order)) <= 10, order


def test_more_workers_make_no_longer_way() -> None:
    assert request_that_starts_a_round("00", "01", "10", "11") == request_that_starts_a_round("00", "01")
