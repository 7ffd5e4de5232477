"""Sphinx's settings for the site (`make site`), and what the docstrings of ffserve mean in it."""

from __future__ import annotations

import os
import re
import textwrap
from typing import Any

project = "ffserve"
author = "The ffserve authors"
copyright = "The ffserve authors. Apache License 2.0"
version = release = os.environ["FFSERVE_VERSION"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]
nb_execution_mode = "off"  # they have run
nb_render_markdown_format = "myst"
myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",  # notebooks of few headings
    "misc.highlighting_failure",  # cells of a shell
]
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_mock_imports = ["datasets", "grain", "pyspark", "ray", "tensorflow"]
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "ffserve"
html_static_path = ["static"]
html_css_files = ["ffserve.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher"],
    "header_links_before_dropdown": 4,
    "show_prev_next": False,
    "show_toc_level": 2,
    "check_switcher": False,
    "switcher": {"json_url": "../versions.json", "version_match": version},
}

SECTION = re.compile(r"^((?:Args|Attributes|Cost|Raises|Returns|Source|Yields)(?:, \w+)*):(.*)$")
NAME = r"\*{0,2}[\w.]+(?:\s\([^)]*\))?"
ENTRY = re.compile(rf"^({NAME}(?:,\s{NAME})*): (.*)$", re.S)


def escaped(text: str) -> str:
    """Return text whose only markup is code in backticks."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for k, part in enumerate(parts):
        if k % 2:
            parts[k] = f"``{part.strip('`')}``\\ "
        else:
            parts[k] = re.sub(r"([\\*|_`])", r"\\\1", part)
    return "".join(parts)


def entries(lines: list[str]) -> list[str]:
    """Return the body of a section: one entry a name, or prose."""
    body = textwrap.dedent("\n".join(lines)).strip("\n")
    found = re.split(r"\n(?=\S)", body)
    if not all(ENTRY.match(entry) for entry in found):
        return [escaped(" ".join(body.split()))]
    listed = []
    for entry in found:
        name, meaning = (" ".join(part.split()) for part in ENTRY.match(entry).groups())  # type: ignore[union-attr]
        listed.append(f"- **{escaped(name)}**: {escaped(meaning)}")
    return listed


def prose(lines: list[str]) -> list[str]:
    """Return paragraphs and lists; those that are indented are code."""
    made = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = paragraph.strip("\n").split("\n")
        if all(row.startswith("    ") for row in rows):
            made += ["::", "", *rows, ""]
        elif rows[0].startswith("- "):
            made += [escaped(row) for row in rows] + [""]
        else:
            made += [escaped(row.strip()) for row in rows] + [""]
    return made


def from_docstring(*arguments: Any) -> None:
    """Write a docstring of ffserve (CONTRIBUTING.md) as reStructuredText, in place."""
    lines: list[str] = arguments[-1]
    made: list[str] = []
    part: list[str] = []
    title = None
    for line in [*lines, "Args:"]:
        match = SECTION.match(line)
        ends = match or (title and line and not line.startswith(" "))
        if not ends:
            part.append(line)
            continue
        if title is None:
            made += prose(part)
        elif any(part):
            made += [f":{title}:", *(f"   {row}" for row in entries(part)), ""]
        title = match[1] if match else None
        # What stands beside the title is indented as what follows is, or as that of its own.
        rest = match[2].strip() if match else line
        part = [rest] if rest else []
        if match and rest:
            part = [f"        {rest}"]
    lines[:] = made


def setup(app: Any) -> None:
    """Let Sphinx call the function for docstrings."""
    app.connect("autodoc-process-docstring", from_docstring)
