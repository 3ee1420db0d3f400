"""Gathers the pages of the site in build/docs: ``python -m scripts.docs``; scripts/docs.sh builds it from them.

Those in docs/, those of benchmarks/results as performance/, README.md as the home page, CONTRIBUTING.md, CHANGELOG.md,
the generated reference, and a page for each other file of the repository that a page links to.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from scripts.docs import reference

ROOT = Path(__file__).parents[2]
STAGED = ROOT / "build" / "docs"
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "contributing/changelog.md",
}
FOLDERS = {"docs/": "", "benchmarks/results/": "performance/"}
"""What is copied to the site, and where to."""
OLD = {"operations": "guides/failures", "changelog": "contributing/changelog"}
"""Pages that have gone, beside those that stood outside of the folders, and where they lead."""
FORWARD = """<!doctype html><meta charset="utf-8"><title>Moved</title><a href="{0}">This page has moved.</a>
<script>location.replace("{0}" + location.hash)</script>
"""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
SHOWN = (".json", ".md", ".py", ".sbatch", ".sh", ".toml", ".yaml", ".yml")
"""Which files of a folder that a page links to are shown."""
FENCE = re.compile(r"^(```+).*?^\1$", re.M | re.S)


def sources() -> list[Path]:
    """Return the pages that people write."""
    return [
        *(ROOT / name for name in MOVED),
        *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md"))),
    ]


def stage(folder: Path) -> None:
    """Fill a folder with all pages, what they show, and what they link to."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, place in FOLDERS.items():
        shutil.copytree(ROOT / name, folder / place, dirs_exist_ok=True)
    linked: set[str] = set()
    for page in sources():
        name = page.relative_to(ROOT).as_posix()
        linked |= {target for target in links(page) if not target.startswith(tuple(FOLDERS))}
        _write(folder / _place(name), rewritten(page.read_text(encoding="utf-8"), name))
    for name in sorted(linked - MOVED.keys()):
        _write(folder / _place(name), _listing(ROOT / name))
    for name, text in reference.pages():
        _write(folder / "reference" / f"{name}.md", text)
    moved = {path.stem: f"{path.parent.name}/{path.stem}" for path in (ROOT / "docs").glob("*/*.md")} | OLD
    for old, new in moved.items():
        _write(folder / old / "index.html", FORWARD.format(f"../{new}/"))
    shutil.copy(Path(__file__).parent / "site.css", folder)


def links(page: Path) -> Iterator[str]:
    """Yield the files and folders of the repository that a page links to, from the repository's root."""
    for found in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield os.path.normpath(page.parent.relative_to(ROOT) / found[0])


def rewritten(text: str, name: str) -> str:
    """Return a page with its links as they are on the site; fenced code stays as it is."""
    folder = PurePosixPath(name).parent
    here = PurePosixPath(_place(name)).parent

    def moved(found: re.Match[str]) -> str:
        return os.path.relpath(_place(os.path.normpath(folder / found[0])), here)

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(moved, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join((*parts, LINK.sub(moved, text[end:])))


def _place(name: str) -> str:
    """Return where a file of the repository is on the site."""
    if name in MOVED:
        return MOVED[name]
    for folder, place in FOLDERS.items():
        if name.startswith(folder):
            return place + name.removeprefix(folder)
    return f"files/{name}.md"


def _listing(path: Path) -> str:
    """Return a page that shows a file, or the files of a folder."""
    name = path.relative_to(ROOT).as_posix()
    shown = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SHOWN)
    parts = [f"# {name}", ""]
    for file in shown:
        if file != path:
            parts += [f"## {file.relative_to(path).as_posix()}", ""]
        parts += [f"````{file.suffix[1:] or 'text'}", file.read_text(encoding="utf-8").rstrip(), "````", ""]
    return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    stage(Path(sys.argv[1]) if len(sys.argv) > 1 else STAGED)
