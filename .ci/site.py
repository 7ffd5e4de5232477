"""The site: documents, tutorials and reference as HTML, into dist/site/VERSION (`make site`).

    .venv/bin/python .ci/site.py                     # runs the tutorials, then builds
    .venv/bin/python .ci/site.py --tutorials sweep   # runs one; the others as they ran last

The sources stay as they are read on a host of repositories. What Sphinx gets is a copy in
build/site: README is its first page; tutorials are notebooks, made by jupytext and executed from
beginning to end; links to files that are no page become text. A warning is an error. dist/site has
a folder for each version and versions.json, from which the pages offer the others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import ffserve

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "site"
OUTPUT = ROOT / "dist" / "site"
DATA = ROOT / ".venv" / "site-data"
"""Where .ci/setup puts the packages with pictures and sounds."""
NOT_RUN = re.compile(r"^<!-- not run: .*? -->\n```\S+\n", re.M)
HEADER = """---
jupyter:
  kernelspec:
    display_name: Python 3
    language: python
    name: python3
---
"""
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)")
PAGES = {
    "Tutorials": "tutorials/README tutorials/pictures tutorials/tokens tutorials/sweep "
    "tutorials/store",
    "How to": "howto/install howto/pictures howto/lines howto/tar howto/any-dataset howto/train "
    "howto/read howto/parts howto/convert howto/coming-from howto/several-jobs "
    "howto/without-daemon howto/remote howto/many-nodes howto/service howto/mount "
    "howto/replace howto/command-line INPUTS SPARK RAY KUBERNETES OPERATIONS",
    "Reference": "api TORCH CONFIGURATION REFERENCE FORMATS POLICY SECURITY GLOSSARY BENCHMARKS",
    "Development": "CONTRIBUTING ARCHITECTURE PROTOCOL decisions/README CHANGELOG",
}
"""Sections of the site, and their pages in the order of the menu."""
API = {
    "Files": "ffserve.open ffserve.Reader ffserve.Batch ffserve.create ffserve.Writer "
    "ffserve.pack_folder ffserve.PackedFolder",
    "PyTorch": "ffserve.torch.*",
    "Event loops": "ffserve.aio.open ffserve.aio.Reader",
    "Features of tf.train.Example": "ffserve.example.decode ffserve.example.encode "
    "ffserve.example.decode_sequence ffserve.example.encode_sequence ffserve.example.to_arrow",
    "Other frameworks": "ffserve.tensorflow.dataset ffserve.tensorflow.examples "
    "ffserve.tensorflow.chunks ffserve.grain.Source ffserve.hf.dataset ffserve.hf.write "
    "ffserve.ray.read ffserve.ray.write ffserve.spark.register",
    "Conversion, inputs, packing": "ffserve.convert.convert "
    "ffserve.convert.ConversionReport ffserve.inputs.* ffserve.packing.plan ffserve.packing.Plan",
    "Drop-ins": "ffserve.FileReader ffserve.FileWriter ffserve.checkFsAlign",
    "Errors": "ffserve.FFServeError ffserve.AccessDenied ffserve.ChecksumError "
    "ffserve.FormatError ffserve.MissingFile ffserve.ProtocolError ffserve.ReadError "
    "ffserve.SampleIndexError ffserve.ServerUnavailable ffserve.TruncatedError ffserve.UsageError",
}
"""What the reference has; `module.*` stands for the names that a module lists."""


def say(text: str) -> None:
    """Print progress."""
    print(f"site: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- tutorials


def notebook(path: Path) -> nbformat.NotebookNode:
    """Return a tutorial as a notebook. Blocks that are not to be run become text."""
    text = NOT_RUN.sub("```text\n", path.read_text())
    # Else the language with the most blocks is that of the notebook.
    made = jupytext.reads(HEADER + text, fmt="md")
    made.metadata["language_info"] = {"name": "python"}
    return made


def execute(name: str) -> Path:
    """Run a tutorial in an empty folder beside the data; return the notebook with its output.

    Raises: CellExecutionError: a cell failed.
    """
    made = notebook(ROOT / "docs/tutorials" / f"{name}.md")
    target = BUILD / "notebooks" / f"{name}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    programs = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="ffs-") as folder:
        for path in DATA.iterdir():
            (Path(folder) / path.name).symlink_to(path)
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "FFSERVE_SOCKET": f"{folder}/s",
            "XDG_CACHE_HOME": f"{folder}/cache",
            "PYTHONWARNINGS": "ignore",
            "NO_COLOR": "1",
        }
        client = NotebookClient(made, timeout=600, resources={"metadata": {"path": folder}})
        try:
            client.execute(env=environment)
        finally:
            words = [programs / "ffserve", "stop"]
            subprocess.run(words, env=environment, capture_output=True)
    nbformat.write(made, target)
    return target


# ---------------------------------------------------------------- sources


def stage() -> Path:
    """Copy the documents for Sphinx; return the directory."""
    place = BUILD / "source"
    shutil.rmtree(place, ignore_errors=True)
    leave = shutil.ignore_patterns("kubernetes", "monitoring", "bench.json", "LICENSE", "*.dot")
    shutil.copytree(ROOT / "docs", place, ignore=leave)
    for path in place.rglob("*.md"):
        path.write_text(with_links(path.read_text(), path.relative_to(place).parent, place))
    first = re.sub(r'(\]\(|src(?:set)?=")docs/', r"\1", (ROOT / "README.md").read_text())
    sections = [title.lower().replace(" ", "-") for title in PAGES]
    for name, (title, pages) in zip(sections, PAGES.items(), strict=True):
        (place / f"{name}.md").write_text(f"# {title}\n{menu(pages)}")
    (place / "index.md").write_text(
        with_links(first, Path(), place) + menu(" ".join(sections), ":hidden:")
    )
    decisions = sorted(path.stem for path in (place / "decisions").glob("[a-z]*.md"))
    with (place / "decisions/README.md").open("a") as file:
        file.write(menu(" ".join(decisions), ":hidden:"))
    (place / "api.md").write_text(reference())
    for path in (place / "tutorials").glob("[a-z]*.md"):
        path.unlink()
        text = (BUILD / "notebooks" / f"{path.stem}.ipynb").read_text()
        made = nbformat.reads(text, as_version=4)
        for cell in made.cells:
            if cell.cell_type == "markdown":
                cell.source = with_links(cell.source, Path("tutorials"), place)
        nbformat.write(made, path.with_suffix(".ipynb"))
    for path in (ROOT / ".ci/site").iterdir():
        if path.is_dir():
            shutil.copytree(path, place / path.name)
        else:
            shutil.copy(path, place)
    return place


def menu(pages: str, options: str = "") -> str:
    """Return a list of pages, which is also a part of the menu."""
    listed = "\n".join(pages.split())
    return f"\n```{{toctree}}\n:maxdepth: 1\n{options}\n\n{listed}\n```\n"


def with_links(text: str, folder: Path, place: Path) -> str:
    """Return a document whose links lead to pages, pictures and other sites only."""

    def linked(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match[0]
        at = os.path.normpath(folder / path)
        if at == "../README.md":
            up = os.path.relpath("index.md", folder)
            return f"[{label}]({up}{'#' * bool(anchor)}{anchor})"
        if re.match(r"tutorials/[a-z]+\.md$", at):
            return f"[{label}]({path.removesuffix('.md')}.ipynb)"
        return match[0] if (place / at).is_file() else label

    return LINK.sub(linked, text)


def reference() -> str:
    """Return the page of the reference."""
    lines = ["# Python reference\n"]
    for title, names in API.items():
        lines.append(f"## {title}\n\n```{{eval-rst}}")
        for name in names.split():
            module, _, attribute = name.rpartition(".")
            listed = [attribute]
            if attribute == "*":
                listed = sorted(importlib.import_module(module).__all__)
            for each in listed:
                if each[0].isupper():
                    lines.append(f".. autoclass:: {module}.{each}\n   :members:")
                    if name in ("ffserve.Reader", "ffserve.aio.Reader"):
                        lines.append("   :inherited-members:")
                elif each.islower():
                    lines.append(f".. autofunction:: {module}.{each}")
        lines.append("```\n")
    return "\n".join(lines)


# ---------------------------------------------------------------- the build


def build(source: Path) -> Path:
    """Build the pages of this version; return their directory."""
    of = ffserve.__version__
    target = OUTPUT / of
    shutil.rmtree(target, ignore_errors=True)
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    environment = {**os.environ, "FFSERVE_VERSION": of}
    done = subprocess.run([*words, source, target], cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(done.returncode)
    for path in (BUILD / "notebooks").glob("*.ipynb"):
        shutil.copy(path, target / "tutorials")
    built = (path.parent.name for path in OUTPUT.glob("*/index.html"))
    versions = sorted(built, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    # Pages of folders need more than a relative address.
    base = os.environ.get("SITE_URL", "/")
    listed = [{"version": each, "url": f"{base}{each}/"} for each in versions]
    (OUTPUT / "versions.json").write_text(json.dumps(listed) + "\n")
    newest = f'<meta http-equiv="refresh" content="0; url={versions[0]}/">\n'
    (OUTPUT / "index.html").write_text(newest)
    (OUTPUT / ".nojekyll").touch()
    return target


def main() -> int:
    """Run tutorials and build the site."""
    names = sorted(path.stem for path in (ROOT / "docs/tutorials").glob("[a-z]*.md"))
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--tutorials", nargs="*", choices=names, default=names)
    for name in parser.parse_args().tutorials:
        say(f"running the tutorial {name}")
        try:
            execute(name)
        except CellExecutionError as error:
            say(f"docs/tutorials/{name}.md failed:\n{error}")
            return 1
    say(f"{build(stage()).relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
