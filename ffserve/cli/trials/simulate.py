"""``ffserve simulate``: hit rates of other cache sizes, numbers of jobs and orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ffserve.cli import FloatRange
from ffserve.cli.terminal import counted, print_json, print_table
from ffserve.config import parse_size
from ffserve.errors import UsageError

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
WARM_EPOCHS, EPOCHS = 3, 2
MOST_SAMPLES = 5_000_000
SIZES = 2048, 1 << 20
DISK_BLOCK = 512
"""Alignment of the simulated disk's reads."""
SMALLEST = 300
"""Samples that fit into the smallest arena."""


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--jobs", "job_count", default=2, show_default=True, type=click.IntRange(1, 64),
    help="Number of jobs.",
)  # fmt: skip
@click.option(
    "--cache", "shares", multiple=True, type=FloatRange(0.01, 1.0), metavar="SHARE",
    help="Arena / data set, such as 0.25; may be repeated.  [default: 0.1 to 0.9]",
)  # fmt: skip
@click.option(
    "--samples", type=click.IntRange(1000, MOST_SAMPLES),
    help="Samples of the data set; in a small one, what is prefetched counts more."
    "  [default: those of PATH, else 20000]",
)  # fmt: skip
@click.option(
    "--sample-size", "size", metavar="SIZE",
    help="Size of a sample, such as 8KiB: counts the unused parts of slots and slabs."
    "  [default: the mean of PATH, else there are none]",
)  # fmt: skip
@click.option(
    "--speeds",
    metavar="A,B,…",
    help="Relative speeds, such as 1,0.6; if there are more jobs, they repeat.  [default: equal]",
)
@click.option("--same-seed", is_flag=True, help="All jobs use the same order.")
@click.option("--silent", is_flag=True, help="The jobs do not announce their order.")
@click.option(
    "--disk", type=FloatRange(0.01), metavar="SHARE",
    help="Rate of the disk / rate of all jobs.  [default: unlimited]",
)  # fmt: skip
@click.option(
    "--prepare-ms", type=FloatRange(0.001, 10_000.0), metavar="MS",
    help="Jobs share prepared samples, each of which takes so long to prepare; --cache is the arena"
    " / prepared samples then.",
)  # fmt: skip
@click.option(
    "--prepared-size", metavar="SIZE",
    help="Size of a prepared sample.  [default: 150KiB, of a picture of 224 x 224]",
)  # fmt: skip
@click.option(
    "--plot", metavar="FILE", help="Draw hit rates by cache size to FILE (needs matplotlib)."
)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
def simulate(
    paths: tuple[str, ...],
    job_count: int,
    shares: tuple[float, ...],
    samples: int | None,
    size: str | None,
    speeds: str | None,
    same_seed: bool,
    silent: bool,
    disk: float | None,
    prepare_ms: float | None,
    prepared_size: str | None,
    plot: str | None,
    as_json: bool,
) -> int:
    """Simulate the hit rates of a cache size.

    Runs the daemon's cache and policy under a virtual clock, with jobs that read every sample of a
    data set once per epoch in random order. Shows the share of samples found in memory, beside
    the best possible for a cache of that size (Belady's algorithm, which knows the future).

    \b
      ffserve simulate --jobs 4 --cache 0.25
      ffserve simulate 's3://bucket/train-*.ffr' --jobs 4 --cache 0.25
      ffserve simulate --jobs 2 --speeds 1,0.6 --plot hits.png
      ffserve simulate --jobs 4 --cache 0.1 --same-seed
      ffserve simulate --jobs 4 --cache 0.5 --prepare-ms 2 --sample-size 30KiB
    """
    paces = _paces(speeds, job_count)
    sample_size = _sample_size("--sample-size", size)
    if paths:
        count, mean = _samples_of(paths)
        samples = samples or min(count, MOST_SAMPLES)
        sample_size = sample_size or (mean if SIZES[0] <= mean <= SIZES[1] else None)
    prepared = None
    if prepare_ms is not None:
        prepared = _sample_size("--prepared-size", prepared_size or "150KiB"), prepare_ms / 1000
    elif prepared_size is not None:
        raise UsageError("--prepared-size needs --prepare-ms")
    if plot is not None:
        _check_plot(plot)
    samples = max(samples or 20_000, int(SMALLEST / min(shares or SHARES)) + 1)
    rows = [
        _row(
            samples,
            sample_size,
            share,
            paces,
            same_seed=same_seed,
            announces=not silent,
            disk=disk,
            prepared=prepared,
        )
        for share in shares or SHARES
    ]
    if plot is not None:
        jobs = f"{job_count} jobs" if job_count > 1 else "one job"
        jobs += f", speeds {speeds}" if speeds else ""
        jobs += ", one order" if same_seed else ""
        jobs += ", silent" if silent else ""
        _draw(plot, rows, f"{jobs}, {samples} samples")
    if as_json:
        print_json({"jobs": job_count, "samples": samples, "rows": rows})
        return 0
    header = ["cache", "hits", "best possible", "disk reads per epoch and job"]
    print_table(
        header + (["speed"] if disk else []) + (["found prepared"] if prepared else []),
        [
            [
                f"{row['cache']:.0%}",
                f"{row['hit_rate']:.1%}",
                f"{row['belady']:.1%}",
                f"{row['read_share']:.1%} of the data set",
                *([f"{row['speed']:.0%}"] if disk else []),
                *([f"{row['shared_rate']:.1%}"] if prepared else []),
            ]
            for row in rows
        ],
    )
    return 0


def _samples_of(paths: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of samples of files, and about their mean size. Raises: FFServeError."""
    import ffserve

    with ffserve.open(paths, server="off") as reader:
        sizes = reader.estimates()
        return len(sizes), int(sizes.sum()) // max(len(sizes), 1)


def _sample_size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_size(text)
    if not SIZES[0] <= size <= SIZES[1]:
        raise UsageError(f"{option} {text}: a size must be between 2KiB and 1MiB")
    return size


def _paces(speeds: str | None, job_count: int) -> list[float]:
    if speeds is None:
        return [1.0] * job_count
    try:
        paces = [float(speed) for speed in speeds.split(",")]
    except ValueError:
        raise UsageError(
            f"--speeds: invalid numbers {speeds!r}", hint="give numbers such as 1,0.6"
        ) from None
    if not all(0.001 <= pace <= 1000 for pace in paces):
        raise UsageError(f"--speeds {speeds}: a speed must be between 0.001 and 1000")
    if len(paces) > job_count:
        raise UsageError(
            f"--speeds {speeds}: {len(paces)} speeds for {counted(job_count, 'job')}",
            hint=f"add --jobs {len(paces)}",
        )
    return [paces[k % len(paces)] for k in range(job_count)]


def _row(
    samples: int,
    sample_size: int | None,
    share: float,
    paces: list[float],
    *,
    same_seed: bool,
    announces: bool,
    disk: float | None,
    prepared: tuple[int | None, float] | None,
) -> dict[str, Any]:
    from ffserve.cache.simulation import SAMPLE_SIZE, SimulatedJob, Simulation, belady, shuffled

    jobs = [
        SimulatedJob(
            shuffled(samples, 0 if same_seed else k), pace=1000 * pace, announces=announces
        )
        for k, pace in enumerate(paces)
    ]
    disk_rate = None if disk is None else disk * sum(job.pace for job in jobs)
    simulation = Simulation(
        samples,
        share,
        jobs,
        sample_size=sample_size or SAMPLE_SIZE,
        alignment=DISK_BLOCK if sample_size else 1,
        disk_rate=disk_rate,
        prepared_size=None if prepared is None else prepared[0],
        prepare_s=0.0 if prepared is None else prepared[1],
    )
    longest = samples / min(job.pace for job in jobs) / min(disk or 1.0, 1.0)
    longest += samples * (0.0 if prepared is None else prepared[1])
    try:
        result = simulation.run(warm_s=WARM_EPOCHS * longest, seconds=EPOCHS * longest)
    finally:
        simulation.close()
    return {
        "cache": share,
        "hit_rate": result.hit_rate,
        "belady": belady(result.trace, result.slots, result.measured_from),
        "read_share": 1 - result.hit_rate,
        "shared_rate": result.shared_rate,
        "speed": result.used / (EPOCHS * longest * sum(job.pace for job in jobs)),
        "jobs": [{"hit_rate": 1 - job.reads / max(job.used, 1)} for job in result.jobs],
    }


def _check_plot(path: str) -> None:
    """Check that the picture can be drawn, before minutes of simulation.

    Raises: UsageError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a plot needs matplotlib", hint="pip install 'ffserve[plot]'") from None
    kinds = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise UsageError(
            f"--plot {path!r}: unknown picture format",
            hint="give a name such as hits.png, hits.svg or hits.pdf",
        )
    if not Path(path).parent.is_dir():
        raise UsageError(f"--plot {path!r}: missing directory {str(Path(path).parent)!r}")


def _draw(path: str, rows: list[dict[str, Any]], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot(xlim=(0, 100), ylim=(0, 100), title=title)
    rows = sorted(rows, key=lambda row: float(row["cache"]))
    shares = [100 * row["cache"] for row in rows]
    axes.plot(shares, [100 * row["hit_rate"] for row in rows], "o-", label="ffserve")
    axes.plot(shares, [100 * row["belady"] for row in rows], "k:", label="best possible")
    axes.plot([0, 100], [0, 100], color="0.7", label="each job for itself")
    axes.set_xlabel("cache, % of the data set")
    axes.set_ylabel("samples found in memory, %")
    axes.grid(color="0.92")
    axes.legend(loc="lower right")
    figure.savefig(path, bbox_inches="tight")
