"""Peers and mixing matrices for 1 to 17 workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.collectives.topology import (
    complete,
    exponential_peer,
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


def averaged(x, peer_of, exchanges):
    """Return the numbers after one exchange of their owners with their peers, each the other's."""
    peers = [peer_of(rank, len(x), exchanges) for rank in range(len(x))]
    assert all(p is None or (p != r and peers[p] == r) for r, p in enumerate(peers))
    return np.array([(x[r] + x[r if p is None else p]) / 2 for r, p in enumerate(peers)])


@sizes
@pytest.mark.parametrize("peer_of", [exponential_peer, shift_one_peer])
def test_peers_reach_consensus(size, peer_of):
    """Averaging with the peers again and again brings all to the mean."""
    x = np.random.default_rng(size).normal(size=size)
    mean = x.mean()
    for exchanges in range(40 * size):
        x = averaged(x, peer_of, exchanges)
    np.testing.assert_allclose(x, mean, atol=1e-9)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_a_sweep_of_exponential_peers_is_the_exact_mean(size):
    """At distances 2^k of a power of two, wherever the sweep begins in the run."""
    bits = size.bit_length() - 1
    for first in (0, 7 * bits):
        x = np.random.default_rng(size).normal(size=size)
        mean = x.mean()
        for exchanges in range(first, first + bits):
            assert np.ptp(x) > 1e-3, "not sooner"
            x = averaged(x, exponential_peer, exchanges)
        np.testing.assert_allclose(x, mean, rtol=1e-12)


@pytest.mark.parametrize("size", [7, 8, 9, 12, 15, 16, 33, 63])
def test_exponential_peers_mix_faster_than_shift_one(size):
    """What is left of any start after the same number of exchanges, as the largest singular value."""
    left = []
    for peer_of in (exponential_peer, shift_one_peer):
        x = np.eye(size) - 1 / size
        for exchanges in range(4 * size.bit_length()):
            x = averaged(x, peer_of, exchanges)
        left.append(np.linalg.norm(x, 2))
    assert left[0] < 0.5 * left[1]


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
