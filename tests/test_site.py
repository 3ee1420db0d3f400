"""The documentation site: its links, its navigation, its generated pages, and that it builds without a warning."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import click
import pytest

import lsgd.client
from lsgd.algorithms import ALGORITHMS
from lsgd.cli.commands import main as lsgd_command
from lsgd.plan.plan import flag
from lsgd.plan.run import RunSettings
from lsgd.server.cli import main as server_command
from lsgd.settings import fields
from scripts.docs import figure, reference
from scripts.docs.__main__ import FENCE, ROOT, rewritten, sources, stage

LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
SETTINGS = {name for cls in (RunSettings, *ALGORITHMS.values()) for name in fields(cls)}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them, and so does the site."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", heading).lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


@pytest.mark.parametrize("page", sources(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_of_a_page_resolve(page):
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page} links to {target}, which is not there"
        assert not anchor or anchor in anchors(linked), f"{page} links to {target}#{anchor}, which is not there"


def test_each_question_is_answered_two_clicks_from_the_start_page():
    """The first click leads to the questions, the second to a page that has the commands of the answer."""
    questions = ROOT / "docs" / "start" / "questions.md"
    start = (ROOT / "README.md").read_text()
    assert f"]({questions.relative_to(ROOT)})" in start
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+\? \| .+) \|$", questions.read_text(), re.M)]
    assert len(rows) == 12
    for question, answer, page in rows:
        pages = [(questions.parent / target).resolve().read_text() for target, _ in LINK.findall(page)]
        commands = [code for code in re.findall(r"`([^`]+)`", answer) if code.startswith(("lsgd ", "RESUME", "--"))]
        for command in commands:
            word = command.partition(" -- ")[0]
            assert any(word in text for text in pages), f"{question}: none of its pages has {word}"


def test_the_start_page_fits_on_three_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_links_are_rewritten_for_the_site_and_fenced_code_is_not():
    code = "```\n[a](docs/start/own-run.md)\n```\n"
    text = "[a](docs/start/own-run.md#x) [b](examples/plain.py) [c](https://a.org/) [d](#e)\n"
    on_site = "[a](start/own-run.md#x) [b](files/examples/plain.py.md) [c](https://a.org/) [d](#e)\n"
    assert rewritten(text + code, "README.md") == on_site + code
    assert (
        rewritten("[a](../../README.md) [b](../../docs/x.md)", "benchmarks/results/y.md")
        == "[a](../index.md) [b](../x.md)"
    )


def test_pages_that_the_package_names_are_there():
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / "lsgd").rglob("*.py")
        for name in re.findall(r"\b(?:docs|benchmarks)/[\w/-]+\.md", path.read_text())
    }
    assert len(named) > 10 and [each for each in named if not (ROOT / each[1]).is_file()] == []


def in_navigation(entries):
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else in_navigation(value)


def test_every_page_is_in_the_navigation_once(tmp_path):
    stage(tmp_path)
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    listed = Counter(in_navigation(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert listed == Counter(page for page in pages if not page.startswith("files/"))


def by_heading(page):
    return dict(part.split("\n", 1) for part in page.split("\n## ")[1:])


def every_command(name, command):
    if isinstance(command, click.Group):
        for part in command.commands.values():
            yield from every_command(f"{name} {part.name}", part)
    else:
        yield name, command


def test_the_reference_names_every_command_and_option():
    sections = by_heading(reference.cli())
    commands = dict([*every_command("lsgd", lsgd_command), *every_command("lsgd-server", server_command)])
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        options = {
            text
            for param in command.params
            if isinstance(param, click.Option) and not param.hidden
            for text in param.opts
        }
        firsts = re.findall(r"^\| `([^`]+)`", sections[name], re.M)
        shown = {option for first in firsts for option in re.findall(r"(?<![\w-])--?[\w-]+", first)}
        assert options - shown <= {flag("algorithm"), *map(flag, SETTINGS)}, name
        assert bool(options - shown) == ("[setting of the plan]" in sections[name])


def test_the_reference_names_every_setting_with_its_meaning():
    sections = by_heading(reference.settings())
    assert sections.keys() == {"The run", *ALGORITHMS}
    for name, cls in {"The run": RunSettings, **ALGORITHMS}.items():
        rows = re.findall(r"^\| `(\w+)` \|", sections[name], re.M)
        assert rows == list(fields(cls)), name
        assert all(spec.metadata["meaning"].replace("<", "&lt;") in sections[name] for spec in fields(cls).values())


def test_the_reference_has_the_client_s_public_names():
    shown = re.findall(r"^::: \S+\.(\w+)$", reference.PYTHON, re.M)
    assert set(lsgd.client.__all__) <= set(shown)


@pytest.mark.parametrize("name", figure.FIGURES)
def test_a_figure_is_current(name):
    drawn = (figure.PICTURES / f"{name}.svg").read_text()
    assert drawn == figure.FIGURES[name].svg(), "make it anew: python -m scripts.docs.figure"


@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds of work, and much reading of files
@pytest.mark.skipif(not importlib.util.find_spec("zensical"), reason="pip install 'lsgd[docs]'")
def test_the_site_builds_without_a_warning():
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", ROOT / "scripts/docs.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "../guides/clusters/" in (ROOT / "build/site/clusters/index.html").read_text(), "old addresses lead on"
    page = (ROOT / "build/site/reference/python/index.html").read_text()
    assert 'id="lsgd.client.worker.Worker.join"' in page
    assert not re.search(r":(meth|class|func|attr|data):", page), "a docstring's role is no Markdown"
