"""A Trainer of Lightning as a worker: a line is fitted, with switches for what a test is about.

Writes to ``<name>.json`` what it knows at the end.
"""

import argparse
import csv
import json
import runpy
import warnings
from os import chdir, environ
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lsgd.integrations.lightning import LsgdCallback

LENGTH = 96

parser = argparse.ArgumentParser()
parser.add_argument("--example", type=Path, help="run this script instead, in the run's folder")
parser.add_argument("--max-steps", type=int, default=1000)
parser.add_argument("--min-steps", type=int, default=None)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--num-workers", type=int, default=0, help="processes that load the data")
parser.add_argument("--manual", action="store_true", help="manual optimization")
parser.add_argument("--every", type=int, default=0, help="batches between validations, and steps between checkpoints")
parser.add_argument("--wait-at", type=int, default=0, help="validate at this step until the others have made the rest")
parser.add_argument("--fail-at", type=int, default=0, help="raise in this step")
parser.add_argument("--shared", action="store_true", help="draw all data in its order, with shard=False")
parser.add_argument("--two", action="store_true", help="train on a dict of two loaders")
parser.add_argument("--resume", default=None, help="a checkpoint of Lightning to begin from")
parser.add_argument("--scores", type=json.loads, default=[], help="of the validations: by them the Trainer stops early")
options = parser.parse_args()
folder = Path(environ["LSGD_RUN_DIR"])


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.automatic_optimization = not options.manual

    def training_step(self, batch):
        index, x = batch["a"] if options.two else batch
        drawn.extend(index.tolist())
        others.extend(batch["b"][0].tolist() if options.two else ())
        loss = (self.layer(x) - x.sum(dim=1, keepdim=True)).square().mean()
        losses.append(loss.item())
        if options.fail_at and self.global_step == options.fail_at:
            raise RuntimeError("as the test wants it")
        if options.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch):
        if self.trainer.sanity_checking:
            return
        if options.scores:
            self.log("score", options.scores[len(states)])
        waits = self.global_step == options.wait_at
        while (status := lsgd.worker.status()) and waits and status["count"] < status["iterations"] - 1:
            pass
        states.extend(each["state"] for each in status["members"] if each["worker"] == lsgd.worker.name)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if not options.scores:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        by = {"scheduler": plateau, "monitor": "score", "interval": "step", "frequency": options.every}
        return {"optimizer": optimizer, "lr_scheduler": by}


class Steps(Callback):
    def on_train_start(self, trainer, module):
        started.append(trainer.global_step)


drawn: list[int] = []
others: list[int] = []
losses: list[float] = []
states: list[str] = []
started: list[int] = []
warnings.simplefilter("ignore")
if options.example:
    chdir(folder)
    names = runpy.run_path(str(options.example))
    trainer, lsgd = names["trainer"], names["lsgd"]
else:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(LENGTH), torch.randn(LENGTH, 4))
    module, lsgd = Line(), LsgdCallback(shard=not options.shared)
    logger = CSVLogger(folder, name="logs", version="mine")
    stops = [EarlyStopping("score", patience=2)] * bool(options.scores)
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=options.every, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=options.max_steps,
        min_steps=options.min_steps,
        accumulate_grad_batches=options.micro_batches,
        val_check_interval=options.every or None,
        limit_val_batches=1 if options.every else 0,
        num_sanity_val_steps=1,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[*stops, lsgd, Steps()] + [saver] * bool(options.every),
        enable_checkpointing=bool(options.every),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=4, shuffle=not options.shared, num_workers=options.num_workers)
    if options.two:
        loader = {"a": loader, "b": DataLoader(data, batch_size=8, shuffle=True)}
    trainer.fit(module, loader, DataLoader(data, batch_size=4), ckpt_path=options.resume, weights_only=False)
    if lsgd.rank == 0:
        rows = list(csv.DictReader((folder / "logs" / "mine" / "metrics.csv").open()))

best = saver.best_model_path if not options.example and options.every else ""
result = {
    "best": [best, torch.load(best, weights_only=False)["global_step"]] if best else [],
    "iterations": lsgd.worker.iterations,
    "steps": trainer.global_step,
    "started": started,
    "rate": trainer.optimizers[0].param_groups[0]["lr"],
    "stopped": lsgd.worker.stopped,
    "rank": lsgd.rank,
    "first": lsgd.first,
    "drawn": drawn,
    "others": others,
    "losses": losses,
    "states": states,
    "final": [x.flatten().tolist() for x in trainer.model.state_dict().values()],
    "logs": rows if not options.example and lsgd.rank == 0 else [],
}
(folder / f"{lsgd.worker.name.replace('/', '-')}.json").write_text(json.dumps(result))
