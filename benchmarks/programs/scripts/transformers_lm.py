"""transformers' Trainer: a causal language model, a tokenizer built on the spot, evaluations, checkpoints.

Needs: transformers accelerate datasets tokenizers
Steps: 80
"""

import sys
import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS, BLOCK = int(sys.argv[1]), 64
set_seed(0)
texts = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts, vocab_size=500, special_tokens=["<|endoftext|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
tokenizer.pad_token = tokenizer.eos_token


def group(examples):
    ids = sum((tokenizer(text)["input_ids"] for text in examples["text"]), [])
    return {"input_ids": [ids[i : i + BLOCK] for i in range(0, len(ids) - BLOCK, BLOCK)]}


data = Dataset.from_dict({"text": [text[:20_000] for text in texts]})
data = data.map(group, batched=True, remove_columns=["text"]).train_test_split(0.1, seed=0)
config = GPT2Config(
    vocab_size=len(tokenizer), n_positions=BLOCK, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir="clm",
    max_steps=STEPS,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    warmup_steps=STEPS // 10,
    lr_scheduler_type="cosine",
    eval_strategy="steps",
    eval_steps=STEPS // 2,
    save_steps=STEPS // 2,
    logging_steps=10,
    use_cpu=True,
    report_to=[],
)
lsgd = LsgdCallback()  # lsgd
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[lsgd],  # lsgd
)
trainer.train()
if lsgd.first:  # lsgd
    trainer.save_model("clm/final")
    print(f"held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
