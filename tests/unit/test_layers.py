"""The layers of the package: which folder may import which, the doors of the core, no circles."""

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
    "parts": "",
    "engine": "",
    "formats": "engine",
    # local files, this machine
    "disk": "engine formats",
    "system": "disk",
    "config": "system",
    # what every read is
    "reads": "engine formats disk",
    # packed folders, remote files, data sets
    "store": "limits config engine formats disk system",
    "dataset": "engine formats disk store",
    "writer": "formats disk store",
    "folders": "engine formats system disk store writer",
    # the daemon
    "cache": "limits reads engine formats system",
    "server": "_version limits protocol config engine formats reads dataset disk system cache "
    "store",
    # the client
    "client": "_version limits protocol engine formats reads dataset disk system store",
    "reader": "formats dataset disk client store folders parts",
    "aio": "dataset client reader",
    # inputs of programs
    "inputs": "order formats disk store ffserve",
    # tables
    "arrow": "system engine formats disk writer client reader store",
    # what programs use
    "compat": "system formats dataset disk folders writer reader store ffserve",
    "example": "formats arrow dataset reader",
    "convert": "system engine formats dataset disk writer reader store folders example inputs "
    "ffserve",
    "torch": "order mixture packing engine client ffserve",
    "spark": "arrow store",
    "ray": "formats arrow reader store",
    "testing": "engine formats reads",
    "package": "folders compat",
    "fileio recordio utils": "compat",
    "tensorflow grain hf": "formats dataset writer reader recordio example",
    # files for programs
    "view": "engine dataset disk server client folders reader store ffserve",
    # the command line
    "examples": "torch example spark ray ffserve",
    "bench": "engine formats disk client ffserve",
    "doctor": "limits system config engine formats dataset disk server client ffserve",
    "cli": "order system config engine formats dataset disk cache server client reader "
    "folders convert inputs bench doctor store view ffserve",
    "__main__": "cli",
}
"""What each folder and each top-level module may import, from the lowest layer up. All may import
errors and dtypes; "ffserve" is the package itself, which offers the names of the upper layers."""

GUESTS = (
    "arrow bench cli compat convert doctor examples example fileio grain hf inputs package ray "
    "recordio spark tensorflow torch utils view __main__"
)
"""They stand on the core, which imports none of them. They import what the package exports, the
modules of FACE, each other as LAYERS says, and the doors below; nothing else."""

FACE = "aio dtypes errors formats formats.base mixture order packing reader testing writer"
"""Modules of the core that users import as well."""

DOORS = {
    "cache.simulation": ("cli", "`ffserve simulate` plays an order through the daemon's policy"),
    "client.public": (
        "arrow bench cli doctor torch view",
        "the daemon is asked without a reader; samples are read into other memory, in place",
    ),
    "config": ("cli doctor", "settings are flags of a command, and are examined"),
    "dataset.paths": ("cli compat convert doctor example hf view", "what a user's paths denote"),
    "disk.files": (
        "arrow cli compat convert doctor inputs view",
        "files are opened, and errors of the system become ours, in one way",
    ),
    "disk.output": ("arrow bench compat inputs", "output is complete or absent"),
    "disk.shardfile": ("arrow cli", "tables are read by block, shown, and written as index files"),
    "engine.codec": ("arrow convert doctor", "checksums of frames that are not read as samples"),
    "engine.example": ("arrow cli torch", "Examples are decoded to columns in C, or described"),
    "engine.fuse": ("view", "requests that need no Python are answered in C"),
    "engine.io": ("bench doctor", "direct reads, and which engines this machine has"),
    "engine.shm": ("torch", "a flag in shared memory"),
    "folders": ("cli compat convert package view", "names of packed files; they are packed"),
    "limits": ("doctor", "the bounds of the daemon are compared with those of its process"),
    "server.life.daemon": ("cli", "`serve` runs it"),
    "server.life.starts": ("cli", "after failed starts the next one waits, before anything else"),
    "server.life.startup": (
        "cli doctor",
        "the daemon's own checks at start are made, and explained",
    ),
    "server.status.overview": ("cli", "`status` and `top` show it"),
    "server.users.access": ("doctor view", "which files are taken, and who may read them"),
    "store.public": (
        "arrow cli convert inputs ray spark",
        "remote files are found, read, copied and written",
    ),
    "store.urls": ("arrow cli compat view", "what is a URL, and how it is shown"),
    "system.capabilities": ("doctor", "rights of a process are examined"),
    "system.machine_memory": ("doctor", "limits of memory are examined"),
    "system.memfd": ("doctor", "shared memory is tried"),
    "system.parallel": ("compat convert", "worker processes that report progress"),
    "system.socket_path": ("arrow cli doctor", "where the daemon's socket is, and whose"),
    "system.systemd": ("cli", "`mount` tells that it is ready; messages carry a priority"),
}
"""What guests may use of the core besides: by module, which guests, and what for."""

PURE = "dtypes limits formats protocol order mixture packing cache dataset.layout"
"""They can be simulated: they, and what they import, open no socket, run no event loop, start no
thread and read no clock."""
IMPURE = {"asyncio", "cffi", "concurrent", "ctypes", "datetime", "multiprocessing", "select"}
IMPURE |= {"selectors", "socket", "subprocess", "_thread", "threading", "time", "uvloop"}
IMPURE |= {"ffserve.engine.core"}
COMPUTING = {
    "ffserve.engine.arrays": "lists of numbers to arrays",
    "ffserve.engine.codec": "checksums, and scans of bytes in memory",
    "ffserve.engine.inflate": "decompression of bytes in memory",
    "ffserve.engine.slots": "tables of the cache, in memory",
    "ffserve.engine.tar": "scans of bytes in memory",
    "ffserve.system.memfd": "the memory of these tables, which other processes map",
}
"""Foreign functions that pure modules may call: they compute, and wait for nothing."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "example_pb2.py"}


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere: in functions, for type checking, and by a
    name in a string too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in MODULES and node.value != "ffserve":
            yield node.value
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


IMPORTS = {module: set(imports_of(path)) for module, path in MODULES.items()}
IMPORTS["ffserve"] = {"ffserve._version", "ffserve.errors"}
"""The package imports its other names when they are first used."""
IMPORTS["ffserve.testing"] -= {"ffserve.torch.audit"}
"""Users import the audit of a loader from here; formats are tested without torch."""


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


def test_guests_enter_by_the_front_door() -> None:
    guests = GUESTS.split()
    faces = {f"ffserve.{name}" for name in FACE.split()} | {"ffserve"}
    doors = {f"ffserve.{name}": users.split() for name, (users, _) in DOORS.items()}
    used: dict[str, set[str]] = {door: set() for door in doors}
    for module, others in IMPORTS.items():
        guest = folder_of(module)
        for other in others & set(MODULES):
            if guest not in guests or module == "ffserve":
                assert folder_of(other) not in guests, f"{module} of the core imports {other}"
            elif folder_of(other) not in guests and other not in faces:
                assert guest in doors.get(other, ()), f"{module} imports {other}, which is no door"
                used[other].add(guest)
    assert used == {door: set(users) for door, users in doors.items()}, "doors that nobody uses"


def test_the_pure_modules_import_nothing_that_does_io() -> None:
    for module in MODULES:
        if not f"{module}.".startswith(tuple(f"ffserve.{name}." for name in PURE.split())):
            continue
        chains = {module: module}
        waiting = [module]
        while waiting:
            reached = waiting.pop()
            for other in IMPORTS[reached] - set(COMPUTING):
                assert other not in IMPURE and other.split(".")[0] not in IMPURE, (
                    f"{chains[reached]} imports {other}"
                )
                if other in MODULES and other not in chains:
                    chains[other] = f"{chains[reached]}, which imports {other}"
                    waiting.append(other)


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {module: {o for o in others if o in MODULES} for module, others in IMPORTS.items()}
    del left["ffserve"]  # imported before every other module
    while left:
        needed = {other for others in left.values() for other in others}
        done = [m for m, others in left.items() if m not in needed or not others & set(left)]
        if not done:
            break
        for module in done:
            del left[module]
    assert not left


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
    ("reading.engines", "prepared"): "a copy of prepared samples is a load, as a read is",
    ("prepared.sharing", "sessions"): "it is the part of a session that shares prepared samples",
    ("life.startup", "status"): "settings name an address for HTTP, whose packages may be missing",
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


TWO_FACES = {
    "example ffrecord hf mixture recordio": "what users import, and what it stands on",
    "public": "a door for guests",
    "tar": "the face of the C core, and the format",
    "resize scrub": "a command, and what the daemon does for it",
}
"""Names of modules in two folders, and why."""


def test_names_have_one_meaning_each() -> None:
    classes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(module)
    twice = {name: found for name, found in classes.items() if len(found) > 1}
    assert twice == {"Reader": ["ffserve.aio", "ffserve.reader"]}

    folders: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            folders.setdefault(path.stem, []).append(module)
    names = {name for name, found in folders.items() if len(found) > 1}
    assert names == {name for row in TWO_FACES for name in row.split()}


def test_no_folder_has_more_than_fifteen_modules() -> None:
    counts: dict[Path, int] = {}
    for path in MODULES.values():
        counts[path.parent] = counts.get(path.parent, 0) + 1
    large = {folder for folder, count in counts.items() if count > 15}
    assert large == {PACKAGE}  # its modules are what users import
