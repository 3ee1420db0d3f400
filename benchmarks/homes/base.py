"""Makes the language model that is fine-tuned: ``python base.py FOLDER STEPS``, on the standard library's sources."""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WIDTH, LAYERS, VOCABULARY, CONTEXT, BATCH = 256, 4, 1000, 128, 8


def main(folder: str, steps: int) -> None:
    """Train it, and save it as from_pretrained reads it."""
    torch.manual_seed(0)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sources)[: 1 << 21]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=VOCABULARY, special_tokens=["<eos>", "<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", pad_token="<pad>")
    ids = torch.tensor(bpe.encode(text).ids)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        places = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        windows = torch.stack([ids[place : place + CONTEXT] for place in places])
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"loss: {loss.item():.3f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
