"""Django: a click in an async view, and a command for the night."""

from __future__ import annotations

import asyncio
from importlib import import_module

import pytest

pytest.importorskip("django", reason="without Django")

import django
import httpx


def as_json(profile):
    return {
        str(key): sorted(value) if isinstance(value, frozenset) else value for key, value in profile.items()
    }


@pytest.fixture
def panel(service, tmp_path, monkeypatch):
    """Set Django up with a database that holds the members of the simulator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE", str(tmp_path / "db.sqlite3"))
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "partner.settings")
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "")
    django.setup()
    from django.core.management import call_command  # noqa: PLC0415  after the set-up
    from django.db import connection  # noqa: PLC0415

    models = import_module("partner.models")
    connection.settings_dict["NAME"] = str(tmp_path / "db.sqlite3")
    call_command("migrate", run_syncdb=True, verbosity=0)
    models.PanelMember.objects.bulk_create(
        models.PanelMember(code=code, answers=as_json(member.profile))
        for code, member in service.members.items()
    )
    yield service
    connection.close()


def test_a_click_in_an_async_view_gets_a_link(panel):
    asgi = import_module("partner.asgi")

    async def clicks():
        async with asgi.application.router.lifespan_context(asgi.application) as state:
            app = with_state(asgi.application, state)
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://partner"
            ) as browser:
                while not state["router"].status.is_ready:  # noqa: ASYNC110  as a probe looks
                    await asyncio.sleep(0.01)
                return [await browser.get("/go", headers={"X-Member": code}) for code in panel.members]

    answers = asyncio.run(clicks())
    assert {answer.status_code for answer in answers} <= {302, 404}
    assert sum(answer.status_code == 302 for answer in answers) > 10


def with_state(app, state):
    """Give each request the state of the lifespan, as a server does."""

    async def inner(scope, receive, send):
        await app({**scope, "state": dict(state)}, receive, send)

    return inner


def test_the_command_for_the_night_accounts_for_each_pair(panel, capsys):
    from django.core.management import call_command  # noqa: PLC0415  after the set-up

    call_command("night")
    counts = eval(capsys.readouterr().out)
    assert counts["invited"] == len(panel.ledger.invites) > 20
    assert set(counts) <= {"invited", "rejected"}
