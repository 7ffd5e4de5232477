"""Windows of frames out of large videos in a store, by files of samples and by Lance's blobs.

    python -m benchmarks.parts [--folder DIR] [--gop 250] [--windows 60]

ffmpeg makes MP4s of 150 MB: 8 minutes of 360p at 30 frames a second, with sound, half of them with
their index at the end, as ffmpeg writes them, and half at the beginning. They are the samples of an
FFRecord file and the blobs of a Lance dataset, which `rclone serve s3` serves over a link of
50 MB/s, 20 ms a request. Both are opened once; each window opens a sample and a decoder of
torchcodec, and decodes 16 frames at random, the same for both. They take turns; each has a relay of
its own, which counts. Needs root, ffmpeg, pylance, rclone, torch and torchcodec.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import ffserve
from benchmarks.harness.relay import Relay, relayed
from benchmarks.subjects.peer_rows import LATENCY_S
from benchmarks.subjects.store import BUCKET, KEY, SECRET, Origin, origin

COUNT, SIZE, CLIP_S, RATE = 4, 150_000_000, 30, 30
"""Videos, the bytes of each, and the seconds of what each repeats, with so many frames a second."""
FRAMES, WAIT_S = 16, 600.0
DATA = "videos"
"""The directory in the bucket."""


def videos(folder: Path, gop: int) -> list[bytes]:
    """Return the videos. Args: gop: frames from one that is whole to the next."""
    length = f"duration={CLIP_S}"
    clip, whole = str(folder / "clip.mp4"), str(folder / "whole.mp4")
    program = ["ffmpeg", "-v", "error", "-y"]
    picture = f"testsrc2=size=640x360:rate={RATE}:{length},noise=alls=12:allf=t"
    inputs = ["-f", "lavfi", "-i", picture, "-f", "lavfi", "-i", f"sine={length}"]
    coded = ["-c:v", "libx264", "-preset", "veryfast", "-b:v", "2500k", "-pix_fmt", "yuv420p"]
    whole_pictures = ["-g", str(gop), "-sc_threshold", "0"]
    subprocess.run([*program, *inputs, *coded, *whole_pictures, "-c:a", "aac", clip], check=True)
    times = str(round(SIZE / os.path.getsize(clip)) - 1)
    found = []
    for moved in ([], ["-movflags", "faststart"]):
        repeated = ["-stream_loop", times, "-i", clip, "-c", "copy"]
        subprocess.run([*program, *repeated, *moved, whole], check=True)
        found.append(Path(whole).read_bytes())
    return [found[k % 2] for k in range(COUNT)]


def write(folder: Path, gop: int) -> None:
    """Write both kinds of files below the folder of the origin, unless they exist."""
    import lance
    import pyarrow as pa

    place = folder / "origin" / BUCKET / DATA
    if place.exists():
        return
    part = folder / "part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    contents = videos(folder, gop)
    with ffserve.create(part / "videos.ffr", n=COUNT) as writer:
        for content in contents:
            writer.write(content)
    schema = pa.schema([lance.blob_field("video")])
    table = pa.table([lance.blob_array(contents)], schema=schema)
    lance.write_dataset(table, str(part / "videos.lance"), data_storage_version="2.2")
    place.parent.mkdir(parents=True, exist_ok=True)
    part.rename(place)


def ours() -> Callable[[int], Any]:
    """Open the FFRecord file; return what opens a sample."""
    return ffserve.open(f"s3://{BUCKET}/{DATA}/videos.ffr", server="off").open_sample


def blobs() -> Callable[[int], Any]:
    """Open the Lance dataset; return what opens a blob."""
    import lance

    options = {
        "aws_endpoint": os.environ["AWS_ENDPOINT_URL"], "allow_http": "true",
        "aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_region": "us-east-1",
    }  # fmt: skip
    dataset = lance.dataset(f"s3://{BUCKET}/{DATA}/videos.lance", storage_options=options)
    return lambda index: dataset.take_blobs("video", indices=[index])[0]


class Timed:
    """A file, and the seconds that its reads took."""

    def __init__(self, file: Any) -> None:
        self.seconds = 0.0
        self.seek, self._read = file.seek, file.read

    def read(self, size: int) -> bytes:
        """Read."""
        begun = time.perf_counter()
        content: bytes = self._read(size)
        self.seconds += time.perf_counter() - begun
        return content


def decoding(
    open_: Callable[[], Callable[[int], Any]], environment: dict[str, str], pipe: Any
) -> None:
    """Decode a window for each (sample, place of 0 to 1, mode); send seconds, frames and a sum."""
    os.environ.update(environment)
    from torchcodec.decoders import VideoDecoder

    opened = open_()
    while request := pipe.recv():
        sample, place, mode = request
        cpu, begun = time.process_time(), time.perf_counter()
        file = Timed(opened(sample))
        file.seconds = time.perf_counter() - begun
        decoder = VideoDecoder(file, seek_mode=mode)
        first = int(place * (len(decoder) - FRAMES))
        frames = decoder.get_frames_in_range(first, first + FRAMES).data
        seconds = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        pipe.send((seconds, file.seconds, cpu, len(frames), int(frames.sum())))


@dataclasses.dataclass
class Contestant:
    """A process that decodes windows, and the relay by which it reads."""

    pipe: Any
    relay: Relay

    def window(self, *request: Any) -> tuple[dict[str, float], int]:
        """Return the figures of a window, and the sum of its frames."""
        received, requests = self.relay.received, self.relay.requests
        self.pipe.send(request)
        assert self.pipe.poll(WAIT_S), "no window"
        seconds, reading, cpu, count, total = self.pipe.recv()
        assert count == FRAMES
        return {
            "s": seconds,
            "s in reads": reading,
            "s of CPU": cpu,
            "MB": (self.relay.received - received) / 1e6,
            "requests": self.relay.requests - requests,
        }, total


@contextlib.contextmanager
def contestant(served: Origin, open_: Callable[[], Any]) -> Iterator[Contestant]:
    """Run one."""
    url = urlsplit(served.endpoint)
    assert url.hostname and url.port
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    with relayed((url.hostname, url.port), LATENCY_S) as relay:
        through = dataclasses.replace(served, endpoint=f"http://127.0.0.1:{relay.port}")
        case = open_, through.case()["environment"], far
        process = context.Process(target=decoding, args=case)
        process.start()
        far.close()  # so that its end is seen
        try:
            yield Contestant(near, relay)
        finally:
            near.send(None)
            process.join()


def main() -> None:
    """Print medians, the most, ratios, and what torchcodec's other mode reads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the files are, of any --gop, or are made")
    for name, default in (("gop", 250), ("windows", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        write(folder, options.gop)
        served = stack.enter_context(origin(str(folder / "origin"), DATA))
        both = {
            name: stack.enter_context(contestant(served, open_))
            for name, open_ in (("ffserve", ours), ("Lance", blobs))
        }
        for each in both.values():
            each.window(0, 0.5, "approximate")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in both}
        turns = list(both.items())
        for _ in range(options.windows):
            window = int(random.integers(COUNT)), random.random(), "approximate"
            sums = set()
            for name, each in turns:
                figures, total = each.window(*window)
                found[name].append(figures)
                sums.add(total)
            assert len(sums) == 1, "both decode the same frames"
            turns.reverse()
        for name, rows in found.items():
            print(f"{name:8} {len(rows) / sum(row['s'] for row in rows):6.2f} windows/s", end="")
            for what in ("s in reads", "s of CPU", "MB", "requests"):
                values = [row[what] for row in rows]
                print(f"  {statistics.median(values):5.2f} {what} (most {max(values):.2f})", end="")
            print()
        for what in ("s", "s in reads"):
            ratios = [b[what] / a[what] for a, b in zip(*found.values(), strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"Lance / ffserve, {what} of a window: {middle:.2f} ({low:.2f} to {high:.2f})")
        figures, _ = both["ffserve"].window(1, 0.5, "exact")
        print(f'seek_mode="exact": {figures["MB"]:.0f} MB, {figures["s"]:.1f} s a window')


if __name__ == "__main__":
    main()
