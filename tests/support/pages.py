"""README.md, CONTRIBUTING.md and docs/: their text, commands, headings and links."""

from __future__ import annotations

import re

from support.processes import ROOT

README, RUNNING = "README.md", "docs/running.md"
HOMEWORK, PARALLEL = "docs/lesson/homework.md", "docs/lesson/parallel.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchor(title: str) -> str:
    """GitHub's: lower case, spaces to dashes, without punctuation."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


class Page:
    """A page, by its path under the repository's root."""

    def __init__(self, name: str) -> None:
        self.name, self.text = name, (ROOT / name).read_text()
        blocks = [(m[1], m[2]) for m in FENCED.finditer(self.text)]
        self.commands = [text for kind, text in blocks if kind == "bash"]
        self.printed = [text for kind, text in blocks if kind == "text"]
        self.prose = FENCED.sub("", self.text)
        self.anchors = [*map(anchor, re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE))]
        self.links = re.findall(r"\]\(([^)]+)\)", self.prose)


DOCS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))]
PAGES = {name: Page(name) for name in [README, "CONTRIBUTING.md", *DOCS]}
