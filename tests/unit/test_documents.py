"""The documents: every command and code block runs, and every link, file and name exists."""

from __future__ import annotations

import ast
import functools
import html
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
from daemon import Daemon

import ffserve
import ffserve.example
from benchmarks import readme
from ffserve import cli
from ffserve.client.daemon.preparing import prepared_source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
HISTORY = {"docs/CHANGELOG.md"}
"""Documents that may name what is no longer there."""
LANGUAGES = {"python", "sh", "toml", "text", "frames", "c"}
SMALLER = {"/data": "{folder}/data", "16GiB": "32MiB", "32GiB": "48MiB"}
"""What a block says, and what is put in its place when it is run."""

FENCE = re.compile(
    r"(?:^(?P<mark> *<!-- not run: .*? -->)\n)?"
    r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.*/{}-]+/[\w.-]+\.(?:py|c|h|md|toml|json|service|socket|dot|svg|png|proto)")


class Block(NamedTuple):
    """A fenced block: where it stands, its language, its text, whether it is run."""

    place: str
    language: str
    text: str
    runs: bool


def document(name: str) -> str:
    """Return a document's text."""
    return (ROOT / name).read_text()


@functools.cache
def blocks(name: str) -> tuple[Block, ...]:
    """Return the fenced blocks of a document."""
    text = document(name)
    found = []
    for match in FENCE.finditer(text):
        place = f"{name}:{text.count(chr(10), 0, match.start('indent')) + 1}"
        body = textwrap.dedent(match["text"])
        found.append(Block(place, match["language"], body, match["mark"] is None))
    assert 2 * len(found) == text.count("```"), f"{name}: a fence that does not end"
    return tuple(found)


def commands(name: str, languages: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the shell lines in blocks and of the commands in running text."""
    for block in blocks(name):
        if block.language in languages:
            for line in block.text.splitlines():
                yield block.place, line.partition("#")[0].rstrip()
    for span in CODE.findall(FENCE.sub("", document(name))):
        yield name, span


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("name", NAMES)
def test_blocks_say_their_language(name: str) -> None:
    for block in blocks(name):
        assert block.language in LANGUAGES, block.place
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "python":
            compile(block.text, block.place, "exec")
        if block.language == "sh":
            done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert done.returncode == 0, f"{block.place}: {done.stderr}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path with small data of every kind that the documents name."""
    path = Path(tempfile.mkdtemp(prefix="ffs-"))
    try:
        _fill(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _png(pixels: bytes, width: int) -> bytes:
    """Return an RGB picture of square pixels, so that no package is needed to make one."""
    rows = b"".join(b"\0" + pixels[k : k + 3 * width] for k in range(0, len(pixels), 3 * width))
    head = struct.pack(">IIBBBBB", width, len(pixels) // (3 * width), 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _fill(path: Path) -> None:
    random = np.random.default_rng(0)
    (path / "photos" / "cats").mkdir(parents=True)
    (path / "photos" / "cats" / "tom.jpg").write_bytes(b"\xff\xd8 tom")
    for number in range(20):
        (path / "photos" / f"{number}.jpg").write_bytes(random.bytes(500))
    for name in ("cats/tom", "cats/kit", "dogs/rex", "dogs/pup"):
        (path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "pictures" / f"{name}.png").write_bytes(_png(random.bytes(16 * 16 * 3), 16))
    (path / "corpus.txt").write_text("".join(f"line {number}\n" for number in range(1, 201)))
    for number in range(2):
        with ffserve.create(path / f"pictures-{number}.tfrecord") as writer:
            for label in range(2):
                image = _png(random.bytes(16 * 16 * 3), 16)
                writer.write(ffserve.example.encode({"image": image, "label": label}))
    np.save(path / "features.npy", random.random((10, 4)))
    for number in range(2):
        with tarfile.open(path / f"web-{number}.tar", "w") as tar:
            for key in range(5):
                info = tarfile.TarInfo(f"{number}{key}.txt")
                info.size = 5
                tar.addfile(info, io.BytesIO(b"words"))
    for directory, suffix in (("data/photos", "ffr"), ("web-shards", "tfrecord"), ("train", "ffr")):
        (path / directory).mkdir(parents=True)
        for number in range(2):
            with ffserve.create(path / directory / f"{number}.{suffix}") as writer:
                for _ in range(200):
                    sample = random.bytes(256)
                    writer.write(pickle.dumps(sample) if directory == "train" else sample)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "README.md" else pytest.param(name, marks=pytest.mark.check)
        for name in NAMES
        if not name.startswith("docs/tutorials/")  # `make site` runs them
        and any(b.runs and b.language in {"python", "sh"} for b in blocks(name))
    ],
)
def test_every_block_runs(name: str, folder: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("google.protobuf")
    pytest.importorskip("PIL")
    runs = []
    for block in blocks(name):
        if block.runs and block.language in {"python", "sh"}:
            text = block.text
            for said, used in SMALLER.items():
                text = text.replace(said, used.format(folder=folder))
            runs.append((block.place, block.language, text))
    (folder / "blocks.json").write_text(json.dumps(runs))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FFSERVE_SOCKET": str(folder / "s"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "run_document.py", "blocks.json"],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- commands


def _parameters(command: click.Command) -> set[str]:
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    return options | {"-h", "--help"}


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_of_ffserve_exist(name: str) -> None:
    for place, line in commands(name, {"sh"}):
        for words in re.findall(
            r"(?:^|[ /|&;])ffserve ((?:-?-?[a-z][\w-]*(?:[ =]|$)|\S+ ?)*)", line
        ):
            split = re.split(r"\||(?:^| )-- ", words)[0].split()
            if not split or not re.fullmatch(r"[a-z]+", split[0]) or split[0] in {"is", "as"}:
                continue
            assert split[0] in cli.COMMANDS, f"{place}: no command {split[0]!r} ({line})"
            command = cli.cli.get_command(click.Context(cli.cli), split[0])
            assert command is not None
            known = _parameters(command)
            for word in split[1:]:
                if word.startswith("-") and word != "-":
                    option = word.partition("=")[0]
                    assert option in known, f"{place}: {split[0]} has no {option}"


@functools.cache
def _help(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, text=True, capture_output=True
    )
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_other_commands_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for place, line in commands(name, {"sh"}):
        for target in re.findall(r"(?:^|[;&] *)make ([a-z]+)", line):
            assert target in targets, f"{place}: make {target}"
        for extras in re.findall(r"(?:\.|ffserve)\[([\w,-]+)\]", line):
            for extra in extras.split(","):
                assert extra in project["optional-dependencies"], f"{place}: {extra}"
        for module, rest in re.findall(r"python -m ([\w.]+)((?: \S+)*)", line):
            assert importlib.util.find_spec(module), f"{place}: python -m {module}"
            if module.startswith("benchmarks"):
                for option in re.findall(r" (--[\w-]+)", rest):
                    assert option in _help(module), f"{place}: {module} {option}"


# ---------------------------------------------------------------- links and names


def _anchors(path: Path) -> set[str]:
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", FENCE.sub("", path.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for link in LINK.findall(FENCE.sub("", document(name))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in _anchors(path), f"{name}: {link}"


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        path = left.pop().resolve()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        links = (link.partition("#")[0] for link in LINK.findall(path.read_text()))
        left += [path.parent / link for link in links if link and ":" not in link]
    assert set(DOCUMENTS) <= reached


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+", (ROOT / ".ci/site.py").read_text()))
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in NAMES}
    assert not {page for page in pages - listed - {"README"} if not page.startswith("decisions/")}


@pytest.mark.parametrize("name", sorted(set(NAMES) - HISTORY))
def test_files_that_are_named_exist(name: str) -> None:
    shells = "\n".join(block.text for block in blocks(name) if block.language == "sh")
    for span in [*CODE.findall(FENCE.sub("", document(name))), *shells.split()]:
        for path in FILE.findall(span):
            if path.startswith(("ffserve/", "tests/", "benchmarks/", "docs/")):
                assert any(ROOT.glob(path)), f"{name}: {path}"


def test_folders_hold_the_files_that_the_architecture_lists() -> None:
    section = document("docs/ARCHITECTURE.md").partition("\n## Folders")[2].partition("\n**")[0]
    for folder, files in re.findall(r"^\| `([\w/]+/)` \|.*?\| (.+) \|$", section, re.M):
        path = ROOT if folder == "ffserve/" else ROOT / "ffserve"
        for name in re.findall(r"`(\w+\.[ch]|\w+\.py)`", files):
            assert (path / folder / name).exists(), f"{folder}{name}"


def test_the_drawing_names_files_that_exist_and_is_drawn() -> None:
    images = ROOT / "docs" / "images"
    drawn = html.unescape((images / "architecture.svg").read_text())
    labels = re.findall(r"<b>(.*?)</b>", (images / "architecture.dot").read_text())
    for label in labels:
        assert label in drawn, f"{label}: run make docs"
        folder = ""
        for path in re.findall(r"[\w/]+\.py|\w+/", label):
            folder, _, name = path.rpartition("/") if "/" in path else (folder, "", path)
            assert (ROOT / "ffserve" / folder / name).exists(), f"{label}: {path}"


def test_documents_that_the_code_names_exist() -> None:
    sources = (path for ext in ("py", "c", "h") for path in (ROOT / "ffserve").rglob(f"*.{ext}"))
    for source in sources:
        for named in re.findall(r"docs/[\w/.-]+\.\w+|\b[A-Z]{4,}\.md\b", source.read_text()):
            path = ROOT / (named if named.startswith("docs/") else f"docs/{named}")
            assert path.exists() or named == "README.md", f"{source}: {named}"


DEFINED = re.compile(r"^((?!tests/)[\w/]+\.(?:py|c|h)): ([\w.]+)$")


def _defines(path: Path, name: str) -> bool:
    text = path.read_text()
    if path.suffix != ".py":
        return re.search(rf"^[\w *]*\b{name}\(|#define {name}\b|\b{name};$", text, re.M) is not None
    body: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        for node in body:
            targets = {getattr(node, "name", None)}
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                each = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (name for target in each for name in ast.walk(target))
                targets = {name.id for name in names if isinstance(name, ast.Name)}
            if part in targets:
                body = getattr(node, "body", [])
                break
        else:
            return False
    return True


@pytest.mark.check
@pytest.mark.parametrize("name", sorted(set(NAMES) - HISTORY))
def test_functions_that_are_named_exist(name: str) -> None:
    for span in CODE.findall(document(name)):
        match = DEFINED.match(span)
        if match is not None:
            path = ROOT / "ffserve" / match[1]
            assert path.exists(), f"{name}: {span}"
            assert _defines(path, match[2]), f"{name}: {span}"


TEST = re.compile(r"^(tests/[\w/]+\.py): (test_\w+)$")


@pytest.mark.parametrize("name", sorted(set(NAMES) - HISTORY))
def test_tests_that_are_named_exist(name: str) -> None:
    for span in CODE.findall(document(name)):
        match = TEST.match(span)
        if match is not None:
            named = rf"^(async )?def {match[2]}\("
            assert re.search(named, (ROOT / match[1]).read_text(), re.M), f"{name}: {span}"


def test_every_threat_has_a_test() -> None:
    section = document("docs/SECURITY.md").partition("\n## Threats\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    threats = [row for row in rows if not row[0].startswith("| **")]
    assert len(threats) > 30
    for row in threats:
        assert len(row) == 3 and row[1], row
        assert all(TEST.match(span) for span in CODE.findall(row[2])), row
        assert CODE.findall(row[2]), f"no test: {row[0]}"


@pytest.mark.parametrize("name", ["README.md", "docs/TORCH.md", "docs/BENCHMARKS.md"])
def test_the_measured_section_is_what_was_recorded(name: str) -> None:
    recorded = json.loads(document("docs/bench.json"))
    assert readme.measured(document(name)) == readme.section(recorded, Path(name).name)


FIGURE = re.compile(r"\d+\.\d+|\d+(?:\.\d+)? ?(?:×|%|ns|µs|ms|MB/s|GB/s|times)")


def test_every_figure_of_the_readme_comes_from_a_recorded_row() -> None:
    """None is written by hand: outside of the section, or into its text."""
    text = document("README.md")
    outside = text.replace(readme.measured(text), "")
    versions = re.compile(r"Python 3\.\d+|Apache 2\.0")
    assert not FIGURE.findall(versions.sub("", outside))
    for by_hand in readme.SECTIONS.values():
        assert not FIGURE.findall(re.sub(r"below 0\.01", "", readme.PLACE.sub("", by_hand)))


# ---------------------------------------------------------------- what the daemon says


def _keys(facts: Any, prefix: str = "") -> Iterator[str]:
    """Yield the places of all values in a report: `jobs[].name`, `arena.size`."""
    if isinstance(facts, dict):
        for key, value in facts.items():
            yield from _keys(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(facts, list) and facts and isinstance(facts[0], dict):
        yield from _keys(facts[0], f"{prefix}[]")
    else:
        yield prefix


def test_every_field_of_status_is_explained(tmp_path: Path) -> None:
    section = document("docs/REFERENCE.md").partition("\n## Status")[2].partition("\n## ")[0]
    named = [
        name
        for cell in re.findall(r"^\| (`[^|]+`) \|", section, re.M)
        for name in CODE.findall(cell)
    ]
    explained = set(named)
    assert len(explained) == len(named), "a field has two rows"
    with ffserve.create(tmp_path / "train.ffr") as writer:
        for _ in range(100):
            writer.write(b"sample")
    # A warning for the list of lines, and a slow file.
    patch = (
        "import ffserve.server.reading.engines; ffserve.server.reading.engines.SLOW_READ_S = 0.0"
    )
    daemon = Daemon(roots=("/", "/no/such/root"), patch=patch).start()
    try:
        with daemon.open(tmp_path / "train.ffr") as reader:
            reader.announce(range(100))
            reader.read(range(10))
            prepared = prepared_source(
                reader.current_source(),
                bytes(32),
                "n",
                lambda value: [value],
                bytes,
                reader.sample_indices,
            )
            assert prepared is not None
            assert prepared.values(np.arange(2), lambda indices: [b"x"] * 2) == [b"x"] * 2
            assert set(_keys(daemon.status())) == explained
    finally:
        daemon.close()


PLACEHOLDER = re.compile(r"%[-\d.]*[sdrgif]|\{[^{}]*\}")


def _messages() -> Iterator[tuple[str, str, bool]]:
    """Yield where each log call or warning stands, its text with {} for what is filled in, and
    whether it is written once and then by count."""
    for path in sorted((ROOT / "ffserve").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            who = getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))
            repeats = who in {"repeated", "lines"}
            logs = (repeats or who in {"log", "_log", "logger"}) and node.func.attr in {
                "debug", "info", "warning", "error", "exception", "critical",
            }  # fmt: skip
            if not (logs or (who == "warnings" and node.func.attr == "warn")):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):
                parts = (getattr(part, "value", "{}") for part in first.values)
                yield place, "".join(p if isinstance(p, str) else "{}" for p in parts), False
            else:
                assert isinstance(first, ast.Constant), f"{place}: the text is not written here"
                yield place, PLACEHOLDER.sub("{}", str(first.value)), repeats


def _pattern(message: str) -> str:
    return ".+?".join(re.escape(part) for part in message.split("{}"))


@pytest.mark.check
def test_every_log_line_is_explained() -> None:
    section = document("docs/REFERENCE.md").partition("\n## Log lines")[2].partition("\n## ")[0]
    marked = dict(re.findall(r"^\| `([^`]+)`( ↻)? \|", section, re.M))
    explained = set(marked)
    found = set()
    for place, message, repeats in _messages():
        literal = re.sub(r"[\W{}]", "", message)
        assert len(literal) > 8, f"{place}: the text is all placeholders"
        fits = {line for line in explained if re.fullmatch(_pattern(message), line)}
        assert fits, f"{place}: docs/REFERENCE.md does not explain {message!r}"
        assert {bool(marked[line]) for line in fits} == {repeats}, f"{place}: is it marked with ↻?"
        found |= fits
    assert found == explained, f"no longer logged: {explained - found}"
