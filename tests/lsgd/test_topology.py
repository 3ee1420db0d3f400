"""Peers and mixing matrices for 1 to 17 workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.collectives.topology import (
    complete,
    first_ranks,
    mixing_matrix,
    node_index,
    node_ranks,
    ring,
    shift_one_peer,
)

sizes = pytest.mark.parametrize("size", range(1, 18))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_ranks_of_a_node_are_consecutive(node_sizes):
    ranks = [rank for first in first_ranks(node_sizes) for rank in node_ranks(first, node_sizes)]
    assert ranks == list(range(sum(node_sizes)))
    for rank in ranks:
        assert rank in node_ranks(rank, node_sizes)
        assert first_ranks(node_sizes)[node_index(rank, node_sizes)] == node_ranks(rank, node_sizes)[0]


@sizes
def test_shift_one_pairs_up(size):
    """Peers are each other's; exactly one has a bye where the number is odd, each in turn."""
    byes = []
    for exchanges in range(3 * size):
        peers = [shift_one_peer(rank, size, exchanges) for rank in range(size)]
        for rank, peer in enumerate(peers):
            assert peer is None or (peer != rank and peers[peer] == rank)
        byes += [rank for rank, peer in enumerate(peers) if peer is None]
    assert byes == [exchanges % size for exchanges in range(3 * size)] if size % 2 else byes == []


def test_shift_one_is_that_of_the_original():
    """The formula of Bagua, written out for six: r < n/2 meets ((s + r) mod n/2) + n/2."""
    assert [shift_one_peer(r, 6, 0) for r in range(6)] == [3, 4, 5, 0, 1, 2]
    assert [shift_one_peer(r, 6, 1) for r in range(6)] == [4, 5, 3, 2, 0, 1]
    assert [shift_one_peer(r, 6, 5) for r in range(6)] == [5, 3, 4, 1, 2, 0]
    assert [shift_one_peer(r, 5, 1) for r in range(5)] == [4, None, 3, 2, 0]


@sizes
def test_shift_one_reaches_consensus(size):
    """Averaging with the peers again and again brings all to the mean."""
    x = np.random.default_rng(size).normal(size=size)
    mean = x.mean()
    for exchanges in range(40 * size):
        peers = [shift_one_peer(rank, size, exchanges) for rank in range(size)]
        x = np.array([(x[r] + x[r if p is None else p]) / 2 for r, p in enumerate(peers)])
    np.testing.assert_allclose(x, mean, atol=1e-9)


@sizes
@pytest.mark.parametrize("graph", [ring, complete])
@pytest.mark.parametrize("equal", [True, False])
def test_mixing_matrix(size, graph, equal):
    """Non-negative, rows add up to 1, the mean over workers stays, and powers of it converge to that mean."""
    workers = np.array([2 if equal else 1 + (3 * r) % 4 for r in range(size)])
    neighbors = graph(size)
    w = np.array(mixing_matrix(neighbors, workers.tolist()))
    assert (w >= 0).all()
    np.testing.assert_allclose(w.sum(axis=1), 1)
    np.testing.assert_allclose(workers @ w, workers)
    if equal:
        np.testing.assert_allclose(w, w.T)
        np.testing.assert_allclose(w.sum(axis=0), 1)
    for r in range(size):
        assert set(np.flatnonzero(w[r])) - {r} == set(neighbors[r])
    assert np.abs(np.linalg.eigvals(w)).round(9).tolist().count(1.0) == 1
    limit = np.tile(workers / workers.sum(), (size, 1))
    np.testing.assert_allclose(np.linalg.matrix_power(w, 4000), limit, atol=1e-9)


def test_known_weights():
    assert mixing_matrix(ring(2), [1, 1]) == [[0.5, 0.5], [0.5, 0.5]]
    np.testing.assert_allclose(mixing_matrix(ring(5), [1] * 5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(mixing_matrix(complete(4), [1] * 4), np.full((4, 4), 0.25))
    assert mixing_matrix(ring(1), [3]) == [[1.0]]
