"""trl's DPOTrainer: preferences between two answers, with a reference model.

Needs: trl transformers datasets tokenizers
Steps: 60
"""

import random
import sys
from pydoc_data.topics import topics

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
set_seed(0)
words = " ".join(topics[name] for name in sorted(topics)).split()[:12_000]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([" ".join(words)], vocab_size=400, special_tokens=["<eos>", "<pad>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", pad_token="<pad>")
mixed = random.Random(0)
rows = []
for i in range(0, len(words) - 24, 24):
    right = words[i + 8 : i + 24]
    wrong = mixed.sample(right, len(right))
    rows.append({"prompt": " ".join(words[i : i + 8]), "chosen": " ".join(right), "rejected": " ".join(wrong)})
data = Dataset.from_list(rows).train_test_split(0.2, seed=0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
arguments = DPOConfig(
    output_dir="dpo",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    max_length=96,
    learning_rate=1e-3,
    eval_strategy="no",
    save_strategy="no",
    logging_steps=10,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    report_to=[],
)
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
lsgd = LsgdCallback()  # lsgd
trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    callbacks=[lsgd],  # lsgd
)
trainer.train()
if lsgd.first:  # lsgd
    trainer.save_model("dpo/final")
    print(f"held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
