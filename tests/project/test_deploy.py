"""The files of the page on deployment agree with the program and with each other, and their commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from cli_kit import command_tree
from docs_kit import ROOT, examples_of
from packaging.requirements import Requirement
from wire import free_port

from sampling_async.simulator import Simulator

FILES = ROOT / "docs" / "files" / "deploy"
COMPOSE = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
DEPLOYMENT, SERVICE, NIGHT, VOLUME = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
UNITS = {path.name: path.read_text() for path in FILES.glob("*.service")}
APP = next(
    each for each in examples_of(ROOT / "docs/howto/monitoring.md") if each.name == "monitored_service.py"
)


def instructions():
    """Return the instructions of the Dockerfile, each with its words."""
    text = re.sub(r"^#.*\n", "", (FILES / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def of_kind(name):
    return [rest for kind, rest in instructions() if kind == name]


def pod(manifest):
    spec = manifest["spec"]
    return (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]["spec"]


CMD = json.loads(of_kind("CMD")[0])
HEALTH = json.loads(of_kind("HEALTHCHECK")[0].partition("CMD ")[2])
CAMPAIGNS = {
    "compose": COMPOSE["night"]["command"],
    "kubernetes": pod(NIGHT)["containers"][0]["args"],
    "systemd": shlex.split(re.search(r"exec /opt/partner/venv/bin/(.*)'", UNITS["sampling-night.service"])[1]),
}


# --- They agree with the program and with each other --------------------------------------------------------


@pytest.mark.parametrize("words", CAMPAIGNS.values(), ids=CAMPAIGNS)
def test_campaigns_use_options_that_the_command_has(words):
    assert words[:3] == ["sampling-async", "campaign", "run"]
    command = command_tree().commands["campaign"].commands["run"]
    known = {option for each in command.params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert words[3].endswith("panel.parquet")


def test_the_services_run_the_same_command():
    unit = re.search(r"ExecStart=/opt/partner/venv/bin/(.*)", UNITS["sampling-partner.service"])[1].split()
    assert set(CMD) - {"--host=0.0.0.0"} == set(unit) - {"--host=127.0.0.1"}
    container = pod(DEPLOYMENT)["containers"][0]
    assert "command" not in container  # the image's own
    assert "args" not in container
    assert "command" not in COMPOSE["partner"]


def test_ports_and_probes_are_those_of_the_service():
    container = pod(DEPLOYMENT)["containers"][0]
    port = int(re.search(r"--port=(\d+)", " ".join(CMD))[1])
    assert of_kind("EXPOSE") == [str(port)]
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == "http"
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert COMPOSE["partner"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")}
    assert paths == {"livenessProbe": "/alive", "readinessProbe": "/ready"}
    assert all(f'@app.get("{path}")' in APP.text for path in paths.values())
    assert f"127.0.0.1:{port}/alive" in HEALTH[-1]


def test_there_is_time_to_end_before_the_kill():
    limit = int(re.search(r"--timeout-graceful-shutdown=(\d+)", " ".join(CMD))[1])
    wait = int(pod(DEPLOYMENT)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod(DEPLOYMENT)["terminationGracePeriodSeconds"] > wait + 2 * limit
    assert pod(NIGHT)["terminationGracePeriodSeconds"] >= 30
    assert COMPOSE["partner"]["stop_grace_period"] == "30s"
    assert all("TimeoutStopSec=" in unit for unit in UNITS.values())


def test_replicas_divide_one_limit():
    spec = DEPLOYMENT["spec"]
    env = {each["name"]: each["value"] for each in pod(DEPLOYMENT)["containers"][0]["env"]}
    assert int(env["SHARES"]) == spec["replicas"] + spec["strategy"]["rollingUpdate"]["maxSurge"]
    assert ".share(of=SHARES)" in APP.text


def test_environment_and_secrets_are_what_the_service_reads():
    env = set(COMPOSE["partner"]["environment"])
    needed = {"SAMPLING_BASE_URL", "SAMPLING_PANEL_GUID", "SAMPLING_API_KEY"}
    assert env == needed | {"STORE", "SHARES", "PGPASSWORD"}
    assert all(f'"{name}"' in APP.text for name in ("STORE", "SHARES"))
    for text in (path.read_text() for path in FILES.iterdir()):
        assert not re.search(r"postgresql://\w+:", text)  # no password in an address
        assert not re.search(r"API_KEY[=:]\s*[0-9a-f]", text)


def test_nothing_runs_as_root():
    (user,) = of_kind("USER")
    assert f"--uid {user}" in " ".join(of_kind("RUN"))
    for manifest in (DEPLOYMENT, NIGHT):
        context = pod(manifest)["securityContext"]
        assert context["runAsNonRoot"]
        assert str(context["runAsUser"]) == user
        assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in pod(manifest)["containers"])
    assert all("User=partner" in unit for unit in UNITS.values())


def test_a_night_keeps_its_ledger_on_a_volume_and_to_itself():
    assert NIGHT["spec"]["concurrencyPolicy"] == "Forbid"
    volumes = {each["name"]: each for each in pod(NIGHT)["volumes"]}
    assert volumes["nights"]["persistentVolumeClaim"]["claimName"] == VOLUME["metadata"]["name"]
    mounts = {each["mountPath"] for each in pod(NIGHT)["containers"][0]["volumeMounts"]}
    assert "/nights" in mounts
    assert CAMPAIGNS["kubernetes"][5] == "/nights/$(NIGHT)"


def test_requirements_are_extras_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    lines = (FILES / "requirements.txt").read_text().splitlines()
    package, *others = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert package.name == "sampling-async"
    assert all(re.search(rf"^{extra} = \[", project, flags=re.MULTILINE) for extra in package.extras)
    assert [each.name for each in others] == ["fastapi"]


@pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="without kubernetes-validate: nox -s recipes"
)
@pytest.mark.parametrize("manifest", [DEPLOYMENT, SERVICE, NIGHT, VOLUME], ids=lambda each: each["kind"])
def test_manifests_follow_the_schema_of_kubernetes(manifest):
    import kubernetes_validate  # noqa: PLC0415  only where it is

    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


# --- Their commands run, without Docker ---------------------------------------------------------------------


def without_docker(words, folder, port):
    """Return a command of the image for a folder and a port of this machine."""
    return [word.replace("8000", str(port)).replace("/data", str(folder)) for word in words]


def fetched(url):
    for _ in range(600):
        try:
            with urlopen(url, timeout=5) as response:
                return response.status
        except URLError:
            time.sleep(0.05)
    raise TimeoutError(url)


def test_the_image_s_command_serves_is_healthy_and_ends_on_sigterm(tmp_path):
    (tmp_path / "monitored_service.py").write_text(APP.text)
    port = free_port()
    sim = Simulator(seed=0, surveys=5, members=5)
    with sim.serve() as url:
        env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path),
            "SAMPLING_BASE_URL": url,
            "SAMPLING_PANEL_GUID": sim.panel_guid,
            "SAMPLING_API_KEY": sim.api_key,
            "STORE": str(tmp_path / "partner.db"),
            "SHARES": "3",
        }
        health = without_docker(HEALTH, tmp_path, port)
        assert subprocess.run(health, env=env, capture_output=True, check=False).returncode == 1  # nobody there
        command = without_docker(CMD, tmp_path, port)
        with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE) as process:
            try:
                assert fetched(f"http://127.0.0.1:{port}/ready") == 200
                assert subprocess.run(health, env=env, check=False).returncode == 0
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=15)
            finally:
                process.kill()
        assert process.returncode in {0, -signal.SIGTERM, 128 + signal.SIGTERM}


def test_the_image_s_packages_can_be_resolved(tmp_path):
    """The Dockerfile's RUN of the first stage, where the libraries are those of this environment."""
    make, install = of_kind("RUN")[:2]
    subprocess.run(shlex.split(make.replace("/venv", str(tmp_path / "venv"))), check=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    packages = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (packages / "here.pth").write_text(f"{here}\n")
    command = shlex.split(install.replace("/venv", str(tmp_path / "venv")).replace(" . ", f" {tmp_path} "))
    done = subprocess.run(
        [*command, "--no-index"],
        cwd=FILES,
        env={**os.environ, "PYTHONWARNINGS": ""},  # the pip that Python brings warns of itself
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("useradd") is None or os.geteuid() != 0, reason="takes root and useradd")
def test_the_image_s_user_can_be_added(tmp_path):
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).touch()
    command = [*shlex.split(of_kind("RUN")[2]), "--prefix", str(tmp_path)]
    subprocess.run([word for word in command if word != "--create-home"], check=True, capture_output=True)
    assert ":10001:" in (tmp_path / "etc/passwd").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="without systemd: apt-get install systemd")
def test_systemd_takes_the_units(tmp_path):
    for path in (*FILES.glob("*.service"), *FILES.glob("*.timer")):
        unit = path.read_text().replace("/opt/partner/venv/bin", str(Path(sys.executable).parent))
        (tmp_path / path.name).write_text(unit)
    names = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def docker(*words):
    """Run a command of Docker; return what it prints."""
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout.strip()


def no_engine():
    """Return why no image can be built here; an empty text if one can."""
    if shutil.which("docker") is None:
        return "without docker"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no Docker engine answers"
    return (
        "" if find_spec("build") and find_spec("hatchling") else "without build and hatchling: nox -s package"
    )


NO_ENGINE = no_engine()


@pytest.mark.skipif(bool(NO_ENGINE), reason=NO_ENGINE or "there is one")
def test_the_image_is_built_and_runs(tmp_path):
    context = tmp_path / "context"
    shutil.copytree(FILES, context)
    (context / "monitored_service.py").write_text(APP.text)
    built = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(context / "dist"),
        str(ROOT),
    ]
    subprocess.run(built, check=True, capture_output=True)
    docker("build", "--tag", "sampling-async-test", str(context))
    env = {**dict.fromkeys(("SAMPLING_PANEL_GUID", "SAMPLING_API_KEY"), "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11")}
    env["SAMPLING_BASE_URL"] = "https://sampling.invalid"  # it starts while the service is away
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    container = docker("run", "--detach", *options, "sampling-async-test")
    try:
        assert docker("exec", container, "id", "-u") == of_kind("USER")[0]
        deadline = time.monotonic() + 60
        while docker("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < deadline, docker("logs", container)
            time.sleep(0.5)
        docker("stop", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container) in {"0", "143"}
    finally:
        docker("rm", "--force", container)
