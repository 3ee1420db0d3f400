"""Codecs: what each promises, one of thirty lines that all algorithms use at once, and payloads that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSettings
from lsgd.algorithms.qsgd import QSGDSettings
from lsgd.codecs import CODECS, OWN_BLOCK, Codec, blocks, codec_of
from lsgd.codecs.base import flags_of
from lsgd.codecs.levels import Levels1, Levels2
from lsgd.codecs.minmax import MinMax4, MinMax8
from lsgd.codecs.plain import Float16, Float32
from lsgd.codecs.topk import TopK
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.errors import ConfigError, ProtocolError
from lsgd.payload import HEADER_NBYTES
from lsgd.testing.simulation import simulate
from tests import golden

from .reference import Problem
from .training import TorchWorker, make_round, train


@dataclass(frozen=True)
class Sign(Codec):
    """A byte with its sign for each number, and the mean of |x| of each block."""

    name: ClassVar[str] = "sign"
    block: int = 64

    @property
    def unit(self) -> int:
        return self.block

    def nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + 4 * self._blocks(numel) + numel

    def encode(self, x, payload, seed=None):
        body, blocks = self.begin(payload, x), self._blocks(x.numel())
        rows = torch.zeros(blocks * self.block)
        rows[: x.numel()] = x
        means = rows.view(blocks, self.block).abs().sum(1) / self._counts(x.numel())
        body[: 4 * blocks].view(torch.float32).copy_(means)
        body[4 * blocks :].view(torch.int8).copy_(x.nan_to_num().sign())

    def decode(self, payload, out):
        body, blocks = self.body(payload, out.numel()), self._blocks(out.numel())
        means = body[: 4 * blocks].view(torch.float32).repeat_interleave(self._counts(out.numel()))
        out.copy_(body[4 * blocks :].view(torch.int8) * means)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _counts(self, numel: int) -> torch.Tensor:
        return torch.tensor([min(self.block, numel - i) for i in range(0, numel, self.block)], dtype=torch.int64)


FEW_BITS = [Levels2(), Levels2(8), Levels1(), Levels1(64), MinMax4(), MinMax4(7), MinMax4(0), TopK(), TopK(8)]
ALL = [Float32(), Float16(), MinMax8(), MinMax8(7), MinMax8(0), *FEW_BITS, Sign()]
KNOWN = "known: float16, levels1, levels2, minmax4, minmax8, none, topk"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture
def sign(monkeypatch):
    monkeypatch.setitem(CODECS.classes, "sign", Sign)


def payload_of(codec: Codec, x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    payload = codec.empty(x.numel(), x.device)
    codec.encode(x, payload, seed)
    return payload


def decoded(codec: Codec, payload: torch.Tensor, numel: int, dtype=torch.float32) -> torch.Tensor:
    out = torch.empty(numel, dtype=dtype)
    codec.decode(payload, out)
    return out


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 500])
def test_the_other_verbs_are_made_of_encode_and_decode(codec, dtype, numel):
    """Also where a codec has faster ones: the same bits."""
    xs = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    payloads = [payload_of(codec, x) for x in xs]
    parts = [decoded(codec, payload, numel) for payload in payloads]
    assert all(torch.equal(decoded(codec, payloads[0], numel, dtype), parts[0].to(dtype)) for _ in range(2))
    start = torch.linspace(-1, 1, numel).to(dtype)
    out = start.clone()
    codec.decode_add(payloads[0], out, -0.5)
    wide = start.to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(out, (wide + parts[0] * -0.5).to(dtype))
    for mean in (True, False):
        total = torch.empty(numel)
        codec.reduce(payloads, total, mean=mean)
        assert torch.equal(total, (parts[0] + parts[1] + parts[2]) * ((1 / 3) if mean else 1))
        again = codec.empty(numel, total.device)
        codec.reduce_encode(payloads, again, numel=numel, mean=mean)
        assert torch.equal(again, payload_of(codec, total))
    left = xs[0].clone()
    codec.encode_and_subtract(left, again)
    assert torch.equal(again, payloads[0]) and torch.equal(left, xs[0] - parts[0])


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 500, 70_000])
def test_a_mean_in_pieces(codec, numel, monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS_PIECE", 1 << 14)
    payloads = [payload_of(codec, torch.randn(numel, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    whole = torch.empty(numel)
    codec.reduce(payloads, whole, mean=True)
    out, reached = torch.full((numel,), torch.nan), 0
    for here, piece in codec.means(payloads, numel):
        assert here.start == reached and piece.numel() == here.stop - here.start
        out[here], reached = piece, here.stop
    assert reached == numel and torch.equal(out, whole)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_what_rounding_lost_of_a_vector_of_several_pieces(codec, monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS_PIECE", 1 << 14)
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
    left, payload = x.clone(), codec.empty(x.numel(), x.device)
    codec.encode_and_subtract(left, payload)
    assert torch.equal(payload, payload_of(codec, x))
    assert torch.equal(left, x - decoded(codec, payload, x.numel()))


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_flagged_and_comes_out_as_nan(codec, bad):
    x = torch.linspace(-1, 1, 200)
    assert int(flags_of(payload_of(codec, x))) == 0
    x[77] = bad
    payload = payload_of(codec, x)
    assert int(flags_of(payload)) == 1
    assert not decoded(codec, payload, 200)[77].isfinite()


def test_float16_flags_what_it_cannot_hold():
    payload = payload_of(Float16(), torch.tensor([1.0, 70_000.0]))
    assert int(flags_of(payload)) == 1
    assert decoded(Float16(), payload, 2).isnan().tolist() == [False, True]


def test_float32_is_as_it_was():
    x = torch.randn(100) * torch.logspace(-38, 38, 100)
    assert torch.equal(decoded(Float32(), payload_of(Float32(), x), 100), x)
    assert [codec.lossless for codec in ALL] == [True, *[False] * (len(ALL) - 1)]


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_payload_of_another_kind_is_refused(codec):
    """Of another codec, of other parameters, of another length: never decoded into something else."""
    x = torch.randn(448)
    payload = payload_of(codec, x)
    others = [other for other in ALL if other != codec]
    for other in others:
        with pytest.raises(ProtocolError, match=golden.pattern("codecs.payload_size")):
            decoded(other, payload, 448)
    for numel in (0, 447, 449):
        for verb in (codec.decode, codec.decode_add):
            with pytest.raises(ProtocolError, match=golden.pattern("codecs.payload_size")):
                verb(payload, torch.empty(numel))
    for part in (payload[:16], payload[:-1], payload[:HEADER_NBYTES]):
        with pytest.raises(ProtocolError, match="bytes came"):
            decoded(codec, part.clone(), 448)


def test_members_with_different_codecs_do_not_learn_garbage():
    """The payloads have equal lengths, so that only the headers tell; models stay as they were."""
    changed = []

    def member(group):
        settings = LeaderSettings(compression=f"minmax8:block={64 + group.rank}")
        worker = TorchWorker(settings, group, Problem(2))
        worker.begin(make_round([1, 1]))
        before = worker.model
        try:
            worker.algorithm.before_forward(worker.parameters, group, make_round([1, 1])).apply()
        finally:
            if group.rank == 1:
                changed.append((before != worker.model).any())

    with pytest.raises(ProtocolError, match=golden.pattern("codecs.other_parameters")):
        simulate([1, 1], member)
    assert changed == [False]


def test_the_name_and_parameters_are_in_the_header():
    header = bytes(payload_of(Sign(512), torch.zeros(3))[:HEADER_NBYTES].tolist())
    assert header[24:] == b"sign\0\0\0\0" and header[16:20] == (512).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("minmax8", MinMax8(64)),
        ("minmax8:block=512", MinMax8(512)),
        ("minmax8:block=0", MinMax8(0)),
        ("levels2", Levels2(64)),
        ("levels2:block=512", Levels2(512)),
        ("levels1:scale_block=512", Levels1(512)),  # the name of the parameter in earlier versions
    ],
)
def test_a_setting_names_a_codec(text, codec):
    assert codec_of(text, 64) == codec
    assert codec_of(str(codec)) == codec


@pytest.mark.parametrize(
    ("text", "codec"),
    [("none", Float32()), ("float16", Float16()), ("minmax8", MinMax8(2048)), ("levels2", Levels2(64))],
)
def test_a_setting_leaves_blocks_to_the_codec(text, codec):
    assert codec_of(text) == codec_of(text, OWN_BLOCK) == codec


@pytest.mark.parametrize(
    ("text", "takes"), [("none", "it takes none"), ("float16", "it takes none"), ("topk:k=8", "it takes k=NUMBER")]
)
def test_a_codec_without_blocks_refuses_their_size(text, takes):
    with pytest.raises(ConfigError, match=golden.pattern("codecs.no_block", takes=takes)):
        codec_of(text, 64)


@pytest.mark.parametrize("settings", [LocalSettings, LeaderSettings])
def test_settings_refuse_a_block_that_their_codec_does_not_have(settings):
    assert settings(compression="minmax8", block=64).make_codec() == MinMax8(64)
    with pytest.raises(ConfigError, match=golden.pattern("codecs.no_block_topk")):
        settings(compression="topk", block=64)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("minmx8", f"codec 'minmx8' is unknown; did you mean 'minmax8'? {KNOWN}"),
        ("", f"codec '' is unknown; {KNOWN}"),
        ("minmax8:", golden.text("codecs.no_such_parameter", parameter="''", codec="minmax8", takes="block=NUMBER")),
        (
            "minmax8:k=3",
            golden.text("codecs.no_such_parameter", parameter="'k=3'", codec="minmax8", takes="block=NUMBER"),
        ),
        ("minmax8:block=-1", golden.text("codecs.negative_block")),
        ("minmax8:block=4294967296", golden.text("codecs.block_range")),
        ("none:block=1", golden.text("codecs.no_such_parameter", parameter="'block=1'", codec="none", takes="none")),
    ],
)
def test_a_setting_that_names_none(text, problem):
    with pytest.raises(ConfigError) as error:
        codec_of(text)
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize("settings", [ByteGradSettings, QSGDSettings, LowPrecisionDecentralizedSettings])
def test_a_codec_that_cannot_round_at_random_says_so(settings):
    assert settings(codec="float16", rounding="nearest").make_codec() == Float16()
    with pytest.raises(ConfigError, match=golden.pattern("codecs.only_nearest")):
        settings(codec="float16", rounding="stochastic")


def test_names_and_parameters_that_do_not_fit_a_header():
    with pytest.raises(ConfigError, match=golden.pattern("codecs.bad_name")):
        type("Long", (Codec,), {"name": "much too long"})
    with pytest.raises(ConfigError, match=golden.pattern("codecs.two_parameters")):
        payload_of(Sign(1 << 32), torch.zeros(1))


SETTINGS = {
    "leader": lambda codec: LeaderSettings(period=4, local_period=4, compression=codec, pull_global=0.5),
    "local": lambda codec: LocalSettings(period=4, compression=codec),
    "bytegrad": lambda codec: ByteGradSettings(codec=codec, error_feedback=True),
    "low_precision_decentralized": lambda codec: LowPrecisionDecentralizedSettings(codec=codec, rounding="nearest"),
}


@pytest.mark.parametrize(
    "codec",
    [
        "none",
        "float16",
        "sign:block=16",
        "levels1:block=16",
        "minmax4:block=16",
        "topk:k=8",
    ],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_algorithm_takes_every_codec(sign, name, codec):
    """Models that are to be alike are, and they learn; nothing but the codec's class is new."""
    workers = train(SETTINGS[name](codec), [1, 1, 1], 60, period=4 if name in ("leader", "local") else 1)
    if name == "leader":
        leaders = [torch.cat(worker.algorithm.global_leader) for worker in workers]
        assert all(torch.equal(leader, leaders[0]) for leader in leaders)
    elif name == "bytegrad":
        assert all((worker.model == workers[0].model).all() for worker in workers)
    untrained = train(SETTINGS[name](codec), [1, 1, 1], 0)
    assert sum(w.loss() for w in workers) < 0.5 * sum(w.loss() for w in untrained)


def test_bytes_of_a_codec_of_ones_own(sign):
    settings = LocalSettings(1, compression="sign:block=64")
    assert settings.sent_nbytes(1_000_000, 2) == pytest.approx(1_000_000 * (1 + 4 / 64))

    def member(group):
        x = torch.randn(100_000)
        QuantizedAllReduce(group, Sign())(x, x, ())
        return group.sent_nbytes

    assert sum(simulate([1, 1], member)) / 2 == pytest.approx(settings.sent_nbytes(100_000, 2), rel=0.01)
