"""What a project needs that others can join: licence, citation, one version, workflows that call make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support

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
    assert f"version = {{{version}}}" in text("docs/citing.md")


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
    files = (".pre-commit-config.yaml", "docs/dev/releasing.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
    for name in (*files, ".github/PULL_REQUEST_TEMPLATE.md"):
        assert text(name).strip()
    assert "fastsparse_core.doctor" in text(".github/ISSUE_TEMPLATE/bug.yml")
    assert "another" in text("CONTRIBUTING.md").partition("## Licence")[2].partition("##")[0]
    assert re.search(r'^license-files = \["LICENSE"\]$', text("pyproject.toml"), re.MULTILINE)


def instructions(stage):
    """(instruction, rest) of a stage of the Dockerfile."""
    lines = re.sub(r"^#.*\n", "", stage, flags=re.MULTILINE).replace("\\\n", " ").splitlines()[1:]
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def copied(stage):
    return {name for kind, rest in stage if kind == "COPY" for name in rest.split()[:-1]}


def test_the_image():
    """An edit of a page or a plugin compiles nothing again; the result has no compiler and is not root's."""
    stages = re.split(r"^FROM ", text("Dockerfile"), flags=re.MULTILINE)[1:]
    build, runtime = map(instructions, stages)
    (compiled,) = (index for index, (_, rest) in enumerate(build) if "build_ext" in rest)
    assert copied(build[:compiled]) == {"pyproject.toml", "setup.py", "LICENSE", "kernels"}
    packages = {path.parent.name for path in CHECKOUT.glob("fastsparse_*/__init__.py")}
    assert copied(build[compiled:]) == {"README.md", *packages}

    assert "g++" not in str(runtime)
    kinds = [kind for kind, _ in runtime]
    assert "RUN" not in kinds[kinds.index("USER") :]
    assert ("USER", "1001") in runtime
    (torch,) = re.findall(r"^TORCH \?= (.+)$", text("Makefile"), re.MULTILINE)
    assert {("ARG", f"TORCH={torch}"), ("ARG", "TORCH_INDEX=")} <= set(runtime)


def test_the_conda_recipe():
    """Rendered with stand-ins for conda-build's functions, on Linux: what pip needs is what conda needs."""
    jinja2, yaml = pytest.importorskip("jinja2"), pytest.importorskip("yaml")
    linux = re.sub(r"^.*# \[win\]\n", "", text("recipe/meta.yaml"), flags=re.MULTILINE)
    rendered = jinja2.Template(linux, undefined=jinja2.StrictUndefined).render(
        compiler=lambda language: f"{language}-compiler",
        load_file_data=lambda name, from_recipe_dir: support.pyproject(),
        PYTHON="python",
    )
    recipe, project = yaml.safe_load(rendered), support.pyproject()
    assert recipe["package"] == {key: project["project"][key] for key in ("name", "version")}

    def packages(needed):
        return {need.replace(" ", "").replace("pytorch", "torch") for need in needed} - {"python", "pip"}

    assert packages(recipe["requirements"]["run"]) == set(project["project"]["dependencies"])
    assert packages(recipe["requirements"]["host"]) == set(project["build-system"]["requires"])
    assert recipe["test"]["commands"] == ["fastsparse doctor"]
    assert "skip" not in recipe["build"]
