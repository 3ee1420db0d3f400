"""The loss of each integration with a trainer, beside one process that sees as many samples.

``python -m benchmarks.trainers`` trains the transformer of benchmarks/transformers.py on the standard library's
sources by Lightning, by accelerate and by Hugging Face's Trainer: in one process without lsgd, and in two workers with
it, each for as many batches in all. It prints the mean loss on windows that are held out, as a Markdown table.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.transformers import Transformer

CONTEXT, BATCH, RATE, TEST = 64, 16, 1e-3, 256


class Model(nn.Module):
    """A decoder of bytes that returns its loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = Transformer(width=64, layers=2, heads=2, context=CONTEXT)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of the bytes after the first, for windows (windows, context)."""
        return {"loss": functional.cross_entropy(self.decoder(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())}


def windows() -> tuple[Tensor, Tensor]:
    """Return windows to train on, and others to test on."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: 1 << 20]
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT)
    mixed = found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]
    return mixed[TEST:], mixed[:TEST]


def by_lightning(model: Model, data: Tensor, steps: int, shared: bool) -> int:
    """Train; return this worker's rank."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss: Tensor = self.model(batch[0])["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    callbacks: list[Any] = []
    if shared:
        from lsgd.integrations.lightning import LsgdCallback

        callbacks = [LsgdCallback()]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, callbacks=callbacks, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=True))
    return callbacks[0].rank if callbacks else 0


def by_accelerate(model: Model, data: Tensor, steps: int, shared: bool) -> int:
    """Train; return this worker's rank."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=RATE),
        DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=True),
    )

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if not shared:
        for x in _forever(loader, steps):
            step(x)
        return 0
    from lsgd.integrations.accelerate import LsgdLoop

    with LsgdLoop(accelerator, model, optimizer, loader) as lsgd:
        while not lsgd.stopped:
            for (x,) in lsgd.batches():
                lsgd.report(step(x))
    return lsgd.worker.rank


def by_transformers(model: Model, data: Tensor, steps: int, shared: bool) -> int:
    """Train; return this worker's rank."""
    from transformers import Trainer, TrainingArguments

    callbacks: list[Any] = []
    if shared:
        from lsgd.integrations.transformers import LsgdCallback

        callbacks = [LsgdCallback()]
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.01,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        report_to=[],
    )
    trainer = Trainer(
        *(model, arguments),
        train_dataset=TensorDataset(data),
        data_collator=lambda samples: {"x": torch.stack([x for (x,) in samples])},
        callbacks=callbacks,
    )
    trainer.train()
    return callbacks[0].rank if callbacks else 0


TRAINERS: dict[str, Callable[[Model, Tensor, int, bool], int]] = {
    "lightning": by_lightning,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
}


@click.command()
@click.option("--steps", default=1200, show_default=True, help="Batches that one process, or two workers together see.")
@click.option("--algorithm", default="local", show_default=True)
@click.option("--period", default=8, show_default=True)
@click.option("--one", type=click.Choice(list(TRAINERS)), hidden=True, help="Train in this process.")
@click.option("--shared", is_flag=True, hidden=True, help="As a worker.")
def main(steps: int, algorithm: str, period: int, one: str | None, shared: bool) -> None:
    """Compare the losses."""
    if one is not None:
        data, test = windows()
        model = Model()
        torch.set_num_threads(1)
        if TRAINERS[one](model, data, steps, shared) == 0:
            model.eval()
            with torch.no_grad():
                print(json.dumps({"loss": model(test)["loss"].item()}), flush=True)
        return
    print(f"| trainer | one process | two workers, `{algorithm}`, period {period} |\n|---|---:|---:|")
    for name in TRAINERS:
        script = [sys.executable, "-m", "benchmarks.trainers", "--steps", str(steps), "--one", name]
        with tempfile.TemporaryDirectory() as folder:
            place = ["--workers", "2", "--device", "cpu", "--port", "0", "--run-dir", f"{folder}/run"]
            launch = [sys.executable, "-m", "lsgd.client", "launch", *place, "--"]
            plan = {"LSGD_ITERATIONS": str(steps), "LSGD_ALGORITHM": algorithm, "LSGD_PERIOD": str(period)}
            losses = [_loss(script, {}), _loss([*launch, *script, "--shared"], plan)]
        print(f"| {name} | {losses[0]:.3f} | {losses[1]:.3f} |", flush=True)


def _loss(command: list[str], variables: dict[str, str]) -> float:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if '{"loss"' in line]
    if done.returncode or not found:
        raise click.ClickException(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return float(json.loads(found[-1][found[-1].index("{") :])["loss"])


def _forever(loader: Any, steps: int) -> Iterator[Tensor]:
    made = 0
    while made < steps:
        for (x,) in loader:
            yield x
            made += 1
            if made == steps:
                return


if __name__ == "__main__":
    main()
