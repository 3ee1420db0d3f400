"""The example that ``lsgd quickstart`` and ``scripts/train.sh`` train, and what it shows and saves."""
