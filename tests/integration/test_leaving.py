"""``worker.leave()`` before the end of the plan: the consensus where all leave, and what one has where others go on."""

import pytest

METHODS = {
    "leader": ("--period", "8", "--local-period", "4"),
    "elastic": ("--period", "4"),
    "decentralized": ("--interval", "4"),
    "allreduce": (),
}
"""Those that exchange models between two iterations, one before the optimizer's step, and one gradients."""


@pytest.mark.parametrize(
    ("method", "options", "inside"),
    [
        ("leader", ("--period", "64"), False),
        ("leader", ("--period", "64"), True),
        ("decentralized", ("--interval", "64"), False),
        ("allreduce", (), True),
    ],
)
def test_workers_that_all_leave_have_the_consensus(cluster, method, options, inside) -> None:
    server, _ = cluster.start("--workers", "2", "--algorithm", method, *options)
    switch = ["--inside"] if inside else []
    workers = [cluster.worker("leaves", 0, index, "--after", 30 if index else 10, *switch) for index in (0, 1)]
    for worker in workers:
        worker.succeeds()
    first, second = (cluster.result(0, index) for index in (0, 1))
    assert (first["iterations"], second["iterations"], second["consensus"]) == (10, 30, True)
    if method == "allreduce":  # nobody waits: the first has the second's model of that time
        assert first["consensus"] is False
    else:
        assert first["consensus"] is True and first["weights"] == second["weights"]
    assert "the run is over: all workers leave after 40 iterations; 40 iterations" in server.succeeds()


@pytest.mark.parametrize("method", METHODS)
def test_one_that_leaves_has_the_model_of_its_last_round_and_the_others_go_on(cluster, method) -> None:
    server, _ = cluster.start("--workers", "2", "--iterations", "200", "--algorithm", method, *METHODS[method])
    stays, leaves = (cluster.worker("leaves", 0, index, "--after", 10 if index else 1000) for index in (0, 1))
    assert "leaves after 10 iterations: the run continues without it, and its model is not the" in leaves.succeeds()
    stays.succeeds()
    assert (cluster.result(0, 1)["consensus"], cluster.result(0, 0)["consensus"]) == (False, None)
    assert cluster.result(0, 0)["iterations"] == 190
    assert "the run is over: all 200 iterations are done; 200 iterations" in server.succeeds()
