"""Release notes of a tag, out of docs/CHANGELOG.md, to standard output.

    python3 .ci/notes.py v0.1.0

Links to documents become links to those of the tag where GITHUB_REPOSITORY names the repository, as
in a workflow, and plain text elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "docs" / "CHANGELOG.md"


def notes(changelog: str, tag: str, repository: str | None = None) -> str:
    """Return the section of a tag.

    Args: changelog: its text. repository: "https://HOST/OWNER/NAME".
    Raises: ValueError: there is no section, or it says that the version is not released.
    """
    for section in re.split(r"^## ", changelog, flags=re.M)[1:]:
        heading, _, text = section.partition("\n")
        if heading.split(",")[0] == tag.removeprefix("v"):
            break
    else:
        raise ValueError(f"docs/CHANGELOG.md has no section for {tag}")
    if "not yet released" in heading:
        raise ValueError(
            f"docs/CHANGELOG.md says `## {heading}`: write the date in place of `not yet released`"
        )
    target = rf"[\1]({repository}/blob/{tag}/docs/\2)" if repository else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)", target, text).strip() + "\n"


def main() -> int:
    """Print the notes of the tag that is named."""
    host = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    named = os.environ.get("GITHUB_REPOSITORY")
    try:
        [tag] = sys.argv[1:]
        print(notes(CHANGELOG.read_text(), tag, named and f"{host}/{named}"), end="")
    except ValueError as error:
        print(f"notes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
