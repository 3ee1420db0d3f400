"""The objects below a URL: each operation succeeds, or raises an error that says which object and what to do.

fsspec is imported at first use: a launcher without a store does without it.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lsgd.errors import ConfigError, LsgdError

PART_NBYTES, PARTS = 5 << 20, 4
"""Size of the parts of an upload to S3 or Google's cloud, and how many are sent at a time to S3."""

MAX_PARTS = 9_000
"""S3 takes 10,000."""

_S3, _GOOGLE, _SFTP = ("s3", "s3a"), ("gs", "gcs"), ("sftp", "ssh")
_RENAMES = ("file", "local", *_SFTP)
"""Stores where a file is seen while it is written, and a rename puts it in the place of an older one at once."""

_WITH_FOLDERS = ("memory", "smb", *_RENAMES)
_TELL = (*_S3, *_GOOGLE, *_WITH_FOLDERS)
"""Stores whose libraries say how far an upload is."""

CONNECT_S, SILENT_S = 10, 60
"""How long a store may take to connect, and be silent, in seconds, where its library leaves that to us."""

_S3_PATIENCE = {"connect_timeout": CONNECT_S, "read_timeout": SILENT_S, "retries": {"max_attempts": 1}}
T = TypeVar("T")

_PACKAGES = "s3fs for s3://, gcsfs for gs://, huggingface_hub for hf://, paramiko for sftp://"


class StoreError(LsgdError):
    """A store did not do what was asked; trying again may help."""


def patiently(attempt: Callable[[], T], pauses_s: Sequence[float], say: Callable[[str], object]) -> T:
    """Return what ``attempt`` returns; after a StoreError, say so and try again after each of the pauses.

    Raises:
        StoreError: the last attempt has failed, too.
    """
    for pause_s in pauses_s:
        try:
            return attempt()
        except StoreError as error:
            say(f"{error}; trying again in {pause_s:g} s")
            threading.Event().wait(pause_s)
    return attempt()


def is_url(text: str) -> bool:
    """Whether a text names a store, and not a folder."""
    return "://" in text


class Store:
    """The objects below a URL, by their names relative to it.

    Args:
        connects: whether to connect now; otherwise the first operation does.

    Attributes:
        url: the URL, without a slash at its end.
        moved_s: time at which an operation in progress last moved data; None if none is in progress, or none that
            tells.
    """

    def __init__(self, url: str, *, connects: bool = True) -> None:
        self.url = url.rstrip("/")
        self.moved_s: float | None = None
        self._protocol = _known(url)
        self._fs: Any = None
        self._root = ""
        if connects:
            self._fs, self._root = _open(self.url)

    def names(self, under: str) -> list[str]:
        """Return the names of all objects below a name."""
        with self._asking(f"list {under}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(f"{self._root}/{under}")
            except FileNotFoundError:
                return []
            return sorted(path[len(self._root) :].lstrip("/") for path in found)

    def nbytes(self, name: str) -> int:
        """Return an object's size."""
        with self._asking(f"read {name}"):
            return int(self._fs.size(f"{self._root}/{name}"))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's content, or its bytes from ``start`` to ``end``."""
        with self._asking(f"read {name}"):
            if self._protocol in _SFTP and start is not None and end is not None:  # fsspec's waits for each 32 KB
                with self._fs.ftp.open(f"{self._root}/{name}", "rb") as file:
                    return b"".join(file.readv([(start, end - start)]))
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=start, end=end))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, which is there as a whole or not at all."""
        with self._asking(f"write {name}"), self._as_a_whole(name) as path:
            self._fs.pipe_file(path, content)

    def upload(self, name: str, file: Path) -> None:
        """Write a file as an object, which is there as a whole or not at all; check its size there."""
        nbytes = file.stat().st_size
        with self._asking(f"write {name}"), self._as_a_whole(name) as path:
            if self._protocol in _SFTP:  # fsspec's would not say how far it is
                self._fs.ftp.put(str(file), path, self._moved, confirm=False)
            else:
                self._fs.put_file(str(file), path, callback=self._callback(), **self._parts(nbytes))
            there = self._fs.size(path)
            # A log may have grown meanwhile; a checkpoint may be deleted by now, since there are newer ones.
            if there != nbytes and not nbytes <= there <= file.stat().st_size:
                raise OSError(f"{there} of {nbytes} bytes arrived")

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file."""
        with self._asking(f"read {name}"):
            self._fs.get_file(f"{self._root}/{name}", str(path), callback=self._callback())

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with self._asking(f"delete {name}"), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def _parts(self, nbytes: int) -> dict[str, int]:
        """Return the options for the parts of an upload of this size."""
        if self._protocol in _S3:
            return {"chunksize": max(PART_NBYTES, -(-nbytes // MAX_PARTS)), "max_concurrency": PARTS}
        return {"chunksize": PART_NBYTES} if self._protocol in _GOOGLE else {}

    @contextmanager
    def _as_a_whole(self, name: str) -> Iterator[str]:
        """Yield the path to write an object to; after that it takes the place of an older one."""
        path = f"{self._root}/{name}"
        if self._protocol in _WITH_FOLDERS:  # elsewhere this might create a bucket
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if self._protocol in _RENAMES:
            try:
                yield f"{path}.tmp"
                self._fs.mv(f"{path}.tmp", path)
            except Exception:
                with suppress(Exception):
                    self._fs.rm_file(f"{path}.tmp")
                raise
        else:
            yield path

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn whatever the store's library raises into a StoreError; after one, connect again."""
        self._moved()
        try:
            if self._fs is None:
                self._fs, self._root = _open(self.url)
            yield
        except Exception as error:
            if self._fs is not None and not self._fs.async_impl:  # others have no connection that lasts
                self._fs = None
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise StoreError(f"the store {self.url} cannot {what}: {why}") from None
        finally:
            self.moved_s = None

    def _moved(self, *counts: int) -> None:
        if self._protocol in _TELL:
            self.moved_s = time.monotonic()

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": lambda *_, **__: self._moved()})


def _known(url: str) -> str:
    """Return a URL's protocol, and import what it needs.

    Raises:
        ConfigError: it is none, or its package is missing.
    """
    from fsspec import available_protocols, get_filesystem_class

    if not is_url(url):
        raise ConfigError(f"{url} is no store: give a URL, such as s3://bucket/run or file:///shared/run")
    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        raise ConfigError(
            f"{url} needs another package: {error}; install it ({_PACKAGES}): {sys.executable} -m pip install PACKAGE"
        ) from None
    except ValueError as error:
        known = ", ".join(sorted(p for p in available_protocols() if p in (*_TELL, "hf")))
        raise ConfigError(f"the store {url} cannot be opened: {error}; known are {known} and fsspec's others") from None
    for library in ("gcsfs", "paramiko"):  # they write, with tracebacks, what they also raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    return protocol


def _open(url: str) -> tuple[Any, str]:
    """Return a URL's file system, and the path in it; connect to its server if the connection lasts."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"skip_instance_cache": True}
    if protocol in _S3:
        options["config_kwargs"] = _S3_PATIENCE | conf.get("s3", {}).get("config_kwargs", {})
    if protocol in _SFTP:
        options |= {"timeout": CONNECT_S, "host_key_policy": _known_hosts()} | conf.get(protocol, {})
    try:
        filesystem, path = url_to_fs(url, **options)
    except Exception as error:
        raise ConfigError(f"the store {url} cannot be opened: {error}") from None
    if protocol in _SFTP:
        filesystem.ftp.get_channel().settimeout(SILENT_S)
    return filesystem, str(path).rstrip("/")


def _known_hosts() -> Any:
    """Return what checks an SFTP server's key: those in known_hosts are accepted, where fsspec accepts any."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc, unused-ignore]
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            known = paramiko.HostKeys()
            for path in (Path("/etc/ssh/ssh_known_hosts"), Path.home() / ".ssh" / "known_hosts"):
                if path.is_file():
                    known.load(str(path))
            if not known.check(hostname, key):
                raise paramiko.SSHException(
                    f"its key ({key.get_name()}) is not in ~/.ssh/known_hosts; log in once by ssh, and compare it"
                )

    return KnownHosts()
