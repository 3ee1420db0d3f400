"""The programs' own environment: made once, with the versions in requirements.txt."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".programs" / "venv"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SCHEMAS = Path(__file__).with_name("torchvision_schemas.py")
_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def make(folder: Path = FOLDER) -> str:
    """Return the interpreter of the environment; make it if it is not there, which takes minutes."""
    python = folder / "bin" / "python"
    whole = folder / "whole"  # it may have been interrupted
    if not whole.exists() or whole.read_text() != REQUIREMENTS.read_text():
        print(f"making {folder} with the packages of {REQUIREMENTS.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--requirement", str(REQUIREMENTS), "--editable", str(ROOT)], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        shutil.copy(SCHEMAS, site)
        (site / f"{SCHEMAS.stem}.pth").write_text(f"import {SCHEMAS.stem}\n")
        whole.write_text(REQUIREMENTS.read_text())
    return str(python)


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages in an interpreter's environment, without those that are not there."""
    if python == sys.executable:
        return {name: importlib.metadata.version(name) for name in packages if _is_here(name)}
    done = subprocess.run([python, "-c", _VERSIONS, *packages], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _is_here(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
