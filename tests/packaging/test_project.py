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
        title, *lines = [line for line in section.splitlines() if line and not line.startswith("#")]
        assert len(lines) <= 15, title


def test_the_pages_and_the_citation_name_the_same_papers():
    titles = re.findall(r'^    title: "(.+)"$', text("CITATION.cff"), re.MULTILINE)
    assert len(titles) == 5
    assert [title for title in titles if title not in text("docs/citing.md")] == []


WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))


def test_workflows_run_what_make_knows():
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    called = set()
    for workflow in WORKFLOWS:
        for command in re.findall(r"run: make ([^#\n]+)", workflow.read_text()):
            called |= {word for word in command.split() if "=" not in word}
    assert called == {"lint", "typecheck", "test", "docs", "wheel", "wheel-check"}
    assert called <= targets
    for target in ("lint", "typecheck", "test", "docs"):
        assert f"in_make {target}" in text(".ci/run")


def test_actions_are_pinned():
    """By commit: a tag can be moved."""
    for workflow in WORKFLOWS:
        for action in re.findall(r"uses: (.+)", workflow.read_text()):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_files_for_contributors():
    for name in ("Dockerfile", ".pre-commit-config.yaml", "docs/dev/releasing.md"):
        assert text(name).strip()
    assert "fastsparse_core.doctor" in text(".github/ISSUE_TEMPLATE/bug.yml")
    assert "another" in text("CONTRIBUTING.md").partition("## Licence")[2].partition("##")[0]
    assert re.search(r'^license-files = \["LICENSE"\]$', text("pyproject.toml"), re.MULTILINE)
