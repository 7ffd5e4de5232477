"""The image of docs/kubernetes/Containerfile: built and used as docs/KUBERNETES.md says.

Debian's image comes from Debian's packages here: no registry is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import until
from roots import NoRoot, release

import ffserve

pytestmark = pytest.mark.wheels

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docs/kubernetes/Containerfile"
IMAGE = f"ffserve:{ffserve.__version__}"
USER = 64738
"""Of the daemon in the image, and its group."""
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
"""The limits that podman sets otherwise are above what some machines allow."""
CLIENT = """
import hashlib, sys
import ffserve

with ffserve.open("/data/a.ffr", server="require") as reader:
    assert reader.source == "daemon /run/ffserve/ffserve.sock", reader.source
    for _ in range(2):
        read = b"".join(map(bytes, reader.read(range(len(reader)))))
        print(len(reader), hashlib.sha256(read).hexdigest())
"""


@dataclasses.dataclass(frozen=True)
class Podman:
    """podman with images and containers of its own, below a directory."""

    directory: Path

    def command(self, *words: object) -> list[str]:
        """Return a command of podman."""
        places = [f"--root={self.directory}/images", f"--runroot={self.directory}/run"]
        without_systemd = ["--cgroup-manager=cgroupfs", "--events-backend=file"]
        # crun takes no machine that has cgroups of both versions.
        return ["podman", *places, *without_systemd, "--runtime=runc", *map(str, words)]

    def run(self, *words: object, timeout_s: float = 300) -> str:
        """Run podman; return what it and the program in the container wrote."""
        done = subprocess.run(
            self.command(*words),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (words, done.stdout[-4000:])
        return done.stdout


def base(podman: Podman) -> None:
    """Import Debian under the name that the recipe has for it. Skips where no container runs."""
    named = re.search(r"^ARG BASE=(\S+)$", RECIPE.read_text(), re.M)
    assert named is not None
    try:
        root = release("bookworm", [])
    except NoRoot as error:
        pytest.skip(str(error))
    pack = ["tar", "-C", root, "--exclude=./var/cache/apt/archives/*.deb", "-c", "."]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as packed:
        subprocess.run(
            podman.command("import", "-", named[1]),
            stdin=packed.stdout, capture_output=True, check=True, timeout=300,
        )  # fmt: skip
    trial = podman.command("run", "--rm", "--network=none", *LIMITS, named[1], "true")
    done = subprocess.run(trial, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"podman cannot run a container on this machine: {done.stderr}")


def reach_packages(directory: Path) -> list[str]:
    """Return options for `podman build`: pip inside finds packages as it does here."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    settings = {"cert": os.environ.get("SSL_CERT_FILE", "")}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'")
    words = []
    if settings["cert"]:
        words.append(f"--volume={settings['cert']}:/etc/here.crt:ro")
        settings["cert"] = "/etc/here.crt"
    # What is in directories of this machine is not in the container.
    local = [name for name, value in settings.items() if not value or "file:" in value]
    local += {"constraint", "requirement"} & set(settings)
    for name in {*local, "find-links"} & set(settings):
        del settings[name]
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
    # Debian's image has the second as well: dpkg waits for no disk.
    for name, text, target in (
        ("pip.conf", "\n".join(lines), "/etc/pip.conf"),
        ("speed", "force-unsafe-io", "/etc/dpkg/dpkg.cfg.d/docker-apt-speedup"),
    ):
        (directory / name).write_text(text + "\n")
        words.append(f"--volume={directory / name}:{target}:ro")
    return words


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """podman with the image, built by the recipe as it stands."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed: apt-get install podman runc")
    if os.geteuid() != 0:
        pytest.skip("podman needs root here")
    assert list((ROOT / "dist").glob("ffserve-*-abi3-*.whl")), "run `make wheels`"
    directory = tmp_path_factory.mktemp("podman")
    podman = Podman(directory)
    try:
        base(podman)
        words = ["--isolation=chroot", "--network=host", "--pull=never", "--layers=false"]
        words += reach_packages(directory)
        recipe = RECIPE.relative_to(ROOT)
        podman.run("build", *words, "-f", recipe, "-t", IMAGE, ".", timeout_s=1100)
        yield podman
    finally:
        subprocess.run(podman.command("rm", "--all", "--force", "--time=10"), timeout=120)
        shutil.rmtree(directory, ignore_errors=True)


def lowest_oom_score() -> str:
    """The option of the documents, where root may give a process a score below that of others."""
    words = ["sh", "-c", "echo -900 >/proc/self/oom_score_adj"]
    if subprocess.run(words, capture_output=True).returncode:
        print("this machine allows nobody a low OOM score: tried without")
        return ""
    return " --oom-score-adj=-900"


@pytest.fixture
def documented(tmp_path: Path) -> tuple[list[str], list[str]]:
    """The commands of the documents that run daemon and job, with directories of the test."""
    text = (ROOT / "docs/KUBERNETES.md").read_text().partition("## Without Kubernetes\n")[2]
    block = text.partition("```text\n")[2].partition("```")[0].replace("\\\n", " ")
    for old, new in (
        (" /run/ffserve:", f" {tmp_path}/run:"),
        (" /var/cache/ffserve:", f" {tmp_path}/cache:"),
        (" /data:", f" {tmp_path}/data:"),
        (" --oom-score-adj=-900", lowest_oom_score()),
        ("--arena 16GiB", "--arena 64MiB"),
        ("podman run ", f"podman run --network=none {shlex.join(LIMITS)} "),
    ):
        assert old in block, old
        block = block.replace(old, new)
    made, daemon, job = block.strip().splitlines()
    assert made.startswith(f"install -d -o {USER} -g {USER} "), made
    for name in ("run", "cache"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, USER, USER)
    for each in (tmp_path, *tmp_path.parents[:3]):
        each.chmod(0o755)
    return shlex.split(daemon)[1:], shlex.split(job.partition("IMAGE")[0])[1:]


def test_a_container_serves_jobs_in_others(
    podman: Podman, documented: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    daemon, job = documented
    samples = [b"%d " % k * (k % 300) for k in range(1000)]
    (tmp_path / "data").mkdir()
    with ffserve.create(str(tmp_path / "data/a.ffr")) as writer:
        for sample in samples:
            writer.write(sample)
    podman.run(*daemon)
    assert podman.run("inspect", "--format={{.Config.User}}", "ffserve").strip() == f"{USER}:{USER}"
    status = ["exec", "ffserve", "ffserve", "status"]
    until(
        lambda: not subprocess.run(podman.command(*status), capture_output=True).returncode,
        "the daemon answers in its container",
    )
    expected = f"1000 {hashlib.sha256(b''.join(samples)).hexdigest()}\n"
    user = ["--rm", "--user=1000:1000"]
    for _ in range(2):
        shown = podman.run(*job, *user, IMAGE, "python", "-c", CLIENT)
        assert shown == 2 * expected
    # A job outside of all containers, by the same socket.
    with ffserve.open(
        str(tmp_path / "data/a.ffr"), server=f"{tmp_path}/run/ffserve.sock"
    ) as reader:
        assert [bytes(sample) for sample in reader.read(range(1000))] == samples
    podman.run("stop", "--time=60", "ffserve")
    assert podman.run("inspect", "--format={{.State.ExitCode}}", "ffserve").strip() == "0"
    log = podman.run("logs", "ffserve")
    assert "serving" in log and "stopping" in log, log
