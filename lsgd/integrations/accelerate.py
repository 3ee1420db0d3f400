"""Makes a training loop with Hugging Face accelerate a worker of a run; replaces accelerate's LocalSGD."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from lsgd.client.control.joining import unwrapped
from lsgd.client.data.passes import Pass
from lsgd.client.worker import Worker
from lsgd.errors import ConfigError
from lsgd.integrations.shared import Integration
from lsgd.schedulers import counts, inner, length_of, optimizer_of

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise ImportError(f"LsgdLoop needs accelerate: pip install 'lsgd[accelerate]' ({missing})") from missing

logger = logging.getLogger("lsgd")


class LsgdLoop(Integration):
    """Makes a loop with accelerate a worker of a run.

    ::

        with LsgdLoop(accelerator, model, optimizer, loader) as lsgd:
            while not lsgd.stopped:
                for batch in lsgd.batches():
                    with accelerator.accumulate(model):
                        loss = model(**batch).loss
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    lsgd.report(loss)

    The worker joins at the start of the block and leaves at its end. If the loop ends before the run, the worker takes
    part in the next global round. Gradients are exchanged in the micro-batch that accelerate synchronizes.

    Args:
        accelerator: accelerator of one process.
        model: model as prepared by accelerate.
        optimizer: optimizer as prepared by accelerate; one or several.
        loader: training data, as prepared by accelerate. Each worker draws its shard, if the dataset has a length.
        shard: whether to deal the training data to the workers; False if each has its own data.
        seed: seed of the shards; the same on all workers.
        options: options of :meth:`lsgd.client.Worker.join`.

    Raises:
        ConfigError: accelerate trains in several processes, or would.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        *,
        shard: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__("accelerate", shard, options)
        if accelerator.use_distributed:
            raise ConfigError(
                f"accelerate has set up {accelerator.num_processes} processes ({accelerator.distributed_type}), and "
                f"lsgd takes the place of DistributedDataParallel and of accelerate's LocalSGD: start the script by "
                f"`lsgd launch -- python SCRIPT`, without torchrun, accelerate launch or mpirun"
            )
        self._accelerator, self._model, self._optimizer, self._loader = accelerator, model, optimizer, loader
        self._seed = seed

    def __enter__(self) -> Self:
        if "accelerate.local_sgd" in sys.modules:
            logger.warning(
                "the script imports accelerate's LocalSGD: remove it, because lsgd takes its place: in one process "
                "it averages nothing"
            )
        worker = self._join(self._model, self._optimizer, self._accelerator.scaler, 0)
        self._shard(self._loader, self._seed)
        worker.accumulate_while(lambda: not self._accelerator.sync_gradients)
        own = unwrapped(self._optimizer)
        prepared = [each for each in map(inner, self._accelerator._schedulers) if optimizer_of(each) in own]
        counting = Counter(optimizer_of(each) for each in prepared if counts(each))
        for each in prepared:  # of those that do not say how long they are, or are several, the script has to say
            if not counts(each) or (length_of(each) is not None and counting[optimizer_of(each)] == 1):
                worker.follow(each)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._leave()
        self._close(error)

    @property
    def worker(self) -> Worker:
        """The worker; available inside the block and after it."""
        return self._joined

    @property
    def stopped(self) -> bool:
        """Whether the run has ended; see :attr:`lsgd.client.Worker.stopped`."""
        return self.worker.stopped

    def batches(self) -> Iterator[Any]:
        """Yield the loader's batches, once, as :meth:`lsgd.client.Worker.batches`; it raises the same."""
        loader = Pass[Any](self._loader, lambda: iter(self._loader))  # whether it is divided is known
        for batch in self.worker.batches(loader):
            self._consume()  # not those that accelerate prefetches
            yield batch

    def report(self, loss: Tensor | float) -> None:
        """Report the loss of a batch, before it is divided by the number of micro-batches in a step."""
        self.worker.report(loss.detach() if isinstance(loss, Tensor) else loss)
