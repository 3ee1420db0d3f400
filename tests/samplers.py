"""Samplers of scripts, for tests of what shards them."""

from torch.utils.data import SequentialSampler


class Turning(SequentialSampler):
    """Begins each epoch one sample later."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        size = len(self.data_source)
        return iter([(self.epoch + index) % size for index in range(size)])
