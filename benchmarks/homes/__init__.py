"""Fine-tuning a language model between two homes: what crosses the link, with lsgd and with DDP."""
