"""The benchmarks run, and their figures are possible ones; what the figures are is for docs/performance."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import utils

from benchmarks import tables
from benchmarks.baselines import ddp
from benchmarks.baselines.member import Member
from benchmarks.efficiency.__main__ import row as efficiency_row
from benchmarks.efficiency.run import Measured
from benchmarks.endtoend import recorder
from benchmarks.endtoend.runs import result_of
from benchmarks.endtoend.tables import table_of
from benchmarks.endtoend.worth import compared
from benchmarks.mixing import measure, mixing
from benchmarks.network import tables as network_tables
from benchmarks.newcomer import __main__ as newcomer
from benchmarks.testbed.launch import RunFailedError
from benchmarks.transport.member import VERBS
from benchmarks.workloads import WideDigits
from lsgd.plan.estimate import OFF

from .integration.running import FORKS, LIGHT
from .needs import to_install
from .speed import scaled

ROOT = Path(__file__).parents[1]
DEADLINE_S = scaled(240)
root = pytest.mark.root
slow = pytest.mark.slow
alone = pytest.mark.alone
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

pytestmark = pytest.mark.timeout(260)


def quick(name: str, folder: Path, *arguments: str, size: str = "--quick", **variables: str) -> dict:
    """Run a benchmark with --quick, or in another size, and return what it has written."""
    result = folder / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", size, "--json", str(result), *arguments]
    environ = {**os.environ, **LIGHT, "DRAWS": "1", "OMP_NUM_THREADS": "1", **variables}
    done = FORKS.popen(command, cwd=ROOT, env=environ)
    output, _ = done.communicate(DEADLINE_S)
    assert done.returncode == 0, output
    found = json.loads(result.read_text())
    for result_ in found["results"]:
        assert all(math.isfinite(x) for x in result_.values() if isinstance(x, float)), result_
    return found


@root
@needs_root
@slow
def test_newcomers_receive_what_they_lack_and_nothing_else(tmp_path: Path) -> None:
    results = {result["case"]: result for result in quick("newcomer", tmp_path)["results"]}
    assert results["equal"]["received"] < 0.01
    for case in ("unequal", "restarted", "third"):
        assert 0.7 < results[case]["received"] < 1.1
    assert results["third"]["ordinary_s"] < 30


@root
@alone
@needs_root
@slow
def test_collectives_send_what_the_formula_says(tmp_path: Path) -> None:
    results = quick("collectives", tmp_path)["results"]
    assert [r["method"] for r in results] == [
        *("all-reduce, float32", "all-reduce, float16", "all-reduce, 8 bits"),
        *("broadcast, Gloo's", "broadcast"),
    ]
    assert [len(r["speed_ups"]) for r in results] == [0, 1, 2, 0, 1]
    for result in results:
        assert result["members"] == 2
        assert 1.0 < result["bytes_over_formula"] < 1.2
        assert result["seconds_over_link"] > 0.95  # nothing is faster than the link
        assert all(speed_up > 0.3 for speed_up in result["speed_ups"].values())


@root
@alone
@needs_root
@slow
def test_overlap_is_within_what_is_possible(tmp_path: Path) -> None:
    results = quick("overlap", tmp_path)["results"]
    assert [r["method"] for r in results] == ["bytegrad", "decentralized"]
    for result in results:
        # The sleeps alone take that long, and the step cannot be shorter than they are.
        assert result["step_s"] > result["load"] * result["link_by_arithmetic_s"]
        assert result["link_s"] > 0.8 * result["link_by_arithmetic_s"]
        assert result["ceiling"] <= 1.0


@root
@alone
@needs_root
@slow
def test_transport_measures_every_verb_and_a_link_that_is_cut(tmp_path: Path) -> None:
    results = quick("transport", tmp_path)["results"]
    assert [(r["verb"], r["transport"]) for r in results] == [
        (verb, transport) for verb in VERBS for transport in ("gloo", "tcp", "tcp, TLS")
    ]
    whole, cut = quick("transport.cuts", tmp_path, "--every-s", "3", "--cut-s", "1", size="--messages=4")["results"]
    assert (whole["cuts"], whole["speed"]) == (0, 1.0)
    assert cut["cuts"] >= 1 and cut["speed"] < 0.9
    assert whole["goodput_mbit"] < 10
    beside = quick("transport.requests", tmp_path, "--idle-s", "1", size="--nbytes=250000")["results"]
    assert [r["beside"] for r in beside] == ["nothing", "gloo", "tcp", "tcp, TLS"]
    assert all(r["median_s"] >= 0.05 for r in beside)  # there and back


@pytest.mark.parametrize("peers", ["exponential", "shift_one"])
def test_mixing_keeps_the_mean_and_sees_what_is_exact(peers: str) -> None:
    for members in (1, 2, 5, 8):
        for exchanges in range(9):
            matrix = mixing(peers, members, exchanges)
            assert (matrix == matrix.T).all() and (matrix.sum(axis=1) == 1).all()
    assert measure(peers, 4).contraction == 0 < measure(peers, 5).contraction < 1
    assert (measure(peers, 8).contraction == 0) is (peers == "exponential")


@slow
def test_sweep_has_every_pair_of_settings(tmp_path: Path) -> None:
    found = quick("sweep", tmp_path)
    results = found["results"]
    pairs = [(r["learning_rate"], r["strength"]) for r in results]
    assert len(set(pairs)) == len(pairs) == 9
    errors = [outcome["test_error"] for r in results for outcome in r["outcomes"]]
    assert len(errors) == 9 * found["seeds"]
    assert len(set(errors)) > 1, "the settings change nothing"
    assert min(errors) < 0.6, "nothing was learned: nine of ten guesses are wrong"


@slow
def test_kernels_measure_every_operation(tmp_path: Path) -> None:
    results = quick("kernels", tmp_path, "--sizes", "1")["results"]
    operations = " ".join(r["operation"] for r in results)
    assert all(word in operations for word in ("nearest", "stochastic", "dequantize"))
    assert all(r["seconds"] > 0 and r["ratio_to_copy"] > 0 for r in results)


@slow
def test_the_dashboard_is_measured_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip(f"Chromium not found: {to_install('chromium')}")
    small, large = quick("dashboard", tmp_path)["results"]
    assert small["kilobytes"] < large["kilobytes"] < 1000
    for result in (small, large):
        assert result["updates"] > 0 and result["zoom_ms"] > 0
        median, most, longest = result["frames_ms"]
        assert 0 < median <= most <= longest


@slow
@alone
def test_control_measures_real_servers_and_simulated_runs(tmp_path: Path) -> None:
    results = quick("control", tmp_path, size="--smoke")["results"]
    of_part: dict[str, list[dict]] = {}
    for result in results:
        of_part.setdefault(result["part"], []).append(result)
    (requests,) = of_part["requests"]
    assert requests["requests_per_s"] > 0
    assert requests["server_cpu_us"] > 0
    assert [(r["asked_by"], r["lookahead"]) for r in of_part["waits"]] == [
        (name, lookahead) for lookahead in (0, 1) for name in ("the client's Channel", "a bare socket")
    ]
    for waits in of_part["waits"]:
        assert waits["iterations"] > 0 and 0 <= waits["p50_ms"] <= waits["p99_ms"]
    by_socket = {r["lookahead"]: r["p50_ms"] for r in of_part["waits"] if r["asked_by"] == "a bare socket"}
    assert by_socket[0] > by_socket[1] == 0, "what is asked for ahead is there"
    ten, forty = of_part["simulation"]
    for run in (ten, forty):
        assert run["iterations"] == 128 * run["workers"], "the count is exact whatever died"
        assert run["killed"] == 2
        assert run["rounds_global"] >= 3, "one every 64 iterations, and the consensus"
        assert 2 < run["messages_per_iteration"] < 3, "a request and its answer, and little else"
    assert forty["global_round_mb"] > ten["global_round_mb"]
    messages = {r["lookahead"]: r["messages_per_period"] for r in of_part["growth"]}
    assert messages[16] < messages[0] < messages[1], "one request ahead finds nothing in each period"


@root
@alone
@needs_root
def test_network_measures_ours_and_baselines_and_goes_on_where_it_was(tmp_path: Path) -> None:
    smallest = ("--steps", "3", "--periods", "1", "--methods")
    found = quick("network", tmp_path, *smallest, "ddp", "leader-8bit")
    ddp, leader = found["results"]
    assert (ddp["method"], leader["method"]) == ("ddp", "leader-8bit")
    for result in (ddp, leader):
        assert result["compute_s"] > found["settings"]["compute_ms"] / 1e3, "the sleep is a part of the step"
        assert result["step_s"] > 0.9 * result["sent_nbytes"] * 8 / 100e6, "nothing is faster than the link"
    model_nbytes = 4 * found["settings"]["parameters"]
    assert 1.0 < ddp["sent_nbytes"] / model_nbytes < 1.2, "two nodes: each sends the whole model once"
    assert 1.0 < leader["sent_nbytes"] / leader["needed_nbytes"] < 1.3
    assert leader["wait_s"] > 0
    assert leader["step_s"] < ddp["step_s"] / 2, "a 64th of the bytes, on a link that slow"
    again = quick("network", tmp_path, *smallest, "leader-8bit", "ddp")
    assert again["results"] == found["results"], "what the file has is not run again"


@root
@alone
@needs_root
def test_endtoend_tests_the_average_of_the_models_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "endtoend.png"
    found = quick("endtoend", tmp_path, "--plot", str(picture), "--methods", "ddp", "local-8bit")
    ddp, local = found["results"]
    assert (ddp["method"], local["method"]) == ("ddp", "local-8bit")
    for result in (ddp, local):
        steps, seconds, losses, accuracies = zip(*result["curve"], strict=True)
        assert result["final_loss"] == pytest.approx(losses[-1]) and losses[-1] < losses[0]
        assert list(steps) == list(range(8, result["steps"] + 1, 8))
        assert list(seconds) == sorted(set(seconds))
        assert 0.85 < max(accuracies) < 1.0
        assert result["step_s"] > 0.9 * result["sent_nbytes"] * 8 / 100e6, "nothing is faster than the link"
    assert 16 < ddp["steps"] < local["steps"] == found["settings"]["steps"], "its bytes would take too long"
    assert local["sent_nbytes"] < ddp["sent_nbytes"] / 32, "a quarter of the bytes, every 16 steps"
    assert local["step_s"] < ddp["step_s"]
    assert picture.stat().st_size > 10_000


@slow
def test_finetuning_gives_both_optimizers_the_same_pretrained_models(tmp_path: Path) -> None:
    results = quick("finetuning", tmp_path)["results"]
    assert len(results) == 8
    for before in ("task", "muon"):
        here = [r for r in results if r["pretrained_with"] == before]
        assert len({r["before"] for r in here}) == 1
        assert all(r["loss"] < r["before"] for r in here)
        assert len({r["loss"] for r in here}) == 4


def test_the_table_of_endtoend_has_medians_and_ratios_only_where_both_reached_the_target() -> None:
    common = {"steps": 80, "sent_nbytes": 2.1e6, "final_loss": 0.07, "final_accuracy": 0.98}
    measured = [("ddp", 40.0, 64, 0.5), ("leader", 5.0, 72, 0.1), ("alone", None, None, 0.05)]
    measured += [("leader", 4.0, 48, 0.05), ("leader", None, None, 0.2)]
    rows = [
        {**common, "method": m, "seconds_to_target": s, "steps_to_target": steps, "step_s": step_s}
        for m, s, steps, step_s in measured
    ]
    assert table_of(rows).splitlines()[-3:] == [
        "| DistributedDataParallel | 1 | 80 | 40.0 |  | 1.00 | 64 | 500.0 | 1.00 | 2.100 | 0.070 | 0.9800 |",
        "| lsgd leader | 3 | 80 | 5.0 | 4.0 to never | 8.00 | 72 | 100.0 | 5.00 | 2.100 | 0.070 | 0.9800 |",
        "| no exchange | 1 | 80 | never |  |  |  | 50.0 | 10.00 | 2.100 | 0.070 | 0.9800 |",
    ]


def test_the_table_of_endtoend_names_the_optimizer_and_takes_another_target() -> None:
    common = {"method": "ddp", "steps": 80, "sent_nbytes": 2.1e6, "step_s": 0.5, "final_accuracy": 0.98}
    muon, other = ({"optimizer": "muon", "learning_rate_times": times} for times in (4.0, 2.0))
    learners = ({}, muon, {**muon, "method": "leader"}, {**other, "method": "leader"})
    rows = [
        {**common, "final_loss": 1.0, "seconds_to_target": None, "steps_to_target": None, **learner}
        | {"curve": [(8, 4.0, 2.0, 0.3), (16, 8.0 / (1 + number), 1.0, 0.5)]}
        for number, learner in enumerate(learners)
    ]
    names = ["DistributedDataParallel", "DistributedDataParallel, Muon, rate times 4"]
    names += ["lsgd leader, Muon, rate times 4", "lsgd leader, Muon, rate times 2"]
    assert [line.split(" | ")[0] for line in table_of(rows).splitlines()[-4:]] == [f"| {name}" for name in names]
    lines = [line.split(" | ") for line in table_of(rows, 1.5).splitlines()[-4:]]
    assert [line[3] for line in lines] == ["8.0", "4.0", "2.7", "2.0"]
    assert [line[5] for line in lines] == ["1.00", "1.00", "1.50", ""], "beside DDP with the same optimizer and rate"
    assert [line[8] for line in lines] == ["1.00", "1.00", "1.00", ""]


@pytest.mark.parametrize(("period", "step_s", "sent_nbytes"), [(16, 1.5, 6.25), (1, 1.6, 7.5)])
def test_a_step_of_endtoend_has_its_share_of_whole_periods(
    tmp_path: Path, period: int, step_s: float, sent_nbytes: float
) -> None:
    """Of 48 steps of 1 s, each sixteenth also sends 100 bytes in 8 s; the models are tested every eight."""
    exchanges = {step: step // 16 for step in range(8, 49, 8)}
    marks = [{"step": step, "at_s": step + 8.0 * n, "sent_nbytes": 100 * n} for step, n in exchanges.items()]
    (tmp_path / recorder.MARKS).write_text(json.dumps(marks))
    task = WideDigits(width=2)
    models = torch.zeros(len(marks), sum(x.numel() for x in task.model().parameters()))
    models.numpy().tofile(tmp_path / recorder.SNAPSHOTS)
    result = result_of(task, [tmp_path], period)
    assert (result.steps, result.step_s, result.sent_nbytes) == (48, step_s, sent_nbytes)


def test_a_round_that_a_fault_hits_is_a_pause() -> None:
    steps = [0.0, 1.0, 2.0, 12.0, 13.0, 19.0, 20.0, 26.0]
    assert newcomer.compared(steps, 5.0, 19.5, 1.0) == ([4.0, 0.0], 5.0)
    with pytest.raises(RunFailedError, match="before the newcomer trained, no round"):
        newcomer.compared(steps, 12.5, 13.5, 1.0)
    with pytest.raises(RunFailedError, match="after the newcomer trained, no round"):
        newcomer.compared(steps, 5.0, 26.5, 1.0)


def test_results_of_other_settings_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "newcomer.json"
    kept.write_text('{"settings": {"period": 1}, "results": []}')
    monkeypatch.setattr(sys, "argv", ["benchmarks.newcomer", "--json", str(kept)])
    assert newcomer.main() == 2
    assert f"error: {kept} has results with other settings" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the import of torch.distributed.optim
def test_post_local_sgd_averages_after_each_period_and_leaves_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged = []
    monkeypatch.setattr(utils, "average_parameters_or_parameter_groups", lambda *_: averaged.append(step))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        with ddp.post_local_sgd(model, sgd, Member(0, ["127.0.0.1"], 4, 1)) as (wrapped, optimizer):
            for step in range(1, 10):  # noqa: B007
                optimizer.step()
        assert averaged == [4, 8]
        assert not wrapped.broadcast_buffers
    finally:
        dist.destroy_process_group()


def test_a_ratio_of_step_times_is_the_median_of_those_within_a_turn() -> None:
    common = {"nodes": 2, "link": "100mbit", "compute_s": 0.1, "wait_s": 0.02, "sent_nbytes": 2.1e6}
    steps_s = {"ddp": (1.0, 2.0, 4.0), "leader": (0.5, 0.5, 0.4)}  # ratios of a turn: 2, 4, 10
    rows = [
        {
            **common,
            "method": method,
            "repeat": repeat,
            "step_s": step_s,
            "needed_nbytes": 2e6 * (method != "ddp"),
        }
        for method, of_turns in steps_s.items()
        for repeat, step_s in enumerate(of_turns)
    ]
    lines = network_tables.step_table(rows).splitlines()
    assert lines[0] == "**2 nodes, 100mbit**"
    assert lines[-1] == "| leader | 500.0 | 4.00 | 2.100 | 1.050 | 20% | 4.0% | 76% |"


def test_the_fastest_baseline_is_that_of_the_same_link_and_number_of_nodes() -> None:
    def measured(nodes: int, link: str, method: str, step_s: float) -> dict:
        place = {"nodes": nodes, "link": link, "method": method, "repeat": 0, "step_s": step_s}
        return {**place, "compute_s": 0.1, "wait_s": 0.0, "sent_nbytes": 1e6, "needed_nbytes": 0.0}

    two, three = (2, "100mbit"), (3, "100mbit")
    rows = [
        *(
            measured(*two, "ddp", 9.0),
            measured(*two, "post-local-sgd", 0.3),
            measured(*two, "leader-8bit", 0.2),
        ),
        *(measured(*two, "local", 0.1), measured(*three, "leader-8bit", 0.25), measured(*three, "ddp", 8.0)),
        *(measured(*three, "leader-8bit-delay", 0.16), measured(2, "1gbit", "leader-8bit", 0.15)),
    ]
    assert network_tables.step_table(rows).splitlines()[-2:] == [
        "| 100mbit | 2 | post-local-sgd | 300.0 | 200.0 | 1.50 |  |  |",
        "| 100mbit | 3 | ddp | 8000.0 | 250.0 | 32.00 | 160.0 | 50.00 |",
    ]


@pytest.mark.parametrize("page", tables.WRITTEN, ids=lambda page: page.stem)
def test_the_tables_of_the_docs_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->") == len(tables.TABLE.findall(text))
    assert tables.made_anew(text, page) == text, "run python -m benchmarks.tables"


def test_every_benchmark_with_kept_results_has_tables_of_them() -> None:
    with_tables = {page.stem for page in tables.PAGES if tables.TABLE.search(page.read_text())}
    with_tables.add("versions")  # README's table of what ran where
    assert with_tables == {kept.stem.partition("-")[0] for kept in tables.RESULTS.glob("*.json")}


def test_what_two_machines_were_worth_is_in_the_range_of_the_estimate() -> None:
    found = compared([json.loads(path.read_text()) for path in tables.RESULTS.glob("endtoend-*.json")])
    assert len({(each.name, each.link) for each in found}) >= 6
    for each in found:
        assert each.predicted.machines == 2 and abs(each.off) <= OFF, each
        assert each.predicted.most == pytest.approx(each.predicted.times * (1 + OFF))


def test_the_page_of_conclusions_names_each_page() -> None:
    conclusions = (tables.RESULTS.parents[1] / "docs" / "performance.md").read_text()
    assert [page for page in tables.PAGES if f"](../benchmarks/results/{page.name})" not in conclusions] == []


@pytest.mark.parametrize(
    ("what", "reason"), [("network 1gbit 99", "has no results"), ("of contents", "no table is called")]
)
def test_a_table_that_cannot_be_made_is_named(what: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"network.md.* {reason}"):
        tables.made_anew(f"<!-- table: {what} -->\n<!-- end of table -->\n", Path("network.md"))


def test_efficiency_is_that_of_equal_times() -> None:
    calm = Measured(0, 100.0, 4000, 1.0, "")
    disturbed = Measured(9, 50.0, 1500, 0.875, "")
    assert efficiency_row("worker", 10.0, disturbed, calm) == ["worker", "10", "9", "1,500", "0.750", "0.875"]
    assert efficiency_row("", 0.0, calm, calm)[:2] == ["nothing", ""]
