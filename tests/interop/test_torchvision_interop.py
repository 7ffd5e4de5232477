"""ImageFolder and DatasetFolder, held against torchvision's own where it can be imported.

Its releases need a torch of their own, so it does not stand in the tests' environment.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ffserve.folders import pack

pytestmark = pytest.mark.interop

try:
    from torchvision.datasets import folder
except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
    pytest.skip(f"cannot import torchvision: {error}", allow_module_level=True)

from torch_cases import folder_tree  # noqa: E402

from ffserve.torch import DatasetFolder, ImageFolder  # noqa: E402


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
