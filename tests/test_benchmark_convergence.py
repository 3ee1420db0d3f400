"""The benchmark of convergence: its tasks, its tuning, its tables, and that it runs."""

import contextlib
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import tables as convergence_tables
from benchmarks.convergence import tuning
from benchmarks.convergence.runs import Training
from benchmarks.methods import sent_nbytes
from benchmarks.workloads import PARTS, SHARDS, Digits, Text, VisionDigits

from .integration.running import LIGHT, until
from .test_benchmarks import DEADLINE_S, ROOT, quick

slow = pytest.mark.slow

pytestmark = pytest.mark.timeout(260)


def test_shards_are_dealt_as_the_task_says() -> None:
    def epochs(shards: str, count: int) -> list[list[Tensor]]:
        """Return the images of two workers in some epochs."""
        digits = Digits()
        digits.shards = shards
        workers = [digits.batches(rank, 2, seed=0) for rank in range(2)]
        per_epoch = 1437 // 2 // digits.batch_size
        return [
            [torch.cat([x for x, _ in islice(each, per_epoch)]).flatten(1) for each in workers] for _ in range(count)
        ]

    def seen(images: list[Tensor]) -> set[tuple[float, ...]]:
        return {tuple(image.tolist()) for each in images for image in each}

    for shards in SHARDS:
        for one, other in epochs(shards, 2):
            assert not seen([one]) & seen([other])
    every = len(seen([Digits().train_data[0].flatten(1)]))
    assert len(seen([one for one, _ in epochs("dealt", 8)])) > 0.95 * every
    assert len(seen([one for one, _ in epochs("fixed", 8)])) < 0.52 * every
    skewed = Digits()
    skewed.shards = "skewed"
    labels = [{int(y) for _, ys in islice(skewed.batches(rank, 2, seed=0), 40) for y in ys} for rank in range(2)]
    assert labels[0] <= set(range(6)) and labels[1] <= set(range(4, 10))


def test_a_moved_image_is_the_image_but_for_its_border_and_noise() -> None:
    task = VisionDigits()
    task.noise = 0.0
    batches, same = task.batches(0, 2, seed=3), Digits.batches(Digits(), 0, 2, seed=3)
    moves = set()
    for (x, labels), (plain, wanted) in islice(zip(batches, same, strict=False), 8):
        assert labels.tolist() == wanted.tolist()
        padded = torch.nn.functional.pad(plain, (1, 1, 1, 1))
        for image, wide in zip(x, padded, strict=True):
            fits = [(r, c) for r in range(3) for c in range(3) if torch.equal(image, wide[:, r : r + 8, c : c + 8])]
            assert fits
            moves |= set(fits)
    assert len(moves) == 9
    task.noise = 0.2
    noisy, _ = next(task.batches(0, 2, seed=3))
    again, _ = next(task.batches(0, 2, seed=3))
    other, _ = next(task.batches(1, 2, seed=3))
    assert torch.equal(noisy, again) and not torch.equal(noisy, other)


def test_a_task_with_a_warm_up_sets_the_rate_of_each_step() -> None:
    constant, text = Digits(), VisionDigits()
    for task, rates in ((constant, [1, 1, 1, 1]), (text, [0.5, 1, 1, 0.5])):
        optimizer = task.optimizer(task.model())
        for progress, times in zip((1 / 64, 1 / 32, 0.8, 0.9), rates, strict=True):
            task.set_learning_rate(optimizer, progress)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(task.learning_rate * times)


def test_bytes_are_those_of_the_formulas() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 1, bias=False))
    numel = 100 * 50 + 50 + 50
    assert sent_nbytes("alone", 0, model, 2) == sent_nbytes("one-machine-samples", 0, model, 2) == 0
    assert sent_nbytes("ddp", 0, model, 2) == sent_nbytes("allreduce", 0, model, 2) == 4 * numel
    assert sent_nbytes("ddp-float16", 0, model, 4) == 3 * numel
    assert sent_nbytes("torchft-diloco", 16, model, 2) == sent_nbytes("local", 16, model, 2) == 4 * numel / 16
    assert sent_nbytes("ddp-powersgd2", 0, model, 2) == 4 * (2 * 150 + 50 + 50)  # a row of 50 would become longer
    assert sent_nbytes("hivemind", 64, model, 2) is None


def test_what_is_reported_has_no_trials_and_the_best_learning_rate() -> None:
    training = Training("vit", "local", 16, 0, None, 1.0)
    assert [t.learning_rate_times for t in tuning.trials([training, replace(training, seed=1)])] == [
        0.5,
        0.5,
        1.0,
        1.0,
        2.0,
        2.0,
    ]
    assert {t.learning_rate_times for t in tuning.trials([replace(training, learning_rate_times=4.0)])} == {2, 4, 8}
    trials = [
        {**asdict(trial), "final_loss": loss}
        for trial, loss in zip(tuning.trials([training]), (0.1, 0.8, 0.2, math.nan, 0.4, 0.4), strict=True)
    ]
    assert {trial["seed"] for trial in trials} == set(tuning.SEEDS)
    assert tuning.tuned([training], trials[:5], 1.0) == []  # a trial has failed
    other = tuning.trials([replace(training, learning_rate_times=4.0)])
    trials += [{**asdict(trial), "final_loss": 0.1} for trial in other if trial.learning_rate_times > 2]
    (best,) = tuning.tuned([training], trials, 1.0)
    assert best == replace(training, learning_rate_times=2.0)
    untuned = {**asdict(replace(training, method="leader")), "final_loss": 0.7}
    rows = [*trials, {**asdict(training), "final_loss": 0.6}, {**asdict(best), "final_loss": 0.3}, untuned]
    assert tuning.reported(rows, 1.0) == rows[-2:]


@slow
def test_convergence_trains_simulated_workers_as_real_ones_of_a_baseline(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    smallest = ("--workers", "3", "--steps", "32", "--plots", str(pictures), "--methods", "ddp", "allreduce", "leader")
    results = {r["method"]: r for r in quick("convergence", tmp_path, *smallest)["results"]}
    for result in results.values():
        assert [step for step, _, _ in result["curve"]] == [8, 16, 24, 32]
        assert result["final_loss"] < 2.0, "nothing was learned: ten equal guesses have a loss of 2.3"
    losses = {method: result["final_loss"] for method, result in results.items()}
    assert math.isclose(losses["allreduce"], losses["ddp"], rel_tol=0.1), "they differ in batch-norm's averages only"
    assert not math.isclose(losses["leader"], losses["allreduce"], rel_tol=1e-3)
    pictures_made = sorted(picture.name for picture in pictures.iterdir())
    assert pictures_made == ["convergence-digits-16.png", "convergence-digits-bytes.png"]
    nbytes = {method: result["sent_nbytes"] for method, result in results.items()}
    assert nbytes["ddp"] == nbytes["allreduce"] == 2 * 2 / 3 * 4 * 14_458
    assert results["ddp"]["compute_s"] is None and 0 < results["allreduce"]["compute_s"] < 1


@slow
def test_convergence_tunes_every_method_alike_and_remembers_it(tmp_path: Path) -> None:
    smallest = ("--tasks", "skewed", "--workers", "2", "--steps", "16", "--tune", "--methods")
    methods = ("one-machine", "one-machine-samples", "alone", "allreduce")
    found = quick("convergence", tmp_path, *smallest, *methods, **LIGHT)
    assert found["settings"] == {"workers": 2}
    rows = found["results"]
    assert {row["shards"] for row in rows} == {"skewed"}
    trials = [(row["method"], row["learning_rate_times"]) for row in rows if row["seed"] in tuning.SEEDS]
    assert trials == [(method, times) for method in methods for times in tuning.TIMES for _ in tuning.SEEDS]
    last = {row["method"]: row for row in rows if row["seed"] == 0}
    assert len(rows) == len(trials) + len(last) == 28
    for method, row in last.items():
        losses = {r["learning_rate_times"]: r["final_loss"] for r in rows if r["seed"] and r["method"] == method}
        assert row["learning_rate_times"] == min(losses, key=losses.__getitem__)
        assert row["curve"][-1][0] == (32 if method == "one-machine-samples" else 16)
        assert row["final_loss"] == pytest.approx(row["curve"][-1][1], abs=1e-5), (
            "the rate has decayed: the last counts"
        )
    assert quick("convergence", tmp_path, *smallest, *methods, **LIGHT)["results"] == rows, "nothing is run again"


def test_convergence_wants_steps_up_to_the_first_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.convergence", "--tasks", "digits", "--steps", "7"])
    with pytest.raises(SystemExit) as refused:
        convergence.main()
    assert refused.value.code == 2
    assert "--steps must be at least 8, when the average is first tested, not 7" in capsys.readouterr().err


@slow
def test_a_killed_convergence_leaves_no_process_of_a_baseline() -> None:
    steps = f"--steps={10**9 + os.getpid()}"  # marks its processes
    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", steps, "--workers=2", "--methods=ddp"]

    def ranks() -> list[bytes]:
        said = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                said.append(process.read_bytes())
        return [line for line in said if b"convergence.baseline" in line and steps.encode() in line]

    with subprocess.Popen(command, cwd=ROOT, env=os.environ | LIGHT, stdout=subprocess.DEVNULL) as benchmark:
        try:
            until(lambda: len(ranks()) == 2, "two processes train", DEADLINE_S / 2)
        finally:
            benchmark.kill()
    until(lambda: not ranks(), "they have ended", DEADLINE_S / 2)


def test_the_time_to_a_target_is_steps_times_the_time_of_a_step_of_the_same_period() -> None:
    def trained(method: str, period: int, seed: int, steps: int | None, accuracy: float) -> dict:
        common = {"task": "digits", "method": method, "period": period, "seed": seed}
        return {**common, "steps_to_target": steps, "final_accuracy": accuracy}

    rows = [
        *(trained("ddp", 0, 0, 100, 0.98), trained("ddp", 0, 1, 300, 0.98)),
        *(trained("leader", 16, 0, 110, 0.97), trained("leader", 16, 1, None, 0.98)),
        trained("leader", 64, 0, 120, 0.96),
        trained("bytegrad", 0, 0, 400, 0.96),
    ]
    measured = [("ddp", 4, 0.5), ("leader", 4, 0.1), ("leader", 2, 0.05), ("bytegrad", 4, 0.1)]
    results = [{"method": m, "link": "100mbit", "nodes": nodes, "step_s": s} for m, nodes, s in measured]
    network = {"settings": {"period": 16}, "results": results}
    assert convergence_tables.task_table(rows, "digits", network, "100mbit", 4).splitlines()[-4:] == [
        "| ddp |  | 200 ± 141 | 2 of 2 | 1.00 | 0.9800 ± 0.0000 |  | 500.0 | 100.0 | 1.00 |",
        "| leader | 16 | 110 | 1 of 2 | 1.10 | 0.9750 ± 0.0071 | -0.50 ± 0.71 | 100.0 | never |  |",
        "| leader | 64 | 120 | 1 of 1 | 1.20 | 0.9600 | -2.00 |  |  |  |",
        "| bytegrad |  | 400 | 1 of 1 | 4.00 | 0.9600 | -2.00 | 100.0 | 40.0 | 2.50 |",
    ]
    assert convergence_tables.task_table(rows, "digits").splitlines()[-2] == (
        "| leader | 64 | 120 | 1 of 1 | 1.20 | 0.9600 | -2.00 |"
    )


def test_a_task_says_whether_it_can_show_what_exchanges_are_worth() -> None:
    def table(**losses: tuple[float, ...]) -> list[str]:
        rows = [
            {"task": "text", "method": name.replace("_", "-"), "period": 0, "seed": seed, "final_loss": loss}
            for name, of_seeds in losses.items()
            for seed, loss in enumerate(of_seeds)
        ]
        return convergence_tables.worth_table(rows, "text", 2).splitlines()

    one = {"one_machine": (2.0, 2.2), "one_machine_samples": (1.6, 1.8)}
    lines = table(**one, allreduce=(1.6, 1.8), alone=(2.0, 2.2), bytegrad=(1.8,))
    assert lines[2:5] == ["| alone |  | 1.00 ± 0.00 |", "| allreduce |  | 2.00 ± 0.00 |", "| bytegrad |  | 1.41 |"]
    assert lines[-1].startswith("Synchronous training of 2 workers is worth 2.00 machines")
    assert lines[-1].endswith("this one can show it.")
    assert table(**one, allreduce=(1.8, 2.0))[-1].endswith("this one CANNOT show it.")
    assert table(allreduce=(1.8,))[-1].startswith("One machine was not run")
    assert table(**one, alone=(1.8, 2.0))[-1].startswith("Synchronous training was not run")


def test_the_table_of_losses_has_bytes_and_computed_seconds() -> None:
    def trained(method: str, period: int, seed: int, steps: int | None, loss: float, nbytes: float) -> dict:
        common = {"task": "vit", "method": method, "period": period, "seed": seed, "learning_rate_times": 2.0}
        return {**common, "steps_to_target": steps, "final_loss": loss, "sent_nbytes": nbytes, "compute_s": 0.01}

    rows = [
        *(trained("allreduce", 0, 0, 100, 0.2, 1e6), trained("allreduce", 0, 1, 300, 0.4, 1e6)),
        *(trained("local", 16, 0, 200, 0.3, 62_500), trained("local", 16, 1, None, 0.5, 62_500)),
        trained("alone", 0, 0, None, 0.8, 0),
    ]
    columns, _, *lines = convergence_tables.loss_table(rows, "vit").splitlines()
    assert columns.count("computed s to the target") == 3
    assert lines == [
        "| alone |  | 2 | 0.8000 | +300.00 |  |  | 0.00 |  | never | never | never |",
        "| local | 16 | 2 | 0.3000, 0.5000 | +37.50 | 12.50 |  | 62.50 | 16 | never | never | never |",
        "| allreduce |  | 2 | 0.2000, 0.4000 |  |  |  | 1000.00 | 1 | 3.6 | 18.0 | 162.0 |",
    ]
    old = [{k: v for k, v in row.items() if k not in ("sent_nbytes", "compute_s")} for row in rows]
    assert convergence_tables.loss_table(old, "vit").splitlines()[-1] == (
        "| allreduce |  | 2 | 0.2000, 0.4000 |  |  |  |  |  |  |  |  |"
    )


def test_a_difference_of_losses_stands_beside_the_errors_of_the_seeds_and_of_the_test_data() -> None:
    def trained(method: str, seed: int, *parts: float) -> dict:
        common = {"task": "text", "method": method, "period": 0, "seed": seed, "learning_rate_times": 1.0}
        return {**common, "steps_to_target": None, "final_loss": sum(parts) / len(parts), "parts": list(parts)}

    rows = [
        *(trained("allreduce", 0, 1.0, 3.0), trained("allreduce", 1, 1.0, 3.0)),
        *(trained("local", 0, 1.1, 3.1), trained("local", 1, 1.1, 3.3)),
        trained("leader", 0, 1.2, 3.2),
    ]
    cells = [line.split(" | ")[3:7] for line in convergence_tables.loss_table(rows, "text").splitlines()[2:]]
    assert cells == [
        ["2.2000", "+10.00", "", "0.00"],  # both parts are harder for all: they say nothing about the difference
        ["2.1000, 2.2000", "+7.50", "2.50", "2.50"],
        ["2.0000, 2.0000", "", "", ""],
    ]


def test_a_trained_model_is_measured_on_all_test_data_and_a_curve_on_a_part() -> None:
    task = Text()
    torch.manual_seed(0)
    model = task.model()
    measured, tested = task.measure(model), task.test(model)
    assert len(measured.parts) == PARTS and measured.loss == pytest.approx(sum(measured.parts) / PARTS)
    assert measured.loss != tested.loss and not tested.parts
    digits = Digits()
    model = digits.model()
    assert digits.measure(model).loss == pytest.approx(digits.test(model).loss), "360 images in unequal parts"
