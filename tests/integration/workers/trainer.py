"""A Trainer of transformers as a worker: a tiny GPT-2 learns to count, with switches for what a test is about.

Writes to ``<name>.json`` what it knows at the end.
"""

import argparse
import hashlib
import json
import runpy
from os import chdir, environ
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lsgd.integrations.transformers import LsgdCallback

LENGTH, CONTEXT = 96, 8

parser = argparse.ArgumentParser()
parser.add_argument("--example", type=Path, help="run this script instead, in the run's folder")
parser.add_argument("--max-steps", type=int, default=1000)
parser.add_argument("--trainings", type=int, default=1, help="calls of train(), one after the other")
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--every", type=int, default=1000, help="steps between evaluations, and between checkpoints")
parser.add_argument("--at-epochs", action="store_true", help="evaluate once an epoch instead")
parser.add_argument("--wait-at", type=int, default=0, help="evaluate at this step until the run is over for the others")
parser.add_argument("--fail-at", type=int, default=0, help="raise in the user's own callback, after this step")
parser.add_argument("--sampler", choices=["repeats", "batches", "stream"], help="draw by a sampler of the script's own")
parser.add_argument("--no-loss", action="store_true", help="let the Trainer compute the loss, and not the model")
parser.add_argument("--scores", type=json.loads, default=[], help="of the evaluations: by them the Trainer stops early")
options = parser.parse_args()
folder = Path(environ["LSGD_RUN_DIR"])


class Notes(TrainerCallback):
    """Notes what a user's own callback sees."""

    losses: list[float] = []  # noqa: RUF012
    rates: list[float] = []  # noqa: RUF012
    states: list[str] = []  # noqa: RUF012
    saved: list[str] = []  # noqa: RUF012
    saved_last: list[str] = []  # noqa: RUF012
    logs: dict[str, object] = {}  # noqa: RUF012

    def on_log(self, args, state, control, *, logs, **_):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.rates.append(logs["learning_rate"])
            self.logs |= logs

    def on_evaluate(self, args, state, control, **_):
        if control.should_training_stop:
            return
        waits = state.global_step == options.wait_at
        while (status := lsgd.worker.status())["code"] != "made" and waits and others_train(status):
            pass
        self.states += [each["state"] for each in status["members"] if each["worker"] == lsgd.worker.name]

    def on_step_end(self, args, state, control, **_):
        if state.global_step == options.fail_at:
            raise RuntimeError("as the test wants it")

    def on_save(self, args, state, control, **_):
        path = f"{args.output_dir}/checkpoint-{state.global_step}/model.safetensors"
        (self.saved_last if control.should_training_stop else self.saved).append(digest(load_file(path)))


def others_train(status):
    """Whether another worker is to make iterations of the run yet."""
    return status["count"] < status["iterations"] - 1


class Repeats(torch.utils.data.Sampler):
    """Each prompt four times in a row, for a group of completions, as trl's for GRPO."""

    def __init__(self, data_source, mini_repeat_count, seed):
        self.data_source, self.mini_repeat_count = data_source, mini_repeat_count
        self.generator = torch.Generator().manual_seed(seed)
        self.seed = seed

    def __iter__(self):
        prompts = torch.randperm(len(self.data_source), generator=self.generator).tolist()
        return (prompt for prompt in prompts for _ in range(self.mini_repeat_count))

    def __len__(self):
        return len(self.data_source) * self.mini_repeat_count


class Pairs(torch.utils.data.BatchSampler):
    """Batches of neighbours in an order by a fixed seed, as sentence-transformers has them."""

    def __iter__(self):
        order = torch.randperm(LENGTH // 4, generator=torch.Generator().manual_seed(12)).tolist()
        return ([*range(4 * place, 4 * place + 4)] for place in order)


class Stream(torch.utils.data.IterableDataset):
    """The data, shuffled without a seed in each pass."""

    def __iter__(self):
        return iter(data[torch.randperm(LENGTH)])


class OwnSampler(Trainer):
    """A Trainer with a sampler of its own, whose seed depends on the worker."""

    def _get_train_sampler(self, dataset=None):
        if options.sampler == "repeats":
            return Repeats(self.train_dataset, 4, int(environ["LSGD_LOCAL_RANK"]))
        return super()._get_train_sampler(dataset)

    def get_train_dataloader(self):
        if options.sampler != "batches":
            return super().get_train_dataloader()
        pairs = Pairs(range(LENGTH), 4, drop_last=False)
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=pairs, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def batch(samples):
    drawn.extend(int(x[0]) for x in samples)
    inputs = torch.stack([x[1:] for x in samples])
    return {"input_ids": inputs, "labels": inputs}


def loss_of(output, labels, num_items_in_batch):
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def digest(state):
    data = b"".join(state[name].detach().view(torch.uint8).numpy().tobytes() for name in sorted(state))
    return hashlib.blake2b(data, digest_size=8).hexdigest()


drawn: list[int] = []
notes = Notes()
if options.example:
    chdir(folder)
    names = runpy.run_path(str(options.example))
    trainer, lsgd = names["trainer"], names["lsgd"]
else:
    starts = torch.arange(LENGTH).unsqueeze(1)
    data = torch.cat([starts, (starts + torch.arange(CONTEXT)) % 16], dim=1)
    shape = {"n_positions": CONTEXT, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, bos_token_id=0, eos_token_id=0, **shape))
    strategy = "epoch" if options.at_epochs else "steps" if options.every < options.max_steps else "no"
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=options.max_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.micro_batches,
        learning_rate=0.02,
        logging_steps=1,
        eval_strategy=strategy,
        eval_steps=options.every,
        save_strategy="no" if options.at_epochs else strategy,
        save_steps=options.every,
        dataloader_pin_memory=False,
        use_cpu=True,
        disable_tqdm=True,
        metric_for_best_model="score" if options.scores else None,
        greater_is_better=False if options.scores else None,
    )
    scores = iter(options.scores)
    stops = [EarlyStoppingCallback(1)] * bool(options.scores)
    lsgd = LsgdCallback()
    trainer = (OwnSampler if options.sampler else Trainer)(
        *(model, arguments),
        train_dataset=Stream() if options.sampler == "stream" else data,
        eval_dataset=data[:4],
        data_collator=batch,
        callbacks=[*stops, lsgd, notes],
        compute_metrics=(lambda _: {"score": next(scores)}) if options.scores else None,
        compute_loss_func=loss_of if options.no_loss else None,
    )
    with lsgd:
        for _ in range(options.trainings):
            trainer.train()

tensors = {name: x for name, x in trainer.model.state_dict().items() if name != "lm_head.weight"}  # which is tied
result = {
    "iterations": lsgd.worker.iterations,
    "steps": trainer.state.global_step,
    "best": trainer.state.best_metric,
    "stopped": lsgd.worker.stopped,
    "rank": lsgd.rank,
    "first": lsgd.first,
    "drawn": drawn,
    "final": digest(tensors),
    "saved": notes.saved,
    "saved_last": notes.saved_last,
    "losses": notes.losses,
    "rates": notes.rates,
    "logs": {name: value for name, value in notes.logs.items() if name.startswith("lsgd_")},
    "states": notes.states,
}
(folder / f"{lsgd.worker.name.replace('/', '-')}.json").write_text(json.dumps(result))
