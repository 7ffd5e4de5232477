"""The README's picture: bars of what loaders with two workers bring, a bar for each package.

A bar says in which order its package reads, since an easier order is faster: in random order, out
of a buffer, or in one of its own. The picture is drawn from recorded rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.subjects.peer_rows import OWN
from ffserve.errors import UsageError

PANELS = {"4KiB": "samples of 4 KiB", "100KiB": "samples of 100 KiB"}
ORDERS = {
    "WebDataset": "shuffle buffer", "litData": "own order", "FFCV-quasi-random": "own order",
}  # fmt: skip
"""Of the loaders that do not read in random order."""
RANDOM = "random order"
COLOURS = {RANDOM: "#0072B2", "shuffle buffer": "#BBBBBB", "own order": "#E69F00"}
"""Of Okabe and Ito, which colour-blind readers can distinguish."""
EMPHASIS = "#D55E00"
Rows = Sequence[dict[str, Any]]


class Bar(NamedTuple):
    """One bar. rate: samples a second. order: a key of COLOURS."""

    name: str
    rate: float
    order: str


def bars(rows: Rows, size: str) -> list[Bar]:
    """Return the bars of the rows loaders/SIZE, the fastest first."""
    found = []
    for row in rows:
        kind, of, who = [*row["name"].split("/"), "", ""][:3]
        if (kind, of) == ("loaders", size) and "mb_s" in row:
            found.append(Bar(who, 1e6 * row["mb_s"] / row["bytes"], ORDERS.get(who, RANDOM)))
    return sorted(found, key=lambda bar: -bar.rate)


def draw(rows: Rows, path: Path) -> None:
    """Draw a panel for each size into a PNG or SVG file.

    Raises: UsageError when the rows of the picture were not measured.
    """
    panels = {title: found for size, title in PANELS.items() if (found := bars(rows, size))}
    if not panels:
        raise UsageError(
            "no rows of the picture were measured",
            hint="python -m benchmarks --only loaders/ --record FILE",
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
    own = [bar.name == OWN for bar in found]
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
