"""Reads a global server's stream of events with several readers, four times a second each, until it is killed."""

import argparse
import time

from lsgd.watch.reader import ASK_EVERY_S, Reader
from lsgd.watch.view import RunView


def main() -> None:
    """Read; say so once all readers have read something."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("readers", type=int)
    given = parser.parse_args()
    readers = [(Reader(given.address), RunView()) for _ in range(given.readers)]
    started = False
    while True:
        began_at = time.monotonic()
        for reader, view in readers:
            view.apply(reader.read(ASK_EVERY_S / len(readers)))
        if not started and all(view.connected for _, view in readers):
            started = True
            print("started", flush=True)
        time.sleep(max(0.0, ASK_EVERY_S - (time.monotonic() - began_at)))


if __name__ == "__main__":
    main()
