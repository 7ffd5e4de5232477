"""The README's picture: bars of what two jobs on one data set get, a bar for each package.

A bar says in which order its package reads, since an easier order is faster: in random order, in
order, or in one of its own. The picture is drawn from recorded rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.peers import BY_NAME
from ffserve.errors import UsageError

PANELS = {"4KiB": "samples of 4 KiB", "100KiB": "samples of 100 KiB"}
OWN = {"one-order": "ffserve, one order for both", "own-orders": "ffserve"}
OWN_ORDER = ("FFCV quasi-random", "litData", "TensorSocket")
"""Peers that do not read in order, and choose the order themselves."""
SHOWN = (
    *OWN.values(), "preadv", "LMDB", "MosaicML", "WebDataset", "litData", "TFRecord", "HF datasets",
    "FFCV", "FFCV quasi-random",
)  # fmt: skip
"""What people use. docs/BENCHMARKS.md has all."""
COLOURS = {"random order": "#0072B2", "in order": "#BBBBBB", "own order": "#E69F00"}
"""Of Okabe and Ito, which colour-blind readers can distinguish."""
EMPHASIS = "#D55E00"
Rows = Sequence[dict[str, Any]]


class Bar(NamedTuple):
    """One bar. rate: samples a second. order: a key of COLOURS."""

    name: str
    rate: float
    order: str


def order_of(name: str) -> str:
    """Return the order in which a contestant reads: a key of COLOURS."""
    if name in OWN_ORDER:
        return "own order"
    peer = BY_NAME.get(name)
    return "in order" if peer is not None and peer.in_order else "random order"


def bars(rows: Rows, size: str) -> list[Bar]:
    """Return the bars of the rows jobs/SIZE, the fastest first."""
    found = []
    for row in rows:
        if row["name"].startswith(f"jobs/{size}/") and "mb_s" in row:
            last = row["name"].rpartition("/")[2]
            name = OWN.get(last, last)
            if name in SHOWN:
                found.append(Bar(name, 1e6 * row["mb_s"] / row["bytes"], order_of(name)))
    return sorted(found, key=lambda bar: -bar.rate)


def draw(rows: Rows, path: Path) -> None:
    """Draw a panel for each size into a PNG or SVG file.

    Raises: UsageError when the rows of the picture were not measured.
    """
    panels = {title: found for size, title in PANELS.items() if (found := bars(rows, size))}
    if not panels:
        raise UsageError(
            "no rows of the picture were measured",
            hint="python -m benchmarks --only jobs/ --record FILE",
        )
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, len(panels), figsize=(10.4, 4.2), squeeze=False)
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        _panel(axis, title, found)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Any, title: str, found: list[Bar]) -> None:
    own = [bar.name in OWN.values() for bar in found]
    colours = [
        EMPHASIS if mine else COLOURS[bar.order] for bar, mine in zip(found, own, strict=True)
    ]
    axis.barh(range(len(found)), [bar.rate for bar in found], color=colours, height=0.72)
    axis.set_yticks(range(len(found)), [bar.name for bar in found])
    for label, mine in zip(axis.get_yticklabels(), own, strict=True):
        label.set_fontweight("bold" if mine else "normal")
    axis.invert_yaxis()
    most = max(bar.rate for bar in found)
    for at, bar in enumerate(found):
        text = f" {float(f'{bar.rate:.2g}'):,.0f}, {bar.order}"
        axis.text(bar.rate, at, text, va="center", fontsize=8)
    axis.set_xlim(0, 1.75 * most)
    axis.set_title(f"samples a second, {title}", fontsize=9.5, loc="left")
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
