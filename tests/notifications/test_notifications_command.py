"""`sampling-async notifications`: a receiver that survives a kill, and what it has received."""

from __future__ import annotations

import json
import select
import signal
import sqlite3
from contextlib import closing
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio
import pytest
from cli_kit import on_terminal, program, run
from store_kit import CLOSED, COMPLETION, MEMBER, TERMINATE, encoded, status

from sampling_async.notifications import (
    Completion,
    HandlerPolicy,
    Inbox,
    SqliteStore,
    State,
    UnknownNotification,
    kept_secrets,
)
from sampling_async.simulator import Notifying, Simulator

KINDS = ["invite", "completion", "terminate", "survey_closed", "quota_status"]


@pytest.fixture
def store(tmp_path):
    return tmp_path / "n.db"


class Receiver:
    """`notifications serve` as a program, piped."""

    def __init__(self, store, *options) -> None:
        self._command = ["notifications", "serve", "--store", store, *options]

    def __enter__(self):
        self.process = program(*self._command)
        self.urls = json.loads(self.process.stdout.readline())
        return self

    def __exit__(self, *_) -> None:
        self.end(signal.SIGINT)

    def end(self, number) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors

    def post(self, kind, fields, *, path="", headers=None) -> int:
        try:
            asked = Request(self.urls[kind] + path, data=encoded(fields), headers=headers or {})
            with urlopen(asked) as response:
                return response.status
        except HTTPError as exc:
            exc.close()
            return exc.code


def shown(store, *options) -> list[dict]:
    done = run("notifications", "show", "--store", store, *options)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_was_acknowledged_survives_a_kill_and_the_urls_stay(store):
    with Receiver(store, "--port", "0") as receiver:
        assert list(receiver.urls) == KINDS
        assert receiver.post("completion", COMPLETION) == 200
        assert (
            receiver.post("completion", {name.upper(): str(value) for name, value in COMPLETION.items()}) == 200
        )
        assert receiver.post("completion", COMPLETION, path="x") == 404
        assert receiver.post("invite", b"?") == 200
        receiver.end(signal.SIGKILL)
        first = receiver.urls
    port = first["invite"].split(":")[2].split("/")[0]
    with Receiver(store, "--port", port) as receiver:
        assert receiver.urls == first
        assert receiver.post("completion", COMPLETION) == 200
        facts = shown(store)
    assert [(fact["Kind"], fact["Receipts"]) for fact in facts] == [("completion", 3), ("unknown", 1)]
    assert facts[0]["Fields"] == COMPLETION
    assert facts[1]["PostedAs"] == "invite"
    assert facts[1]["Body"] == "?"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly(store, number):
    with Receiver(store, "--port", "0") as receiver:
        assert receiver.end(number) == (0, "")


def test_urls_can_be_those_of_a_proxy(store):
    with Receiver(store, "--port", "0", "--public-url", "https://partner.example/events/") as receiver:
        assert receiver.urls["terminate"].startswith("https://partner.example/events/terminate/")


def test_addresses_and_signatures_are_checked(store, monkeypatch):
    monkeypatch.setenv("SAMPLING_SHARED_SECRETS", "one secret,another secret")
    with Receiver(store, "--port", "0", "--require-signature", "--trusted-proxy", "127.0.0.0/8") as receiver:
        assert receiver.post("completion", COMPLETION) == 403
        assert receiver.post("survey_closed", CLOSED) == 200
    with Receiver(store, "--port", "0", "--from", "198.51.100.0/24") as receiver:
        assert receiver.post("survey_closed", CLOSED) == 403
        assert receiver.post("survey_closed", CLOSED, headers={"X-Forwarded-For": "198.51.100.7"}) == 403


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "here"], "'here' is no network"),
        (["--require-signature"], "needs shared_secrets"),
        (["--host", "203.0.113.1"], "annot assign requested address"),
    ],
)
def test_wrong_options_end_it_with_a_reason(store, options, message):
    done = run("notifications", "serve", "--store", store, "--port", "0", *options)
    assert done.exit_code != 0
    assert message in done.stderr


def put(store, *hits) -> None:
    """Store hits without a server."""
    from test_notifications_store import put as stored  # noqa: PLC0415

    kept_secrets(store)
    opened = SqliteStore(store)
    opened.open()
    for kind, fields in hits:
        stored(opened, kind, fields)
    opened.close()


def test_show_selects_kinds_and_leaves_out_what_was_replaced(store):
    put(
        store,
        ("quota_status", status(1, is_live=True)),
        ("quota_status", status(2, is_live=False)),
        ("completion", COMPLETION),
        ("terminate", TERMINATE),
        ("invite", MEMBER),
    )
    assert [fact["Kind"] for fact in shown(store)] == ["quota_status", "completion", "terminate", "invite"]
    assert [fact["Standing"] for fact in shown(store, "--all")][:2] == ["stale", "stands"]
    assert shown(store)[0]["Fields"]["IsLive"] is False
    assert shown(store)[2]["Standing"] == "overruled"
    assert [fact["FactID"] for fact in shown(store, "--kind", "completion", "--kind", "invite")] == [3, 5]


def test_a_damaged_fact_is_named_and_the_others_are_shown(store):
    put(store, *[("completion", {**COMPLETION, "UniqueCode": f"m-{number}"}) for number in range(3)])
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE facts SET fields = '{' WHERE id = 2")
    result = run("notifications", "show", "--store", store)
    assert [json.loads(line)["FactID"] for line in result.stdout.splitlines()] == [1, 3]
    assert (result.exit_code, "fact 2 is damaged and left out" in result.stderr) == (1, True)


def test_show_on_a_terminal_is_a_table_of_the_last_facts(store, monkeypatch):
    put(store, ("quota_status", [status(1, is_live=True, quota_id=number) for number in range(1, 70)]))
    taken_back = {**COMPLETION, "Revenue": 225, "ReconciliationID": 7, "DateTime": "soon"}
    put(
        store,
        ("invite", b"?"),
        ("completion", {**COMPLETION, "EncryptedValue": "abc"}),
        ("terminate", taken_back),
    )
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    table = run("notifications", "show", "--store", store).stdout
    assert "The last 50 of 72 facts" in table
    assert "neither JSON nor XML nor a form" in table
    assert "UniqueCode=m-1" in table
    assert "worth=1.50" in table  # Revenue counts hundredths
    assert "worth=-2.25" in table
    assert "anomaly=datetime" in table
    assert "EncryptedValue" not in table
    assert "No facts." in run("notifications", "dead", "--store", store).stdout


def test_dead_facts_are_shown_and_replayed(store):
    put(store, ("completion", COMPLETION), ("invite", MEMBER))

    async def give_up() -> None:
        policy = HandlerPolicy(attempts=1, poll=0.01)
        inbox = Inbox(store, secrets=kept_secrets(store), handling=policy)

        @inbox.on(Completion, UnknownNotification)
        async def refuse(_fact) -> None:
            raise LookupError("no account")

        async with inbox:
            while not [fact async for fact in inbox.facts(state=State.DEAD)]:  # noqa: ASYNC110  of a store
                await anyio.sleep(0.01)

    anyio.run(give_up)
    done = run("notifications", "dead", "--store", store)
    assert [json.loads(line)["Error"] for line in done.stdout.splitlines()] == ["LookupError: no account"]
    done = run("notifications", "replay", "--store", store)
    assert (done.exit_code, done.stderr) == (0, "Due to their handlers again: 1\n")
    assert run("notifications", "dead", "--store", store).stdout == ""
    assert run("notifications", "replay", "2", "--store", store).exit_code == 0
    assert run("notifications", "replay", "99", "--store", store).exit_code == 1


@pytest.mark.parametrize("command", ["show", "tail", "dead", "replay", "prune"])
def test_a_store_that_is_not_there_is_not_made(store, command):
    done = run("notifications", command, "--store", store)
    assert done.exit_code == 2
    assert "no such store" in done.stderr
    assert not store.exists()


def test_old_receipts_are_pruned(store):
    put(store, ("completion", COMPLETION), ("completion", COMPLETION), ("invite", MEMBER))
    done = run("notifications", "prune", "--store", store, "--older-than", "36500")
    assert (done.exit_code, done.stderr) == (0, "Receipts deleted: 0\n")
    done = run("notifications", "prune", "--store", store, "--older-than", "0")
    assert (done.exit_code, done.stderr) == (0, "Receipts deleted: 3\n")
    shown = run("notifications", "show", "--store", store).stdout.splitlines()
    assert [json.loads(line)["Receipts"] for line in shown] == [2, 1]


def test_tail_prints_what_comes(store):
    put(store, ("completion", COMPLETION))
    with program("notifications", "tail", "--store", store, "--kind", "completion") as process:
        for number in range(100):  # until it has begun to look
            put(store, ("completion", {**COMPLETION, "UniqueCode": "m-9", "WaveId": number}))
            if select.select([process.stdout], [], [], 0.1)[0]:
                break
        line = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert line["Fields"]["UniqueCode"] == "m-9"


def test_settings_are_compared_with_those_of_the_operator(store, monkeypatch):
    sim = Simulator(notifying=Notifying())
    options = ("notifications", "settings", "--store", store, "--public-url", "https://partner.example")
    with sim.serve() as url:
        done = run(*options)
        urls = json.loads(done.stdout)
        assert list(urls) == KINDS
        monkeypatch.setenv("SAMPLING_BASE_URL", url)
        monkeypatch.setenv("SAMPLING_PANEL_GUID", sim.panel_guid)
        monkeypatch.setenv("SAMPLING_API_KEY", sim.api_key)
        done = run(*options)
        assert done.exit_code == 1
        verdicts = [line.partition(": ")[2] for line in done.stderr.splitlines()]
        assert verdicts == ["not set", *["another URL"] * 4]
        written = ("https://partner.example", "HTTPS://Partner.Example:443")  # the same, as people write it
        sim.notification_urls = {kind: url.replace(*written) for kind, url in urls.items()}
        done = run(*options)
        assert done.exit_code == 0
        assert {line.partition(": ")[2] for line in done.stderr.splitlines()} == {"same"}
        done = run(*options, "--rotate")
        assert done.exit_code == 1
    kept = kept_secrets(store)
    assert [kept[kind][1:] for kind in urls] == [[url.rpartition("/")[2]] for url in urls.values()]


def test_settings_show_the_url_of_the_serve_that_the_store_belongs_to(store, monkeypatch):
    with Receiver(store, "--port", "0") as receiver:
        assert json.loads(run("notifications", "settings", "--store", store).stdout) == receiver.urls
    with Receiver(store, "--port", "0", "--public-url", "https://partner.example/events/") as receiver:
        urls = receiver.urls
    assert json.loads(run("notifications", "settings", "--store", store, "--json").stdout) == urls
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    table = run("notifications", "settings", "--store", store).stdout.splitlines()
    assert [line.strip() for line in table[1::2]] == list(urls.values())
    assert table[0] == "Invite Notification URL (not compared)"


def simulated(monkeypatch, *options) -> Simulator:
    """Return the simulator of a `simulate` with options."""
    ran: list[Simulator] = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **_: ran.append(sim))
    assert run("simulate", "--port", 0, "--members", 1, *options).exit_code == 0
    return ran[0]


def test_the_json_of_settings_is_what_simulate_takes(store, tmp_path, monkeypatch):
    (tmp_path / "urls.json").write_text(run("notifications", "settings", "--store", store, "--json").stdout)
    urls = simulated(monkeypatch, "--notify", tmp_path / "urls.json").notification_urls
    assert list(urls) == KINDS
    assert urls["invite"].startswith("http://127.0.0.1:8090/invite/")


def test_simulate_posts_to_a_receiver(store, tmp_path, monkeypatch):
    with Receiver(store, "--port", "0") as receiver:
        urls = tmp_path / "urls.json"
        urls.write_text(json.dumps(receiver.urls))
        options = ("--port", "0", "--notify", urls, "--survey-seconds", "0")
        with program("simulate", *options) as simulated:
            lines = [simulated.stdout.readline() for _ in range(4)][1:]
            for name, value in (line.strip().removeprefix("export ").split("=", 1) for line in lines):
                monkeypatch.setenv(name, value)
            shown_quotas = run("quotas")
            assert shown_quotas.exit_code == 0, shown_quotas.stderr
            surveys = [json.loads(line) for line in shown_quotas.stdout.splitlines()]
            quota_ids = [quota["QuotaID"] for survey in surveys for quota in survey["Quotas"]]
            asked = run("bulk-invite", "m000001", *quota_ids)
            outcomes = asked.stdout.splitlines()
            invited = {each["QuotaID"] for each in map(json.loads, outcomes) if each["Status"] == "invited"}
            assert invited, (len(surveys), asked.exit_code, asked.stderr, outcomes[:3])
            ended: set[int] = set()
            while ended != invited:
                facts = [fact for fact in shown(store) if fact["Kind"] in ("completion", "terminate")]
                ended = {fact["Fields"]["QuotaID"] for fact in facts}
            simulated.send_signal(signal.SIGINT)
            assert simulated.wait(20) == 0


def test_a_simulator_notifies_badly_on_request(monkeypatch):
    notifying, made = [], Simulator.__init__

    def noted(sim, *seed, **given) -> None:
        notifying.append(given["notifying"])
        made(sim, *seed, **given)

    monkeypatch.setattr(Simulator, "__init__", noted)
    for options in ((), ("--notify", "http://x"), ("--notify", "http://x", "--notify-badly")):
        simulated(monkeypatch, *options)
    silent, well, badly = notifying
    assert silent is None
    assert well.forged == 0 < badly.forged


@pytest.mark.parametrize(
    ("value", "message"),
    [("no-such-file", "no http URL, and no file"), ("list.json", "expected one JSON object of URLs by kind")],
)
def test_simulate_refuses_urls_that_it_cannot_read(value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    done = run("simulate", "--port", "0", "--notify", value)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [("http://x/a/", "http://x/a/invite"), ("https://x/{kind}/secret", "https://x/invite/secret")],
)
def test_a_url_is_for_all_kinds(value, expected, monkeypatch):
    urls = simulated(monkeypatch, "--notify", value).notification_urls
    assert list(urls) == KINDS
    assert urls["invite"] == expected
