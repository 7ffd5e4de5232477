"""The README's picture: throughput by record size and by number of clients.

Values are shares of the yardstick, since the points were measured one after the other and a
machine's speed changes between them; the GB/s of 1.0 are below each point. The picture is drawn
from recorded rows alone. The colours are mostly those of Okabe and Ito, which colour-blind readers
can distinguish; the markers differ, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffserve.config import format_size
from ffserve.errors import UsageError

FFSERVE, YARDSTICK = "ffserve", "yardstick"
CLIENTS_AT = 4096
STYLES: dict[str, tuple[str, str]] = {
    FFSERVE: ("#D55E00", "o"),
    "mmap": ("#56B4E9", "s"),
    "preadv": ("#0072B2", "v"),
    "LMDB": ("#009E73", "^"),
    "ArrayRecord": ("#CC79A7", "D"),
    "MosaicML": ("#E69F00", "P"),
    "Lance": ("#8C6D31", "X"),
    "h5py": ("#6A51A3", "<"),
    "TFRecord": ("#666666", ">"),
    "WebDataset": ("#AAAAAA", "h"),
    "ffrecord": ("#333333", "*"),
    "HF datasets": ("#B15928", "p"),
    "litData": ("#1B9E77", "1"),
    "SPDL": ("#7570B3", "2"),
    "TensorSocket": ("#E7298A", "3"),
    "tf.data service": ("#A6761D", "4"),
    "FFCV": ("#4D4D4D", "d"),
    "FFCV quasi-random": ("#4D4D4D", "H"),
}
Rows = Sequence[dict[str, Any]]
Curve = dict[float, tuple[float, float, float]]
"""x → share of the yardstick: the median, the slowest turn, the fastest turn."""


def curves(rows: Rows, state: str, by: str) -> dict[str, Curve]:
    """Return a curve per contestant (the better of ffserve's), and under YARDSTICK the GB/s of 1.0.

    Args:
        state: "hot" or "cold".
        by: "bytes" (one client) or "clients" (records of CLIENTS_AT bytes).
    """
    found: dict[str, Curve] = {}
    for row in rows:
        if not row["name"].startswith(f"{state}-peers/") or "mb_s" not in row:
            continue
        fits = row["clients"] == 1 if by == "bytes" else row["bytes"] == CLIENTS_AT
        if not fits or (row["at_most"] or row["unit"] != "×"):
            continue
        own = row["contestant"].startswith(FFSERVE)
        point = (row["value"], row["low"], row["high"])
        curve = found.setdefault(FFSERVE if own else row["contestant"], {})
        curve[row[by]] = max(point, curve.get(row[by], (0.0, 0.0, 0.0)))
        base = row["yardstick_mb_s"] / 1e3
        found.setdefault(YARDSTICK, {})[row[by]] = (base, base, base)
    return found


def draw(rows: Rows, path: Path) -> None:
    """Draw three panels into a PNG or SVG file.

    Raises: UsageError when the rows of the picture were not measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (curves(rows, "hot", "bytes"), "In memory, by record size", "bytes", "memcpy"),
        (curves(rows, "cold", "bytes"), "From disk, by record size", "bytes", "fio"),
        (curves(rows, "hot", "clients"), "In memory, 4 KiB, by clients", "clients", "memcpy"),
    ]
    if not all(found for found, *_ in panels):
        raise UsageError(
            "no rows of the picture were measured",
            hint="python -m benchmarks --only hot-peers --only cold-peers --record FILE",
        )
    plt.rcParams.update({"font.size": 8.5, "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, 3, figsize=(10.4, 4.6), sharey=True)
    handles: dict[str, Any] = {}
    for axis, (found, title, by, base) in zip(axes, panels, strict=True):
        speeds = found.pop(YARDSTICK)
        line = axis.axhline(1, color="black", linestyle="--", linewidth=1.2, zorder=2)
        handles.setdefault("1.0: memcpy, fio", line)
        for name, curve in found.items():
            if len(curve) == 1 < len(speeds):
                continue  # a single point is no curve
            label, line = _plot(axis, name, curve, _in_order(rows, name))
            handles.setdefault(label, line)
        axis.set_title(title, fontsize=9.5)
        axis.set_ylabel(f"share of {base}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        points = sorted({x for curve in found.values() for x in curve})
        axis.set_xticks(points, [f"{_tick(x, by)}\n{speeds[x][0]:.2g}" for x in points])
        label = "record size" if by == "bytes" else "clients"
        axis.set_xlabel(f"{label}; below it, 1.0 in GB/s", fontsize=8)
        axis.minorticks_off()
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    low, high = axes[0].get_ylim()
    ticks = [t for t in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) if low < t < high]
    axes[0].set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes[0].minorticks_off()
    order = sorted(
        handles, key=lambda name: (not name.startswith(FFSERVE), not name.startswith("1.0"))
    )
    figure.legend(
        [handles[name] for name in order], order, loc="lower center", ncols=5, frameon=False,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.19, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot(axis: Any, name: str, curve: Curve, in_order: bool) -> tuple[str, Any]:
    xs = sorted(curve)
    ys = [curve[x][0] for x in xs]
    color, marker = STYLES[name]
    errors = [
        [max(0.0, curve[x][0] - curve[x][1]) for x in xs],
        [max(0.0, curve[x][2] - curve[x][0]) for x in xs],
    ]
    own = name == FFSERVE
    line = axis.errorbar(
        xs, ys, yerr=errors, color=color, marker=marker, elinewidth=0.8,
        linewidth=2.2 if own else 1.1, markersize=6 if own else 4.5,
        linestyle=":" if in_order else "-", zorder=5 if own else 3,
    )  # fmt: skip
    return f"{name} (in order only)" if in_order else name, line


def _in_order(rows: Rows, name: str) -> bool:
    return any(
        row["contestant"] == name and row["description"].endswith(", in order") for row in rows
    )


def _tick(value: float, by: str) -> str:
    if by == "clients":
        return str(int(value))
    return format_size(value).replace(".00", "").replace(".0 ", " ")
