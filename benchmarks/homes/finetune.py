"""Fine-tunes a causal language model with trl, with LoRA adapters or whole.

Needs: trl peft transformers datasets tokenizers
"""

import sys
from pydoc_data.topics import topics

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from lsgd.integrations.transformers import LsgdCallback  # lsgd

BASE, OUTPUT, STEPS, LORA = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "lora"
set_seed(0)
parts = [part for name in sorted(topics) for part in topics[name].split("\n\n") if 100 < len(part) < 1000]
data = Dataset.from_list([{"text": part} for part in parts]).train_test_split(0.1, seed=0)
arguments = SFTConfig(
    output_dir=OUTPUT,
    max_steps=STEPS,
    per_device_train_batch_size=4,
    max_length=128,
    learning_rate=5e-3 if LORA else 1e-3,
    lr_scheduler_type="cosine",
    save_strategy="no",
    logging_steps=10,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    report_to=[],
)
lsgd = LsgdCallback()  # lsgd
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(BASE),
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=AutoTokenizer.from_pretrained(BASE),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if LORA else None,
    callbacks=[lsgd],  # lsgd
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
if lsgd.first:  # lsgd
    trainer.save_model(OUTPUT)
    print(f"trained parameters: {trained}")
    print(f"held-out loss: {loss:.4f}")
