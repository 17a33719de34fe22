"""The log on stderr by SAMPLING_LOG: one line an attempt, and no secret in any."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import doubles
import httpx
import pytest
from cli_kit import run
from doubles import KEY, PANEL

from sampling_async import InvalidRequestError, SamplingError
from sampling_async._log import follow_environment, log_on_stderr

MEMBER = "member-canary"
LOGGER = logging.getLogger("sampling_async")


@pytest.fixture
def log(monkeypatch):
    """Set the variable, and take the handler away afterwards."""
    handlers, level = list(LOGGER.handlers), LOGGER.level
    yield lambda value: monkeypatch.setenv("SAMPLING_LOG", value)
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(level)


@pytest.mark.parametrize("value", ["debug", "DEBUG", " Debug "])
async def test_each_attempt_is_a_line_with_what_a_support_case_needs(log, capsys, value):
    log(value)
    service = doubles.Service(
        httpx.Response(503, headers={"X-Request-ID": "req-1", "Retry-After": "2"}),
        httpx.Response(200, json=[], headers={"X-Request-ID": "req-2"}),
    )
    async with doubles.client(service) as client:
        await client.get_settings()
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "get_settings: at most 4 requests at once, 8 before: the service is overloaded",
        "GET get_settings: 503 after 0.000 s, attempt 1, 0 quota IDs, unknown, request ID req-1",
        "get_settings: held for 2.000 s, as the service requests",
        "get_settings: attempt 1 is repeated in 2.200 s",
        "GET get_settings: 200 after 0.000 s, attempt 2, 0 quota IDs, answered, request ID req-2",
    ]


async def test_no_line_has_a_key_a_panel_a_member_code_or_a_url(log, capsys):
    log("debug")
    echo = f"{KEY} {PANEL} {MEMBER} https://service.example/{MEMBER}"

    def answer(request):
        headers = {"X-Request-ID": echo, "Via": echo, "Set-Cookie": echo, "Server": f"of {request.url}"}
        return httpx.Response(500, text=echo, headers=headers)

    failures = (answer, httpx.ReadError(echo), httpx.ConnectTimeout(echo), answer)
    async with doubles.client(doubles.Service(*failures), on_attempt=lambda _: 1 / 0) as client:
        for call in (client.generate_invite(MEMBER, 5), client.get_settings(), client.get_quotas()):
            with pytest.raises(SamplingError):
                await call
        await client.bulk_invite(MEMBER, range(1, 250))
    printed = capsys.readouterr().err
    assert printed.count("attempt") > 10
    for secret in (KEY, PANEL, MEMBER, "https://", "canary"):
        assert secret not in printed


@pytest.mark.parametrize("value", ["", " "])
def test_without_the_variable_nothing_is_set_up(log, value):
    log(value)
    before = list(LOGGER.handlers), LOGGER.level
    follow_environment()
    assert (list(LOGGER.handlers), LOGGER.level) == before


def test_another_value_is_refused_with_the_rule(log):
    log("1")
    with pytest.raises(
        InvalidRequestError, match="SAMPLING_LOG must be one of debug, info, warning, error, not"
    ):
        doubles.client(doubles.Service([]))


def test_many_clients_and_the_option_debug_print_a_line_once(log, capsys):
    log("info")
    for _ in range(3):
        follow_environment()
    with log_on_stderr():
        LOGGER.debug("once")
    assert capsys.readouterr().err.count("once") == 1
    assert LOGGER.level == logging.INFO


def test_the_command_line_has_it_too(sim, log):
    log("debug")
    result = run("settings")
    assert result.exit_code == 0
    assert "GET get_settings: 200 after" in result.stderr
    assert sim.api_key not in result.stderr


def test_a_program_that_configures_nothing_shows_it():
    program = (
        "import logging, sampling_async as s\n"
        f"s.SamplingClient('https://service.example', panel_guid='{PANEL}', api_key='{KEY}')\n"
        "logging.getLogger('sampling_async.calls').info('shown')\n"
        "logging.getLogger('sampling_async.calls').debug('not shown')\n"
        "logging.getLogger('other').info('not shown')\n"
    )
    environment = {**os.environ, "SAMPLING_LOG": "info"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stderr.count("shown") == 1


def test_a_client_made_within_the_block_leaves_the_whole_log_shown(log):
    log("info")
    follow_environment()
    with log_on_stderr():
        follow_environment()  # as each client does
        assert LOGGER.level == logging.DEBUG
    assert LOGGER.level == logging.INFO
