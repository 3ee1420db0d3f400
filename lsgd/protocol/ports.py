"""TCP ports of this machine: lsgd's own, one that is held until its server listens, and who has one that is taken."""

import errno
import os
import shlex
import socket
import struct
from contextlib import suppress

import psutil

from lsgd.errors import ConfigError

DEFAULT_PORT = 27400
"""TCP port of the global server, and the next one of its relay.

Nobody gets these by chance: IANA's registry has no user of them (those beside are 27345 and 27442), and they lie below
what Linux (from 32768 on) and Kubernetes (from 30000 on) hand out by themselves.
"""

MAX_COMMAND = 60
"""Longest command of a process, in characters, that an error shows."""


def hold(ip: str, port: int = 0) -> socket.socket:
    """Return a socket that holds ``port`` of ``ip``, an address of this machine, until it is closed; 0: a free port.

    It does not listen. A server with SO_REUSEADDR, as lsgd's and torch's are, may do so meanwhile, in any process;
    Linux gives the port to nobody who asks for any, nor to a connection.

    Raises:
        ConfigError: another process listens there, or the address belongs to another machine.
    """
    return _bound(ip, port, shared=bool(port))


def hold_or_any(ip: str, port: int) -> socket.socket:
    """Hold ``port`` unless it is taken, or held by another process; else any free one.

    Raises:
        ConfigError: the address belongs to another machine.
    """
    with suppress(ConfigError):
        return _bound(ip, port, shared=False)
    return hold(ip)


def everywhere() -> str:
    """Return the address that stands for all of this machine's, those of IPv6 too if it has it."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def port_of(held: socket.socket) -> int:
    """Return the port that a socket holds."""
    return int(held.getsockname()[1])


def _bound(ip: str, port: int, *, shared: bool) -> socket.socket:
    """Return a bound socket. ``shared``: also if others hold the port, or its last connections are still closing."""
    holder = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if ip == "::":
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if shared:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((ip, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on others may listen there
    except OSError as error:
        holder.close()
        raise ConfigError(_why_not(error, ip, port)) from None
    return holder


def _why_not(error: OSError, ip: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {ip} is taken by {user_of(ip, port)}; end that, or use another port on all nodes: "
            f"PORT={port + 2} (--port; the next one is the relay's)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{ip} is not an address of this machine, but node 0 has to run where IP_ADDR (--address) is; "
            "ip -brief address lists the addresses here"
        )
    return f"no server can listen on port {port} of {ip}: {error.strerror}"


def user_of(ip: str, port: int) -> str:
    """Return, in words, who has a TCP port of this machine, at that address if that is a numeric one."""
    with suppress(psutil.Error, OSError):
        there = (ip, "0.0.0.0", "::")
        on_port = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port]
        users = [one for one in on_port if one.laddr.ip.removeprefix("::ffff:") in there] or on_port
        listens = [one for one in users if one.status == psutil.CONN_LISTEN]
        for one in (*listens, *users):
            if one.pid:
                return process(one.pid) if one in listens else f"a connection of {process(one.pid)}"
        if users:
            return f"a process of another user (sudo ss -tanp 'sport = :{port}' names it)"
    return f"a process that does not listen there yet (ss -tanp 'sport = :{port}' names others)"


def user_of_socket(link: socket.socket) -> str:
    """Return, in words, who listens at the Unix socket to which ``link`` is connected."""
    pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return process(pid)


def process(pid: int) -> str:
    """Return a process's number, its command, and how to end it."""
    if pid == os.getpid():
        return f"this process ({pid})"
    if not pid:
        return "a process in another container"
    command = "no command"
    with suppress(psutil.Error):
        one = psutil.Process(pid)
        command = " ".join(shlex.join(one.cmdline()).split()) or one.name()
    if len(command) > MAX_COMMAND:
        command = f"{command[: MAX_COMMAND - 3]}..."
    return f"process {pid} ({command}; to end it: kill {pid})"
