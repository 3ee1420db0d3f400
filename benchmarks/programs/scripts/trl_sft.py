"""trl's SFTTrainer with LoRA: packed text, completions with a chat template, adapters alone saved.

Needs: trl peft transformers datasets tokenizers
Steps: 60
"""

import sys
from pydoc_data.topics import topics

from datasets import Dataset
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
set_seed(0)
names = sorted(topics)
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([topics[name] for name in names], vocab_size=500, special_tokens=["<eos>", "<pad>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", pad_token="<pad>")
tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
paragraphs = [(name, part) for name in names for part in topics[name].split("\n\n") if 40 < len(part) < 400]
rows = [
    {
        "prompt": [{"role": "user", "content": f"What of {name}?"}],
        "completion": [{"role": "assistant", "content": part}],
    }
    for name, part in paragraphs
]
data = Dataset.from_list(rows[:1000]).train_test_split(0.1, seed=0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
arguments = SFTConfig(
    output_dir="sft",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    max_length=128,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    eval_strategy="steps",
    eval_steps=STEPS // 2,
    save_strategy="no",
    logging_steps=10,
    bf16=False,
    use_cpu=True,
    report_to=[],
)
lsgd = LsgdCallback()  # lsgd
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"]),
    callbacks=[lsgd],  # lsgd
)
trainer.train()
if lsgd.first:  # lsgd
    trainer.save_model("sft/final")
    print(f"held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
