"""The chart and the manifests of docs/kubernetes: linted by Helm, validated by Kubernetes' schemas,
and run as far as a machine without Kubernetes can."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import socket
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from container import Container, put_inside
from daemon import Daemon

import ffserve
from ffserve.config import load_config, parse_size
from ffserve.engine import io
from ffserve.limits import OWN_SIZE

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "docs" / "kubernetes"
CHART = PLACE / "chart"
MANIFEST = PLACE / "ffserve.yaml"
RENDER = """
import json, sys
import helm_python
path, values = sys.argv[1], json.loads(sys.argv[2])
report = helm_python.lint(path, values, strict=True)
with helm_python.Chart.load(path) as chart:
    try:
        chart.validate_schema(values)
        rendered = chart.render(values, name="ffserve", namespace="ffserve", is_install=True)
    except helm_python.HelmError as error:
        rendered = {"error": str(error)}
print(json.dumps([report, rendered]))
"""
"""In a process of its own: the library has threads of its own."""
VARIANTS: list[dict[str, Any]] = [
    {},
    {"seccomp": "RuntimeDefault", "updateStrategy": "OnDelete", "hostPID": False},
    {"httpPort": 9469},
    {
        "volumes": [{"name": "data", "hostPath": {"path": "/data", "type": "Directory"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
        "config": 'common = "user"\nsocket_mode = 0o666\n',
        "supplementalGroups": [2000],
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "system-node-critical",
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
]

helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="no helm-python-sdk: there are wheels for x86_64 only",
)
schemas = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="no kubernetes-validate"
)


def rendered(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return Helm's report about the chart, and the manifests by their names."""
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(CHART), json.dumps(values)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    report, manifests = json.loads(done.stdout)
    return report, manifests


def joined(manifests: dict[str, str]) -> str:
    """Return the manifests as one file."""
    head = "# helm template ffserve docs/kubernetes/chart\n"
    return head + "".join(f"---\n{manifests[name].strip()}\n" for name in sorted(manifests))


def documents(text: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [each for each in yaml.safe_load_all(text) if each is not None]


def daemon_set(text: str) -> dict[str, Any]:
    (found,) = [each for each in documents(text) if each["kind"] == "DaemonSet"]
    return found


def validate(document: dict[str, Any]) -> None:
    """Compare with the schemas of the oldest and the newest Kubernetes that the package has."""
    import kubernetes_validate

    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    names = [each.name for each in schemas.iterdir() if each.name.endswith("-strict")]
    versions = sorted(tuple(map(int, re.findall(r"\d+", name)))[:2] for name in names)
    for major, minor in (versions[0], versions[-1]):
        kubernetes_validate.validate(document, f"{major}.{minor}", strict=True)


@helm
@pytest.mark.parametrize("values", VARIANTS, ids=["default", "less", "http", "more"])
def test_helm_finds_no_fault_in_the_chart(values: dict[str, Any]) -> None:
    report, manifests = rendered(values)
    assert report["errors"] == []
    # 1: information, such as the lack of an icon.
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert "error" not in manifests
    assert {each["kind"] for each in documents(joined(manifests))} == {"ConfigMap", "DaemonSet"}


@helm
@pytest.mark.parametrize(
    "wrong", [{"arenas": "1GiB"}, {"arena": "much"}, {"user": 0}, {"seccomp": "Unconfined"}]
)
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    _, manifests = rendered(wrong)
    assert next(iter(wrong)) in manifests["error"]


@helm
@pytest.mark.parametrize(
    ("arena", "memory", "fits"),
    [
        ("16GiB", "16Gi", False),
        ("64GiB", "18Gi", False),
        ("16GiB", "17G", False),
        ("1.5 TiB", "1Ti", False),
        ("16GiB", f"{(16 << 10) + (OWN_SIZE >> 20) - 1}Mi", False),
        ("16GiB", f"{(16 << 10) + (OWN_SIZE >> 20)}Mi", True),
        ("16GB", "16Gi", True),
        ("16G", "18G", True),
        ("512MiB", "1Gi", True),
    ],
)
def test_an_arena_above_the_limit_of_the_pod_is_refused(
    arena: str, memory: str, fits: bool
) -> None:
    _, manifests = rendered({"arena": arena, "memory": memory})
    assert ("error" not in manifests) == fits, manifests
    assert fits or f"an arena of {arena} does not fit into memory: {memory}" in manifests["error"]


@helm
@pytest.mark.parametrize(
    "config", ["depth = ", 'common = "user', "[store", 'arena = "1GiB"', "a = 1\na = 2"]
)
def test_settings_that_are_no_toml_are_refused(config: str) -> None:
    _, manifests = rendered({"config": config})
    assert "config is not valid" in manifests["error"]


@helm
def test_the_manifest_is_the_chart() -> None:
    """`python tests/unit/test_kubernetes.py` writes it anew."""
    assert MANIFEST.read_text() == joined(rendered({})[1])


@schemas
def test_manifests_fit_the_schemas_of_kubernetes() -> None:
    for path in (MANIFEST, PLACE / "job.yaml"):
        for document in documents(path.read_text()):
            validate(document)


@helm
@schemas
@pytest.mark.parametrize("values", VARIANTS, ids=["default", "less", "http", "more"])
def test_the_chart_fits_the_schemas_of_kubernetes(values: dict[str, Any]) -> None:
    for document in documents(joined(rendered(values)[1])):
        validate(document)


@helm
def test_a_port_makes_probes_of_http_and_lets_the_daemon_have_one() -> None:
    text = joined(rendered({"httpPort": 9469})[1])
    (settings,) = [each["data"] for each in documents(text) if each["kind"] == "ConfigMap"]
    assert 'http = "0.0.0.0:9469"' in settings["ffserve.toml"].splitlines()
    allowed = {
        name: rule.get("args")
        for rule in json.loads(settings["seccomp.json"])["syscalls"]
        for name in rule["names"]
    }
    assert allowed["socket"] == [{"index": 0, "value": socket.AF_INET, "op": "SCMP_CMP_LE"}]
    template = daemon_set(text)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9469"
    assert "httpGet" not in MANIFEST.read_text()
    assert "[metrics]" in (PLACE / "Containerfile").read_text(), "the image has the packages"


@schemas
@pytest.mark.parametrize("field", ["unknown", "hostPid"])
def test_an_unknown_field_is_refused(field: str) -> None:
    import kubernetes_validate

    document = copy.deepcopy(daemon_set(MANIFEST.read_text()))
    document["spec"]["template"]["spec"][field] = True
    with pytest.raises(kubernetes_validate.ValidationError, match=field):
        validate(document)


def test_the_daemon_takes_the_settings_and_the_arguments_of_the_manifest(tmp_path: Path) -> None:
    found = documents(MANIFEST.read_text())
    (settings,) = [each["data"] for each in found if each["kind"] == "ConfigMap"]
    path = tmp_path / "ffserve.toml"
    path.write_text(settings["ffserve.toml"])
    config = load_config(str(path), {})
    spec = daemon_set(MANIFEST.read_text())["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    limit = parse_size(container["resources"]["limits"]["memory"] + "B")
    assert config.arena_size_bytes is not None and config.arena_size_bytes + (1 << 30) <= limit
    assert spec["terminationGracePeriodSeconds"] > config.drain_timeout_s
    assert container["command"] + container["args"][:2] == ["ffserve", "serve", "--config"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["FFSERVE_SOCKET"] == config.socket
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(Path(config.socket).parent) in mounts
    assert f"{environment['XDG_CACHE_HOME']}/ffserve" in mounts
    assert str(Path(container["args"][2]).parent) in mounts


def test_the_job_has_the_directory_and_the_group_of_the_daemon() -> None:
    (job,) = documents((PLACE / "job.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    daemons = daemon_set(MANIFEST.read_text())["spec"]["template"]["spec"]
    (theirs,) = [each for each in daemons["volumes"] if each["name"] == "run"]
    (ours,) = [each for each in spec["volumes"] if each["name"] == "ffserve"]
    assert ours["hostPath"] == theirs["hostPath"]
    assert spec["securityContext"]["supplementalGroups"] == [
        daemons["containers"][0]["securityContext"]["runAsGroup"]
    ]
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "ffserve"]
    assert mount == {"name": "ffserve", "mountPath": "/run/ffserve", "readOnly": True}
    assert spec["containers"][0]["image"] == daemons["containers"][0]["image"]


def test_the_containerfile_copies_what_there_is() -> None:
    text = (PLACE / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        *sources, _ = line.split()
        wheel = f"dist/ffserve-{ffserve.__version__}-cp310-abi3-manylinux_2_28_x86_64.whl"
        assert all((ROOT / each).exists() or fnmatch(wheel, each) for each in sources), line
    user = daemon_set(MANIFEST.read_text())["spec"]["template"]["spec"]["containers"][0]
    assert f"USER {user['securityContext']['runAsUser']}:" in text


PROFILE = CHART / "files" / "seccomp.json"


@pytest.mark.check
@pytest.mark.skipif("os.geteuid() != 0", reason="makes namespaces")
@pytest.mark.parametrize("engine", [io.probe()[0], "aio"])
def test_the_seccomp_profile_lets_the_daemon_run(engine: str) -> None:
    """With io_uring, and as with the profiles of runtimes, which forbid it."""
    profile = json.loads(PROFILE.read_text())
    expect = []
    if engine == "aio":
        rules = profile["syscalls"]
        profile["syscalls"] = [r for r in rules if "io_uring_setup" not in r["names"]]
        assert len(profile["syscalls"]) == len(rules) - 1
        expect = [r"io_uring is not used \(.*\): reading with aio"]
    text_of_it = json.dumps(profile)
    box = Container(users=None, uid=4444, namespaces=("mnt", "ipc", "net"), profile=text_of_it)
    daemon = Daemon(options=["--socket-mode", "0666"], expect=expect)
    daemon.directory.chmod(0o777)
    put_inside(daemon, box)
    from test_containers import COUNT, READ, record_file, text  # type: ignore[import-not-found]

    try:
        daemon.start()
        data = record_file(daemon.directory / "a.ffr", 1)
        # A job under the same profile.
        job = Container(users=None, uid=5555, namespaces=("mnt", "ipc", "net"), profile=text_of_it)
        _, _, hits, content = json.loads(job.run(READ, daemon.socket, data))
        assert (hits, content) == (COUNT, text(1))
        assert daemon.status()["engine"]["kind"] == engine
        # The probe of the manifest, in the daemon's container.
        probe = "from ffserve import cli\nraise SystemExit(cli.run(sys.argv[1:]))"
        assert "engine" in box.run(probe, "status", "--socket", daemon.socket)
        assert daemon.end() == 0
        daemon.check_log()
    finally:
        daemon.close()


FORBIDDEN = """
import ctypes, socket
for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    try:
        socket.socket(kind, socket.SOCK_DGRAM)
    except PermissionError:
        print("no socket", end=" ")
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x20000, 0x10000000):
    print(libc.unshare(flags), ctypes.get_errno(), end=" ")
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())
"""


@pytest.mark.skipif("os.uname().machine != 'x86_64'", reason="has a number of a system call")
@pytest.mark.skipif("os.geteuid() != 0", reason="makes namespaces")
def test_the_seccomp_profile_allows_less_than_the_defaults_of_runtimes() -> None:
    # As root with all capabilities, so that nothing else forbids it.
    box = Container(users=None, namespaces=("mnt",), profile=PROFILE.read_text())
    assert box.run(FORBIDDEN) == "no socket no socket no socket -1 1 -1 1 -1 1"
    names = {name for rule in json.loads(PROFILE.read_text())["syscalls"] for name in rule["names"]}
    assert not names & {
        "unshare",
        "setns",
        "mount",
        "ptrace",
        "bpf",
        "add_key",
        "keyctl",
        "kexec_load",
    }


if __name__ == "__main__":
    MANIFEST.write_text(joined(rendered({})[1]))
