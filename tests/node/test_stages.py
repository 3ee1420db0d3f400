"""Several trainings in one script: each is a stage of the run, which the launchers begin one after the other."""

import json
import signal

import pytest

from lsgd.run_folder import runs, stage_of
from tests import golden

from ..integration.running import free_port
from .test_launch import Node, start, until

__all__ = ["start"]  # a fixture

FOLDS = """
import json, os, signal, sys, lsgd, torch
from pathlib import Path

here, me, stays = Path(os.environ["LSGD_RUN_DIR"]), os.environ["LSGD_RANK"], sys.argv[1]
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
scores = []
for fold, rest in enumerate(torch.arange(48).chunk(3), start=1):
    torch.manual_seed(fold)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 10**6 if (stays, fold) == ("stops", 2) else 12
    worker = lsgd.wrap(model, optimizer, steps=steps)
    train = [x for i, x in enumerate(data) if i not in rest.tolist()]
    loader = worker.shard(torch.utils.data.DataLoader(train, batch_size=4, shuffle=True))
    before = worker.step
    while worker.step < steps and not worker.stopped:
        for x in loader:
            if stays == "dies" and (fold, me) == (2, "1") and worker.step == 6 and not (here / "died").exists():
                (here / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if worker.step == 6 and fold == 2:
                (here / f"half-{me}").touch()
                while stays == "waits":
                    signal.pause()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    whole = worker.finish()
    score = worker.mean({"val": (model(data[rest]) - data[rest].sum(1, keepdim=True)).square().mean().item()})
    about = {"fold": fold, "before": before, "whole": whole, "first": worker.first, "score": score["val"]}
    about["weights"] = model.weight.flatten().tolist()
    with (here / f"folds-{me}.jsonl").open("a") as file:
        file.write(json.dumps(about) + "\\n")
"""


def folds(node: Node, rank: int) -> list[dict]:
    """Return what a worker has written of its folds."""
    return list(map(json.loads, (node.run_dir / f"folds-{rank}.jsonl").read_text().splitlines()))


@pytest.mark.slow
def test_folds_are_stages_also_for_a_worker_that_dies_in_one(start) -> None:
    node = start("--node", "0", "--port", "0", script=FOLDS, program=("dies",), LSGD_ALGORITHM="local")
    status, output = node.finish()
    assert status == 0, output
    stays, dies = folds(node, 0), folds(node, 1)
    assert [(each["fold"], each["whole"]) for each in stays] == [(1, True), (2, True), (3, True)]
    # Its second life goes through the first fold, which is over, with the model of its checkpoint.
    assert [(each["fold"], each["whole"]) for each in dies] == [(1, True), (1, False), (2, True), (3, True)]
    passed = dies.pop(1)
    assert passed["before"] == 12 and not passed["first"]
    assert golden.text("stages.without_training") in output and golden.text("stages.over") in output
    assert [each["weights"] for each in stays] == [each["weights"] for each in dies]
    assert [each["first"] for each in stays] == [True] * 3
    assert [stage_of(run) for run in runs(node.run_dir / "checkpoints")] == [3, 2, 1]
    results = [json.loads((node.run_dir / part / "result.json").read_text()) for part in ("stage1", "stage2", "")]
    assert [(stage_of(result["run"]), result["state"]) for result in results] == [(n, "finished") for n in (1, 2, 3)]
    assert node.result["rounds"][0]["round"] == 1


@pytest.mark.slow
def test_two_nodes_go_on_to_the_next_stage_together_and_resume_in_it(start) -> None:
    common = ("--nodes", "2", "--address", "127.0.0.1", "--port", str(free_port()), "--workers", "1")
    options = {"script": FOLDS, "LSGD_ALGORITHM": "local", "LSGD_CHECKPOINT_EVERY": "1", "LSGD_PERIOD": "2"}
    first = start("--node", "0", *common, program=("waits",), **options)
    second = start("--node", "1", *common, program=("waits",), **options)
    for node, rank in ((first, 0), (second, 1)):
        until((node.run_dir / f"half-{rank}").exists, "the second fold is half over")
        node.process.kill()
        until(lambda node=node: not node.left(), "its processes are gone")
    assert [stage_of(run) for run in runs(first.run_dir / "checkpoints")][:1] == [2]
    again = start("--node", "0", *common, "--run-dir", str(first.run_dir), "--resume", program=("goes",), **options)
    other = start("--node", "1", *common, "--run-dir", str(second.run_dir), "--resume", program=("goes",), **options)
    for node in (again, other):
        status, output = node.finish()
        assert status == 0, output
    one, two = folds(first, 0), folds(second, 1)
    assert [(each["fold"], each["whole"]) for each in one] == [(1, True), (1, False), (2, True), (3, True)]
    assert 0 < one[2]["before"] <= 6  # it has continued
    assert [each["weights"] for each in one[2:]] == [each["weights"] for each in two[2:]]
    assert [each["score"] for each in one[2:]] != [0.0, 0.0]


@pytest.mark.slow
def test_after_a_stop_the_next_stage_does_not_begin(start) -> None:
    node = start("--node", "0", "--port", "0", script=FOLDS, program=("stops",))
    until((node.run_dir / "half-0").exists, "the second fold is half over")
    node.process.send_signal(signal.SIGINT)
    status, output = node.finish()
    assert status == 0, output
    assert [each["fold"] for each in folds(node, 0)] == [1, 2]
    assert golden.text("stages.not_begun") in output
    result = json.loads((node.run_dir / "result.json").read_text())
    assert (stage_of(result["run"]), result["state"]) == (2, "stopped")


TRAINERS = {
    "transformers": """
from transformers import Trainer, TrainingArguments
from lsgd.integrations.transformers import LsgdCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

rows = [{"x": x, "labels": x.sum()} for x in data]
callback = LsgdCallback()

def train():
    model = Model()
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": []}
    arguments = TrainingArguments(str(here / "out"), disable_tqdm=True, use_cpu=True, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return model.layer, trainer.state.global_step
""",
    "lightning": """
import lightning.pytorch as lightning
from lsgd.integrations.lightning import LsgdCallback

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def train():
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=6, accelerator="cpu", callbacks=[LsgdCallback()], **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return module.layer, trainer.global_step
""",
    "accelerate": """
from accelerate import Accelerator
from lsgd.integrations.accelerate import LsgdLoop

accelerator = Accelerator(cpu=True)

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with LsgdLoop(accelerator, model, optimizer, loader) as lsgd:
        for batch in lsgd.batches():
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if lsgd.worker.iterations == 5:
                break
    return model, lsgd.worker.iterations
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", list(TRAINERS))
def test_a_trainer_trains_again(start, library) -> None:
    pytest.importorskip(library)
    before = "import json, os, torch\nfrom pathlib import Path\n\nhere = Path(os.environ['LSGD_RUN_DIR'])\n"
    before += "data = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))\n"
    after = """
for fold in (1, 2):
    layer, steps = train()
    about = {"weights": layer.weight.flatten().tolist(), "steps": steps}
    with (here / f"folds-{os.environ['LSGD_RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(about) + "\\n")
"""
    draws = {"DRAWS": "1"} if library == "lightning" else {}  # it imports matplotlib
    script = before + TRAINERS[library] + after
    node = start("--node", "0", "--port", "0", script=script, LSGD_ALGORITHM="local", **draws)
    status, output = node.finish()
    assert status == 0, output
    one, two = folds(node, 0), folds(node, 1)
    assert [each["weights"] for each in one] == [each["weights"] for each in two]
    assert [each["steps"] for each in one] == [each["steps"] for each in two] == [6, 6]
    assert one[0]["weights"] != one[1]["weights"]
    assert [stage_of(run) for run in runs(node.run_dir / "checkpoints")] == [2, 1]
