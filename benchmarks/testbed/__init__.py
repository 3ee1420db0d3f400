"""The testbed: several hosts on one machine, on a network of known bandwidth and latency. Linux, root.

A host is a set of kernel namespaces (network, processes, mounts, host name) with an interface ``eth0``, a name and a
hosts file of its own::

    with Testbed(2, rate_mbit=100, delay_ms=5) as testbed:
        processes = [host.popen(["python", "train.py", testbed.hosts[0].address]) for host in testbed.hosts]
        codes = [process.wait() for process in processes]
        print([host.sent_nbytes for host in testbed.hosts])

Or from a shell, with ``TESTBED_HOST`` and ``TESTBED_ADDRESS`` in the environment of the command on each host::

    sudo python -m benchmarks.testbed 2 --rate-mbit 100 --delay-ms 5 -- sh -c 'hostname; ping -c 1 node0'

Nothing has a name outside, neither namespace nor interface, so testbeds never meet, and nothing is to be swept
up: the first process of each host waits on a pipe from the testbed and ends when that closes or its owner is
killed; with it the kernel ends every process of the host and then frees the namespaces, the links and the mounts.
"""

from benchmarks.testbed.hosts import LINKS, Host, Testbed, TestbedError, no_nat, told

__all__ = ["LINKS", "Host", "Testbed", "TestbedError", "no_nat", "told"]
