"""``python -m lsgd.server`` is ``lsgd-server``."""

from lsgd.server.cli import main

main(prog_name="lsgd-server")
