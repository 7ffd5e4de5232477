"""ImageFolder and DatasetFolder, held against torchvision's own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ffserve.folders import pack

pytestmark = pytest.mark.interop


found = importlib.util.find_spec("torchvision")
if found is None or not found.submodule_search_locations:
    pytest.skip("needs torchvision (make interop)", allow_module_level=True)
try:
    from torchvision.datasets import folder
except RuntimeError:
    # A build for CUDA cannot load its operators beside a torch for CPUs, and its import fails
    # without them. Reading folders uses none: declare them.
    declared = torch.library.Library("torchvision", "FRAGMENT")
    fakes = Path(found.submodule_search_locations[0]) / "_meta_registrations.py"
    for name in set(re.findall(r'"(?:torchvision::)?(\w+)"\)\ndef', fakes.read_text())):
        declared.define(f"{name}(Tensor x) -> Tensor")
    from torchvision.datasets import folder

from daemon import Daemon  # noqa: E402
from keeping import pictures, twice  # noqa: E402
from torch_cases import folder_tree  # noqa: E402

from ffserve.torch import DatasetFolder, ImageFolder, cache  # noqa: E402


@pytest.mark.parametrize("kind", ["pictures", "everything", "hidden"])
def test_classes_and_labels_are_the_same(tmp_path: Path, kind: str) -> None:
    root = folder_tree(tmp_path / "tree")
    pack([root], tmp_path / "tree.ffr")
    if kind == "pictures":
        theirs = folder.ImageFolder(root, loader=str, allow_empty=True)
        ours = ImageFolder(tmp_path / "tree.ffr", loader=bytes, allow_empty=True)
    else:

        def valid(name: str) -> bool:
            return kind == "everything" or "/." in name.removeprefix(str(root))

        theirs = folder.DatasetFolder(root, str, is_valid_file=valid, allow_empty=True)
        ours = DatasetFolder(
            tmp_path / "tree.ffr", bytes, is_valid_file=lambda n: valid(f"/{n}"), allow_empty=True
        )
    assert ours.classes == theirs.classes and ours.class_to_idx == theirs.class_to_idx
    assert ours.targets == theirs.targets
    assert ours.samples == [
        (path.removeprefix(f"{root}/"), label) for path, label in theirs.samples
    ]


def test_an_image_folder_is_kept(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path)
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    theirs = folder.ImageFolder(str(tmp_path), transform=np.asarray)
    assert cache(theirs, version=1).classes == ["cat", "dog"]
    twice(theirs, str(tmp_path), daemon)
