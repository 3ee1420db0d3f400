"""A Slurm cluster of this machine: munged, slurmctld and two slurmd, in a folder, on ports of their own."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..integration.running import free_port, until
from ..speed import scaled

ENDS_WITHIN_S = scaled(10.0)
JOBS_END_WITHIN_S = scaled(60.0)
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait={kill_wait_s}
MinJobAge=600
FirstJobId={first_job}
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The cluster; its nodes are called one and two.

    Args:
        folder: for all of its files.
        kill_wait_s: how long a job has from SIGTERM to SIGKILL.
    """

    def __init__(self, folder: Path, kill_wait_s: int = 60) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir()
        for node in ("one", "two"):
            (folder / f"spool.{node}").mkdir()
        path = folder / "slurm.conf"
        path.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                user=getpass.getuser(),
                ports=[free_port() for _ in range(3)],
                folder=folder,
                kill_wait_s=kill_wait_s,
                first_job=os.getpid() % 10_000 + 1,  # jobs have ports by their numbers, and another cluster may be here
                cpus=os.cpu_count(),
            )
        )
        self.environ = {**os.environ, "SLURM_CONF": str(path)}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def start(self) -> None:
        """Start the daemons; return when both nodes can run jobs."""
        at = self.folder
        munged = ["--key-file", at / "munge.key", "--socket", at / "munge.socket", "--pid-file", at / "munge.pid"]
        self._run(
            "munged", "--foreground", "--force", *munged, "--log-file", at / "munge.log", "--seed-file", at / "seed"
        )
        until((at / "munge.socket").exists, "munged listens")
        self._run("slurmctld", "-D", "-i")
        for node in ("one", "two"):
            self._run("slurmd", "-D", "-N", node)
        until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 2, "both nodes are idle")

    def _run(self, program: str, *arguments: object) -> None:
        command = [shutil.which(program) or program, *map(str, arguments)]
        with (self.folder / f"{program}.out").open("ab") as output:
            self._processes.append(subprocess.Popen(command, env=self.environ, stdout=output, stderr=output))

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints; nothing if it fails."""
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=scaled(60))
            return done.stdout if done.returncode == 0 else ""
        return ""

    def submit(self, folder: Path, variables: Mapping[str, str], *command: object) -> str:
        """Submit a batch file in ``folder``; return the number of the job."""
        done = subprocess.run(
            ["sbatch", "--parsable", *map(str, command)],
            env=self.environ | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=scaled(90),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def end(self) -> None:
        """Cancel all jobs, and end the daemons."""
        self.ask("scancel", "--user", getpass.getuser())
        with suppress(AssertionError):  # the daemons end in any case
            until(lambda: not self.ask("squeue", "-h"), "no job is left", JOBS_END_WITHIN_S)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
