"""Data of other packages: `other_packages.py compare|resume|memory KIND` in an empty folder.

It writes a data set with a package, in an interpreter that has it. `compare` then runs the blocks
of docs/howto/coming-from.md about it: the command, their lines, ours; both must use the same
samples, those that were written. `resume` kills conversions and lets them go on. `memory` converts
more than the memory that it may use.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "coming-from.md"
COUNT = 120
Sample = tuple[bytes, int]
"""A picture as it is encoded, and its class."""


def pictures(count: int = COUNT) -> Iterator[Sample]:
    from PIL import Image

    random = np.random.default_rng(7)
    for k in range(count):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (8, 6 + k % 5, 3), np.uint8)).save(file, "JPEG")
        yield file.getvalue(), k % 10


def large(count: int, size: int = 1 << 20) -> Iterator[Sample]:
    random = np.random.default_rng(3)
    block = random.bytes(2 * size)
    for k in range(count):
        yield block[k * 977 % size :][:size], k % 10


# ---- one writer for each kind: samples to files in the current folder, returns the input ---------


def need_torchvision() -> None:
    """Import it. Beside a build of torch that is not its own it cannot load its operators, which
    nothing here calls; those that it describes to torch are declared."""
    with contextlib.suppress(RuntimeError):
        importlib.import_module("torchvision")
        return
    library = importlib.import_module("torch").library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")


def mds(samples: Iterator[Sample], **options: Any) -> str:
    writer = importlib.import_module("streaming").MDSWriter(
        out="mds", columns={"image": "jpeg", "label": "int", "note": "json", "x": "ndarray:int16"},
        **{"size_limit": 20_000, "hashes": ["sha1", "xxh64"], **options},
    )  # fmt: skip
    with writer:
        for image, label in samples:
            row = {"note": {"class": label}, "x": np.arange(label + 1, dtype=np.int16)}
            writer.write({"image": image, "label": label, **row})
    return "mds"


def litdata(samples: Iterator[Sample], **options: Any) -> str:
    cache = importlib.import_module("litdata.streaming.cache").Cache(
        "optimized", **{"chunk_bytes": 20_000, **options}
    )
    for k, (image, label) in enumerate(samples):
        cache[k] = {"image": image, "class": label, "meta": {"x": np.arange(label + 2.0)}}
    cache.done()
    cache.merge()
    return "optimized"


def webdataset(samples: Iterator[Sample]) -> str:
    module = importlib.import_module("webdataset")
    with module.ShardWriter("web-%03d.tar", maxcount=50, verbose=0) as sink:
        for k, (image, label) in enumerate(samples):
            sink.write({"__key__": f"{k:06}", "jpg": image, "cls": label})
    return "web-*.tar"


def imagefolder(samples: Iterator[Sample]) -> str:
    need_torchvision()
    for k, (image, label) in enumerate(samples):
        path = Path("pictures") / f"class{label}" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return "pictures"


def _tables(samples: Iterator[Sample], rows: int) -> Iterator[Any]:
    """As Hugging Face writes pictures."""
    import pyarrow as arrow

    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    features = {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}
    schema = arrow.schema(
        [("image", kind), ("label", arrow.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    part: list[dict[str, Any]] = []
    for k, (image, label) in enumerate(samples):
        part.append({"image": {"bytes": image, "path": f"{k}.jpg"}, "label": label})
        if len(part) == rows:
            yield arrow.Table.from_pylist(part, schema)
            part = []


def parquet(samples: Iterator[Sample], rows: int = 20, **options: Any) -> str:
    from pyarrow import parquet as module

    writer, file = None, 0
    for k, table in enumerate(_tables(samples, rows)):
        if k % 4 == 0:
            if writer is not None:
                writer.close()
            writer, file = module.ParquetWriter(f"train-{file}.parquet", table.schema), file + 1
        assert writer is not None
        writer.write_table(table, row_group_size=rows)
    assert writer is not None
    writer.close()
    return "train-*.parquet"


def arrow(samples: Iterator[Sample]) -> str:
    datasets = importlib.import_module("datasets")
    rows = [{"text": image.hex(), "label": label} for image, label in samples]
    datasets.Dataset.from_list(rows).save_to_disk("saved", num_shards=3)
    return "saved"


def arrayrecord(samples: Iterator[Sample]) -> str:
    module = importlib.import_module("array_record.python.array_record_module")
    writer, file = None, 0
    for k, (image, _) in enumerate(samples):
        if k % 50 == 0:
            if writer is not None:
                writer.close()
            writer, file = module.ArrayRecordWriter(f"train-{file}.array_record", ""), file + 1
        writer.write(image)
    writer.close()
    return "train-*.array_record"


def lmdb(samples: Iterator[Sample]) -> str:
    env = importlib.import_module("lmdb").open("database", map_size=1 << 32)
    with env.begin(write=True) as transaction:
        for k, (image, label) in enumerate(samples):
            transaction.put(b"%d/%06d" % (label, k), image)
    env.close()
    return "database"


def h5py(samples: Iterator[Sample], shape: tuple[int, int] = (3, 4)) -> str:
    module = importlib.import_module("h5py")
    labels = np.array([label for _, label in samples])
    with module.File("features.h5", "w") as file:
        rows = np.arange(len(labels) * shape[0] * shape[1], dtype=np.float32)
        rows = rows.reshape(-1, *shape)
        file.create_dataset("features", data=rows, chunks=(7, *shape), compression="lzf")
        file["labels"] = labels
    return "features.h5"


KINDS: dict[str, tuple[str, Callable[..., str]]] = {
    "mds": ("MDS", mds),
    "litdata": ("litData", litdata),
    "webdataset": ("WebDataset", webdataset),
    "imagefolder": ("ImageFolder", imagefolder),
    "parquet": ("Parquet", parquet),
    "arrow": ("Arrow", arrow),
    "arrayrecord": ("ArrayRecord", arrayrecord),
    "lmdb": ("LMDB", lmdb),
    "h5py": ("HDF5", h5py),
}
"""The word that begins the section, and the writer."""
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mds": [{}, {"compression": "zstd"}, {"compression": "gz:5", "hashes": []}],
    "litdata": [
        {}, *({"compression": "zstd", "compression_level": k} for k in ("batch", "chunk", "sample"))
    ],
}  # fmt: skip
LARGE: dict[str, dict[str, Any]] = {
    "mds": {"size_limit": 64 << 20},
    "litdata": {"chunk_bytes": 64 << 20},
    "parquet": {"rows": 20},
    "h5py": {"shape": (256, 1024)},
}
"""Options for samples of 1 MiB."""
FIELDS = {
    "mds": "image", "litdata": "image", "webdataset": "jpg", "imagefolder": None,
    "parquet": "image", "arrow": "text", "arrayrecord": None, "lmdb": None, "h5py": "features",
}  # fmt: skip
"""The column that becomes the sample of a record file."""


# ---- what is checked -----------------------------------------------------------------------------


def command(words: list[str]) -> None:
    from ffserve import cli

    assert cli.run(words) == 0, words


def plain(value: Any) -> Any:
    """A value that can be compared and sorted."""
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # Pillow
        return value.convert("RGB").size, value.convert("RGB").tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return bytes(value) if isinstance(value, memoryview) else value


def compare(kind: str) -> None:
    section = re.split(r"^## ", HOWTO.read_text(), flags=re.M)
    (text,) = [each for each in section if each.startswith(KINDS[kind][0])]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
    assert [language for language, _ in blocks] == ["sh", "python", "python"], kind
    for words in map(shlex.split, blocks[0][1].splitlines()):
        assert words[:2] == ["ffserve", "convert"]
        command(words[1:])
    used: list[list[Any]] = [[], []]
    for (_, code), seen in zip(blocks[1:], used, strict=True):
        names = {"use": lambda *values, seen=seen: seen.append(tuple(map(plain, values)))}
        exec(compile(code, "coming-from.md", "exec"), {"__name__": "__main__", **names})
    theirs, ours = used
    assert len(theirs) == len(ours) == COUNT, (len(theirs), len(ours))
    assert len(set(ours)) > COUNT * 0.9 and sorted(theirs) == sorted(ours)
    assert theirs != sorted(theirs) and ours != sorted(ours)


def damage(kind: str, given: str) -> None:
    """Halve the largest file: an error, no output."""
    from ffserve import cli

    if kind == "imagefolder":  # a picture is a file of any content
        return
    below = glob.glob(f"{given}/*.*") if os.path.isdir(given) else glob.glob(given)
    largest = max(below, key=os.path.getsize)
    os.truncate(largest, os.path.getsize(largest) // 2)
    column = FIELDS[kind]
    words = ["convert", given, "damaged.ffr", *(["--fields", column] if column else [])]
    assert cli.run(words) == 1 and not os.path.exists("damaged.ffr"), largest


def resume(kind: str, given: str, format: str) -> None:
    """Kill a conversion twice; what it ends with is that of one that was not killed."""
    column = FIELDS[kind]
    options = ["--format", format, "--shards", "12", "--jobs", "1"]
    options += ["--fields", column] if column else []
    command(["convert", given, "whole", *options])
    finished = []
    for parts in (1, 7):
        program = [sys.executable, __file__, "cli", "convert", given, "killed", *options]
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(list(Path().glob("killed/PART*"))) < parts:
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished.append(len(list(Path().glob("killed/PART*"))))
    assert 0 < finished[0] < 12, finished
    command(["convert", given, "killed", *options, "--verify"])
    whole = {path.name: path.read_bytes() for path in Path("whole").iterdir()}
    assert whole == {path.name: path.read_bytes() for path in Path("killed").iterdir()}, kind


def measure(kind: str, given: str) -> None:
    """Convert, and print the size, and the growth of this process's own memory meanwhile."""
    from ffserve.convert import convert

    if kind == "litdata":  # it imports PyTorch, which has 140 MB
        importlib.import_module("litdata")
    seen = [_own_memory()]
    column = FIELDS[kind]
    convert(
        given, "out.ffr", fields=[column] if column else None, verify=True,
        progress=lambda count, size: seen.append(_own_memory()),
    )  # fmt: skip
    assert len(seen) > 3
    print(kind, os.stat("out.ffr").st_size >> 20, (max(seen) - seen[0]) >> 20)


def _own_memory() -> int:
    """Bytes of memory of this process that are in no file."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def main() -> int:
    check, kind = sys.argv[1:3]
    if "mds" in sys.argv:
        need_torchvision()
    if check == "cli":
        from ffserve import cli

        return cli.run(sys.argv[2:])
    if check == "measure":
        measure(kind, sys.argv[3])
        return 0
    top = Path.cwd()
    for number, options in enumerate(VARIANTS.get(kind, [{}])):
        if options.get("compression") == "zstd" and importlib.util.find_spec("zstd") is None:
            print("without the package zstd:", options)
            continue
        os.makedirs(top / f"{number}")
        os.chdir(top / f"{number}")
        writer = KINDS[kind][1]
        if check == "memory":
            given = writer(large(300), **LARGE.get(kind, {}), **options)
            program = [sys.executable, __file__, "measure", kind, given]
            print(options, flush=True)
            subprocess.run(program, check=True)
            continue
        given = writer(pictures(), **options)
        if check == "compare":
            compare(kind)
            damage(kind, given)
        elif number < 2:
            resume(kind, given, ("tar", "ffrecord")[number % 2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
