"""The layers of the package: which folder may import which, and no circles between modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ffserve"

LAYERS = {
    # descriptions of data, without I/O
    "errors dtypes protocol order _version": "",
    "limits": "protocol",
    "mixture packing": "order",
    "engine": "",
    "formats": "engine",
    # local files, this machine
    "disk": "engine formats",
    "system": "disk",
    "config": "system",
    # what every read is
    "reads": "engine formats disk",
    # remote files, data sets
    "store": "config engine formats disk system",
    "dataset": "engine disk store",
    "writer": "formats disk",
    # the daemon
    "cache": "limits reads engine formats system",
    "server": "_version limits protocol config engine formats reads dataset disk system cache "
    "store",
    # the client
    "client": "_version protocol engine formats reads dataset disk system store",
    "reader": "formats dataset disk client store",
    "aio": "dataset client reader",
    # inputs of programs
    "inputs": "order formats disk reader store",
    # tables
    "arrow": "system engine formats disk writer client reader store",
    # what programs use
    "compat": "system formats dataset disk writer client reader store",
    "folders": "system disk compat writer",
    "example": "formats arrow dataset reader",
    "convert": "system engine formats dataset disk writer client reader folders example",
    "torch": "_version order mixture packing engine client compat",
    "spark": "arrow",
    "ray": "formats arrow reader",
    "testing": "engine formats reads",
    "tensorflow grain hf": "formats dataset writer reader compat example",
    "package": "folders",
    "fileio recordio utils": "compat",
    # files for programs
    "view": "engine dataset disk server client folders reader store",
    # the command line
    "examples": "torch example spark ray ffserve",
    "bench": "engine formats disk client ffserve",
    "doctor": "_version limits system config engine formats dataset disk server client",
    "cli": "order system config formats dataset disk cache server client reader "
    "folders convert inputs bench doctor store view ffserve",
    "__main__": "cli",
}
"""What each folder and each top-level module may import, from the lowest layer up. All may import
errors and dtypes; "ffserve" is the package itself, which offers the names of the upper layers."""

LAZY: dict[tuple[str, str], str] = {}
"""Imports inside functions that would close a circle, and why."""

PURE = {"dtypes", "limits", "formats", "protocol", "order", "mixture", "packing", "cache"}
"""They can be simulated: no socket, event loop, thread, foreign function or clock of their own."""
IMPURE = {"asyncio", "cffi", "concurrent", "ctypes", "datetime", "multiprocessing", "select"}
IMPURE |= {"selectors", "socket", "subprocess", "_thread", "threading", "time", "uvloop"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "example_pb2.py"}


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, except for type checking only."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


IMPORTS = {module: set(imports_of(path)) for module, path in MODULES.items()}


def test_modules_import_only_from_the_layers_below() -> None:
    allowed = {folder: row.split() for names, row in LAYERS.items() for folder in names.split()}
    wrong, used = [], set()
    for module, others in IMPORTS.items():
        folder = folder_of(module)
        if module == "ffserve":  # it imports its names when they are first used
            allowed[folder] = ["_version"]
        for other in others & set(MODULES):
            if folder_of(other) in (folder, "errors", "dtypes"):
                continue
            used.add((folder, folder_of(other)))
            if folder_of(other) not in allowed[folder]:
                wrong.append(f"{module} imports {other}")
    assert not wrong
    for names, row in LAYERS.items():
        unused = [n for n in row.split() if not {(f, n) for f in names.split()} & used]
        assert not unused, f"{names} no longer imports {unused}"


def test_the_pure_layers_import_nothing_that_does_io() -> None:
    for module in MODULES:
        if folder_of(module) in PURE:
            assert not {other.split(".")[0] for other in IMPORTS[module]} & IMPURE, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {
        module: {o for o in others if o in MODULES and (module, o) not in LAZY}
        for module, others in IMPORTS.items()
    }
    del left["ffserve"]  # imported before every other module
    while left:
        needed = {other for others in left.values() for other in others}
        done = [m for m, others in left.items() if m not in needed or not others & set(left)]
        if not done:
            break
        for module in done:
            del left[module]
    assert not left
    assert all(other in IMPORTS[module] for module, other in LAZY)


def test_importing_the_package_is_light() -> None:
    # Coverage imports some of them before anything else.
    program = "import sys; was = {*sys.modules}; import ffserve; print(*{*sys.modules} - was)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"torch", "asyncio", "numpy", "socket", "ffserve.reader"}


ROOMS = ("users", "files", "reading", "prepared", "sessions", "life", "status")
"""The folders of `ffserve/server/`. Each one imports only those before it."""

WIRING = {"sessions.state"}
"""Modules that put the parts of the daemon together."""

UPWARDS = {
    ("reading.io", "prepared"): "a copy of prepared samples is a load, as a read is",
    ("prepared.sharing", "sessions"): "it is the part of a session that shares prepared samples",
    ("sessions.session", "life"): "a message asks for a hand-over",
    ("sessions.session", "status"): "a message asks for the status",
}
"""Other imports of a later folder, and why."""


def test_folders_of_the_server_import_only_those_before_them() -> None:
    used = set()
    for module, others in IMPORTS.items():
        if not module.startswith("ffserve.server.") or module.count(".") < 3:
            continue
        name = module.removeprefix("ffserve.server.")
        for other in others & set(MODULES):
            if other.startswith("ffserve.server.") and name not in WIRING:
                room = other.split(".")[2]
                if ROOMS.index(room) > ROOMS.index(name.split(".")[0]):
                    used.add((name, room))
    assert used == set(UPWARDS)
    assert {*ROOMS, "__init__.py", "__pycache__"} >= {
        p.name for p in (PACKAGE / "server").iterdir()
    }
