"""What pyproject.toml cannot do: mend the link lsgd/examples, which Python's zipfile unpacks as a file of text."""

from pathlib import Path

from setuptools import setup

link = Path(__file__).parent / "lsgd" / "examples"
if link.is_file():
    target = link.read_text()
    link.unlink()
    link.symlink_to(target)
setup()
