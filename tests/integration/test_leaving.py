"""``worker.leave()`` before the end of the plan: the consensus where all leave, and what one has where others go on."""

import re
from pathlib import Path

import pytest

from lsgd.protocol.messages import StopRun
from lsgd.server.reasons import Why
from tests import golden

from .running import until

ROOT = Path(__file__).parents[2]

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
    assert f"{Why.ENDED(reason=Why.ALL_LEAVE(count=40))}; 40 iterations" in server.succeeds()


@pytest.mark.parametrize("method", METHODS)
def test_one_that_leaves_has_the_model_of_its_last_round_and_the_others_go_on(cluster, method) -> None:
    server, _ = cluster.start("--workers", "2", "--iterations", "200", "--algorithm", method, *METHODS[method])
    stays, leaves = (cluster.worker("leaves", 0, index, "--after", 10 if index else 1000) for index in (0, 1))
    assert golden.text("exchange.leaves_early") in leaves.succeeds()
    stays.succeeds()
    assert (cluster.result(0, 1)["consensus"], cluster.result(0, 0)["consensus"]) == (False, None)
    assert cluster.result(0, 0)["iterations"] == 190
    assert f"{Why.ENDED(reason=Why.ALL_MADE(limit=200))}; 200 iterations" in server.succeeds()


def first_example(page: str) -> str:
    """Return the first script of a page."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs/start" / page).read_text(), re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("script", "method"),
    [("from-ddp.md", "local"), ("from-ddp.md", "allreduce"), ("own-run.md", "local"), ("plain_lsgd.py", "local")],
)
def test_a_script_of_the_docs_reaches_its_last_lines_when_the_run_is_stopped(cluster, tmp_path, script, method) -> None:
    """However long its own loop is: the model file is the consensus."""
    length = ("--iterations", "1000000") if script == "own-run.md" else ()
    cluster.start("--workers", "2", "--algorithm", method, *length)
    code = (ROOT / "examples" / script).read_text() if script.endswith(".py") else first_example(script)
    place = tmp_path / "script.py"
    long = code.replace("EPOCHS = 4\n", "EPOCHS = 1000000\n")
    place.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{long}\nprint('ITERATIONS', worker.iterations)\n")
    workers = [cluster.worker(str(place.with_suffix("")), 0, index) for index in (0, 1)]
    until(lambda: cluster.status()["count"] > 30, "they train")
    cluster.ask(StopRun("enough"))
    outputs = [worker.succeeds() for worker in workers]
    made = [int(re.search(r"ITERATIONS (\d+)", output)[1]) for output in outputs]
    assert (tmp_path / "model.pt").exists() and 30 < sum(made) < 1_000_000
    assert not any(golden.text("exchange.more_steps") in output for output in outputs) or method == "allreduce"
