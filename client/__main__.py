"""``python -m lsgd.client`` is ``lsgd``."""

from lsgd.client.cli import main

main(prog_name="lsgd")
