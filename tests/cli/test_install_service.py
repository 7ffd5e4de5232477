"""What installing the service writes and removing it leaves, in a folder. `make systemd` does both
where systemd runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command import run, text_of

from ffserve.cli.daemon import service
from ffserve.errors import UsageError


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_the_service_is_written_and_removed(tmp_path: Path) -> None:
    text_of("install-service", "--root", tmp_path)
    units = "usr/local/lib/systemd/system"
    assert files_below(tmp_path) == {
        f"{units}/ffserve.service",
        f"{units}/ffserve.socket",
        f"{units}/ffserve@.service",
        f"{units}/ffserve@.socket",
        f"{units}/ffserve-mount@.service",
        "usr/local/lib/sysusers.d/ffserve.conf",
        "etc/ffserve/ffserve.toml",
        "usr/local/bin/ffserve",
    }
    assert (tmp_path / "usr/local/bin/ffserve").readlink() == Path(sys.prefix) / "bin/ffserve"
    text = (tmp_path / units / "ffserve.service").read_text()
    assert f"ExecStart={sys.prefix}/bin/ffserve serve --config /etc/ffserve/ffserve.toml" in text
    assert "%i" not in text and "/opt/ffserve" not in text
    assert "kept" not in text_of("uninstall-service", "--root", tmp_path)
    assert files_below(tmp_path) == set()
    assert "removed" in text_of("uninstall-service", "--root", tmp_path), "a second time as well"


@pytest.mark.parametrize("link", [None, "/opt/other/bin/ffserve"])
def test_a_command_of_somebody_else_is_left_alone(link: str | None, tmp_path: Path) -> None:
    command = tmp_path / "usr/local/bin/ffserve"
    command.parent.mkdir(parents=True)
    command.write_text("mine") if link is None else command.symlink_to(link)
    assert f"{command} is left as it is" in text_of("install-service", "--root", tmp_path)
    text_of("uninstall-service", "--root", tmp_path)
    assert files_below(tmp_path) == {"usr/local/bin/ffserve"}
    assert command.readlink() == Path(link) if link else command.read_text() == "mine"


def test_settings_outlive_upgrade_and_removal(tmp_path: Path) -> None:
    text_of("install-service", "--root", tmp_path)
    settings = tmp_path / "etc/ffserve/ffserve.toml"
    settings.write_text('roots = ["/data"]\n')
    (tmp_path / "etc/ffserve/fast.toml").write_text('arena = "1G"\n')
    (tmp_path / "etc/ffserve/photos.conf").write_text("MOUNTPOINT=/mnt/photos\n")
    change = tmp_path / "etc/systemd/system/ffserve.service.d/override.conf"
    change.parent.mkdir(parents=True)
    change.write_text("[Service]\nMemoryMax=1G\n")
    (tmp_path / "var/cache/private/ffserve").mkdir(parents=True)
    (tmp_path / "var/cache/private/ffserve-fast").mkdir()
    (tmp_path / "var/cache/ffserve").symlink_to("private/ffserve")
    assert "(kept as they are)" in text_of("install-service", "--root", tmp_path)
    assert settings.read_text() == 'roots = ["/data"]\n'
    told = text_of("uninstall-service", "--root", tmp_path)
    kept = {f"etc/ffserve/{name}" for name in ("ffserve.toml", "fast.toml", "photos.conf")}
    assert files_below(tmp_path) == {*kept, str(change.relative_to(tmp_path))}
    assert all(f"kept {tmp_path / name}, which was changed" in told for name in kept)
    assert f"kept {change.parent}" in told
    assert list((tmp_path / "var/cache/private").iterdir()) == []
    text_of("uninstall-service", "--root", tmp_path, "--purge")
    assert files_below(tmp_path) == set()


def test_a_unit_that_would_hide_the_installed_one_is_named(tmp_path: Path) -> None:
    earlier = tmp_path / "etc/systemd/system/ffserve.service"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("[Service]\n")
    done = run("install-service", "--root", tmp_path)
    assert f"{earlier} hides the unit that was installed" in done.stderr.decode()


def test_an_installation_that_the_service_cannot_see_is_refused(tmp_path: Path) -> None:
    prefix = str(tmp_path)
    with pytest.raises(UsageError, match="which does not exist"):
        service._program(live=True, prefix=prefix)
    program = tmp_path / "bin" / "ffserve"
    program.parent.mkdir()
    program.touch(mode=0o755)
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match=r"is not for all|sees no home") as caught:
        service._program(live=True, prefix=prefix)
    assert "/opt/ffserve" in (caught.value.hint or "")
    assert service._program(live=False, prefix=prefix) == str(program)
