"""The support table, its pages, the metadata and the workflows name the same versions."""

from __future__ import annotations

import re

import pytest
import support

PYTHONS = [row["python"] for row in support.rows()]


@pytest.mark.parametrize("page", support.PAGES)
def test_pages_show_the_table(page):
    assert support.shown(page) == support.table(), "run `python tests/packaging/support.py`"


def test_metadata_and_workflows_name_the_pythons():
    project = (support.CHECKOUT / "pyproject.toml").read_text()
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in project
    workflows = support.CHECKOUT / ".github" / "workflows"
    quoted = ", ".join(f'"{version}"' for version in PYTHONS)
    assert f"python: [{quoted}]" in (workflows / "checks.yml").read_text()
    assert re.findall(r"^ +(3\.\d+)$", (workflows / "release.yml").read_text(), re.MULTILINE) == PYTHONS


@pytest.mark.parametrize(("package", "key"), [("torch", "torch"), ("torch_geometric", "pyg"), ("dgl", "dgl")])
def test_the_oldest_versions_are_the_bounds(package, key):
    """What the metadata promises is what is tried."""
    project = (support.CHECKOUT / "pyproject.toml").read_text()
    (bound,) = re.findall(rf'"{package}>=([\d.]+)', project)
    versions = [row[key] for row in support.rows() if key in row]
    oldest = min(versions, key=lambda version: [int(part) for part in version.split(".")])
    assert (oldest + ".").startswith(bound + ".")
