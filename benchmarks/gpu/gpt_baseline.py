"""A worker of part 4 for what lsgd is compared with: no exchange, and DistributedDataParallel over Gloo."""

from typing import NoReturn

import torch

from benchmarks.baselines.joining import add_arguments, end_process, joined
from benchmarks.gpu.gpt_training import SIZES, Meter, generated, loss_of, made, parser, warm_up
from benchmarks.methods import ALONE


def main() -> NoReturn:
    """Train until all steps are measured."""
    arguments = parser()
    add_arguments(arguments)
    arguments.add_argument("--port", type=int, required=True)
    arguments.add_argument("--device", required=True)
    given = arguments.parse_args()
    size, home = SIZES[given.size], torch.device(given.device)
    warm_up(size, given.warm_up, home)
    model, optimizer = made(size, home)
    meter = Meter(given, given.rank, len(given.addresses), home)
    with joined(given, model, optimizer, size.batch, given.port) as (wrapped, stepped):
        for tokens in generated(size, given.rank, home):
            if meter.step_begins() and (given.method != ALONE or meter.all_have_measured()):
                break
            stepped.zero_grad()
            loss_of(wrapped, tokens).backward()
            stepped.step()
    end_process()


if __name__ == "__main__":
    main()
