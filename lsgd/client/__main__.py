"""``python -m lsgd.client`` is ``lsgd``."""

from lsgd.client.cli.commands import main

main(prog_name="lsgd")
