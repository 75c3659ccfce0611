"""Sentences on the pages: no longer than a reader can hold, and in the words that the field uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LONGEST = 35
#: What is not written -> what is written instead.
BANNED = {
    r"\brivals?\b": "baseline",
    r"(?<!at )(?<!At )\bleast\b": "worst case, smallest",
    r"\btwins?\b": "masked function",
    r"\b[Rr]oom (for|of|in)\b": "capacity",
    r"\bjournal\b": "rollback",
    r"\bobstacles?\b": "reason",
    r"\blies?\b": "is, are",
    r"\b(comes?|came) again\b": "is used again",
    r"\b(sets?|bounds?) the pace\b|\bhost (decides|bounds)\b": "launch overhead decides",
    r"\bof which\b|\bwhich those\b|\bthat which\b": "a sentence of its own",
    r"\bbut for\b|\bsave for\b": "except",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, during, with",
    r"\bserves?\b|\bserved\b": "supports, runs",
    r"\btakes? no notice\b": "ignores",
    r"\bin turn\b|\bthe like\b|\band its like\b": "and similar",
    r"\bis said (once|by)\b|\bsays? so on\b": "is logged",
    r"\b(are|is|were|was|been) noticed\b": "is detected",
    r"\bTo no\b|\bOf (these|those) only\b": "subject first",
    r"^(What|Whatever|Whoever|Where|Whether) [^?]*[.:]$": "subject, verb, object",
}
#: Pages that are not clean yet. Take a page out when it is; add none.
NOT_YET = {
    "CHANGELOG.md",
    "docs/dev/adding_an_operator.md",
    "docs/dev/additive_attention.md",
    "docs/dev/architecture.md",
    "docs/dev/attention.md",
    "docs/dev/attention_bsb.md",
    "docs/dev/decisions/one_attention.md",
    "docs/dev/edge_features.md",
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
    """The sentences in paragraphs, lists and cells of tables; code and headings are left out."""
    text = re.sub(r"^```.*?^```", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^`]*``|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$", "X", text, flags=re.DOTALL)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if paragraph.lstrip().startswith("#"):
            continue
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


@pytest.mark.parametrize("page", sorted(PAGES.keys() - GENERATED - NOT_YET))
def test_page(page: str) -> None:
    assert faults(PAGES[page].read_text()) == []


def test_the_list_of_other_pages_only_shrinks() -> None:
    assert {page for page in NOT_YET if page not in PAGES or not faults(PAGES[page].read_text())} == set()


def test_faults_are_found() -> None:
    long = " ".join(["Word"] * (LONGEST + 1)) + "."
    table = "| the rival | ok |\n|---|---|\n"
    text = f"# What is here\n\nIt is good. {long}\n\n{table}\n- What no kernel covers runs PyG.\n"
    assert [fault.partition(":")[0] for fault in faults(text)] == [
        f"{LONGEST + 1} words",
        "'rival', write 'baseline'",
        "'What no kernel covers runs PyG.', write 'subject, verb, object'",
    ]
    assert faults("What is it? `rival`\n\n```python\nrival = 1\n```\n") == []
