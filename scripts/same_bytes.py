"""Packs sdists anew, so that the same files give the same bytes: ``python scripts/same_bytes.py FILE.tar.gz ...``.

Members are in the order of their names, and have the time SOURCE_DATE_EPOCH and no owner; so does the archive.
"""

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def pack_anew(path: Path, epoch: int) -> None:
    """Write an archive again in place."""
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            content = old.extractfile(member)
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            new.addfile(member, content)
    with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as compressed:
        compressed.write(packed.getvalue())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        pack_anew(Path(name), int(os.environ["SOURCE_DATE_EPOCH"]))
