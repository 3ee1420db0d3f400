"""State in host memory, through real servers and lsgd's own connections."""

from pathlib import Path

import pytest

from .running import Cluster
from .test_algorithms import plan, run

PLACES = [(0, 0), (0, 1), (1, 0)]
PHASES = [  # in which each worker makes one iteration a round, and leaders and rounding are the same in each run
    {"name": "local", "period": 1, "iterations": 12},
    {"name": "leader", "period": 1, "local_period": 1, "election": "loss", "compression": "minmax8", "iterations": 12},
    {"name": "diloco", "period": 1, "outer_momentum": 0.3, "iterations": 12},
    {"name": "elastic", "period": 1, "iterations": 12},
    {"name": "decentralized", "iterations": 12},
    {"name": "low_precision_decentralized", "rounding": "nearest", "block": 64},
]


@pytest.mark.slow
def test_offload_changes_no_bit_of_the_model(tmp_path: Path) -> None:
    made = []
    for offload in (False, True):
        folder = tmp_path / str(offload)
        folder.mkdir()
        cluster = Cluster(folder)
        try:
            flags = plan(folder, *PHASES, iterations=72, offload=offload)
            results = run(cluster, PLACES, *flags, seed=1, low=True)
        finally:
            cluster.close()
        made.append([(result["turns"], result["final"]) for result in results])
    assert made[0] == made[1]
    assert len({bits for bits, *_ in made[0][0][0]}) == 24
