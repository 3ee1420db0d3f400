"""trl's GRPOTrainer: generates groups of answers to each prompt, and learns from a reward function.

Needs: trl transformers datasets tokenizers
Steps: 24
Figure: held-out reward
Remark: The reward is the share of the letter e in what is generated; more is better
"""

import sys
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
set_seed(0)
words = " ".join(topics[name] for name in sorted(topics)).split()[:4000]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([" ".join(words)], vocab_size=300, special_tokens=["<eos>", "<pad>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", pad_token="<pad>")
tokenizer.padding_side = "left"
data = Dataset.from_dict({"prompt": [" ".join(words[i : i + 4]) for i in range(0, len(words) - 4, 4)]})
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
    bos_token_id=None,
)


def reward(completions, **_):
    return [sum(letter == "e" for letter in text) / max(1, len(text)) for text in completions]


arguments = GRPOConfig(
    output_dir="grpo",
    max_steps=STEPS,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=12,
    learning_rate=1e-2,
    beta=0.0,
    save_strategy="no",
    logging_steps=4,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    report_to=[],
)
lsgd = LsgdCallback()  # lsgd
trainer = GRPOTrainer(
    model=LlamaForCausalLM(config),
    reward_funcs=reward,
    args=arguments,
    train_dataset=data,
    processing_class=tokenizer,
    callbacks=[lsgd],  # lsgd
)
trainer.train()
if lsgd.first:  # lsgd
    trainer.save_model("grpo/final")
    prompts = tokenizer(data["prompt"][:64], return_tensors="pt", padding=True)
    prompts.pop("token_type_ids", None)
    torch.manual_seed(0)
    found = trainer.model.generate(**prompts, max_new_tokens=12, do_sample=True)
    texts = tokenizer.batch_decode(found[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"held-out reward: {sum(reward(texts)) / len(texts):.4f}")
