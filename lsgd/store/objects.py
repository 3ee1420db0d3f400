"""The objects below a URL: each operation succeeds, or raises an error that says which object and what to do.

fsspec is imported at first use: a launcher without a store does without it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lsgd.errors import ConfigError, LsgdError

PART_NBYTES, PARTS = 5 << 20, 4
"""Size of the parts of an upload to S3, and how many are sent at a time."""

MAX_PARTS = 9_000
"""S3 takes 10,000."""

_S3 = ("s3", "s3a")
_S3_PATIENCE = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
_WITH_FOLDERS = ("file", "local", "memory", "sftp", "ssh", "smb")
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

    Attributes:
        url: the URL, without a slash at its end.
        moved_s: time at which an operation in progress last moved data; None if none is in progress.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.moved_s: float | None = None
        self._fs, self._root = _open(self.url)
        self._protocol = url.partition("://")[0]

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
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=start, end=end))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with self._asking(f"write {name}"):
            self._make_folder(name)
            self._fs.pipe_file(f"{self._root}/{name}", content)

    def upload(self, name: str, path: Path) -> None:
        """Write a file as an object, and check its size there."""
        nbytes = path.stat().st_size
        options: dict[str, Any] = {}
        if self._protocol in _S3:
            options = {"chunksize": max(PART_NBYTES, -(-nbytes // MAX_PARTS)), "max_concurrency": PARTS}
        with self._asking(f"write {name}"):
            self._make_folder(name)
            self._fs.put_file(str(path), f"{self._root}/{name}", callback=self._callback(), **options)
            there = self._fs.size(f"{self._root}/{name}")
            if there != nbytes:
                raise OSError(f"{there} of {nbytes} bytes arrived")

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file."""
        with self._asking(f"read {name}"):
            self._fs.get_file(f"{self._root}/{name}", str(path), callback=self._callback())

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with self._asking(f"delete {name}"), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def _make_folder(self, name: str) -> None:
        """Create the folders above an object where the store has folders; elsewhere this might create a bucket."""
        if self._protocol in _WITH_FOLDERS:
            self._fs.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn whatever the store's library raises into a StoreError."""
        self._moved()
        try:
            yield
        except Exception as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise StoreError(f"the store {self.url} cannot {what}: {why}") from None
        finally:
            self.moved_s = None

    def _moved(self) -> None:
        self.moved_s = time.monotonic()

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": lambda *_, **__: self._moved()})


def _open(url: str) -> tuple[Any, str]:
    """Return a URL's file system, and the path in it."""
    from fsspec import available_protocols
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    if not is_url(url):
        raise ConfigError(f"{url} is no store: give a URL, such as s3://bucket/run or file:///shared/run")
    options: dict[str, Any] = {"skip_instance_cache": True}
    if url.startswith(tuple(f"{name}://" for name in _S3)):
        options["config_kwargs"] = _S3_PATIENCE | conf.get("s3", {}).get("config_kwargs", {})
    try:
        filesystem, path = url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(f"{url} needs another package: {error}; pip install 'lsgd[store]', or: {_PACKAGES}") from None
    except Exception as error:
        known = ", ".join(sorted(p for p in available_protocols() if p in (*_S3, *_WITH_FOLDERS, "gs", "hf")))
        raise ConfigError(f"the store {url} cannot be opened: {error}; known are {known} and fsspec's others") from None
    return filesystem, str(path).rstrip("/")
