"""sentence-transformers' Trainer: pairs of texts, negatives in the batch, batches without duplicates.

Needs: sentence-transformers transformers datasets tokenizers
Steps: 60
Remark: After a resume its sampler orders the passes that follow otherwise
"""

import random
import sys
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.training_args import BatchSamplers
from tokenizers import ByteLevelBPETokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
set_seed(0)
words = " ".join(topics[name] for name in sorted(topics)).split()[:16_000]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([" ".join(words)], vocab_size=500, special_tokens=["[PAD]"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="[PAD]", model_max_length=64)
config = BertConfig(vocab_size=500, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
BertModel(config).save_pretrained("base")
tokenizer.save_pretrained("base")
body = models.Transformer("base")
model = SentenceTransformer(modules=[body, models.Pooling(48)], device="cpu")
mixed = random.Random(0)
pieces = [words[i : i + 16] for i in range(0, len(words) - 16, 16)]
pairs = [{"anchor": " ".join(each[:10]), "positive": " ".join(mixed.sample(each, 10))} for each in pieces]
data = Dataset.from_list(pairs).train_test_split(0.2, seed=0)
loss = MultipleNegativesRankingLoss(model)
arguments = SentenceTransformerTrainingArguments(
    output_dir="sentences",
    max_steps=STEPS,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=32,
    learning_rate=3e-3,
    warmup_steps=STEPS // 10,
    batch_sampler=BatchSamplers.NO_DUPLICATES,
    save_strategy="no",
    logging_steps=10,
    use_cpu=True,
    report_to=[],
)
lsgd = LsgdCallback()  # lsgd
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    loss=loss,
    callbacks=[lsgd],  # lsgd
)
trainer.train()
if lsgd.first:  # lsgd
    model.save_pretrained("sentences/final")
    torch.manual_seed(0)
    print(f"held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
