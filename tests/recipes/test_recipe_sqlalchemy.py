"""SQLAlchemy: a panel is read from a database, and invites are requested for it."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("sqlalchemy", reason="without SQLAlchemy")
pytest.importorskip("pyarrow", reason="without pyarrow")

import recipe_sqlalchemy
import sqlalchemy

AGE, GENDER, POSTAL_CODE = 1001538, 1001007, 1001042


def row(member):
    profile = member.profile
    values = {"age": profile.get(AGE), "gender": profile.get(GENDER), "postal_code": profile.get(POSTAL_CODE)}
    return {"code": member.member_code, "device": member.device_type_id, **values}


def run_on(engine, service):
    recipe_sqlalchemy.members.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(recipe_sqlalchemy.members.insert(), [row(each) for each in service.members.values()])
    assert sum(batch.num_rows for batch in recipe_sqlalchemy.panel(engine)) == 30
    counts = asyncio.run(recipe_sqlalchemy.night(engine))
    assert counts["invited"] == len(service.ledger.invites)
    assert sum(counts.values()) > 20
    engine.dispose()


def test_a_panel_of_sqlite(service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_on(sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'panel.db'}"), service)


@pytest.mark.postgres
def test_a_panel_of_postgresql(postgres, service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_on(sqlalchemy.create_engine(postgres.dsn.replace("postgresql:", "postgresql+psycopg:")), service)
