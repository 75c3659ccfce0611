"""Sentences on the pages, messages and titles of commits: short, and in the words that the field uses.

As a script it checks the titles of the commits in a range, as `main..HEAD`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LONGEST = 35
LONGEST_TITLE = 72
#: What is not written -> what is written instead.
BANNED = {
    r"\brivals?\b": "baseline",
    r"(?<!at )(?<!At )(?<!takes )\bleast\b(?!-significant)": "worst case, smallest",
    r"\btwins?\b": "masked function",
    r"\b[Rr]oom (for|of|in)\b": "capacity",
    r"\bjournal\b": "rollback",
    r"\bobstacles?\b": "reason",
    r"\blies?\b": "is, are",
    r"\b(comes?|came) again\b": "is used again",
    r"\b(sets?|bounds?) the pace\b|\bhost (decides|bounds)\b": "launch overhead decides",
    r"(?<!each )(?<!some )(?<!both )(?<!one )\bof which\b|\bwhich those\b|\bthat which\b": "two sentences",
    r"\bbut for\b|\bsave for\b": "except",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, during, with",
    r"(?<!/)\bserves?\b(?!/|\.py)|\bserved\b": "supports, runs",
    r"\btakes? no notice\b": "ignores",
    r"\bin turn\b|\bthe like\b|\band (its|their) like\b": "and similar",
    r"\bis said (once|by)\b|\bsays? so on\b": "is logged",
    r"\b(are|is|were|was|been) noticed\b": "is detected",
    r"\bTo no\b|\bOf (these|those) only\b": "subject first",
    r"\b[Nn]obody\b|\b[Ss]omebody\b|\b[Ww]hoever\b": "no, not, only, who does it",
    r"(^|[.:] )Of (?!(course|the)\b)[^.,:]+,": "subject first",
    r"^(What|Whatever|Whoever|Where|Whether) [^?]*[.:]$": "subject, verb, object",
    r"^(If|When|Because|While) [^,]*\.$": "a main clause",
}
#: Written from records, mostly tables.
GENERATED = {f"docs/results/{path.name}" for path in (CHECKOUT / "docs" / "results").glob("*.md")} - {
    "docs/results/method.md"
}
PAGES = {
    path.relative_to(CHECKOUT).as_posix(): path
    for path in [*sorted(CHECKOUT.glob("*.md")), *sorted(CHECKOUT.glob("docs/**/*.md"))]
}


def sentences(text: str) -> list[str]:
    """The sentences in headings, paragraphs, lists and cells of tables; code is left out."""
    text = re.sub(r"^```.*?^```", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^`]*``|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$", "X", text, flags=re.DOTALL)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        paragraph = re.sub(r"^\s*#+ ", "", paragraph)
        is_table = paragraph.lstrip().startswith("|")
        for part in re.split(r"[|\n]", paragraph) if is_table else [paragraph]:
            line = re.sub(r"\s+", " ", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", part)).replace("**", "").strip()
            # Not after "e.g.", an initial or a number of a version.
            found += [one for one in re.split(r"(?<=[a-zA-Z0-9)%\"'][.!?:;]) (?=[A-Z\"(])", line) if one]
    return found


def faults(text: str) -> list[str]:
    """What is wrong with a page, with the sentence that it is in."""
    found = []
    for sentence in sentences(text):
        if (count := len(sentence.split())) > LONGEST:
            found.append(f"{count} words: {sentence}")
        found += [
            f"{match[0]!r}, write {instead!r}: {sentence}"
            for pattern, instead in BANNED.items()
            if (match := re.search(pattern, sentence))
        ]
    return found


def title_faults(title: str) -> list[str]:
    """What is wrong with a commit's title."""
    found = [f"{len(title)} characters: {title}"] if len(title) > LONGEST_TITLE else []
    if title.endswith(".") or re.match(r"(wip|fixup!|squash!)", title, re.IGNORECASE):
        found.append(f"not a title that can stay: {title}")
    return found + faults(title)


@pytest.mark.parametrize("page", sorted(PAGES.keys() - GENERATED))
def test_page(page: str) -> None:
    assert faults(PAGES[page].read_text()) == []


def messages(code: str) -> list[str]:
    """The texts in a file that are no docstrings: error messages, warnings, reasons, log lines."""
    tree = ast.parse(code)
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            found.append(
                "".join(
                    getattr(part, "value", "") if isinstance(part, ast.Constant) else "X"
                    for part in node.values
                )
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            found.append(node.value)
    return [text for text in found if len(text.split()) > 4 and "\n" not in text]


@pytest.mark.parametrize(
    "package", ["kernels/fastsparse_core", "fastsparse_pyg", "fastsparse_dgl", "fastsparse_run"]
)
def test_messages(package: str) -> None:
    paths = sorted((CHECKOUT / package).rglob("*.py"))
    assert {
        path.name: found
        for path in paths
        if (found := [fault for text in messages(path.read_text()) for fault in faults(text)])
    } == {}


def notes(path: Path) -> list[str]:
    """The comments and docstrings of a file of Python, C++ or CUDA, each run of comments as one text."""
    code = path.read_text()
    if path.suffix != ".py":
        return ["\n".join(re.findall(r"//+(.*)", run)) for run in re.findall(r"(?:.*//.*\n)+", code)]
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    lines = {token.start[0]: token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT}
    runs: list[str] = []
    for number, line in lines.items():
        if number - 1 in lines:
            runs[-1] += f"\n{line}"
        else:
            runs.append(line)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(code)) if isinstance(node, owners)]
    return runs + [text for text in found if text]


@pytest.mark.parametrize(
    "folder",
    [
        *("kernels", "fastsparse_pyg", "fastsparse_dgl", "fastsparse_run", "examples", "tests"),
        *("benchmarks", "setup.py"),
    ],
)
def test_comments(folder: str) -> None:
    """The words alone: a comment need not be a sentence."""
    words = {pattern: instead for pattern, instead in BANNED.items() if pattern[0] != "^"}
    kinds = {".py", ".h", ".cuh", ".cpp", ".cu"}
    place = CHECKOUT / folder
    paths = [place] if place.is_file() else [one for one in sorted(place.rglob("*")) if one.suffix in kinds]
    assert [
        f"{path.name}: {match[0]!r}, write {instead!r}: {text}"
        for path in paths
        for text in notes(path)
        for pattern, instead in words.items()
        if (match := re.search(pattern, re.sub(r"``[^`]*``|`[^`]*`", "X", re.sub(r"\s+", " ", text))))
    ] == []


def test_faults_are_found(tmp_path: Path) -> None:
    long = " ".join(["Word"] * (LONGEST + 1)) + "."
    table = "| the rival | ok |\n|---|---|\n"
    text = f"# What is here\n\nIt is good. {long}\n\n{table}\n- What no kernel covers runs PyG.\n"
    assert [fault.partition(":")[0] for fault in faults(text)] == [
        f"{LONGEST + 1} words",
        "'rival', write 'baseline'",
        "'What no kernel covers runs PyG.', write 'subject, verb, object'",
    ]
    assert messages('"""The rival."""\nraise ValueError(f"{name}: the rival of all {names} is faster")') == [
        "X: the rival of all X is faster"
    ]
    (python := tmp_path / "a.py").write_text('"""The rival."""\nx = "a rival"  # of the\n# rival\n')
    (cuda := tmp_path / "a.cu").write_text("// of the\n// rival\nint rival = 1;\n")
    assert notes(python) == ["of the\nrival", "The rival."]
    assert notes(cuda) == [" of the\n rival"]
    assert faults("What is it? `rival`\n\n```python\nrival = 1\n```\n") == []


def test_faults_of_titles_are_found() -> None:
    assert title_faults("Check the small-graph fallback once per call") == []
    title = "Journal of rivals, " + "x" * LONGEST_TITLE
    assert [fault.partition(":")[0] for fault in title_faults(title)] == [
        f"{len(title)} characters",
        "'rivals', write 'baseline'",
    ]
    assert len(title_faults("fixup! Add a test")) == len(title_faults("Add a test.")) == 1


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="needs the repository")
def test_a_range_without_commits_passes() -> None:
    assert subprocess.run([sys.executable, __file__, "HEAD..HEAD"], cwd=CHECKOUT).returncode == 0


if __name__ == "__main__":
    log = ["git", "log", "--no-merges", "--format=%s", sys.argv[1]]
    titles = subprocess.run(log, text=True, capture_output=True, check=True).stdout.splitlines()
    sys.exit("\n".join(fault for title in titles for fault in title_faults(title)) or None)
