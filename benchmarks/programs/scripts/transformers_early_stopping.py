"""transformers' Trainer: text classification that stops early by a metric, saves the best and weighs classes.

Needs: transformers accelerate datasets tokenizers
Steps: 80
Figure: held-out accuracy
"""

import sys
from pydoc_data.topics import topics

import numpy as np
import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
set_seed(0)
texts = " ".join(topics[name] for name in sorted(topics)).split()
code = " ".join(str(len(word)) + word[::-1] for word in texts).split()  # the other class
pieces = [(" ".join(words[i : i + 12]), label) for label, words in enumerate((texts, code)) for i in range(0, 9600, 12)]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([text for text, _ in pieces], vocab_size=400, special_tokens=["[PAD]"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="[PAD]", model_max_length=64)
data = Dataset.from_dict({"text": [text for text, _ in pieces], "label": [label for _, label in pieces]})
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True).train_test_split(0.2, seed=0)


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 1.5]))
        return (loss, outputs) if return_outputs else loss


arguments = TrainingArguments(
    output_dir="classifier",
    max_steps=STEPS,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    eval_strategy="steps",
    save_strategy="best",
    eval_steps=10,
    metric_for_best_model="accuracy",
    save_total_limit=1,
    logging_steps=10,
    use_cpu=True,
    report_to=[],
)
config = BertConfig(
    vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)
lsgd = LsgdCallback()  # lsgd
trainer = Weighted(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
    callbacks=[
        EarlyStoppingCallback(early_stopping_patience=3),
        lsgd,  # lsgd
    ],
)
trainer.train()
if lsgd.first:  # lsgd
    trainer.save_model("classifier/final")
    print(f"held-out accuracy: {trainer.evaluate()['eval_accuracy']:.4f}")
