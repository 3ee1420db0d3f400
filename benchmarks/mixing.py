"""How fast decentralized SGD's peers mix: ``python -m benchmarks.mixing [--members N ...]``.

Members begin with different numbers and average them with their peers (lsgd/collectives/topology.py), nothing else.
The contraction is what an exchange leaves of the distance from the mean, in the worst case, as the geometric mean over
many exchanges, in float64. It is zero where some exchanges make the exact mean. The share says how many members have a
peer in an exchange, on average: the others send nothing.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.report.about import about, argument_parser, heading
from benchmarks.report.tables import table
from lsgd.algorithms.decentralized import ONE_PEER

MEMBERS = (3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33, 64)
SWEEPS = 40  # through the ranks, at least
EXACT = 1e-12

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Mixing:
    """What one kind of peers does among so many members."""

    peers: str
    members: int
    contraction: float
    share: float


def mixing(peers: str, members: int, exchanges: int) -> Matrix:
    """Return the matrix of one exchange: row r has the weights of what r averages."""
    matrix = np.eye(members)
    for rank in range(members):
        peer = ONE_PEER[peers](rank, members, exchanges)
        if peer is not None:
            matrix[rank, [rank, peer]] = 0.5
    return matrix


def measure(peers: str, members: int) -> Mixing:
    """Multiply the matrices of many exchanges, without their common limit, the mean."""
    rounds = max(SWEEPS, members) * (members - 1).bit_length()
    left, log, paired = np.eye(members) - 1 / members, 0.0, 0
    for exchanges in range(rounds):
        matrix = mixing(peers, members, exchanges)
        paired += members - int(np.trace(matrix == 1.0))
        left = matrix @ left
        left -= left.mean(axis=0)  # what rounding adds to the mean would not shrink
        norm = float(np.linalg.norm(left, 2))
        if norm < EXACT:
            log = -math.inf
            break
        left, log = left / norm, log + math.log(norm)
    return Mixing(peers, members, math.exp(log / rounds), paired / (exchanges + 1) / members)


def main() -> int:
    """Print a Markdown table."""
    parser = argument_parser("benchmarks.mixing", __doc__)
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS, help="how many, one line each")
    options = parser.parse_args()
    machine = about("benchmarks.mixing")
    results = [measure(peers, members) for members in options.members for peers in ONE_PEER]
    print(heading(machine) + "\n")
    columns = ["members", *(f"{peers}: {what}" for what in ("contraction", "share") for peers in ONE_PEER)]
    rows = []
    for members in options.members:
        here = [result for result in results if result.members == members]
        rows.append([str(members), *(f"{r.contraction:.3f}" for r in here), *(f"{r.share:.2f}" for r in here)])
    print(table(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
