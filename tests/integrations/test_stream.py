"""ShardStream: what a worker draws through a trainer of another library."""

from itertools import chain

import pytest
from torch.utils.data import BatchSampler

from lsgd.errors import ConfigError
from lsgd.integrations.shared import ShardStream


def stream(rank: int = 0, size: int = 2, length: int = 20, per_pass: int = 20) -> ShardStream:
    return ShardStream(length, per_pass, lambda: (rank, size), seed=3, shuffle=True)


def test_each_epoch_of_the_run_is_dealt_to_its_workers_whatever_a_pass_is():
    drawn = [list(chain(*(stream_of for stream_of in [s, s, s]))) for s in map(stream, range(2))]
    for epoch in range(6):
        dealt = [mine[epoch * 10 : epoch * 10 + 10] for mine in drawn]
        assert sorted(chain(*dealt)) == list(range(20))
    assert drawn[0][:10] != drawn[0][20:30]


def test_a_pass_has_whole_batches():
    batches = BatchSampler(stream(length=21, per_pass=24), batch_size=8, drop_last=False)
    assert len(batches) == 3 and [len(batch) for batch in batches] == [8, 8, 8]


@pytest.mark.parametrize("trained", [0, 6, 10, 24, 40])
def test_it_goes_on_behind_what_was_trained_on_and_not_behind_what_was_drawn(trained):
    first = stream()
    drawn = [*first, *first, *first]
    for _ in range(trained // 2):
        first.consume(2)
    again = stream()
    again.load_state_dict(first.state_dict())
    assert list(again)[: len(drawn) - trained] == drawn[trained : trained + 20]


def test_a_dataset_smaller_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match="1 samples for 2 workers"):
        list(stream(rank=1, length=1))
