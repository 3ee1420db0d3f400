"""``python -m lsgd.client`` is ``lsgd``."""

from lsgd.cli.commands import main

main(prog_name="lsgd")
