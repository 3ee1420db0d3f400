"""How many processors a container leaves to a process."""

import os
from pathlib import Path

import pytest

from lsgd.processors import usable

OWN = 8


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(text)


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names a process's control groups, on a machine of eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(OWN)))
    return tmp_path / "cgroup"


def test_without_control_groups_it_is_the_affinity(of, tmp_path):
    assert usable(of, tmp_path) == OWN
    of.write_text("3:memory:/a\n0::/a\n")
    assert usable(of, tmp_path) == OWN


@pytest.mark.parametrize(("quota", "number"), [("50000", 1), ("100001", 2), ("max", OWN), ("9900000", OWN)])
def test_version_2(of, tmp_path, quota, number):
    of.write_text("0::/a/b\n")
    group(tmp_path / "a" / "b", max=f"{quota} 100000\n")
    assert usable(of, tmp_path) == number


def test_a_group_above_has_the_smaller_quota(of, tmp_path):
    of.write_text("0::/a/b\n")
    group(tmp_path / "a" / "b", max="max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("100000 100000\n")
    assert usable(of, tmp_path) == 1


@pytest.mark.parametrize(("quota", "number"), [("20000", 2), ("-1", OWN)])
def test_version_1(of, tmp_path, quota, number):
    of.write_text("9:memory:/a\n1:cpu,cpuacct:/a\n")
    group(tmp_path / "cpu,cpuacct" / "a", cfs_quota_us=f"{quota}\n", cfs_period_us="10000\n")
    assert usable(of, tmp_path) == number


def test_a_container_sees_its_own_group_as_the_root(of, tmp_path):
    of.write_text("1:cpu:/docker/1234\n")
    group(tmp_path / "cpu", cfs_quota_us="5000\n", cfs_period_us="10000\n")
    assert usable(of, tmp_path) == 1
