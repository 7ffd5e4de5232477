"""`ffserve run`: real programs, signals, exit codes, directories and outputs."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import ffserve
from ffserve import cli
from ffserve.inputs.job import MAX_ENVIRONMENT

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM", "OMPI", "PMI", "MV2", "TORCHELASTIC", "INPUT_FILE_LIST")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)},
    "PYTHONWARNINGS": "error",
    "FFSERVE_SOCKET": "/nowhere/socket",
    "FFSERVE_START": "0",
}
FILES = {
    f"part-{number}.txt": b"".join(b"%d\n" % (10 * number + k) for k in range(10))
    for number in range(4)
}
LINES = b"".join(FILES.values())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input files that no test changes."""
    path = tmp_path_factory.mktemp("data")
    for name, content in {**FILES, "_SUCCESS": b"", ".crc": b"x", "empty.txt": b""}.items():
        (path / name).write_bytes(content)
    with ffserve.create(path / "_samples.ffr") as writer:
        for number in range(50):
            writer.write(b"\n%d" % number)
    (path / "_broken.gz").write_bytes(gzip.compress(os.urandom(1 << 20))[: 1 << 19])
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory that a run begins in."""
    path = tmp_path / "place"
    path.mkdir()
    return path


def start(place: Path, *words: Any, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ffserve", "run", *map(str, words)],
        cwd=place, env={**ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(place: Path, *words: Any, code: int = 0, **environment: str) -> tuple[str, str]:
    """Run it in this process, expecting an exit code; return what it and its programs wrote."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        open(os.dup(err.fileno()), "w", errors="surrogateescape") as said,
        contextlib.redirect_stderr(said),
    ):
        patch.chdir(place)
        patch.setattr(os, "environ", {**ENVIRONMENT, **environment})
        kept = [(fd, os.dup(fd)) for fd in (1, 2)]
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            got = cli.run(["run", *map(str, words)])
        finally:
            said.flush()
            for fd, old in kept:
                os.dup2(old, fd)
                os.close(old)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    assert got == code, texts
    return texts[0], texts[1]


def shell(text: str) -> list[str]:
    return ["--", "sh", "-c", text]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return path.read_text()


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def ended(pid: int) -> bool:
    return state_of(pid) in "ZX"


def wait_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while not ended(pid):
        assert time.monotonic() < deadline, pid
        time.sleep(0.01)


def content(directory: Path) -> dict[str, bytes]:
    return {
        os.path.relpath(path, directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


# ---- download ------------------------------------------------------------------------------------


def test_files_lie_in_the_directory_of_their_alias(data: Path, place: Path) -> None:
    out, err = run(
        place, "--input", f"{data}#train", "--input", f"{data}/part-0.txt,{data}/part-1.txt",
        *shell("pwd; echo $RANK of $WORLD_SIZE; cat train/*; wc -l < input/part-1.txt"),
    )  # fmt: skip
    assert out == f"{place}\n0 of 1\n{LINES.decode()}10\n"
    assert content(place / "train") == {**FILES, "empty.txt": b""}
    assert (place / "train" / "part-0.txt").stat().st_ino == (data / "part-0.txt").stat().st_ino
    hidden = f"{data}/.crc, {data}/_SUCCESS, {data}/_broken.gz and 1 more"
    assert err == f"left out of the inputs: hidden: {hidden}\n"


def test_several_workers_have_directories_of_their_own(data: Path, place: Path) -> None:
    (place / "train.sh").write_text(
        "#!/bin/sh\ncat input/* > mine; echo $RANK/$WORLD_SIZE >&2; ls\n"
    )
    (place / "train.sh").chmod(0o755)
    for _ in range(2):  # the second finds what the first has left
        out, err = run(place, "--input", f"{data}/*.txt", "--workers", 3, "--", "./train.sh")
        assert sorted(err.splitlines()) == [
            "[0] 0/3", "[1] 1/3", "[2] 2/3",
        ]  # fmt: skip
        names = ["input", "mine", "train.sh"]
        assert sorted(out.splitlines()) == [
            f"[{rank}] {name}" for rank in range(3) for name in names
        ]
        for rank in range(3):
            worker = place / f"worker-{rank}"
            assert set(content(worker / "input")) == set(sorted([*FILES, "empty.txt"])[rank::3])
            assert os.readlink(worker / "train.sh") == "../train.sh"
        assert sorted(os.listdir(place)) == ["train.sh", "worker-0", "worker-1", "worker-2"]
    mine = [(place / f"worker-{rank}" / "mine").read_bytes() for rank in range(3)]
    assert mine == [FILES["part-2.txt"], FILES["part-0.txt"] + FILES["part-3.txt"],
                    FILES["part-1.txt"]]  # fmt: skip


def test_fewer_files_than_workers_are_a_warning(data: Path, place: Path) -> None:
    _, err = run(place, "--input", f"{data}/part-0.txt#x", "--workers", 2, *shell("ls -A x"))
    assert "warning: the alias 'x' has 1 files for 2 workers" in err


def test_names_of_any_kind_are_placed(tmp_path: Path, place: Path) -> None:
    names = [b"line\nfeed", b"x" * 255, b"\xff", b" blank "]
    source = os.fsencode(tmp_path / "source")
    os.mkdir(source)
    for name in names:
        Path(os.fsdecode(source + b"/" + name)).write_bytes(b"x")
    run(place, "--input", tmp_path / "source", *shell("true"))
    assert sorted(os.listdir(os.fsencode(place / "input"))) == sorted(names)
    run(place, "--rename-input-files", "--input", tmp_path / "source", *shell("true"))
    assert {name.partition("_")[2] for name in os.listdir(place / "input")} == set("0123")


def test_equal_names_are_refused_before_anything_starts(tmp_path: Path, place: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_bytes(name.encode())
    both = f"{tmp_path}/a/x.txt,{tmp_path}/b/x.txt"
    _, err = run(place, "--input", both, *shell("touch started"), code=2)
    assert f"{tmp_path}/a/x.txt and {tmp_path}/b/x.txt" in err and "--rename-input-files" in err
    assert os.listdir(place) == []
    run(place, "--input", both, "--rename-input-files", *shell("cat input/*_0.txt input/*_1.txt"))
    run(place, "--input", both, "--workers", 2, *shell("true"))


def test_what_is_wrong_is_said_before_anything_starts(data: Path, place: Path) -> None:
    (place / "plain").write_text("not executable")
    (place / "script").write_text("no interpreter")
    (place / "script").chmod(0o755)
    (place / "other").mkdir()
    (place / "other" / "mine").write_text("mine")
    good = ["--input", f"{data}/part-0.txt"]
    for words, text in (
        (["--input", f"{data}/none*", *shell("touch started")], "no file matches"),
        (
            ["--input", f"{data}/empty.txt", "--input-strategy", "stream", *shell("touch started")],
            f"no file; left out: empty: {data}/empty.txt",
        ),
        ([*good, "--", "no-such-program"], "no-such-program: cannot run the program"),
        ([*good, "--", "./none"], "./none: cannot run the program"),
        ([*good, "--", "./plain"], "chmod"),
        ([*good, "--", "./script"], "first line is #!"),
        ([*good, "--framing", "lines", *shell("touch started")], "strategy stream"),
        (
            ["--input-strategy", "stream", *shell("touch started")],
            "the strategy stream needs an input",
        ),
        (["--input", f"{data}/part-0.txt#other", *shell("touch started")], "other/mine"),
        ([*good, "--output", "input=/x", *shell("touch started")], "of an output"),
        ([*good, "--output", f"out={data}", *shell("touch started")], "is not empty"),
        ([*good, "--rank", "1", *shell("touch started")], "--workers"),
    ):
        _, err = run(place, *words, code=2)
        assert text in err, err
    assert not (place / "started").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_full_disk_is_an_error_and_nothing_half_remains(data: Path, place: Path) -> None:
    large = place.parent / "large"
    large.write_bytes(bytes(1 << 20))
    text = (
        f"mount -t tmpfs -o size=256k none {place} && cd {place} && "
        f"{sys.executable} -m ffserve run --input {large},{data}/part-0.txt -- touch started; "
        "code=$?; find . -type f; exit $code"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", text],
        capture_output=True, text=True, env={**ENVIRONMENT, "PYTHONPATH": os.getcwd()}, timeout=60,
    )  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 1 and "No space left" in done.stderr
    assert set(done.stdout.split()) <= {"./.ffserve-inputs.json", "./input/part-0.txt"}


def test_two_runs_in_one_directory(data: Path, place: Path) -> None:
    words = ["--input", f"{data}/part-0.txt"]
    first = start(place, *words, *shell("echo > started; exec sleep 60"))
    wait_for(place / "started")
    assert "another run uses this directory" in run(place, *words, *shell("true"), code=2)[1]
    first.terminate()
    first.communicate(timeout=30)
    assert first.returncode == 128 + signal.SIGTERM
    run(place, *words, *shell("true"))


# ---- placeholder ---------------------------------------------------------------------------------


def test_the_list_of_files_is_in_the_environment_or_in_a_file(data: Path, place: Path) -> None:
    words = ["--input-strategy", "PlaceHolder", "--input", f"{data}/part-*#x", "--workers", 2]
    out, _ = run(place, *words, *shell('echo "$INPUT_FILE_LIST"; ls -A'))
    lists = dict(line[1:].split("] ", 1) for line in out.splitlines())
    for rank in range(2):
        names = [f"{data}/{name}" for name in sorted(FILES)[rank::2]]
        assert json.loads(lists[str(rank)]) == {"x": names}
    before = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "1"}
    for more in (0, 1):
        alone = json.dumps({"x": [f"{data}/{name}" for name in sorted(FILES)]})
        whole = {**before, "INPUT_FILE_LIST": alone, "FILLER": ""}
        size = len("[" + ", ".join(f"{name}={value}" for name, value in whole.items()) + "]")
        filler = "x" * (MAX_ENVIRONMENT - size + more)
        out, _ = run(
            place, *words[:4], *shell('echo "${INPUT_FILE_LIST-none}"'), FILLER=filler,
            INPUT_FILE_LIST="of another job",
        )  # fmt: skip
        assert out == (alone if not more else "none") + "\n"
        file = place / "inputFileList.txt"
        assert file.exists() == bool(more)
    assert file.read_text() == alone + "\n"


# ---- stream --------------------------------------------------------------------------------------


def test_lines_come_on_standard_input(data: Path, place: Path) -> None:
    words = ["--input-strategy", "STREAM", "--input", f"{data}/part-*"]
    assert run(place, *words, "--", "cat")[0].encode() == LINES
    assert os.listdir(place) == []
    run(place, *words, "--workers", 3, "--stream-epochs", 2, *shell("cat > got"))
    got = [(place / f"worker-{rank}" / "got").read_bytes() for rank in range(3)]
    parts = [FILES[name] for name in sorted(FILES)]
    assert got == [2 * (parts[0] + parts[1]), 2 * parts[2], 2 * parts[3]]
    once, again, other = (
        run(place, *words, "--shuffle", seed, "--", "cat")[0] for seed in ("1", "1", "2")
    )
    assert once == again != other and once.encode() != LINES
    assert sorted(once.split()) == sorted(LINES.decode().split())


def test_samples_come_with_their_sizes(data: Path, place: Path) -> None:
    words = ["--input-strategy", "stream", "--input", f"{data}/_samples.ffr"]
    run(place, *words, "--framing", "length", *shell("cat > got"))
    samples = [b"\n%d" % number for number in range(50)]
    framed = b"".join(struct.pack("<Q", len(sample)) + sample for sample in samples)
    assert (place / "got").read_bytes() == framed
    assert "--framing length" in run(place, *words, "--", "cat", code=2)[1]


def test_a_program_may_stop_reading(data: Path, place: Path) -> None:
    words = ["--input-strategy", "stream", "--input", f"{data}/part-*", "--stream-epochs", 10**6]
    assert run(place, *words, "--", "head", "-1")[0] == "0\n"
    assert run(place, *words, *shell("exec <&-; sleep 0.2; echo on"))[0] == "on\n"
    assert run(place, *words, *shell("head -1; exit 4"), code=4)[0] == "0\n"


def test_a_failing_source_is_an_error_and_no_end_of_the_data(data: Path, place: Path) -> None:
    _, err = run(
        place, "--input-strategy", "stream", "--input", f"{data}/part-0.txt,{data}/_broken.gz",
        "--output", f"out={place}/target",
        *shell("echo x > out/x; cat > got; echo complete > marker"), code=1,
    )  # fmt: skip
    assert "_broken.gz: the compressed file ends too early" in err and "killed" not in err
    assert not (place / "marker").exists()
    assert not (place / "target").exists()


# ---- exit codes and signals ----------------------------------------------------------------------


def test_exit_codes_pass_through(place: Path) -> None:
    assert run(place, *shell("exit 7"), code=7) == ("", "")
    assert "killed by signal 9 (SIGKILL)" in run(place, *shell("kill -9 $$"), code=137)[1]
    assert run(place, "--rank", 1, "--workers", 2, *shell("echo $RANK; exit 3"), code=3)[0] == "1\n"


def test_the_failure_of_one_worker_ends_the_others(place: Path) -> None:
    begun = time.monotonic()
    text = (
        f"case $RANK in 1) until test -e {place}/on; do sleep 0.05; done; exit 3;; "
        "0) exec sleep 100;; "
        f'2) trap "echo saved; exit 0" TERM; touch {place}/on; sleep 100 & wait;; esac'
    )
    out, err = run(place, "--workers", 3, *shell(text), code=3)
    assert "worker 1 exited 3; the other workers are ended" in err
    assert out == "[2] saved\n" and time.monotonic() - begun < 30


@pytest.mark.check
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_pass_through_once(place: Path, number: int) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    text = f'trap "echo got {name}; exit 5" {name}; echo $$ > pid; while :; do sleep 0.05; done'
    process = start(place, *shell(text))
    wait_for(place / "pid")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)  # the shell says that its sleep was killed
    assert (process.returncode, out) == (5, f"got {name}\n".encode())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_interrupt_ends_a_program_that_ignores_the_first(
    place: Path, workers: int
) -> None:
    text = 'trap "" INT TERM; echo $$ > pid; while :; do sleep 0.05; done'
    process = start(place, "--workers", workers, "--grace", 1000, *shell(text))
    folders = [place] if workers == 1 else [place / "worker-0", place / "worker-1"]
    pids = [int(wait_for(folder / "pid")) for folder in folders]
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        time.sleep(0.4)  # two at once are one
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    which = "the program has" if workers == 1 else "the programs of the workers 0, 1 have"
    assert f"{which} not ended and" in process.communicate()[1].decode()
    assert process.returncode == 128 + signal.SIGKILL and all(map(ended, pids))


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(place: Path) -> None:
    process = start(
        place, "--grace", 0, *shell('trap "" TERM; echo $$ > pid; while :; do sleep 0.05; done')
    )
    pid = int(wait_for(place / "pid"))
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL and b"has not ended and is killed" in err
    assert ended(pid)


def test_stopping_the_run_stops_its_program(place: Path) -> None:
    # A shell that is stopped while it starts a program waits uninterruptibly: this one does not.
    process = start(place, *shell("echo $$ > pid; exec sleep 100"))
    pid = int(wait_for(place / "pid"))
    for number, states in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "SRD")):
        process.send_signal(number)
        deadline = time.monotonic() + 30
        for each in (pid, process.pid):
            while (state := state_of(each)) not in states:
                assert time.monotonic() < deadline, state
                time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_program_that_a_signal_ends_gives_its_code(data: Path, place: Path) -> None:
    process = start(
        place, "--workers", 2, "--output", f"out={place}/target",
        *shell("echo x > out/x; echo $$ > pid; exec sleep 100"),
    )  # fmt: skip
    pids = [int(wait_for(place / f"worker-{rank}" / "pid")) for rank in range(2)]
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, b"", b"")
    assert all(map(ended, pids)) and not (place / "target").exists()


def test_programs_die_with_the_run(data: Path, place: Path) -> None:
    process = start(
        place, "--input-strategy", "stream", "--input", f"{data}/part-*", "--stream-epochs", 10**9,
        # Data come when all that protects the program is there.
        *shell("read first; echo $$ > pid; cat > /dev/null; echo complete > marker"),
    )  # fmt: skip
    pid = int(wait_for(place / "pid"))
    process.kill()
    process.communicate(timeout=30)
    wait_end(pid)
    assert not (place / "marker").exists()


def test_what_a_program_has_left_running_is_ended(place: Path) -> None:
    for words in ([], ["--workers", 2]):
        run(place, *words, *shell("sleep 1000 & echo $! > pid; echo out"))
        for path in place.rglob("pid"):
            assert ended(int(path.read_text()))
            path.unlink()


def test_output_is_prefixed_line_by_line(place: Path) -> None:
    text = "import os; os.write(1, b'a\\n' + b'x' * 200_000 + b'\\nno end'); os.write(2, b'e')"
    out, err = run(place, "--workers", 2, "--", sys.executable, "-c", text)
    for rank in ("[0] ", "[1] "):
        mine = [line.removeprefix(rank) for line in out.splitlines() if line.startswith(rank)]
        assert mine[0] == "a" and mine[-1] == "no end"
        assert "".join(mine[1:-1]) == "x" * 200_000
    assert sorted(err.splitlines()) == ["[0] e", "[1] e"] and len(out.splitlines()) < 40


def test_a_reader_of_the_output_may_go(place: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m ffserve run --workers 2 -- yes | head -1",
        shell=True, cwd=place, env=ENVIRONMENT, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.stdout in (b"[0] y\n", b"[1] y\n") and b"Traceback" not in done.stderr


# ---- output --------------------------------------------------------------------------------------


def test_the_output_of_all_workers_appears_together(data: Path, place: Path) -> None:
    target = place / "deep" / "target"
    text = (
        "test ! -e ../deep/target/part-0; cat input/* > out/part-$RANK; "
        "mkdir out/sub; echo $RANK > out/sub/log"
    )
    _, err = run(
        place,
        "--input",
        f"{data}/part-*",
        "--workers",
        2,
        "--output",
        f"out={target}",
        *shell(text),
    )
    got = content(target)
    assert sorted(got) == ["_SUCCESS", "part-0", "part-1", "worker-0/sub/log", "worker-1/sub/log"]
    assert got["part-0"] + got["part-1"] == b"".join(
        FILES[name] for rank in range(2) for name in sorted(FILES)[rank::2]
    )
    assert "2 files have names that several workers use" in err
    assert not (target / "_temporary").exists()


def test_a_failed_program_leaves_no_output(place: Path) -> None:
    target = place / "target"
    words = ["--output", f"out={target}"]
    run(place, *words, *shell("echo x > out/x; exit 9"), code=9)
    assert not target.exists()
    _, err = run(place, *words, *shell("test -e out/x"))
    assert "out has files already" in err and set(content(target)) == {"x", "_SUCCESS"}
    assert "is not empty" in run(place, *words, *shell("true"), code=2)[1]


def test_ranks_of_a_larger_job_commit_together(data: Path, place: Path) -> None:
    target = place / "target"
    words = [
        "--input", f"{data}/part-*", "--output", f"out={target}",
        *shell("cat input/* > out/part-$RANK; echo $WORLD_SIZE"),
    ]  # fmt: skip
    out, _ = run(place, *words, SLURM_PROCID="1", SLURM_NTASKS="2")
    assert out == "2\n" and set(os.listdir(target)) == {"_temporary"}
    run(place, *words, RANK="0", WORLD_SIZE="2")
    assert sorted(content(target)) == ["_SUCCESS", "part-0", "part-1"]
    assert sorted(os.listdir(place)) == ["target", "worker-0", "worker-1"]


def test_other_places_by_fsspec(data: Path, place: Path) -> None:
    url = f"local://{data}"
    out, _ = run(
        place, "--input", f"{url}/part-*", "--output", f"out=local://{place}/target",
        *shell("cat input/*; echo x > out/x"),
    )  # fmt: skip
    assert out.encode() == LINES and set(content(place / "target")) == {"x", "_SUCCESS"}
    words = ["--input-strategy", "stream", "--input", f"{url}/part-*,{url}/_samples.ffr"]
    out, _ = run(place, *words, "--framing", "length", "--", "wc", "-c")
    assert (
        int(out)
        == len(LINES) + 7 * 40 + 8 * 50 + (data / "_samples.ffr").stat().st_size - 12 - 12 * 50
    )
    _, err = run(place, "--input", "none-such://x", *shell("true"), code=2)
    assert "none-such" in err
