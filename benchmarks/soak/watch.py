"""Writes down the state of a node's run, a line of JSON twice a second, until it is ended.

``python -m benchmarks.soak.watch FOLDER``: the run folder of a node, which knows where the global server is.
"""

import json
import sys
import time
from pathlib import Path

from lsgd.errors import LsgdError
from lsgd.protocol.keys import OPERATOR, connector_keys
from lsgd.protocol.messages import StatusQuery
from lsgd.protocol.sockets import keys_for
from lsgd.run_folder import find_live
from lsgd.watch.reader import ask

PERIOD_S = 0.5


def main() -> None:
    """Ask the global server as ``lsgd status`` does."""
    folder = Path(sys.argv[1])
    while True:
        try:
            _, address, key = find_live(folder)
            keys = connector_keys(address, None, OPERATOR, insecure=False)
            status = ask(address, StatusQuery(0), keys_for(keys, key))
        except LsgdError as error:
            status = {"error": str(error)}
        status.pop("leaders", None)
        print(json.dumps({"at": time.time(), **status}), flush=True)
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
