"""The command line as its users meet it: its output, its exit code.

Most commands run within the test's process, since starting one takes longer than what they do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import ENVIRONMENT, error_of, on_a_terminal, run, spawned, text_of
from daemon import DEADLINE_S, damage, run_python, until, write

import ffserve
from ffserve.cli import COMMANDS, cli, report
from ffserve.cli.completion import scripts
from ffserve.cli.files.record_files import BATCH_COUNT, BATCH_SIZE, batches_of
from ffserve.cli.terminal import histogram, progress_line
from ffserve.compat.ffrecord import FileNameError
from ffserve.compat.packed_folder import pack_folder
from ffserve.engine.codec import crc32c
from ffserve.folders import folder_packing

ENVIRONMENT.pop("FFSERVE_SOCKET", None)
CODES = ("0", "1", "2", "3", "4", "130", "141")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a few files in it, one of them empty, one binary."""
    top = tmp_path / "folder"
    (top / "cats").mkdir(parents=True)
    (top / "cats" / "tom.txt").write_text("meow\n")
    (top / "cats" / "empty").touch()
    (top / "noise.bin").write_bytes(bytes(range(256)) * 300)
    return top


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    run("pack", folder, "-o", tmp_path / "packed.ffr")
    return tmp_path / "packed.ffr"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Ten samples of which the fourth has one wrong byte."""
    path = tmp_path / "damaged.ffr"
    with ffserve.create(path) as writer:
        for number in range(10):
            writer.write(bytes([number]) * 1000)
    damage(path, 3)
    return path


# ---------------------------------------------------------------- help, usage, exit codes


@pytest.mark.check
def test_help_names_every_command_and_each_has_an_example() -> None:
    overview = spawned(["--help"]).stdout.decode()
    assert overview == text_of("--help") == text_of("-h")
    for name in COMMANDS:
        assert f"\n  {name} " in overview
        own = text_of(name, "--help")
        assert f"  ffserve {name}" in own
        assert all(f"{code} " in own.partition("Exit codes:")[2] for code in CODES), own
    assert text_of("--version") == f"ffserve {ffserve.__version__}\n"


def test_the_exit_codes_of_the_help_are_those_of_the_document() -> None:
    page = Path(__file__).parents[2] / "docs/howto/command-line.md"
    assert tuple(re.findall(r"^\| (\d+) \|", page.read_text(), re.M)) == CODES


def test_a_wrong_call_is_usage() -> None:
    """Errors of click had another form than all others, and named no command that helps."""
    assert error_of("srve", code=2) == (
        "error: no such command 'srve'\n"
        "  hint: did you mean serve? `ffserve --help` lists all commands"
    )
    assert error_of("status", "--jsn", code=2) == (
        "error: no such option --jsn\n  hint: did you mean --json? see `ffserve status --help`"
    )
    assert error_of("pack", "x", "-o", "y", "--shards", "0", code=2).startswith(
        "error: invalid value for '--shards': "
    )
    for words in (["verify"], ["serve", "--no-such-thing"], ["--nothing"], ["cat", "a"]):
        first, second = error_of(*words, code=2).split("\n")
        assert first.startswith("error: ") and "--help`" in second
    assert "--arena: invalid size '4Q'" in error_of("serve", "--arena", "4Q", code=2)
    assert "invalid size '4Q'" in error_of("resize", "4Q", code=2)
    run("pack", "somewhere", code=2)


def test_a_configuration_with_an_unknown_key_is_usage(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("arean = 3")
    assert "did you mean arena" in error_of("serve", "--config", tmp_path / "x.toml", code=2)


def test_every_refusal_names_the_next_command(tmp_path: Path) -> None:
    assert "hint: see `ffserve run --help`" in error_of(
        "run", "--input", "x", "--input-strategy", "stream", "--rename-input-files", "--", "true",
        code=2,
    )  # fmt: skip
    (tmp_path / "foreign.ffr").write_bytes(b"no record file")
    assert "  hint: " in error_of("inspect", tmp_path / "foreign.ffr", code=1)


def test_colours_are_for_terminals_and_no_color_forbids_them(tmp_path: Path) -> None:
    words = ("inspect", tmp_path / "none.ffr")
    assert b"\x1b[31m" in on_a_terminal(*words)[0]
    assert b"\x1b" not in on_a_terminal(*words, NO_COLOR="1")[0]
    assert b"\x1b" not in on_a_terminal(*words, TERM="dumb")[0]
    assert "\x1b" not in error_of(*words, code=2)


def test_lines_of_progress_have_an_estimate() -> None:
    about = progress_line("packing", 1 << 20, 4 << 20, 10, as_bytes=True)
    assert about == "packing: 1.00 MiB of 4.00 MiB, 30 s left"
    assert progress_line("warming", 5, 5, 10, as_bytes=False) == "warming: 5 of 5, 0 s left"
    assert progress_line("verifying", 5000, 0, 10, as_bytes=False) == "verifying: 5,000"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ffserve st", {"status", "stop", "stage"}),
        ("ffserve pack --sha", {"--shards"}),
        ("ffserve serve --eng", {"--engine"}),
        ("ffserve serve --engine ur", {"uring"}),
        ("ffserve inspect --format ffr", {"ffrecord"}),
        ("ffserve verify --jobs 2 pho", {"FILES"}),
        ("ffserve serve --root ", {"FILES"}),
        ("ffserve mount --server /ru", {"FILES"}),
        ("ffserve resize ", set()),
    ],
)
def test_a_shell_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    """In a real bash; names of files are completed by the shell itself."""
    command = tmp_path / "ffserve"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ffserve "$@"\n')
    command.chmod(0o755)
    last = "''" if line.endswith(" ") else ""
    program = (
        'eval "$(_FFSERVE_COMPLETE=bash_source ffserve)"\n'
        "compopt() { COMPREPLY=(FILES); }\n"
        f"COMP_WORDS=({line}{last})\n"
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        '_ffserve_completion ffserve\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, timeout=60,
        env={**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert set(done.stdout.split()) == expected, done.stderr


def test_packages_have_the_scripts_of_three_shells() -> None:
    found = scripts(cli)
    assert {path.split("/")[3] for path in found} == {"bash-completion", "zsh", "fish"}
    assert all("_FFSERVE_COMPLETE" in text for text in found.values())


def test_no_daemon_is_3(tmp_path: Path) -> None:
    assert "no daemon answers" in error_of("status", "--socket", tmp_path / "none", code=3)
    assert "at most 107 bytes" in error_of("status", "--socket", tmp_path / ("x" * 120), code=3)


def test_an_output_that_cannot_be_created_is_named(
    folder: Path, packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "out"
    for command in (
        ("pack", folder, "-o", f"{below}.ffr"),
        ("pack", folder, "-o", below, "--shards", "2"),
        ("convert", packed, below, "--format", "ffrecord", "--shards", "2"),
        ("convert", packed, f"{below}.ffr"),
    ):
        error = error_of(*command, code=2)
        assert f"{below}" in error and "Errno" not in error


def test_a_path_that_cannot_exist_is_usage(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "turns").symlink_to(tmp_path / "turns")
    for path, hint in (
        (packed / "below.ffr", "a parent of this path is a file"),
        (tmp_path / "turns", "lead in a circle"),
        (tmp_path / ("n" * 300), "choose a shorter name"),
        (tmp_path / "none", "create the directory first"),
    ):
        assert "check the path" in error_of("inspect", path, code=2)
        assert "1 unreadable file" in text_of("verify", path, code=2)
        for options in (["pack", packed, "-o"], ["convert", packed]):
            assert hint in error_of(*options, path / "out.ffr", code=2)


def test_a_name_that_is_too_long_was_to_be_made_a_directory(packed: Path, tmp_path: Path) -> None:
    for options in (["pack", packed, "-o"], ["convert", packed]):
        error = error_of(*options, tmp_path / ("n" * 300 + ".ffr"), code=2)
        assert "choose a shorter name" in error and "directory" not in error


def test_serve_made_the_directory_of_any_socket(tmp_path: Path) -> None:
    error = error_of("serve", "--socket", tmp_path / "nowhere" / "x", code=2)
    assert f"create {tmp_path / 'nowhere'} first" in error
    assert list(tmp_path.iterdir()) == []


def test_pack_of_an_empty_directory_succeeded(tmp_path: Path) -> None:
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    for out in (["x.ffr"], ["x", "--shards", "2"]):
        error = error_of("pack", tmp_path / "empty", "-o", tmp_path / out[0], *out[1:], code=2)
        assert f"{tmp_path / 'empty'}: nothing to pack" in error
    assert os.listdir(tmp_path) == ["empty"]


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{} inspect {} >&- 2>&- <&-", 0, ""),
        ("{} pack {} -o {}.ffr >&-", 0, ""),
        ("{} inspect {} > /dev/full", 1, "No space left"),
        ("{} --help > /dev/full # {}", 1, "No space left"),
    ],
)
def test_closed_and_full_standard_streams(packed: Path, shell: str, code: int, said: str) -> None:
    command = shell.format(f"{sys.executable} -m ffserve", packed, packed)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and "ignored" not in done.stderr


NASTY = "a\nb\x1b[31m\x9b\u202e.ffr"


def test_control_characters_in_names_are_escaped(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / NASTY
    shown = str(tmp_path / r"a\nb\x1b[31m\x9b\u202e.ffr")
    assert text_of("convert", packed, path).strip().endswith(f": {shown}")
    assert text_of("inspect", path).startswith(f"{shown}\n")
    damage(path, 1)
    assert text_of("verify", path, code=1).startswith(f"{shown}: sample 1: ")
    [entry] = json.loads(text_of("verify", "--json", path, code=1))["damaged"]
    assert entry["path"] == str(path)
    path.unlink()
    assert error_of("inspect", path, code=2).startswith(f"error: {shown}: No such file")


@pytest.mark.check
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_file_that_may_not_be_read_is_usage() -> None:
    # Everything is imported while that is still allowed, by a first run as root.
    program = (
        "import os, sys, ffserve.cli as cli\n"
        "assert cli.run([sys.argv[1], sys.argv[2] + '.none', *sys.argv[3:]]) == 2\n"
        "assert cli.run(sys.argv[1:]) == 0\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(cli.run(sys.argv[1:]))"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = write(Path(folder, "a.ffr"), [b"one"])
        os.chmod(path, 0o600)
        for command in (["cat", path, "0"], ["inspect", path], ["verify", path]):
            done = run_python(program, *command, code=2)
            assert "Permission denied" in done.stdout + done.stderr
        os.chmod(path, 0o644)
        os.chmod(folder, 0o700)
        for place in (folder, path):
            for command in (["cat", place, "0"], ["inspect", place], ["verify", place]):
                done = run_python(program, *command, code=2)
                assert f"{place}: Permission denied" in done.stdout + done.stderr


def test_errors_about_names_did_not_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [b"abc", b"piouhjgbr\x80\x04garbage." + b"\0" * 20])
    for command in (
        ["inspect", path],
        ["cat", path, "tom.txt"],
        ["convert", path, tmp_path / "b.recordio"],
    ):
        error = error_of(*command, code=1)
        assert f"{path}, sample 1: invalid folder index: opcode GET" in error


def test_an_error_of_the_operating_system_about_a_path_is_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        os.listdir("/no/such/directory")
    assert report(caught.value) == 2
    assert capsys.readouterr().err.startswith("error: /no/such/directory: No such file")
    assert report(OSError(28, "No space left on device")) == 1


def test_debug_shows_the_place() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ffserve", "--debug", "status", "--socket", "/none/x.sock"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "large.ffr") as writer:
        for _ in range(64):
            writer.write(bytes(1 << 20))
    command = f"{sys.executable} -m ffserve cat {tmp_path / 'large.ffr'} 0:64 | head -c 10 | wc -c"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.stdout.strip() == "10"
    assert done.stderr == ""
    assert done.returncode == 141


def test_ctrl_c_is_130_and_leaves_nothing(tmp_path: Path) -> None:
    fifo = tmp_path / "never"
    os.mkfifo(fifo)

    def opened() -> int | None:
        with contextlib.suppress(OSError):  # ENXIO: nobody reads it yet
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        return None

    with subprocess.Popen(
        [sys.executable, "-m", "ffserve", "serve", "--config", str(fifo)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        fd = until(opened, "the command opens its configuration")
        os.write(fd, b"#")
        until(
            lambda: fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) == bytes(4),
            "it has read that much, and waits for more",
        )
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE_S)
        os.close(fd)
    assert process.returncode == 130
    assert (out, error) == ("", "interrupted\n")


def test_a_sample_too_large_for_memory_is_named_and_the_others_are_read(
    packed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, [b"one"])
    frame = (1 << 43).to_bytes(8, "little")
    crc = crc32c(frame)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    path.write_bytes(path.read_bytes() + frame + masked.to_bytes(4, "little"))
    os.truncate(path, path.stat().st_size + (1 << 43) + 4)
    said = text_of("verify", path, packed, code=1)
    assert f"{path}: a sample is too large" in said and "2 files" in said


def _has_open(pid: int, path: Path) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            if os.readlink(link) == str(path):
                return True
    return False


def test_ctrl_c_waits_for_no_search_through_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.recordio"
    write(path, [b"one"])
    os.truncate(path, 1 << 39)
    with subprocess.Popen(
        [sys.executable, "-m", "ffserve", "verify", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        try:
            until(lambda: _has_open(process.pid, path), "it reads the file")
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (process.returncode, error) == (130, "interrupted\n")


def test_ctrl_c_at_a_terminal_shows_no_traceback_of_a_worker(folder: Path, tmp_path: Path) -> None:
    command = ["pack", str(folder), "-o", str(tmp_path / "out"), "--shards", "3", "--jobs", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "ffserve", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        start_new_session=True,
    ) as process:  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def awake() -> bool:
            """Whether a worker's Python listens to SIGINT by now."""
            caught = 0
            for child in children.read_text().split():
                with contextlib.suppress(OSError):
                    if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                        status = Path(f"/proc/{child}/status").read_text()
                        caught |= int(status.partition("SigCgt:")[2].split()[0], 16)
            return bool(caught >> (signal.SIGINT - 1) & 1)

        until(awake, "a worker begins")
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, error) == (130, "interrupted\n")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- pack


def test_pack_keeps_bytes_and_names(folder: Path, packed: Path) -> None:
    for name in ("cats/tom.txt", "cats/empty", "noise.bin"):
        assert run("cat", packed, name).stdout == (folder / name).read_bytes()


def test_pack_into_shards_reports_in_json(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    facts = json.loads(text_of("pack", folder, "-o", out, "--shards", "2", "--jobs", "2", "--json"))
    assert facts["files"] == 3
    assert facts["size_bytes"] == 5 + 256 * 300
    assert [Path(path).name for path in facts["paths"]] == ["PART_00000.ffr", "PART_00001.ffr"]
    assert run("cat", out, "noise.bin", "cats/tom.txt").stdout.endswith(b"meow\n")


def test_pack_and_the_drop_in_refuse_a_name_by_one_error(folder: Path, tmp_path: Path) -> None:
    name = tmp_path / "x.rio"
    assert "does not end in .ffr" in error_of("pack", folder, "-o", name, code=2)
    with pytest.raises(FileNameError, match=r"does not end in \.ffr"):
        folder_packing.pack([folder], name)
    with pytest.raises(FileNameError, match=r"does not end in \.ffr"):
        pack_folder(folder, name)


def test_pack_that_fails_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    assert "dangling" in error_of("pack", folder, "-o", tmp_path / "x.ffr", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_pack_speaks_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    output, code = on_a_terminal("pack", folder, "-o", tmp_path / "x.ffr")
    assert code == 0
    assert b"packing" in output and b"3 files" in output


# ---------------------------------------------------------------- inspect


def test_inspect_shows_samples_sizes_and_names(packed: Path) -> None:
    text = text_of("inspect", packed)
    assert "ffrecord" in text and "CRC-32 of every sample" in text
    assert "samples       4: 3 files, and one with their names" in text
    [facts] = json.loads(text_of("inspect", "--json", packed))
    assert facts["samples"] == 4
    assert facts["named_files"] == 3
    assert facts["sample_size_bytes"]["min"] == 0
    assert facts["sample_size_bytes"]["max"] == 256 * 300
    assert sum(facts["histogram"].values()) == 4
    assert {key: facts["histogram"][key] for key in ("0", "4", "65536")} == {
        "0": 1, "4": 1, "65536": 1,
    }  # fmt: skip


def test_inspect_continues_after_a_foreign_file(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign.ffr").write_bytes(b"not a record file at all, but long enough")
    done = run("inspect", tmp_path, tmp_path / "missing.ffr", code=1)
    assert b"foreign.ffr" in done.stderr and b"missing.ffr" in done.stderr
    assert b"packed.ffr" in done.stdout
    described = json.loads(run("inspect", "--json", tmp_path, code=1).stdout)
    assert [facts.get("error") for facts in described] != [None, None]


def test_missing_files_are_usage(packed: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for path in (tmp_path / "missing.ffr", tmp_path / "*.tfrecord", nothing, ""):
        for command in ("inspect", "verify", "index"):
            run(command, path, code=2)
        run("cat", path, "0", code=2)
    run("convert", tmp_path / "missing.tar", tmp_path / "out.ffr", code=2)
    run("pack", tmp_path / "missing", "-o", tmp_path / "out.ffr", code=2)
    run("inspect", packed, tmp_path / "missing.ffr", code=2)
    assert "all intact" not in text_of("verify", packed, tmp_path / "missing.ffr", code=2)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ffr")
    for command in ("inspect", "verify", "index"):
        done = run(command, tmp_path / "pipe.ffr", code=1)
        assert b"not a regular file" in done.stdout + done.stderr


@pytest.mark.check
def test_file_names_that_are_not_utf_8(packed: Path) -> None:
    name = os.fsencode(packed.with_name("x.ffr")).replace(b"x.ffr", b"\xff.ffr")
    os.rename(packed, name)
    path = os.fsdecode(name)
    for command in ("inspect", "verify"):
        done = spawned([command, path], PYTHONIOENCODING="utf-8:strict")
        assert done.returncode == 0, done.stderr
        assert command == "verify" or name in done.stdout
    os.truncate(name, 20)
    done = spawned(["verify", path], PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 1 and name in done.stdout
    done = spawned(["verify", "--json", path], PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 1
    assert json.loads(done.stdout)["unreadable"][0]["path"] == path


def test_broken_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "loop.ffr").symlink_to("loop.ffr")
    for command in ("inspect", "verify", "index"):
        done = run(command, tmp_path / "loop.ffr", code=2)
        assert b"levels of symbolic links" in done.stdout + done.stderr


def test_inspect_sees_a_file_that_was_cut(damaged: Path) -> None:
    os.truncate(damaged, damaged.stat().st_size - 1500)
    [facts] = json.loads(run("inspect", "--json", damaged, code=1).stdout)
    assert facts["cut_samples"] == [8, 9]


# ---------------------------------------------------------------- verify


def test_verify_of_intact_files_writes_one_line(packed: Path) -> None:
    assert text_of("verify", packed).strip().endswith("all intact")


def test_verify_names_every_damaged_sample_and_goes_on(
    damaged: Path, packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "foreign.ffr").write_bytes(b"not a record file at all, but long enough")
    lines = text_of("verify", tmp_path, tmp_path / "missing.ffr", code=1).splitlines()
    assert len(lines) == 4
    assert [line for line in lines if f"{damaged}: sample 3: " in line]
    assert [line for line in lines if "foreign.ffr: " in line]
    assert [line for line in lines if "missing.ffr: " in line]
    assert lines[-1].startswith("4 files, 14 samples, ")
    assert lines[-1].endswith("1 damaged sample, 2 unreadable files")
    facts = json.loads(text_of("verify", "--json", "--jobs", "1", damaged, code=1))
    assert [(entry["index"], entry["error"]) for entry in facts["damaged"]] == [(3, "checksum")]
    assert (facts["files"], facts["samples"]) == (1, 10)


def test_batches_are_bounded_and_complete() -> None:
    sizes = np.array([BATCH_SIZE * 3, 1, 1, BATCH_SIZE, 0, *[10] * (BATCH_COUNT * 2)])
    batches = list(batches_of(sizes))
    assert [index for batch in batches for index in batch] == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) == 1 or sizes[batch.start : batch.stop].sum() <= BATCH_SIZE
        assert len(batch) <= BATCH_COUNT
    assert list(batches_of(np.zeros(0, np.int64))) == []


# ---------------------------------------------------------------- cat


def test_cat_writes_samples_byte_for_byte(damaged: Path) -> None:
    assert run("cat", damaged, "0", "9", "1:3").stdout == (
        bytes(1000) + bytes([9]) * 1000 + bytes([1]) * 1000 + bytes([2]) * 1000
    )


def test_cat_of_a_damaged_sample_is_bad_data(damaged: Path) -> None:
    error = error_of("cat", damaged, "3", code=1)
    assert str(damaged) in error and "sample 3" in error


@pytest.mark.parametrize(
    "which", ["10", "5:11", "no/such/name", "-1", "9" * 30, f"0:{10**30}", f"{10**18}:"]
)
def test_cat_of_missing_samples_is_usage(damaged: Path, which: str) -> None:
    done = run("cat", damaged, "--", which, code=2)
    assert done.stdout == b""


@pytest.mark.check
def test_cat_keeps_binary_off_a_terminal(packed: Path) -> None:
    output, code = on_a_terminal("cat", packed, "noise.bin")
    assert code == 2 and b"--force" in output
    output, code = on_a_terminal("cat", packed, "cats/tom.txt")
    assert code == 0 and b"meow" in output
    output, code = on_a_terminal("cat", "--force", packed, "noise.bin")
    assert code == 0 and len(output) > 256 * 300


# ---------------------------------------------------------------- the daemon


@pytest.fixture
def daemon(packed: Path, tmp_path: Path) -> Iterator[Path]:
    """A daemon started from the command line; its socket."""
    socket = tmp_path / "s.sock"
    with subprocess.Popen(
        [
            sys.executable, "-m", "ffserve", "serve", "--config", os.devnull,
            "--socket", socket, "--root", tmp_path, "--arena", "16M", "--depth", "8",
        ],
        env=ENVIRONMENT,
    ) as process:  # fmt: skip
        try:
            until(lambda: socket.exists() or process.poll() is not None, "it is there")
            assert process.poll() is None
            yield socket
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    assert not socket.exists()


def test_small_samples_are_not_more_than_in_memory(daemon: Path, tmp_path: Path) -> None:
    """They take whole slots: 500 bytes in 4 KiB were 819.2 % of the file."""
    with ffserve.create(tmp_path / "small.ffr") as writer:
        for number in range(100):
            writer.write(b"%05d" % number)
    with ffserve.open(tmp_path / "small.ffr", server=str(daemon)) as reader:
        reader.read(range(100))
        (line,) = (t for t in text_of("status", "--socket", daemon).splitlines() if "100  5" in t)
    assert "100.0 %" in line


def test_status_shows_one_screen(daemon: Path, packed: Path) -> None:
    assert run("cat", "--server", daemon, packed, "cats/tom.txt").stdout == b"meow\n"
    text = text_of("status", "--socket", daemon)
    assert "engine" in text and "16.0 MiB" in text and str(packed) in text
    assert len(text.splitlines()) <= 40
    facts = json.loads(text_of("status", "--socket", daemon, "--json"))
    assert facts["cache"]["checksum_failures"] == 0
    assert facts["cache"]["read_size"] > 0


def test_a_second_daemon_on_the_socket_refuses(daemon: Path, tmp_path: Path) -> None:
    error = error_of("serve", "--config", os.devnull, "--socket", daemon, "--arena", "2M", code=2)
    assert "another daemon" in error and "--socket" in error
    run("status", "--socket", daemon)


def test_a_histogram_shows_every_count() -> None:
    assert histogram([0, 1, 1000]) == " ▁█"
    assert histogram([]) == ""
