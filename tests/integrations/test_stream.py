"""ShardStream: what a worker draws through a trainer of another library."""

from itertools import chain

import pytest
from torch.utils.data import BatchSampler

from lsgd.client.loader import ShardSampler
from lsgd.errors import ConfigError, ExchangeError
from lsgd.integrations.shared import ShardStream, is_saver, state_of_run


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


@pytest.mark.parametrize(("size", "length", "epoch"), [(4, 40, 1), (2, 44, 0)])
def test_another_number_of_workers_or_other_data_begins_a_new_epoch(size, length, epoch, caplog):
    """Where the shards are others, the position in the old one says nothing."""
    first = stream(length=40)
    assert len(list(first)) == 20
    first.consume(12)
    again = stream(size=size, length=length)
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    drawn = next(iter(again))
    expected = ShardSampler(length, lambda: (0, size), 3, True)
    expected.epoch = epoch
    assert drawn == expected.shard()[0]
    again.consume(1)
    assert again.state_dict() == {"epoch": epoch, "consumed": 1, "seed": 3, "length": length, "place": [0, size]}
    assert f"the data is dealt again, from epoch {epoch} on" in caplog.text


class Unanswered:
    """A worker whose servers do not answer."""

    name, progress, consensus_distance, stopped = "node0/worker0", 0.25, None, False

    def status(self, timeout_s: float) -> None:
        raise ExchangeError(f"waiting for the status for {timeout_s:g} s: no answer")


def test_a_log_goes_on_without_the_servers():
    assert state_of_run(Unanswered()) == {"lsgd_progress": 0.25}
    assert not is_saver(Unanswered())


def test_a_dataset_smaller_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match="1 samples for 2 workers"):
        list(stream(rank=1, length=1))
