"""Commands with a store in PostgreSQL."""

from __future__ import annotations

import json
import signal
from urllib.request import Request, urlopen

import pytest
from cli_kit import program, run
from store_kit import COMPLETION, encoded
from wire import free_port

pytestmark = pytest.mark.postgres


@pytest.fixture
def address(postgres):
    return postgres.new_dsn()


def test_every_command_takes_an_address(address):
    process = program("notifications", "serve", "--store", address, "--port", "0")
    urls = json.loads(process.stdout.readline())
    with urlopen(Request(urls["completion"], data=encoded(COMPLETION))) as response:
        assert response.status == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    (fact,) = map(json.loads, run("notifications", "show", "--store", address).stdout.splitlines())
    assert fact["Fields"] == COMPLETION
    assert json.loads(run("notifications", "settings", "--store", address, "--json").stdout) == urls
    assert run("notifications", "dead", "--store", address).exit_code == 0
    assert "again: 1" in run("notifications", "replay", str(fact["FactID"]), "--store", address).stderr
    assert "deleted: 1" in run("notifications", "prune", "--store", address, "--older-than", "0").stderr
    (row,) = map(json.loads, run("outcomes", "--store", address, "--json").stdout.splitlines())
    assert (row["Completed"], row["Uninvited"]) == (1, 1)
    assert run("outcomes", "--store", address, "--uninvited").exit_code == 1


@pytest.mark.parametrize("command", [("notifications", "show"), ("notifications", "serve"), ("outcomes",)])
def test_a_database_that_is_away_is_an_error_without_its_password(command):
    away = f"postgresql://me:s3cret-word@127.0.0.1:{free_port()}/x"
    done = run(*command, "--store", away)
    assert done.exit_code not in (0, None)
    assert "Connection refused" in done.stderr
    assert "s3cret-word" not in done.stderr + done.stdout


def test_an_address_that_cannot_be_read_is_wrong_usage():
    done = run("notifications", "show", "--store", "postgresql://me:s3cret-word@[::1/x")
    assert done.exit_code == 2
    assert "the address of the database cannot be read" in done.stderr
    assert "s3cret-word" not in done.stderr
