"""Watches the processes of a machine's workers."""

import os
import selectors


def pid_namespace() -> int:
    """Return the number of this process's PID namespace; 0 if there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Processes:
    """Watches processes, and sees at once when one ends, whoever started it."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._descriptors: dict[bytes, int] = {}

    def watch(self, name: bytes, pid: int, namespace: int) -> None:
        """Watch a process from now on; ignore one that cannot be watched, such as one in a container.

        Args:
            name: that :meth:`ended` returns.
            pid: number of the process, which is alive.
            namespace: PID namespace of that number.
        """
        if name in self._descriptors or not pid or namespace != pid_namespace():
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        self._descriptors[name] = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, name)

    def forget(self, name: bytes) -> None:
        """Stop watching a process."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def ended(self) -> list[bytes]:
        """Return the names of processes that have ended since the last call, and stop watching them."""
        names: list[bytes] = [key.data for key, _ in self._selector.select(0)]
        for name in names:
            self.forget(name)
        return names
