"""Hosts in kernel namespaces of this machine, and the network between them."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

from benchmarks.testbed import relay
from benchmarks.testbed.interface import counters

NETWORK = "10.77.0"
"""First three numbers of every host's address, in every testbed; they reach no further than its own network."""

HOME = "192.168.1"
"""First three numbers of the addresses behind every router: in each home the same ones, as it happens."""

RELAY_MTU_NBYTES = 9000
"""Largest packet on a network with latency: jumbo frames, so that the relay in Python keeps up with 1 Gbit."""

_TOOLS = ("cat", "env", "hostname", "ip", "mount", "nsenter", "sh", "tc", "umount", "unshare")
_ROUTER_RULES = """
table ip nat {
    chain postrouting { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
}
table ip filter {
    chain inside { iifname "home" accept; ct state established accept; }
    chain forward { type filter hook forward priority 0; policy drop; jump inside; }
    chain input { type filter hook input priority 0; policy drop; jump inside; }
}
"""
"""What a home's router does: those inside may connect to the outside, and nothing from there is forwarded."""

_CLONE_NEWPID = 0x20000000  # <linux/sched.h>

_FIRST_PROCESS = """
set -e
mount -t proc proc /proc
mount -t sysfs sysfs /sys
ipv6=/proc/sys/net/ipv6/conf/default/disable_ipv6
[ ! -e $ipv6 ] || echo 1 > $ipv6
ip link set lo up
hostname "$1"
mount -t tmpfs testbed /mnt
printf %s "$2" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
echo ready
exec cat
"""


LINKS: Mapping[str, tuple[float | None, float]] = {
    "unlimited": (None, 0.0),
    "1gbit": (1000.0, 0.0),
    "100mbit": (100.0, 0.0),
    "10mbit": (10.0, 0.0),
    "1gbit-1ms": (1000.0, 1.0),
    "100mbit-5ms": (100.0, 5.0),
    "100mbit-25ms": (100.0, 25.0),
    "100mbit-20ms": (100.0, 20.0),
    "10mbit-20ms": (10.0, 20.0),
}
"""Names of the networks that benchmarks use: rate in Mbit/s (None: no limit) and one-way latency in ms."""


class TestbedError(RuntimeError):
    """The testbed cannot be made here; the message says what is missing."""

    __test__: ClassVar[bool] = False  # pytest: a name with Test, and no test


def told(main: Callable[[], int]) -> int:
    """Return the exit code of a program; if its testbed fails, print why."""
    try:
        return main()
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class Host:
    """A machine of the testbed. Made by :class:`Testbed`.

    Args:
        index: its number, from 0.
        name: its host name, ``node0``.
        address: the address of its ``eth0``.
        hosts_file: text of its /etc/hosts.
    """

    def __init__(self, index: int, name: str, address: str, hosts_file: str) -> None:
        self.index = index
        self.name = name
        self.address = address
        self._processes: list[subprocess.Popen[Any]] = []
        with _children_in_pid_namespace(None):
            self._first = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", _FIRST_PROCESS, "sh", name, hosts_file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self._first.stdout and self._first.stderr
        if self._first.stdout.readline() != "ready\n":
            reason = self._first.stderr.read().strip()
            self.close()
            raise TestbedError(f"the testbed needs full root, with CAP_SYS_ADMIN and CAP_NET_ADMIN: {reason}")

    @property
    def pid(self) -> int:
        """Id of its first process, whose namespaces are the host's."""
        return self._first.pid

    @property
    def sent_nbytes(self) -> int:
        """Bytes that ``eth0`` has sent. One header is counted for up to 64 KiB that leave as one segment."""
        return counters(self.pid).sent_nbytes

    @property
    def received_nbytes(self) -> int:
        """Bytes that ``eth0`` has received, counted like those sent."""
        return counters(self.pid).received_nbytes

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``command`` on this host; ``options`` are those of subprocess.Popen.

        The process is a child of the caller: its id, signals and exit code are its own. The testbed's end kills it.
        """
        cwd = options.pop("cwd", None) or os.getcwd()
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "env", f"--chdir={cwd}"]
        with _children_in_pid_namespace(self.pid):
            process = subprocess.Popen([*enter, *command], **options)
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], **options: Any) -> str:
        """Run ``command`` on this host to its end and return its standard output.

        Raises:
            TestbedError: it failed; the message has its standard error.
        """
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        output, error = process.communicate()
        if process.returncode:
            raise TestbedError(f"{self.name}: {' '.join(command)}: {error.strip()} (exit {process.returncode})")
        return str(output)

    def close(self) -> None:
        """End every process of the host, close the pipes to them, and with the last process end the host."""
        self._first.kill()
        for process in self._processes:  # the kernel kills them now; the first one is gone when they are reaped
            process.wait()
        self._first.wait()
        for process in (self._first, *self._processes):
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()


class Testbed:
    """Hosts on one network; a context manager whose end leaves nothing behind.

    Args:
        hosts: how many, 1 to 250.
        rate_mbit: what each host can send, in 10⁶ bits per second of whole packets; None: unlimited.
        delay_ms: how long each packet is under way, one way.
        loopback_names: each host's own name means 127.0.1.1 to it, as Debian's installer sets it up.
        behind_nat: indices of hosts that are alone behind a router which translates addresses (nftables masquerade) and
            forwards nothing inwards; not in a testbed with latency.

    Raises:
        TestbedError: not root, or a tool is missing.
    """

    __test__: ClassVar[bool] = False

    def __init__(
        self,
        hosts: int,
        *,
        rate_mbit: float | None = None,
        delay_ms: float = 0.0,
        loopback_names: bool = False,
        behind_nat: Collection[int] = (),
    ) -> None:
        if not 1 <= hosts <= 250:
            raise TestbedError(f"a testbed of {hosts} hosts; it can have 1 to 250")
        if os.geteuid() != 0:
            raise TestbedError("the testbed makes network namespaces and needs root: use sudo")
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise TestbedError(f"not found: {', '.join(missing)}; install iproute2 and util-linux")
        if behind_nat and (trouble := no_nat()):
            raise TestbedError(trouble)
        if behind_nat and delay_ms:
            raise TestbedError("a testbed has either latency or hosts behind NAT")
        self._behind_nat = frozenset(behind_nat)
        self._delay_ms = delay_ms
        self._limited = False
        self._switch: Host | None = None
        self._relay: subprocess.Popen[str] | None = None
        self._closing = contextlib.ExitStack()
        self.hosts: list[Host] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            for index in range(hosts):
                self._add_host(index, hosts, loopback_names)
            self._connect_by_relay() if delay_ms else self._connect_by_bridge()
            self.set_rate(rate_mbit)
            undo.pop_all()

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process on every host, and the hosts."""
        self._closing.close()

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change what each host can send, in 10⁶ bits per second; None: unlimited."""
        if rate_mbit is None and not self._limited:
            return
        for host in self.hosts:
            if rate_mbit is None:
                host.run(["tc", "qdisc", "del", "dev", "eth0", "root"])
                continue
            burst_nbytes = max(32 * 1024, int(rate_mbit * 1e6 / 8 * 0.002))
            bucket = ["rate", f"{rate_mbit * 1e6:.0f}bit", "burst", str(burst_nbytes), "latency", "50ms"]
            host.run(["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket])
        self._limited = rate_mbit is not None

    def cut(self, host: Host) -> None:
        """Lose every packet to and from a host, silently, until :meth:`mend`."""
        self._tell(host, "cut", "nomaster")

    def mend(self, host: Host) -> None:
        """Connect a host again."""
        self._tell(host, "mend", "master", "bridge")

    def _tell(self, host: Host, order: str, *link: str) -> None:
        """Give an order to the relay, or the bridge's end of a host's link these settings."""
        if self._relay is not None:
            assert self._relay.stdin
            self._relay.stdin.write(f"{order} {host.index}\n")
            self._relay.stdin.flush()
        else:
            assert self._switch is not None
            self._switch.run(["ip", "link", "set", f"port{host.index}", *link])

    def _add_host(self, index: int, count: int, loopback_names: bool) -> None:
        names = {f"node{i}": f"{NETWORK}.{i + 1}" for i in range(count)}
        own = f"node{index}"
        lines = ["127.0.0.1 localhost"]
        if loopback_names:
            lines.append(f"127.0.1.1 {own}")
        lines += [f"{address} {name}" for name, address in names.items() if not loopback_names or name != own]
        address = f"{HOME}.2" if index in self._behind_nat else names[own]
        host = Host(index, own, address, "\n".join(lines) + "\n")
        self._closing.callback(host.close)
        self.hosts.append(host)

    def _connect_by_bridge(self) -> None:
        self._switch = switch = Host(-1, "switch", "", "127.0.0.1 localhost\n")
        self._closing.callback(switch.close)
        # With snooping the bridge would announce itself to every host, by IGMP, and be counted there.
        switch.run(["ip", "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0"])
        switch.run(["ip", "link", "set", "bridge", "up"])
        for host in self.hosts:
            port = f"port{host.index}"
            outermost = self._put_behind_router(host) if host.index in self._behind_nat else host
            _join(switch, port, outermost, "eth0")
            switch.run(["ip", "link", "set", port, "master", "bridge", "up"])
            self._configure(outermost)

    def _put_behind_router(self, host: Host) -> Host:
        """Connect a host to a router of its own, and return that."""
        router = Host(host.index, f"router{host.index}", f"{NETWORK}.{host.index + 1}", "127.0.0.1 localhost\n")
        self._closing.callback(router.close)
        _join(router, "home", host, "eth0")
        router.run(["ip", "link", "set", "home", "up"])
        router.run(["ip", "address", "add", f"{HOME}.1/24", "dev", "home"])
        router.run(["sh", "-c", 'echo 1 > /proc/sys/net/ipv4/ip_forward && nft "$1"', "sh", _ROUTER_RULES])
        self._configure(host)
        host.run(["ip", "route", "add", "default", "via", f"{HOME}.1"])
        return router

    def _connect_by_relay(self) -> None:
        pids = [str(host.pid) for host in self.hosts]
        self._relay = process = subprocess.Popen(
            [sys.executable, relay.__file__, str(self._delay_ms), *pids],
            stdin=subprocess.PIPE,  # the relay ends when it closes, and takes orders
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._closing.callback(_end_relay, process)
        assert process.stdout and process.stderr
        if process.stdout.readline() != "ready\n":
            raise TestbedError(f"no latency without TUN devices: {process.stderr.read().strip().splitlines()[-1]}")
        for host in self.hosts:
            self._configure(host, "mtu", str(RELAY_MTU_NBYTES), "txqueuelen", "1000")

    def _configure(self, host: Host, *link: str) -> None:
        host.run(["ip", "link", "set", "eth0", *link, "up"])
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])


def no_nat() -> str:
    """Return why no host can be behind NAT here; empty if it can."""
    if shutil.which("nft") is None:
        return "not found: nft, for hosts behind NAT; install nftables"
    done = subprocess.run(["unshare", "--net", "nft", _ROUTER_RULES], capture_output=True, text=True)
    return f"no NAT in this kernel: {done.stderr.strip().splitlines()[0]}" if done.returncode else ""


def _join(one: Host, name: str, other: Host, other_name: str) -> None:
    """Make a link between interfaces of these names on two hosts."""
    pair = ["ip", "link", "add", name, "type", "veth", "peer", "name", other_name, "netns", str(other.pid)]
    _outside(["nsenter", f"--target={one.pid}", "--net", *pair])


def _end_relay(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _outside(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _children_in_pid_namespace(pid: int | None) -> Iterator[None]:
    """Let this thread's next children begin in the process namespace of ``pid``; None: in a new one.

    nsenter can do the same only by a process that stays between, which passes neither signals nor ids on.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        if pid is None:
            _checked(libc.unshare(_CLONE_NEWPID))
        else:
            target = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
            try:
                _checked(libc.setns(target, _CLONE_NEWPID))
            finally:
                os.close(target)
        try:
            yield
        finally:
            _checked(libc.setns(own, _CLONE_NEWPID))
    finally:
        os.close(own)


def _checked(result: int) -> None:
    if result:
        reason = os.strerror(ctypes.get_errno())
        raise TestbedError(f"the testbed needs full root, with CAP_SYS_ADMIN: {reason}")
