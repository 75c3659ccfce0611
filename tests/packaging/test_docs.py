"""Links and paths in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(CHECKOUT.glob("*.md")), *sorted(CHECKOUT.glob("docs/**/*.md"))]
TOP_FOLDERS = r"(?:kernels|fastsparse_pyg|fastsparse_dgl|examples|tests|docs|benchmarks|\.ci)"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_document(document):
    text = document.read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (document.parent / link).exists()] == []
    paths = re.findall(rf"`({TOP_FOLDERS}/[\w./-]*)`", text)
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []
