"""What a node does when its processes fail, die, refuse to end or are not needed, on a clock that the tests move."""

import errno
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from lsgd.errors import ConfigError, NotTrainedError, RunOverError
from lsgd.node import node as module
from lsgd.node.allegiance import RETIRES_S, Event, State
from lsgd.node.following import SERVE_AGAIN_S
from lsgd.node.node import OBSERVE_PATIENCE_S
from lsgd.node.process import Command, Process
from lsgd.node.restarts import MOST_RESTARTS, RESTART_WINDOW_S, Restarts
from lsgd.node.screen import Screen
from lsgd.node.transcript import Reading
from lsgd.server.daemon import CRASHED, MOVED
from tests import golden

from ..speed import scaled
from .simulated_node import World, after, all_of, forever, killed, leaver, server, stubborn, worker


def test_a_failure_stops_the_run_and_is_reported(capfd) -> None:
    world = World({"server": server, "good": worker, "bad": after(1.0, 7, "oops")})
    assert world.finish() == 7
    assert world.lines.index("[server] stopped") < world.lines.index("[good] saved")
    assert "SIGTERM to good" not in world.out
    assert golden.text("node.failed_7") in (err := capfd.readouterr().err) and "    oops\n" in err
    assert world.now < 1010


def test_a_worker_that_fails_when_the_run_is_over_leaves_the_others_the_time_to_save() -> None:
    def over(process):
        process.world.over = True
        return 0
        yield

    world = World({"server": over, "good": after(20.0, 0, "saved"), "bad": after(1.0, 3)})
    assert world.finish() == 3
    assert "[good] saved" in world.out


def test_workers_of_a_server_that_is_dead_for_good_save_and_leave(capfd) -> None:
    """Its restarts are used up, and nobody else can tell them."""
    world = World({"server": killed(times=9), "worker": leaver}, restarts=2)
    assert world.finish() == 128 + SIGKILL
    assert world.lives["server"] == 3
    assert "[worker] saved" in world.out and "SIGTERM to worker" not in world.out
    assert golden.text("node.server_killed") in capfd.readouterr().err


def test_workers_that_the_server_cannot_end_save_and_leave() -> None:
    world = World({"server": server, "worker": leaver, "bad": after(1.0, 5)})
    assert world.finish() == 5
    assert world.lines.index("[server] stopped") < world.lines.index("[worker] saved")
    assert world.now >= 1001 + module.STOP_PATIENCE_S


def test_a_killed_process_is_a_failure_with_its_signal(capfd) -> None:
    assert World({"worker": killed()}).finish() == 128 + SIGKILL
    assert golden.text("node.killed_oom") in capfd.readouterr().err


def test_a_killed_process_is_started_again_after_longer_and_longer() -> None:
    world = World({"server": server, "worker": killed(times=4, then=after(0.0))}, restarts=5)
    assert world.finish() == 0
    waits = [line.partition("restarting it in ")[2].partition(" s (")[0] for line in world.lines]
    assert [wait for wait in waits if wait] == ["1", "2", "4", "8"]
    assert golden.text("node.more_restarts") in world.out


def test_a_server_that_failed_in_its_own_code_is_started_again_a_bounded_number_of_times() -> None:
    world = World({"server": killed(code=70, then=server), "worker": worker}, restarts=5)
    assert world.passes(100)
    assert golden.text("node.failed_70") in world.out
    world.ending.ask("SIGINT")
    assert world.finish() == 0
    world = World({"server": killed(code=70, times=9), "worker": leaver}, restarts=1)
    assert world.finish() == 70
    assert world.lives["server"] == 2 and "[worker] saved" in world.out


def test_a_worker_that_had_completed_a_round_is_started_again_at_once() -> None:
    def dies(process):
        yield from after(1.0)(process)
        if process.lives < 4:
            process.world.rounds_at["worker"] = process.world.now
            process.dies()
            yield
        return 0

    world = World({"server": server, "worker": dies}, restarts=1)
    assert world.finish() == 0
    assert all_of(world.lines, golden.text("node.killed_restarting")) == 3


def test_a_process_that_worked_before_it_died_is_started_again_at_once_and_more_often() -> None:
    known = Restarts()
    assert [known.died("worker", 1.0, 2, worked=False, serves=False) for _ in range(3)] == [(1.0, 1), (2.0, 0), None]
    known = Restarts()
    waits = [known.died("worker", 10.0 * n, 2, worked=n != 3, serves=False) for n in range(8)]
    assert [restart.wait_s for restart in waits] == [0.0] * 3 + [1.0] + [0.0] * 4
    assert waits[2].left == 2 and waits[7].left == 1
    for _ in range(MOST_RESTARTS - 8):
        assert known.died("worker", 80.0, 2, worked=True, serves=False)
    assert known.died("worker", 80.0, 2, worked=True, serves=False) is None
    assert known.died("worker", 80.0 + RESTART_WINDOW_S, 2, worked=True, serves=False)
    assert Restarts().died("worker", 1.0, 0, worked=True, serves=False) is None
    assert "worker" in known and "global" not in known


def test_a_worker_that_the_run_evicted_is_started_again_however_often() -> None:
    world = World({"worker": killed(code=76, times=9, then=after(0.0))}, restarts=1)
    assert world.finish() == 0
    assert all_of(world.lines, golden.text("node.evicted_restarting")) == 9


def test_deaths_of_long_ago_do_not_count() -> None:
    world = World({"worker": killed(RESTART_WINDOW_S, times=3, then=after(0.0))}, restarts=1)
    assert world.finish() == 0
    assert world.lives["worker"] == 4


def test_a_process_that_is_killed_too_often_is_a_failure() -> None:
    world = World({"server": server, "worker": killed(times=9)}, restarts=1)
    assert world.finish() == 128 + SIGKILL
    assert world.lives["worker"] == 2


@pytest.mark.parametrize(("code", "words"), [(3, golden.text("node.failed_3")), (75, golden.text("node.gave_up"))])
def test_a_worker_that_ends_by_itself_is_not_started_again(code, words) -> None:
    world = World({"server": server, "worker": after(1.0, code)}, restarts=5)
    assert world.finish() == code
    assert world.lives["worker"] == 1 and f"worker {words}" in world.out
    assert world.given_up == (code == 75)


def test_a_failed_server_ends_the_workers() -> None:
    world = World({"server": after(1.0, 4), "worker": forever})
    assert world.finish() == 4
    assert golden.text("node.failed_4") in world.out and "SIGTERM to worker" in world.out


def test_a_server_that_has_said_why_the_run_fails_needs_no_report_of_its_lines(capfd) -> None:
    def refuses(process):
        process.say("a line of its log")
        process.world.over, process.world.outcome = True, "two workers draw the same batches"
        return 1
        yield

    world = World({"server": refuses, "worker": worker})
    assert world.finish() == 1
    assert world.node.conclude() == (1, "failed", "two workers draw the same batches")
    assert capfd.readouterr().err == ""


def test_a_mistake_that_the_screen_has_shown_is_not_reported_again(capfd) -> None:
    def fails(process):
        process.mistake = "ValueError: no such row"
        return 7
        yield

    world = World({"server": server, "bad": fails, "too": fails})
    assert world.finish() == 7
    assert golden.text("node.failed_printed") in world.out and "too failed" not in world.out
    assert capfd.readouterr().err == ""


def test_a_process_that_refuses_to_end_is_killed() -> None:
    world = World({"bad": after(1.0, 5), "stubborn": stubborn})
    assert world.finish() == 5
    asked, term, kill = (
        next(i for i, line in enumerate(world.lines) if text in line)
        for text in ("asked to save", "SIGTERM to stubborn", "SIGKILL to stubborn")
    )
    assert asked < term < kill
    waited_s = module.STOP_PATIENCE_S + module.SAVE_PATIENCE_S + module.TERM_PATIENCE_S
    assert waited_s <= world.now - 1001 < waited_s + 2


def test_a_signal_stops_the_run_through_the_server() -> None:
    world = World({"server": server, "worker": worker})
    assert world.passes(100)
    world.ending.ask("SIGINT")
    assert world.finish() == 0
    assert world.lines.index("[server] stopped") < world.lines.index("[worker] saved")


def test_a_worker_that_does_not_follow_the_server_is_ended() -> None:
    world = World({"server": server, "worker": forever})
    world.ending.ask("SIGINT")
    assert world.finish() == 128 + SIGINT
    assert "SIGTERM to worker" in world.out


def test_a_server_that_cannot_stop_the_run_is_not_waited_for() -> None:
    def fails(process):
        while not process.world.stopping:
            yield
        return 1

    world = World({"server": fails, "worker": forever})
    world.ending.ask("SIGTERM")
    assert world.finish() == 128 + SIGTERM
    assert world.now < 1000 + module.STOP_PATIENCE_S / 2


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("while_stopping", [False, True])
def test_a_server_that_dies_before_it_could_stop_the_run_is_started_again_to_do_so(while_stopping, crashes) -> None:
    def dies(process):
        while while_stopping and not process.world.stopping:
            yield
        process.world.stopping = False  # what it has heard is lost with it
        if crashes:
            return CRASHED
        process.dies()
        yield

    def twice(process):
        return (yield from (dies, server)[process.lives > 1](process))

    world = World({"server": twice, "worker": worker}, restarts=1)
    assert world.passes(0.5)
    world.ending.ask("SIGINT")
    assert world.finish() == 0, world.out
    assert while_stopping or golden.text("node.restarting_to_end") in world.out
    assert world.lines.index("[server] stopped") < world.lines.index("[worker] saved")


def test_a_second_signal_kills_at_once() -> None:
    world = World({"server": stubborn, "worker": stubborn})
    world.ending.ask("SIGINT")
    world.ending.ask("SIGTERM")
    assert world.finish(1.0) == 128 + SIGINT
    assert golden.text("node.killing") in world.out


@pytest.mark.parametrize("first", ["SIGHUP", "SIGTERM"])
def test_a_terminal_that_hangs_up_twice_lets_the_workers_save(first) -> None:
    world = World({"server": server, "worker": worker})
    assert world.passes(0.5)
    for name in (first, "SIGHUP"):
        world.ending.ask(name)
    assert world.finish() == 0, world.out
    assert "[worker] saved" in world.out and "SIGKILL" not in world.out


def test_servers_end_after_the_workers() -> None:
    def deaf(process):
        process.handled = []
        while not process.handled:
            yield
        return 0

    world = World({"server": deaf, "worker": after(1.0)})
    assert world.finish() == 0
    said = world.out
    assert said.index(golden.text("node.ended_early")) < said.index("SIGTERM to server")
    assert world.now - 1001 >= module.LINGER_S


def test_a_server_that_goes_on_after_the_stop_is_ended_soon() -> None:
    def deaf(process):
        process.handled = []
        while not process.handled:
            process.world.over |= process.world.stopping
            yield
        return 0

    world = World({"server": deaf, "worker": worker})
    world.ending.ask("SIGINT")
    assert world.finish(module.LINGER_S + 2) == 0
    assert "SIGINT to server" not in world.out and all_of(world.lines, "SIGTERM to server") == 1


def test_servers_that_other_nodes_need_go_on() -> None:
    world = World({"server": server, "worker": after(1.0)}, shared=True)
    assert world.passes(3600)
    world.ending.ask("SIGINT")
    assert world.finish(10) == 0


def test_a_script_that_never_joins_the_run_has_not_trained(capfd) -> None:
    world = World({"server": server, "worker": after(1.0)})
    world.joined = world.ended = set()
    assert world.finish() == NotTrainedError.exit_code
    assert golden.text("node.call_wrap") in capfd.readouterr().err


@pytest.mark.parametrize("of", [1, 2])
def test_a_node_whose_workers_all_leave_early_has_failed(of) -> None:
    def joins(process):
        yield from after(1.0)(process)
        return 0

    world = World({"server": server, "worker0": joins, "worker1": worker if of == 2 else joins})
    world.ended = set()
    if of == 2:
        assert world.passes(10)
        world.over = True
    assert world.finish() == (0 if of == 2 else NotTrainedError.exit_code)
    assert golden.text("node.left_early") in world.out


@pytest.mark.parametrize("of", [1, 2])
def test_a_worker_that_joins_too_late_is_no_failure_unless_all_of_the_node_do(of) -> None:
    world = World({"server": server, "late": after(1.0, 69), "worker": worker if of == 2 else after(1.0, 69)})
    if of == 2:
        assert world.passes(10)
    world.over, world.outcome = True, "all is done"
    assert world.finish() == (0 if of == 2 else RunOverError.exit_code)
    assert golden.text("node.late") in world.out
    if of == 2:
        assert world.node.conclude()[2] == golden.text("node.late_ended")


def test_the_run_continues_without_a_worker_that_ended_as_an_outlier_on_the_node_that_serves() -> None:
    world = World({"server": server, "odd": after(1.0, 65), "worker": worker})
    world.ended = set()
    assert world.passes(60)
    assert not world.stopping
    assert all_of(world.lines, golden.text("node.odd_continues")) == 1
    world.over = True
    assert world.finish() == 0


def test_other_nodes_are_served_although_all_workers_of_this_one_were_outliers(capfd) -> None:
    world = World({"server": server, "odd0": after(1.0, 65), "odd1": after(2.0, 65)}, shared=True)
    world.ended = set()
    assert world.passes(3600)
    world.ending.ask("SIGINT")
    assert world.finish() == 65
    assert golden.text("node.odd_failed") in capfd.readouterr().err


def test_a_node_whose_workers_are_all_outliers_has_failed() -> None:
    world = World({"server": server, "odd0": after(1.0, 65), "odd1": after(2.0, 65)})
    world.ended = set()
    assert world.finish() == 65
    assert world.stopping


def test_a_model_that_is_not_finite_at_the_end_fails_the_launcher() -> None:
    world = World({"server": server, "odd": after(1.0, 65), "worker": after(20.0, 0)})
    assert world.finish() == 65


class TestObservers:
    """Processes that the run does not need."""

    @pytest.mark.parametrize("code", [3, None])
    def test_one_that_fails_or_is_killed_ends_nothing_and_is_not_started_again(self, capfd, code) -> None:
        world = World({"server": server, "worker": after(5.0), "logger": killed(1.0, code=code)}, restarts=3)
        assert world.finish() == 0 and capfd.readouterr().err == ""
        how = "failed with exit code 3" if code else "was killed by SIGKILL (out of memory?)"
        assert golden.text("node.logger_continues", how=how) in world.out
        assert world.lives["logger"] == 1

    def test_one_may_write_what_is_left_and_is_ended_if_it_does_not(self) -> None:
        def saves(process):
            while not process.world.over:
                yield
            yield from after(module.OBSERVE_PATIENCE_S / 2, 0, "written")(process)
            return 0

        def stays(process):
            process.handled = []
            while not process.handled:
                yield
            process.say("ends")
            return 0

        world = World({"server": server, "worker": after(1.0), "logger0": saves, "logger1": stays})
        assert world.finish() == 0
        assert world.lines.index("[logger0] written") < world.lines.index("[logger1] ends")


class TestRelay:
    """The run continues without it, and it is there again as soon as may be."""

    def test_one_that_is_killed_is_started_again_and_ended_after_the_servers(self) -> None:
        def relays(process):
            process.handled = []
            while not process.handled:
                yield
            process.say("last" if process.world.over else "early")
            return 0

        world = World({"server": server, "worker": after(9.0), "relay": killed(then=relays)}, restarts=1)
        assert world.finish() == 0
        assert golden.text("node.relay_killed") in world.out and "restarting it in 1 s" in world.out
        assert "[relay] last" in world.lines

    @pytest.mark.parametrize("code", [2, None])
    def test_one_that_fails_or_dies_too_often_ends_nothing(self, code) -> None:
        world = World({"server": server, "worker": after(9.0), "relay": killed(code=code, times=9)})
        assert world.finish() == 0
        assert golden.text("node.continues_without") in world.out and world.lives["relay"] == 1

    def test_one_that_cannot_be_started_again_ends_nothing(self) -> None:
        def relays(process):
            if process.lives > 1:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return killed()(process)

        world = World({"server": server, "worker": after(99.0), "relay": relays}, restarts=2)
        assert world.finish() == 0
        assert world.out.count(golden.text("node.relay_no_memory")) == 2
        assert golden.text("node.continues_without") in world.out


def test_a_worker_that_is_started_again_goes_on_from_its_checkpoint(tmp_path: Path, capfd) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "run-1" / "40").mkdir(parents=True)
    (checkpoints / "run-1" / "40" / "has.safetensors").touch()
    screen, reading = Screen(), Reading()
    command = ["bash", "-c", "echo resume=$LSGD_RESUME"]
    for name in ("has", "none"):
        for again in (False, True):
            started = Command(name, command, {}, tmp_path / f"{name}{again}.log", checkpoints=checkpoints)
            process = Process(started, 0, again, screen=screen, reading=reading)
            process._process.wait(scaled(20))
    reading.close()
    screen.close()
    logs = {path.stem: path.read_text().strip() for path in tmp_path.glob("*.log")}
    assert logs == {
        "hasFalse": "resume=",
        "hasTrue": f"resume={checkpoints}",
        "noneFalse": "resume=",
        "noneTrue": "resume=",
    }


def test_a_program_that_cannot_be_started_is_an_error_in_words() -> None:
    def refuses(process):
        raise OSError(errno.ENOEXEC, "Exec format error")

    with pytest.raises(ConfigError, match=golden.pattern("node.no_program_worker")):
        World({"server": server, "worker0": refuses})


TWO = {"worker0": after(100.0), "worker1": after(40.0), "server": server, "logger": after(12.0)}


class TestStages:
    """A node whose workers come for the next stage of the run."""

    def over(self, world: World) -> None:
        world.stopping = True  # the server ends the run
        assert world.passes(1.0)
        world.stopping, world.next_is_due, world.finished = False, True, True

    def test_its_servers_and_observers_are_new_and_its_workers_stay(self) -> None:
        world = World(TWO)
        assert world.passes(5.0)
        self.over(world)
        assert world.passes(5.0) and world.stage == 1  # the logger still writes
        assert world.passes(5.0) and world.stage == 2 and world.staff == 2
        assert world.lives == {"worker0": 1, "worker1": 1, "server": 2, "logger": 2}
        assert world.passes(30.0)  # worker1 has ended
        self.over(world)
        assert world.passes(5.0) and world.stage == 3 and world.staff == 1
        assert world.lives == {"worker0": 1, "worker1": 1, "server": 3, "logger": 3}
        world.stopping = True
        assert world.finish() == 0

    def test_an_observer_is_waited_for_only_so_long(self) -> None:
        world = World(TWO | {"logger": stubborn})
        self.over(world)
        assert world.passes(OBSERVE_PATIENCE_S - 1) and world.stage == 1
        assert world.passes(2.0) and world.stage == 2

    def test_one_that_cannot_begin_ends_the_run(self) -> None:
        world = World(TWO)
        self.over(world)
        world.disk_is_full = True
        world.finish()
        assert golden.text("node.no_next_stage") in world.out and world.stage == 1

    def test_a_run_that_is_stopped_begins_none(self) -> None:
        world = World(TWO)
        world.ending.ask("SIGINT")
        assert world.passes(1.0)
        world.next_is_due = world.finished = True
        world.finish()
        assert world.stage == 1


class TestTakingOver:
    """A node that serves the run instead of another one, and one whose server gives up."""

    def test_it_starts_servers_and_waits_for_the_others_when_its_workers_have_ended(self) -> None:
        scripts = {"worker0": after(30.0), "server": server, "relay": forever}
        world = World(scripts, serve=("server", "relay"), shared=True)
        assert world.passes(5.0) and world.lives == {"worker0": 1}
        world.silent = True
        assert world.passes(5.0) and world.lives == {"worker0": 1, "server": 1, "relay": 1}
        world.silent = False
        world.upon(Event.UP)
        assert world.node.serves and world.passes(60.0)  # other nodes need it
        world.stopping = True
        assert world.finish() == 0

    @pytest.mark.parametrize("event", [Event.WELCOME, Event.FOLLOW, Event.GIVES_WAY, Event.VAIN, Event.END])
    def test_servers_that_were_started_in_vain_are_ended(self, event: Event) -> None:
        scripts = {"worker0": worker, "server": stubborn, "relay": forever}
        world = World(scripts, serve=("server", "relay"), shared=True)
        world.silent = True
        assert world.passes(3.0) and world.lives["server"] == world.lives["relay"] == 1
        world.silent = False
        world.upon(event)
        world.over = world.finished = event is Event.END
        assert world.passes(1.0) is (event is not Event.END) and not world.node.serves
        world.over = world.finished = True
        assert world.finish(10.0) == 0  # nothing is left that it would wait for

    @pytest.mark.parametrize("code", [1, None])
    def test_it_goes_on_and_tries_again_if_its_server_ends_before_it_serves(self, code: int | None) -> None:
        scripts = {"worker0": worker, "server": killed(1.0, code=code, then=server)}
        world = World(scripts, serve=("server",), shared=True)
        world.silent = True
        assert world.passes(2.0) and world.allegiance.state is State.UNABLE
        assert world.passes(SERVE_AGAIN_S) and world.lives == {"worker0": 1, "server": 2}

    def test_it_tries_again_where_it_cannot_write_a_journal(self) -> None:
        world = World({"worker0": worker, "server": server}, serve=("server",))
        world.silent = world.disk_is_full = True
        assert world.passes(SERVE_AGAIN_S * 2.5) and world.lives == {"worker0": 1}
        assert world.out.count(golden.text("node.journal_unwritten")) == 3
        world.disk_is_full = False
        assert world.passes(SERVE_AGAIN_S) and world.lives == {"worker0": 1, "server": 1}

    def test_it_tries_again_where_it_cannot_start_a_process(self) -> None:
        def refused(process):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        scripts = {"worker0": worker, "server": server, "relay": refused}
        world = World(scripts, serve=("server", "relay"))
        world.silent = True
        assert world.passes(SERVE_AGAIN_S * 1.5) and not world.node.serves
        assert world.out.count(golden.text("node.no_fork")) == 2
        scripts["relay"] = forever
        assert world.passes(SERVE_AGAIN_S) and world.node.serves
        assert world.lives["worker0"] == 1

    def test_a_server_that_has_given_up_ends_without_ending_the_node(self) -> None:
        scripts = {"server": after(3.0, MOVED), "relay": forever, "worker0": worker}
        world = World(scripts, shared=True)
        assert world.passes(60.0) and not world.node.serves
        assert golden.text("node.looks_elsewhere") in world.out
        assert world.lives == {"server": 1, "relay": 1, "worker0": 1}
        world.over = world.finished = True
        assert world.finish() == 0

    def test_a_server_that_does_not_notice_is_killed_after_a_while(self) -> None:
        world = World({"server": stubborn, "worker0": worker}, restarts=5)
        world.upon(Event.FOLLOW)
        assert world.passes(RETIRES_S - 1.0) and not world.node.serves
        assert not any("are ended" in line for line in world.lines)
        assert world.passes(2.0) and any(golden.text("node.servers_ended") in line for line in world.lines)
        assert world.lives["server"] == 1
        world.over = world.finished = True
        assert world.finish() == 0
