"""What a project needs that others can join: licence, citation, one version, workflows that call make."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (CHECKOUT / name).read_text()


def test_one_licence():
    assert text("LICENSE").startswith("MIT License\n\nCopyright (c) 2026 The FastSparse authors\n")
    assert re.search(r'^license = "MIT"$', text("pyproject.toml"), re.MULTILINE)
    assert re.search(r"^license: MIT$", text("CITATION.cff"), re.MULTILINE)


def test_one_version():
    (version,) = re.findall(r'^version = "(.+)"$', text("pyproject.toml"), re.MULTILINE)
    assert re.findall(r"^version: (.+)$", text("CITATION.cff"), re.MULTILINE) == [version]
    headings = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def test_the_changelog_is_short():
    for section in re.split(r"^## ", text("CHANGELOG.md"), flags=re.MULTILINE)[1:]:
        assert len(re.findall(r"^- ", section, re.MULTILINE)) <= 15, section.splitlines()[0]


def test_the_readme_and_the_citation_name_the_same_papers():
    titles = re.findall(r'^    title: "(.+)"$', text("CITATION.cff"), re.MULTILINE)
    assert len(titles) == 5
    assert [title for title in titles if title not in text("README.md")] == []


def test_workflows_run_what_make_knows():
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    for workflow in (CHECKOUT / ".github" / "workflows").glob("*.yml"):
        for command in re.findall(r"run: make (.+)", workflow.read_text()):
            assert set(command.split()) <= targets, (workflow.name, command)
