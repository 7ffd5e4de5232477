"""Lightning, Accelerate and Ray Train: the examples of docs/howto/train.md, run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import write

torch = pytest.importorskip("torch")

import ffserve.torch  # noqa: E402 - needs torch

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore"),  # of the frameworks
]
HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "train.md"
N = 200


def example(name: str) -> str:
    """Return the block of the document that imports a package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", HOWTO.read_text(), re.M | re.S)
    (block,) = [each for each in blocks if re.search(rf"^(?:import|from) {name}\b", each, re.M)]
    return block


class Numbers(ffserve.torch.Dataset):
    """Samples of one number, as floats; keeps the batches asked for."""

    def process(self, indices: Any, data: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(sample.view(np.int64)).float() for sample in data]


def namespace(tmp_path: Path) -> dict[str, Any]:
    payloads = [np.int64(i).tobytes() for i in range(N)]
    files = write(tmp_path / "train.ffr", payloads)
    names = {name: getattr(ffserve.torch, name) for name in ffserve.torch.__all__}
    model = torch.nn.Linear(1, 1)
    return {
        **names,
        "files": files,
        "dataset": Numbers(files),
        "rank": 0,
        "world_size": 1,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.0),
    }


@pytest.fixture
def torchvision() -> Iterator[None]:
    """Lightning's metrics import torchvision where it is installed, and call none of its operators.
    Beside a build of torch that is not its own (CPU, CUDA), it cannot load them, and stops at the
    first that it describes to torch. Those are declared here."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield


@pytest.mark.usefixtures("torchvision")
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            seen.extend(batch.view(-1).int().tolist())
            return self.layer(batch).sum() * 0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    variables = namespace(tmp_path) | {"model": Model()}
    exec(example("lightning"), variables)
    sampler = variables["sampler"]
    assert seen == [*sampler.order(0).tolist(), *sampler.order(1).tolist()]
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=False)
    states = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert [state["sampler"]["epoch"] for state in states] == [1]


def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []

    def train_step(model: Any, optimizer: Any, batch: Any) -> None:
        seen.extend(batch.view(-1).int().tolist())

    variables = namespace(tmp_path) | {"train_step": train_step}
    exec(example("accelerate"), variables)
    sampler = variables["sampler"]
    assert seen == [*sampler.order(0).tolist(), *sampler.order(1).tolist()]
    accelerator, loader = variables["accelerator"], variables["loader"]
    next(iter(loader))
    state = loader.state_dict()
    accelerator.save_state("middle")
    list(loader)
    accelerator.load_state("middle")
    assert loader.state_dict() == state


def test_ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch")
    monkeypatch.chdir(tmp_path)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def train_step(model: Any, optimizer: Any, batch: Any) -> None:
        rank = torch.distributed.get_rank()
        with (tmp_path / f"seen-{rank}").open("a") as file:
            file.writelines(f"{number}\n" for number in batch.view(-1).int().tolist())

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        exec(example("ray"), namespace(tmp_path) | {"train_step": train_step})
    finally:
        ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    for rank in range(2):
        sampler = ffserve.torch.EpochSampler(N, seed=7, rank=rank, world_size=2)
        seen = [int(text) for text in (tmp_path / f"seen-{rank}").read_text().split()]
        assert seen == [*sampler.order(0).tolist(), *sampler.order(1).tolist()]
