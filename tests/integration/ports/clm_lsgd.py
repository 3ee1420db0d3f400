"""A script like those that train language models with a Trainer: arguments, blocks of tokens, train, evaluate, save."""

import json
import math
import sys
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed

from lsgd.integrations.transformers import LsgdCallback

output_dir, num_train_epochs, block_size = sys.argv[1], float(sys.argv[2]), 16

training_args = TrainingArguments(
    output_dir=output_dir,
    num_train_epochs=num_train_epochs,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    learning_rate=1e-2,
    warmup_steps=5,
    lr_scheduler_type="cosine",
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
set_seed(training_args.seed)


def group_texts(text):
    """Return blocks of a text's bytes, with the same blocks as labels."""
    data = text.encode()
    blocks = [list(data[i : i + block_size]) for i in range(0, len(data) - block_size, block_size)]
    return [{"input_ids": block, "labels": block} for block in blocks]


lm_datasets = {
    "train": group_texts("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(0, 400, 2))),
    "validation": group_texts("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(1, 100, 4))),
}
config = GPT2Config(vocab_size=128, n_positions=block_size, n_embd=32, n_layer=1, n_head=2, bos_token_id=0)
config.eos_token_id = None
model = GPT2LMHeadModel(config)

lsgd = LsgdCallback()
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=lm_datasets["train"],
    eval_dataset=lm_datasets["validation"],
    data_collator=default_data_collator,
    callbacks=[lsgd],
)

train_result = trainer.train()
if not lsgd.first:
    sys.exit()
trainer.save_model()
trainer.log_metrics("train", train_result.metrics)
trainer.save_metrics("train", train_result.metrics)
trainer.save_state()

metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
Path(output_dir, "final.json").write_text(json.dumps({"val": metrics["eval_loss"]}))
