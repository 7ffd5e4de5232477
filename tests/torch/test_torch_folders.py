"""ImageFolder and DatasetFolder, held against torchvision's rules on real trees.

The rules are written down here as torchvision's documentation and sources (datasets/folder.py) have
them, over the directory itself; ``tests/interop`` compares with torchvision where it is installed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_cases import folder_tree

import ffserve
from ffserve.errors import FFServeError, FormatError, MissingFile, UsageError
from ffserve.folders import pack
from ffserve.testing import loader_audit

torch = pytest.importorskip("torch")

from ffserve.torch import DataLoader, DatasetFolder, EpochSampler, ImageFolder  # noqa: E402
from ffserve.torch.image_folder import IMG_EXTENSIONS  # noqa: E402


def by_torchvision(
    root: Path, valid: Callable[[str], bool]
) -> tuple[list[str], list[tuple[str, int]]]:
    """Return classes and samples as torchvision finds them; names relative to the root."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        for above, _, files in sorted(os.walk(root / name, followlinks=True)):
            for file in sorted(files):
                path = os.path.join(above, file)
                if valid(path):
                    samples.append((os.path.relpath(path, root), label))
    return classes, samples


def is_picture(path: str) -> bool:
    return path.lower().endswith(IMG_EXTENSIONS)


def content(sample: bytes) -> bytes:
    return sample


@pytest.fixture(params=[1, 5])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    out = tmp_path / ("one.ffr" if request.param == 1 else "many")
    pack([folder_tree(tmp_path / "tree")], out, shards=request.param)
    return out


def test_classes_and_labels_are_those_of_torchvision(packed: Path) -> None:
    root = packed.parent / "tree"
    classes, samples = by_torchvision(root, is_picture)
    dataset = ImageFolder(packed, loader=content, allow_empty=True)
    assert dataset.classes == classes
    assert dataset.class_to_idx == {name: k for k, name in enumerate(classes)}
    assert dataset.samples == dataset.imgs == samples
    assert dataset.targets == [label for _, label in samples]
    assert len(dataset) == len(samples) == dataset.reader.n
    expected = [((root / name).read_bytes(), label) for name, label in samples]
    assert dataset[list(range(len(samples)))] == expected
    assert [dataset[k] for k in range(len(samples))] == expected
    assert dataset.reader.names == [name for name, _ in samples]


def test_other_files(packed: Path) -> None:
    root = packed.parent / "tree"
    everything = DatasetFolder(packed, content, allow_empty=True)
    assert (everything.classes, everything.samples) == by_torchvision(root, lambda _: True)
    texts = DatasetFolder(packed, content, (".txt",), allow_empty=True)
    assert texts.samples == by_torchvision(root, lambda path: path.lower().endswith(".txt"))[1]
    hidden = ImageFolder(
        packed, loader=content, is_valid_file=lambda n: "/." in f"/{n}", allow_empty=True
    )
    assert hidden.samples == by_torchvision(root, lambda path: "/." in path)[1]


def test_empty_classes_are_an_error_unless_they_are_allowed(packed: Path) -> None:
    with pytest.raises(FileNotFoundError, match="for the classes 'empty', 'notes'") as caught:
        ImageFolder(packed, loader=content)
    assert isinstance(caught.value, MissingFile) and "allow_empty=True" in str(caught.value)


def test_transforms_and_a_prepare_of_a_subclass(packed: Path) -> None:
    plain = ImageFolder(packed, loader=content, allow_empty=True)
    dataset = ImageFolder(packed, len, lambda label: label + 100, content, allow_empty=True)
    indices = [3, 0, 3]
    assert dataset[indices] == [(len(x), y + 100) for x, y in plain[indices]]
    prepared = Lengths(packed, loader=content, allow_empty=True)
    assert prepared[indices] == [(len(x), y) for x, y in plain[indices]]


class Lengths(ImageFolder):
    def prepare(self, indices: Any, data: Any) -> Any:
        return [len(sample) for sample in data]


def collated(batch: Any) -> tuple[list[bytes], list[int]]:
    return [bytes(x) for x, _ in batch], [y for _, y in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_workers_resume_and_audit(packed: Path, server: str, workers: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFSERVE_SOCKET", server if server != "off" else str(packed.parent / "none"))
        dataset = ImageFolder(packed, loader=content, allow_empty=True)
        sampler = EpochSampler(len(dataset), seed=3)
        loader = DataLoader(
            dataset, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=collated
        )
        order = list(sampler)
        expected = [dataset[k] for k in order]
        got = []
        for step, (contents, labels) in enumerate(loader):
            got += list(zip(contents, labels, strict=True))
            if step == 1:
                state = loader.state_dict()
                break
        loader.load_state_dict(state)
        for contents, labels in loader:
            got += list(zip(contents, labels, strict=True))
        assert got == expected
        assert loader_audit(loader).intact


def test_prepared_pictures_are_shared_by_index(packed: Path, server: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFSERVE_SOCKET", server if server != "off" else str(packed.parent / "none"))
        dataset = Lengths(packed, loader=content, allow_empty=True)
        sizes = [(packed.parent / "tree" / name).stat().st_size for name, _ in dataset.samples]
        for _ in range(2):  # the second time they are in memory
            dataset.announce(np.arange(len(dataset)))
            assert dataset[list(range(len(dataset)))] == list(
                zip(sizes, dataset.targets, strict=True)
            )


def test_a_copy_in_a_worker_is_the_same(packed: Path) -> None:
    dataset = ImageFolder(packed, loader=content, allow_empty=True)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.samples == dataset.samples and copy[[5, 1]] == dataset[[5, 1]]


def test_a_closed_dataset_is_reopened_with_the_same_samples(packed: Path) -> None:
    dataset = DatasetFolder(packed, content, IMG_EXTENSIONS, allow_empty=True)
    wanted = dataset[list(range(len(dataset)))]
    dataset.reader.close()
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(dataset.samples)
    assert copy[list(range(len(copy)))] == wanted


def test_a_directory_of_pictures_is_refused(tmp_path: Path) -> None:
    root = folder_tree(tmp_path / "tree")
    with pytest.raises(UsageError, match="a directory of files") as caught:
        ImageFolder(root, loader=content)
    assert f"ffserve pack {root} -o tree.ffr" in str(caught.value)
    with ffserve.create(tmp_path / "plain.ffr") as writer:
        writer.write(b"sample")
    with pytest.raises(UsageError, match=r"no names.*ffserve pack"):
        ImageFolder(tmp_path / "plain.ffr", loader=content)
    with ffserve.create(tmp_path / "web.tar") as writer:
        writer.write({"jpg": b"x", "cls": b"1"})
    with pytest.raises(UsageError, match=r"tar files .*Dataset and fields="):
        ImageFolder(tmp_path / "web.tar", loader=content)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.jpg").write_bytes(b"x")
    pack([tmp_path / "flat"], tmp_path / "flat.ffr")
    with pytest.raises(FileNotFoundError, match="there is no class"):
        ImageFolder(tmp_path / "flat.ffr", loader=content)
    with pytest.raises(UsageError, match="cannot both"):
        DatasetFolder(tmp_path / "flat.ffr", content, (".jpg",), is_valid_file=is_picture)


def test_without_pillow_the_error_names_the_extra(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(UsageError, match=r"Pillow is not installed.*ffserve\[images\]"):
        ImageFolder(packed)


def test_pictures_by_pillow(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("cats/tom.png", (9, 8, 7)), ("dogs/rex.png", (1, 2, 3))):
        (tmp_path / "tree" / name).parent.mkdir(parents=True)
        image.new("RGB", (4, 3), colour).save(tmp_path / "tree" / name)
    (tmp_path / "tree" / "dogs" / "broken.png").write_bytes(b"no picture")
    pack([tmp_path / "tree"], tmp_path / "tree.ffr")
    dataset = ImageFolder(tmp_path / "tree.ffr", np.asarray)
    (tom, label), (rex, other) = dataset[[0, 2]]
    assert (label, other) == (0, 1) and tom.shape == (3, 4, 3)
    assert tom[0, 0].tolist() == [9, 8, 7] and rex[0, 0].tolist() == [1, 2, 3]
    with pytest.raises(FormatError, match=r"cannot read the picture 'dogs/broken\.png'") as caught:
        dataset[1]
    assert isinstance(caught.value, FFServeError) and caught.value.index == 1


@pytest.mark.parametrize("flat", [False, True])
def test_labels_come_with_each_sample_as_a_dict(tmp_path: Path, flat: bool) -> None:
    names = [f"{'' if flat else 'xyz'[k % 3] + '/'}{k}.jpg" for k in range(9)]
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(name.encode())
    rows = "\n".join(f"{name},{k},{k / 2}" for k, name in enumerate(names))
    (tmp_path / "a.csv").write_text(f"name,age,weight\n{rows}\n")
    pack([tmp_path / "tree"], tmp_path / "tree.ffr", labels=tmp_path / "a.csv")
    dataset = ImageFolder(tmp_path / "tree.ffr", loader=bytes.decode)
    assert dataset.classes == ([] if flat else ["x", "y", "z"]) and len(dataset) == 9
    for (name, _), (text, row) in zip(dataset.samples, dataset[list(range(9))], strict=True):
        assert text == name and row == {"age": int(text[-5]), "weight": int(text[-5]) / 2}
    ages = ImageFolder(tmp_path / "tree.ffr", None, lambda row: row["age"], bytes.decode)
    loader = DataLoader(ages, batch_size=9, num_workers=2)
    [(texts, labels)] = list(loader)
    assert labels.tolist() == [int(text[-5]) for text in texts]
