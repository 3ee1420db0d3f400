"""Forks that stand in for Python (become.py): a program sees what it would see, and so does who has started it."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from .running import FORKS, ROOM, until

SEES = """
import atexit, json, logging, os, signal, sys, threading
import helper
from lsgd.server import daemon
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "variables": dict(os.environ), "parent": os.getppid(), "pid": os.getpid(),
    "session": os.getsid(0), "group": os.getpgid(0), "name": __name__, "path": sys.path[0],
    "sees": hasattr(daemon, "seen"),
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 200)[:-1],
    "threads": threading.active_count(),
    "signals": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)],
    "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "shows": open("/proc/self/environ").read().rstrip(chr(0)).split(chr(0)),
}))
atexit.register(print, "ends")
"""
STARTS = """
import atexit, json, os, signal, subprocess, sys, tempfile, threading
from lsgd.server import daemon
daemon.seen = True
atexit.register(print, "the end of who has started it")
print("unwritten", end="")
folder = tempfile.TemporaryDirectory()
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
threading.Thread(target=threading.Event().wait, daemon=True).start()
reading, writing = os.pipe()
how = {"cwd": sys.argv[1], "env": {**os.environ, "OWN": "1"}, "start_new_session": True, "pass_fds": [reading]}
program = [sys.executable, sys.argv[1] + "/sees.py", "a b", ""]
with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(1), **how) as child:
    output = child.communicate()[0]
codes = [subprocess.run([sys.executable, "-P", sys.argv[1] + "/ends.py", how]).returncode for how in "abc"]
again = subprocess.run([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE).stdout.decode()
print("\\n", os.path.exists(folder.name))
print(json.dumps([output, child.pid, os.getpid(), reading, codes, again]))
"""
ENDS = """
import os, signal, sys
match sys.argv[1]:
    case "a":
        sys.exit(3)
    case "b":
        os.kill(os.getpid(), signal.SIGKILL)
raise ValueError("it fails")
"""


def fork(folder: Path, **variables: str):
    for name, script in (("starts", STARTS), ("sees", SEES), ("ends", ENDS), ("helper", "")):
        (folder / f"{name}.py").write_text(script)
    return FORKS.popen([sys.executable, folder / "starts.py", folder], env={**os.environ, **variables})


def test_a_program_sees_what_python_would_have_made_for_it(tmp_path: Path) -> None:
    started = fork(tmp_path, STARTED="1")
    said, _ = started.communicate()
    assert started.returncode == 0, said
    assert said.count("unwritten") == said.count("the end of who") == said.count("ValueError: it fails") == 1
    there, told = said.splitlines()[-3:-1]
    assert there.endswith("True"), "a child has removed its parent's folder"
    output, pid, parent, passed, codes, again = json.loads(told)
    assert (codes, again) == ([3, -signal.SIGKILL, 1], "1\n")
    line, ends = output.splitlines()
    saw = json.loads(line)
    script = str(tmp_path / "sees.py")
    assert (saw["argv"], saw["cwd"], saw["path"]) == ([script, "a b", ""], str(tmp_path), str(tmp_path))
    assert (saw["pid"], saw["parent"], saw["session"], saw["group"]) == (pid, parent, pid, pid)
    assert saw["variables"] == {**os.environ, "STARTED": "1", "OWN": "1"}
    assert saw["open"] == [0, 1, 2, passed]
    assert (saw["name"], saw["threads"], saw["sees"], ends) == ("__main__", 1, False, "ends")
    assert saw["signals"] == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_DFL]
    assert saw["shown"] == [sys.executable, script, "a b"]
    assert len(str(saw["shows"])) > ROOM or "OWN=1" in saw["shows"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_is_its_code(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text("import time; print('waits', flush=True); time.sleep(60)")
    waits = FORKS.popen([sys.executable, "waits.py"], cwd=tmp_path, env=os.environ)
    assert waits.stdout.readline() == "waits\n"
    waits.send_signal(number)
    until(lambda: waits.returncode is not None, "it ends")
    assert waits.returncode == -number
    assert ("KeyboardInterrupt" in waits.communicate()[0]) == (number == signal.SIGINT)
