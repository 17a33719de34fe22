"""The command that runs the simulator."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import KEY_NAMES, run

from sampling_async import SamplingClient
from sampling_async.simulator import Simulator


def test_simulate_prints_the_settings_to_copy(monkeypatch):
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, listener: ran.append((sim, connected(listener))))
    result = run("simulate", "--port", 0, "--seed", 5, "--members", 3)
    assert result.exit_code == 0
    ((sim, port),) = ran
    assert f"export SAMPLING_BASE_URL=http://127.0.0.1:{port}\n" in result.stdout
    assert f"export SAMPLING_PANEL_GUID={sim.panel_guid}\n" in result.stdout
    assert f"export SAMPLING_API_KEY={sim.api_key}\n" in result.stdout
    assert len(sim.members) == 3


def connected(listener):
    """Connect to an address that has been shown, although nothing serves it yet; return its port."""
    socket.create_connection(listener.getsockname(), timeout=10).close()
    return listener.getsockname()[1]


def sourced(script, command):
    """Return what a command prints in a shell that has sourced a script."""
    environment = {"PATH": os.environ["PATH"], "SAMPLING_PANEL_GUID": "left over"}
    shell = ["sh", "-c", f". {script}; {command}"]
    return subprocess.run(shell, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def simulated(monkeypatch):
    """Return what `simulate` prints with options, and its simulator."""
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **_: ran.append(sim))

    def simulate(*options):
        result = run("simulate", "--port", 0, "--members", 3, *options)
        assert result.exit_code == 0, result.stderr
        return result.stdout, ran[-1]

    return simulate


def test_several_panels_are_simulated_and_a_shell_can_source_them(simulated, tmp_path):
    printed, sim = simulated("--panels", 3)
    script = tmp_path / "panels.sh"
    script.write_text(printed)
    assert len({panel.panel_guid for panel in sim.panels}) == 3
    assert {panel.api_key for panel in sim.panels} == {sim.api_key}  # as of one partner
    assert [len(panel.members) for panel in sim.panels] == [3, 3, 3]
    names = "$SAMPLING_PANEL_GUID $SAMPLING_API_KEY $SAMPLING_PANEL_GUID_P3"
    assert sourced(script, f"echo {names}").split() == [
        sim.panel_guid,
        sim.api_key,
        sim.panels[2].panel_guid,
    ]


def test_simulated_panels_come_as_profiles(simulated, tmp_path, monkeypatch):
    for name in KEY_NAMES:
        monkeypatch.delenv(name, raising=False)
    file, script = tmp_path / "my panels.toml", tmp_path / "panels.sh"
    printed, sim = simulated("--panels", 2, "--profiles", file)
    assert "quotas --profile p1" in printed
    script.write_text(printed)
    for name, value in (
        line.partition("=")[::2] for line in sourced(script, "env").splitlines() if line.startswith("SAMPLING_")
    ):
        monkeypatch.setenv(name, value)
    assert "SAMPLING_PANEL_GUID" not in os.environ
    shown = [json.loads(line) for line in run("profile", "list").stdout.splitlines()]
    assert [(each["PanelGUID"], each["Key"]) for each in shown] == [
        (sim.panels[0].panel_guid, "variable SAMPLING_API_KEY: set"),
        (sim.panels[1].panel_guid, "variable SAMPLING_API_KEY: set"),
    ]
    assert SamplingClient.from_env(profile="p2")
    assert sim.api_key not in file.read_text()
    simulated("--panels", 1, "--profiles", file)  # its own file is replaced
    assert "[p2]" not in file.read_text()


def test_profiles_of_somebody_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    file = tmp_path / "profiles.toml"
    file.write_text("[us]\n")
    result = run("simulate", "--port", 0, "--profiles", file)
    assert result.exit_code == 2
    assert "holds other profiles; name another file" in " ".join(result.stderr.split())
    assert file.read_text() == "[us]\n"


def test_the_settings_of_all_panels_are_one_object_of_json(simulated):
    printed, sim = simulated("--panels", 2, "--json")
    panels = json.loads(printed)["Panels"]
    assert [(each["PanelGUID"], each["APIKey"], each["Members"]) for each in panels] == [
        (panel.panel_guid, panel.api_key, 3) for panel in sim.panels
    ]


@pytest.mark.parametrize(
    ("options", "begun"),
    [
        ((), ("sampling-async", "SAMPLING_PANEL_GUID=$SAMPLING_PANEL_GUID_P2 sampling-async")),
        (("--profiles", "p.toml"), ("sampling-async --profile p1", "sampling-async --profile p2")),
    ],
)
def test_what_can_be_tried_with_the_members_of_a_panel_names_that_panel(
    simulated, tmp_path, monkeypatch, options, begun
):
    monkeypatch.chdir(tmp_path)
    printed, _ = simulated("--panels", 2, "--members", "m.jsonl", *options)
    for each, file, night in zip(begun, ("m.jsonl", "m-p2.jsonl"), ("night", "night-p2"), strict=True):
        program, _, profile = each.partition(" --profile")
        end = f" --profile{profile}" if profile else ""
        assert f"#   {program} match {file}{end}\n" in printed
        assert f"#   {program} campaign {file} --out {night} --dry-run{end}\n" in printed


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_simulate_prints_an_address_that_can_be_asked(host, shown, monkeypatch):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    result = run("simulate", "--port", 0, "--host", host, "--members", 1)
    assert f"export SAMPLING_BASE_URL=http://{shown}:" in result.stdout


def test_simulate_takes_faults_and_writes_its_members(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **_: ran.append(sim))
    monkeypatch.chdir(tmp_path)
    Path("faults.json").write_text('[{"Fault": "refusal", "ResultCode": 39, "On": {"MemberCode": "m000001"}}]')
    result = run("simulate", "--port", 0, "--members", "p.jsonl", "--faults", "faults.json")
    assert result.exit_code == 0
    assert [fault.result_code for fault, _ in ran[0].faults.struck()] == [39]
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [row["member_code"] for row in rows] == list(ran[0].members)
    assert len(rows) == 200
    assert json.loads(Path("p.bands.json").read_text())["2006352"] == [18, 24]
    assert Path("p.jsonl").stat().st_mode & 0o777 == 0o600  # it holds member codes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--members", "0"], "--members must be one number from 1 to 10,000,000, or files, or both, not 0"),
        (["--members", "5", "--members", "6"], "not 5 6"),
        (["--members", "-5"], "not -5"),
        (["--members", "panel.csv"], "a number, or a file that ends in .parquet or .jsonl, not panel.csv"),
        (["--members", "many"], "not many"),
        (["--members", "+-5"], "a number, or a file that ends in .parquet or .jsonl, not +-5"),
        (["--notify", "http://["], "--notify http://[: no http URL, and no file"),
        (["--notify", "urls.json"], "urls.json: expected one JSON object of URLs by kind"),
        (["--faults", "status.json"], "status from 200 to 599"),
        (["--members", "nix/panel.jsonl"], "the folder does not exist"),
        (["--members", "folder.jsonl"], "--members folder.jsonl is a folder"),
        (["--faults", "nix.json"], "nix.json: No such file"),
        (["--faults", "folder.jsonl"], "folder.jsonl: Is a directory"),
        (["--faults", "wrong.json"], "wrong.json: $[0].On.Every: expected a whole number, found 'x'"),
    ],
)
def test_invalid_options_of_simulate_are_reported_in_one_line(monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.chdir(tmp_path)
    Path("folder.jsonl").mkdir()
    Path("wrong.json").write_text('[{"Fault": "null", "On": {"Every": "x"}}]')
    Path("status.json").write_text('[{"Fault": "status", "Status": 999}]')
    Path("urls.json").write_text('{"invite": null, "completion": 5}')
    result = run("simulate", "--port", 0, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_simulate_on_a_port_that_is_taken(sim):
    result = run("simulate", "--port", os.environ["SAMPLING_BASE_URL"].rpartition(":")[2])
    assert result.exit_code == 4
    assert result.stderr.startswith("sampling-async: 127.0.0.1, port ")
    assert "in use; --port takes another" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["simulate", "demo"])
def test_a_missing_simulator_extra_is_named_with_what_to_install(command, monkeypatch):
    for name in ("starlette", "uvicorn", "pyarrow", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run(command)
    assert result.exit_code == 2
    extras = "simulator,panel" if command == "demo" else "simulator"
    assert f'pip install "sampling-async[{extras}]"' in result.stderr


def test_simulate_writes_lines_of_json_without_the_extra_of_panels(tmp_path, monkeypatch):
    for name in ("numpy", "pyarrow", "sampling_async._cli._match_run"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    file = tmp_path / "panel.jsonl"
    result = run("simulate", "--port", 0, "--members", 3, "--members", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(file.read_text().splitlines()) == 3
    result = run("simulate", "--port", 0, "--members", tmp_path / "panel.parquet")
    assert result.exit_code == 2
    assert "panel.parquet needs pyarrow" in result.stderr
