"""Notifications as services send them, short ways to post them, and a PostgreSQL server for their stores."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from wire import free_port

from sampling_async import _following
from sampling_async.notifications import State, _app, _handling
from sampling_async.notifications._access import Signatures
from sampling_async.notifications._entries import read_entries
from sampling_async.notifications._facts import Hit, Receipt, Settled
from sampling_async.notifications._stores import store_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sampling_async.notifications import Fact, HitResponse, Inbox, Kind, SqlStore
    from sampling_async.notifications._facts import Entry


# --- Notifications


SECRET = "a-secret-of-the-tests"
PEER = "198.51.100.7"
MEMBER = {
    "UniqueCode": "m-1",
    "SurveyId": 2401,
    "SurveyRef": "S-2401",
    "WaveId": 77,
    "QuotaID": 1100,
    "DateTime": "2026-11-22 10:00:00",
    "AdditionalData": "invite=1&quota=1100",
}
COMPLETION = {**MEMBER, "Revenue": 150}
TERMINATE = {**MEMBER, "Reason": "SCREENED_OUT"}
CLOSED = {
    "SurveyID": 2401,
    "SurveyRef": "S-2401",
    "Status": "Closed",
    "DateTime": "2026-11-22 10:00:00",
    "WaveId": 77,
}

NOTE_SETTLED = """
import os, sys
from contextlib import contextmanager
from sampling_async.notifications import *
from sampling_async.notifications._stores import store_of
store = store_of(sys.argv[1])
file = os.open(sys.argv[2], os.O_APPEND | os.O_WRONLY | os.O_CREAT)
settled = []
real_settle, real_transaction = store.settle, store.transaction
def settle(owner, result):
    is_stored = real_settle(owner, result)
    if is_stored and result.state == State.HANDLED:
        settled.append(result.fact_id)
    return is_stored
@contextmanager
def transaction():
    settled.clear()
    with real_transaction():
        yield
    os.write(file, b"".join(b"settled %d\\n" % number for number in settled))
store.settle, store.transaction = settle, transaction
"""  # the beginning of a program: what its handlers have settled is in a file once it is in the store


def status(second: int, *, is_live: bool, quota_id: int = 1100) -> dict[str, Any]:
    """Return a quota status of a second of some day."""
    return {
        "QuotaID": quota_id,
        "SurveyID": 2401,
        "WaveID": 77,
        "IsLive": is_live,
        "UpdateDateTimeUTC": f"2026-11-22T10:00:{second:02}.1234567Z",
    }


def encoded(fields: object) -> bytes:
    return fields if isinstance(fields, bytes) else json.dumps(fields).encode()


async def post(inbox: Inbox, kind: Kind | str, fields: object, **more: Any) -> HitResponse:
    """Post fields, or a body, with the right secret."""
    return await inbox.receive(kind, encoded(fields), {}, PEER, **{"secret": SECRET, **more})


def read_again_soon(monkeypatch: Any) -> None:
    """Let a live index read a store again at once after it could not."""
    monkeypatch.setattr(_following, "_RETRY_SECONDS", 0.001)


def wait_for_bodies(monkeypatch: Any, seconds: float) -> None:
    """Let an app wait no longer than this for the body of a request."""
    monkeypatch.setattr(_app, "_BODY_SECONDS", seconds)


def pause_extra_place(monkeypatch: Any, seconds: float) -> None:
    """Let the extra place for handlers pause as long as this."""
    monkeypatch.setattr(_handling, "_EXTRA_SECONDS", seconds)


def entries_of(hit: Receipt) -> Iterator[Entry]:
    """Read a body as an inbox does that checks no signatures."""
    return read_entries(hit, Signatures((), is_required=False))


def received(store: SqlStore, hit: Receipt) -> list[str]:
    """Store a hit inside a transaction, and return what became of its notifications."""
    return store.receive_all([Hit(hit, list(entries_of(hit)))])[0]


@contextmanager
def opened(store: SqlStore | str) -> Iterator[SqlStore]:
    """Open a store, or the one at an address, beside others that are open, in a transaction."""
    with closing(store_of(store).copy()) as mine:
        mine.open()
        with mine.transaction():
            yield mine


def comes_before(monkeypatch: Any, step: str, store: SqlStore | str, kind: Kind, fields: object) -> None:
    """Let a notification come just before a step of a module of notifications, `module.function`."""
    module, _, name = step.partition(".")
    function = getattr(import_module(f"sampling_async.notifications.{module}"), name)

    def later(*given: Any) -> Any:
        with opened(store) as mine:
            received(mine, Receipt(kind, 5.0, encoded(fields)))
        return function(*given)

    monkeypatch.setattr(f"sampling_async.notifications.{step}", later)


def handle(store: SqlStore | str, kind: Kind) -> None:
    """Note that the handlers of a program have handled a fact."""
    with opened(store) as mine:
        (fact,) = mine.claim("me", [kind], time.time() + 9, time.time() + 99, 1)
        mine.settle("me", Settled(fact_id=fact.id, state=State.HANDLED))


async def facts_of(inbox: Inbox) -> list[Fact[Any]]:
    return [fact async for fact in inbox.facts()]


# --- PostgreSQL


_NUMBERS = count()
_POOLER = """
[databases]
postgres = host=127.0.0.1 port={server} user=sampling
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = {auth}
auth_file = {users}
pool_mode = {mode}
default_pool_size = 3
"""
_SETTINGS = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
fsync = {fsync}
shared_buffers = 16MB
max_connections = 40
"""


@cache
def programs() -> Path | None:
    """Return the folder of the newest PostgreSQL's programs; None if it is not installed."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb"), *Path("/usr/pgsql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    if not found and on_path:
        return Path(on_path).resolve().parent
    return max(found, key=lambda path: int(re.sub(r"\D", "", path.parts[-3]) or 0)).parent if found else None


def missing() -> str:
    """Return why there can be no server here; an empty text if there can."""
    if find_spec("psycopg") is None:
        return 'psycopg is missing: python -m pip install "psycopg[binary]"'
    if programs() is None:
        return "PostgreSQL is missing: apt-get install postgresql"
    if _is_root() and _other_user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return ""


def pooler_program() -> str | None:
    """Return the path of PgBouncer; None if it is not installed."""
    return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")


def _is_root() -> bool:
    return os.name != "nt" and os.geteuid() == 0


def _other_user() -> tuple[str, int] | None:
    """Return the name and the group of a user that the server may run as: it refuses root."""
    import pwd  # noqa: PLC0415  not there on Windows

    known = {user.pw_name: user.pw_gid for user in pwd.getpwall()}
    return next(((name, known[name]) for name in ("postgres", "nobody") if name in known), None)


class Cluster:
    """A server that can be stopped, killed and started again; each store gets a schema of its own."""

    def __init__(self, *settings: str, fsync: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sampling-postgres-"))
        self.port = free_port()
        self._user = _other_user() if _is_root() else None
        if self._user is not None:
            shutil.chown(self.folder, self._user[0])
        self._run("initdb", "-D", "{data}", "-U", "sampling", "-A", "trust", "-E", "UTF8", "--no-sync")
        lines = [_SETTINGS.format(port=self.port, fsync="on" if fsync else "off"), *settings]
        with (self.folder / "data" / "postgresql.conf").open("a") as file:
            file.write("\n".join(lines))
        self.start()

    @property
    def dsn(self) -> str:
        return f"postgresql://sampling:s3cret-word@127.0.0.1:{self.port}/postgres"

    def new_dsn(self) -> str:
        """Return the address of a schema that nobody has used."""
        return f"{self.dsn}?schema=test_{os.getpid()}_{next(_NUMBERS)}"

    @property
    def process_id(self) -> int:
        return int((self.folder / "data" / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-s", "-D", "{data}", "-l", "{data}/../log")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; `immediate` is like a crash: it recovers at the next start."""
        self._run("pg_ctl", "stop", "-w", "-s", "-D", "{data}", "-m", mode)

    def restart(self) -> None:
        """Let it crash, and start it again."""
        self.stop()
        self.start()

    def remove(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder)

    def query(self, text: str) -> list[tuple[object, ...]]:
        """Run a statement beside all stores."""
        import psycopg  # noqa: PLC0415  an extra

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def pooler(self, mode: str, auth: str = "any") -> Iterator[str]:
        """Run PgBouncer in front of it; gives its address, with the right password if `auth` asks for one."""
        program = pooler_program()
        if program is None:
            pytest.skip("pgbouncer is not installed (a Debian package)")
        port, config = free_port(), self.folder / "pgbouncer.ini"
        users = self.folder / "users.txt"
        users.write_text('"sampling" "s3cret-word"\n')
        config.write_text(_POOLER.format(port=port, server=self.port, mode=mode, auth=auth, users=users))
        user, group = self._user or (None, None)
        groups = None if user is None else []
        running = subprocess.Popen(
            [program, "-q", config], user=user, group=group, extra_groups=groups, stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(500):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.02)
            yield self.dsn.replace(f":{self.port}/", f":{port}/")
        finally:
            running.kill()
            running.wait()

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None
        command: Sequence[str] = [each.format(data=self.folder / "data") for each in arguments]
        user, group = self._user or (None, None)
        errors = self.folder / "errors"
        with errors.open("wb") as file:  # no pipe: the server would hold it open
            done = subprocess.run(
                [folder / program, *command],
                user=user,
                group=group,
                extra_groups=None if user is None else [],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                timeout=60,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{program}: {errors.read_text()}")


@contextmanager
def german_server() -> Iterator[Cluster]:
    """Run a server that asks some users for passwords, and speaks German where its messages are installed."""
    cluster = Cluster()
    cluster.query("CREATE ROLE pw LOGIN PASSWORD 'right'")
    lines = [f"host all {user} 127.0.0.1/32 scram-sha-256" for user in ("pw", "ghost")]
    lines += [f"host all {user} 127.0.0.1/32 trust" for user in ("sampling", "who")]
    (cluster.folder / "data" / "pg_hba.conf").write_text("\n".join(lines) + "\n")
    made = [*("localedef", "-i", "de_DE", "-f", "UTF-8"), cluster.folder / "de_DE.UTF-8"]
    with pytest.MonkeyPatch.context() as patch:
        with suppress(FileNotFoundError, subprocess.CalledProcessError):
            subprocess.run(made, check=True, capture_output=True)
            with (cluster.folder / "data" / "postgresql.conf").open("a") as file:
                file.write("lc_messages = 'de_DE.UTF-8'\n")
            patch.setenv("LOCPATH", str(cluster.folder))
        cluster.restart()
    try:
        yield cluster
    finally:
        cluster.remove()
