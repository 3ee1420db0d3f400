"""Writes down the state of a run, a line of JSON twice a second, until it is ended: ``_soak_watch ADDRESS``."""

import json
import sys
import time

from lsgd.errors import LsgdError
from lsgd.protocol.keys import OPERATOR, connector_keys
from lsgd.protocol.messages import StatusQuery
from lsgd.watch.reader import ask

PERIOD_S = 0.5


def main() -> None:
    """Ask the global server as ``lsgd status`` does."""
    address = sys.argv[1]
    while True:
        try:
            status = ask(address, StatusQuery(0), connector_keys(address, None, OPERATOR, insecure=False))
        except LsgdError as error:
            status = {"error": str(error)}
        status.pop("leaders", None)
        print(json.dumps({"at": time.time(), **status}), flush=True)
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
