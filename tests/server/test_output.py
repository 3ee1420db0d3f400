"""What a server prints: by a thread of its own, in order, with a word on what nobody could read."""

import os
import re
from collections.abc import Iterator

import pytest

from lsgd import output as output_module
from lsgd.output import Output
from lsgd.server import daemon
from tests import golden

from ..integration.running import until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def fill(writing: int) -> int:
    """Fill a pipe, and return with how many bytes."""
    os.set_blocking(writing, False)
    count = 0
    for nbytes in (4096, 1):
        try:
            while True:
                count += os.write(writing, bytes(nbytes))
        except BlockingIOError:
            pass
    os.set_blocking(writing, True)
    return count


def read(reading: int, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += os.read(reading, nbytes - len(data))
    return data


def test_lines_come_out_in_order_and_whole(pipe) -> None:
    reading, writing = pipe
    output = Output(daemon._missing)
    lines = [f"line {number} with an é" for number in range(500)]
    for line in lines:
        output.put(writing, f"{line}\n")
    assert output.flush(20.0)
    expected = "".join(f"{line}\n" for line in lines).encode()
    assert read(reading, len(expected)) == expected


@pytest.mark.parametrize("blocking", [True, False])
def test_nobody_waits_for_a_reader_and_what_is_lost_is_counted(pipe, blocking, monkeypatch) -> None:
    monkeypatch.setattr(output_module, "MAX_WAITING_NCHARS", len("line 0\n" * 10))
    reading, writing = pipe
    full_nbytes = fill(writing)
    os.set_blocking(writing, blocking)
    output = Output(daemon._missing)
    for number in range(30):
        output.put(writing, f"line {number}\n")
    assert not output.flush(0.0)
    read(reading, full_nbytes)
    assert output.flush(20.0)
    output.put(writing, "the last\n")
    assert output.flush(20.0)
    text = os.read(reading, 4096).decode()
    shown = "".join(f"line {number}\n" for number in range(10))
    assert re.fullmatch(shown + golden.pattern("output.lines_missing"), text)


def test_a_reader_that_has_gone_is_written_to_no_more_and_others_are(pipe) -> None:
    reading, writing = pipe
    gone_reading, gone_writing = os.pipe()
    os.close(gone_reading)
    output = Output(daemon._missing)
    for descriptor in (gone_writing, writing, gone_writing, writing):
        output.put(descriptor, "a line\n")
    assert output.flush(20.0)
    assert os.read(reading, 4096) == b"a line\na line\n"
    os.close(gone_writing)


def test_a_full_disk_costs_lines_and_no_more(pipe) -> None:
    reading, writing = pipe
    output = Output(daemon._missing)
    with open("/dev/full", "wb", buffering=0) as full:
        for _ in range(3):
            output.put(full.fileno(), "lost\n")
        assert output.flush(20.0)
    output.put(writing, "a line\n")
    assert output.flush(20.0)
    assert re.search(golden.pattern("output.lines_missing_before"), os.read(reading, 4096).decode())


def test_where_there_is_no_file_lines_are_printed_at_once(capsys) -> None:
    daemon.say("to read")
    daemon.complain("to mend")
    said = capsys.readouterr()
    assert re.fullmatch(r"\d\d:\d\d:\d\d to read\n", said.out)
    assert re.fullmatch(r"\d\d:\d\d:\d\d to mend\n", said.err)


def test_the_thread_ends_no_process_and_begins_with_the_first_line(pipe) -> None:
    _, writing = pipe
    output = Output(daemon._missing)
    assert output._thread is None
    output.put(writing, "a line\n")
    assert output._thread is not None and output._thread.daemon
    until(lambda: output.flush(0.0), "it is written")
