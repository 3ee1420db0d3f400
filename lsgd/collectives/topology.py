"""Ranks, nodes and, for decentralized methods, neighbors."""

from collections.abc import Sequence
from itertools import accumulate


def node_index(rank: int, node_sizes: Sequence[int]) -> int:
    """Return the index of the node that ``rank`` is on; ranks of a node are consecutive."""
    return next(i for i, end in enumerate(accumulate(node_sizes)) if rank < end)


def first_ranks(node_sizes: Sequence[int]) -> list[int]:
    """Return the rank of the first member of each node."""
    return [0, *accumulate(node_sizes)][: len(node_sizes)]


def node_ranks(rank: int, node_sizes: Sequence[int]) -> range:
    """Return the ranks of all members on the node of ``rank``."""
    index = node_index(rank, node_sizes)
    first = first_ranks(node_sizes)[index]
    return range(first, first + node_sizes[index])


def shift_one_peer(rank: int, size: int, exchanges: int) -> int | None:
    """Return the peer of ``rank`` in exchange number ``exchanges`` (from 0); None if ``rank`` has a bye.

    The lower half meets the upper half, each time shifted by one (Bagua's ``shift_one``). If ``size`` is odd, the bye
    goes to rank ``exchanges mod size``, so everyone has it in turn, and the others are renumbered.
    """
    if size % 2:
        bye = exchanges % size
        if rank == bye:
            return None
        peer = _shift_one(rank - (rank > bye), (size - 1) // 2, exchanges)
        return peer + (peer >= bye)
    return _shift_one(rank, size // 2, exchanges)


def _shift_one(rank: int, half: int, shift: int) -> int:
    return (shift + rank) % half + half if rank < half else (rank - half - shift) % half


def exponential_peer(rank: int, size: int, exchanges: int) -> int | None:
    """Return the peer of ``rank`` in exchange number ``exchanges`` (from 0); None if ``rank`` has a bye.

    The one-peer exponential graph (Ying et al., arXiv 2110.13363) in its symmetric form: each sweep pairs ranks that
    differ in one bit, from the highest bit to the lowest. If ``size`` is a power of two, a sweep computes the exact
    mean. Otherwise a rank without a peer has a bye, and ranks shift by ``size // 2`` from sweep to sweep.
    """
    bits = (size - 1).bit_length()
    if not bits:
        return None
    sweep, step = divmod(exchanges, bits)
    shift = sweep * (size // 2)
    peer = (rank + shift) % size ^ 1 << bits - 1 - step
    return (peer - shift) % size if peer < size else None


def ring(size: int) -> list[tuple[int, ...]]:
    """Return the neighbors of each rank in a ring: the ranks before and after it, once if they are the same."""
    return [tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank})) for rank in range(size)]


def complete(size: int) -> list[tuple[int, ...]]:
    """Return the neighbors of each rank in a complete graph: all others."""
    return [tuple(other for other in range(size) if other != rank) for rank in range(size)]


def mixing_matrix(neighbors: Sequence[Sequence[int]], workers: Sequence[int]) -> list[list[float]]:
    """Return Metropolis weights W for a connected graph of nodes: row r has the weights with which r averages.

    Rows add up to 1, and ``workers[r] W[r][s] = workers[s] W[s][r]``, so averaging with W keeps the mean over all
    workers. If all nodes have the same number of workers, W is symmetric and doubly stochastic. A weight between
    neighbors is ``min(workers) / ((1 + max(degrees)) workers[r])``: 1/3 in a ring, 1/2 between two nodes.
    """
    size = len(neighbors)
    matrix = [[0.0] * size for _ in range(size)]
    for r, others in enumerate(neighbors):
        for s in others:
            degree = max(len(others), len(neighbors[s]))
            matrix[r][s] = min(workers[r], workers[s]) / ((1 + degree) * workers[r])
        matrix[r][r] = 1.0 - sum(matrix[r])
    return matrix
