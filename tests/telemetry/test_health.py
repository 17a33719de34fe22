"""The health of a partner's process: when it is ready, why not, and its metrics."""

from __future__ import annotations

import gc
import json
import re
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from attrs import asdict, evolve
from doubles import until
from opentelemetry.metrics import NoOpMeter
from routing_kit import LONG, MEMBER, Panel, live_of
from store_kit import COMPLETION, SECRET, TERMINATE, post
from test_telemetry import Collected
from wire import free_port

from sampling_async import InvalidRequestError, OutagePolicy, Telemetry, TransportTimeoutError
from sampling_async.health import Health
from sampling_async.notifications import (
    Completion,
    GiveUp,
    HandlerPolicy,
    Inbox,
    SqliteStore,
    StoreError,
    UnknownNotification,
)
from sampling_async.routing import SurveyRouter

QUICK_OUTAGES = OutagePolicy(failures=1, patience=0)


class Store(SqliteStore):
    """A store that can be away, hang or be full, and counts how often it was read."""

    def __init__(self, path):
        super().__init__(path)
        self.failure: Exception | None = None
        self.full: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.threads: list[int] = []

    def backlog(self):
        self.threads.append(threading.get_ident())
        assert self.goes_on.wait(30)
        if self.failure is not None:
            raise self.failure
        return super().backlog()

    def check_writable(self):
        super().check_writable()
        if self.full is not None:
            raise self.full

    @contextmanager
    def hanging(self):
        self.goes_on.clear()
        try:
            yield
        finally:
            self.goes_on.set()


class Time:
    """Seconds, as a test sets them."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "notifications.db")


@pytest.fixture
def inbox(store):
    return Inbox(store, secrets=SECRET)


@pytest.fixture
def handled(store):
    """Return an inbox whose handler of completions does not end."""
    inbox = Inbox(store, secrets=SECRET, handling=HandlerPolicy(poll=0.01, grace=0.001))

    @inbox.on(Completion, UnknownNotification)
    async def hangs(_fact: object) -> None:
        await anyio.sleep_forever()

    return inbox


@pytest.fixture
def collected():
    return Collected()


@asynccontextmanager
async def process(panel, inbox, tmp_path, **options):
    """Run all parts of a partner's process, and look at their health."""
    async with (
        live_of(panel, name="us", **options) as (client, live),
        inbox,
        SurveyRouter(client, live, store=tmp_path / "links.db") as router,
    ):
        yield client, live, router, Health(client=client, live=live, inbox=inbox, router=router)


async def test_a_process_that_can_do_everything_is_ready(inbox, tmp_path):
    async with process(Panel(1, 2), inbox, tmp_path) as (client, _, router, health):
        report = await health.report()
        assert report == evolve(report, is_ready=True, reasons=(), problems=(), name="us", inventory="ready")
        assert report.inventory_age >= 0
        assert report.client == client.snapshot()
        assert report.router == router.status
        assert report.inbox.is_open


async def test_a_report_is_json_without_secrets(inbox, tmp_path):
    async with process(Panel(1, 2), inbox, tmp_path) as (_, _, router, health):
        route = await router.route(MEMBER, within=5.0)
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m-canary"})
        text = json.dumps(asdict(await health.report()), allow_nan=False)
    assert json.loads(text)["router"]["clicks"] == {"routed": 1}
    assert json.loads(text)["inbox"]["by_kind"]["completion"]["pending"] == 1
    for secret in (SECRET, MEMBER.member_code, "m-canary", route.url):
        assert secret not in text


async def test_a_service_that_is_away_makes_no_inbox_unready(inbox, tmp_path):
    """Kubernetes would send no notifications to any process, and they would be lost."""
    panel = Panel(1)
    panel.is_away = True
    async with process(panel, inbox, tmp_path, outage=QUICK_OUTAGES) as (client, live, router, health):
        await until(lambda: client.snapshot().breaker == "open")
        report = await health.report()
        alone = await Health(live=live, router=router).report()
        matching = await Health(live=live).report()
    assert report.is_ready
    assert report.problems[0] == "clicks cannot be routed: there is no inventory yet"
    assert report.problems[1].startswith("the service has been away for ")
    assert (report.inventory, report.inventory_age) == ("failing", None)
    assert (alone.is_ready, alone.reasons) == (False, ("clicks cannot be routed: there is no inventory yet",))
    assert (matching.is_ready, matching.reasons) == (False, ("there is no inventory yet",))


async def test_a_process_stays_ready_if_the_service_goes_away_later(inbox, tmp_path):
    panel = Panel(1)
    async with process(panel, inbox, tmp_path, outage=QUICK_OUTAGES) as (_, live, router, _):
        panel.is_away = True
        await router.route(MEMBER, within=0.5)
        report = await Health(live=live, router=router).report()
    assert report.is_ready


async def test_a_closed_inbox_is_not_ready(inbox):
    health = Health(inbox=inbox)
    async with inbox:
        assert (await health.report()).is_ready
    closed = await health.report()  # at once, and not at the next look at the store
    assert (closed.is_ready, closed.reasons) == (False, ("the inbox is closed",))


@pytest.mark.parametrize("where", ["failure", "full"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreError("the store is on a full disk"), "the store is on a full disk"),
        (RuntimeError("password=s3cret"), "its store raised RuntimeError"),
    ],
)
async def test_a_store_that_is_away_is_a_reason_and_no_error(store, inbox, where, error, said):
    async with inbox:
        setattr(store, where, error)
        report = await Health(inbox=inbox).report()
    assert (report.is_ready, report.reasons) == (False, (f"notifications cannot be stored: {said}",))
    assert (report.inbox is None) == (where == "failure")


async def test_a_database_that_is_away_is_a_reason_without_its_password():
    pytest.importorskip("psycopg")
    store = f"postgresql://sampling:s3cret-word@127.0.0.1:{free_port()}/postgres"
    async with Inbox(store, secrets=SECRET) as inbox:
        report = await Health(inbox=inbox).report(within=30)
    assert not report.is_ready
    assert "connection" in report.reasons[0]
    assert "s3cret" not in str(report)


async def test_the_check_leaves_nothing_in_the_store(new_address):
    inbox = Inbox(new_address(), secrets=SECRET)
    async with inbox:
        assert (await Health(inbox=inbox).report()).is_ready
        await post(inbox, "completion", COMPLETION)
        report = await Health(inbox=inbox).report()
    assert (report.is_ready, report.inbox.pending) == (True, 1)


async def test_a_store_that_hangs_is_asked_once_and_waited_for_in_time(store, inbox):
    time = Time()
    async with inbox:
        health = Health(inbox=inbox, clock=time)
        with store.hanging():
            first = await health.report(within=0.001)
            time.now += 7
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(partial(health.report, within=0.001))
            last = await health.report(within=0.001)
        assert [first.reasons, last.reasons] == [
            ("the store of the inbox has not responded for 0.0 s",),
            ("the store of the inbox has not responded for 7.0 s",),
        ]
        assert len(store.threads) == 1
        again = await health.report(within=30)
    assert again.is_ready
    assert len(store.threads) == 1


async def test_a_store_is_asked_at_most_twice_a_second_and_never_in_the_event_loop(store, inbox):
    time = Time()
    async with inbox:
        health = Health(inbox=inbox, clock=time)
        for _ in range(10):
            await health.report()
            time.now += 0.2
    assert len(store.threads) == 4
    assert threading.get_ident() not in store.threads


async def test_dead_facts_and_an_old_inventory_are_problems(store):
    inbox = Inbox(store, secrets=SECRET, handling=HandlerPolicy(poll=0.01))

    @inbox.on(Completion, UnknownNotification)
    async def fails(_fact: object) -> None:
        raise GiveUp

    now = [0.0]
    async with live_of(Panel(1), clock=lambda: now[0]) as (_, live), inbox:
        await post(inbox, "completion", COMPLETION)
        await until(lambda: inbox.read_status().dead)
        now[0] += 9000
        report = await Health(inbox=inbox, live=live).report()
    assert report.is_ready
    assert report.problems[0].endswith("s old")
    assert report.problems[1] == "1 dead fact: mend the handlers, then replay"


def test_health_needs_a_part_of_the_right_type():
    with pytest.raises(InvalidRequestError, match="needs something to look at"):
        Health()
    with pytest.raises(InvalidRequestError, match="inbox must be an Inbox"):
        Health(inbox="notifications.db")  # type: ignore[arg-type]


async def test_a_report_needs_a_time_limit(inbox):
    with pytest.raises(InvalidRequestError, match="within"):
        await Health(inbox=inbox).report(within=0)


# --- Metrics

DOCS = Path(__file__).parents[2] / "docs"


class NamingMeter(NoOpMeter):
    """A provider of itself that keeps the names of metrics, and those that Prometheus makes of them."""

    def __init__(self):
        super().__init__("test")
        self.made = {}

    def get_meter(self, *_args, **_options):
        return self

    def _keep(self, name, unit, end):
        self.made[name] = f"{name.replace('.', '_')}{'_seconds' if unit == 's' else ''}{end}"

    def create_observable_gauge(self, name, callbacks=None, unit="", description=""):
        self._keep(name, unit, "")

    def create_observable_counter(self, name, callbacks=None, unit="", description=""):
        self._keep(name, unit, "_total")


def test_the_dashboard_and_the_page_use_the_metrics_that_there_are(inbox):
    meter = NamingMeter()
    telemetry = Telemetry(meter_provider=meter)
    of_clients = set(meter.made)
    health = Health(inbox=inbox, telemetry=telemetry)
    known = set(meter.made.values())
    labels = {"sampling_kind", "sampling_status", "sampling_panel"}
    for page in ("howto/monitoring.md", "files/grafana-dashboard.json"):
        used = set(re.findall(r"\bsampling_(?!async|simulator)\w+", (DOCS / page).read_text())) - labels
        assert used <= known, page
    table = re.findall(r"^\| `(sampling\.[\w.]+)` \|", (DOCS / "howto/monitoring.md").read_text(), re.MULTILINE)
    assert set(table) == set(meter.made) - of_clients
    del health


def values(collected: Collected) -> dict[str, dict[str, float]]:
    """Return the values of each metric, by the attribute that is not the panel."""
    return {
        name.removeprefix("sampling."): {
            next(
                (str(value) for key, value in point.attributes.items() if key != "sampling.panel"), ""
            ): point.value
            for point in points
        }
        for name, points in collected.metrics().items()
        if name.startswith("sampling.")
    }


async def test_metrics_say_what_the_report_says(collected, handled, tmp_path):
    async with process(Panel(1, 2), handled, tmp_path) as (client, live, router, _):
        telemetry = collected.telemetry()
        health = Health(client=client, live=live, inbox=handled, router=router, telemetry=telemetry)
        for _ in range(2):
            await router.route(MEMBER, within=5.0)
        await post(handled, "completion", COMPLETION)
        await post(handled, "terminate", {**TERMINATE, "WaveId": 5})
        found = await anyio.to_thread.run_sync(values, collected)
        points = await anyio.to_thread.run_sync(collected.metrics)
        report = await health.report()
    assert found["ready"] == {"": 1}
    assert found["facts.pending"]["completion"] == 1
    assert found["facts.dead"]["unknown"] == 0
    assert found["facts.pending"]["terminate"] == 1
    assert set(found["facts.lag"]) == set(found["handler.failures"]) == {"completion", "unknown"}
    assert found["facts.lag"]["completion"] > found["facts.lag"]["unknown"] == 0
    assert found["notifications.not_stored"] == {"": 0}
    assert 0 <= found["inventory.age"][""] <= report.inventory_age
    assert found["outage"] == {"": 0}
    assert found["calls.too_late"] == {"": 0}
    assert found["clicks"] == {"routed": 2}
    assert found["clicks.repeated"] == {"": 1}
    assert found["clicks.invites"] == {"": 1}
    assert found["invites.unused"] == {"": 0}
    assert {point.attributes["sampling.panel"] for each in points.values() for point in each} == {"us"}


async def test_calls_that_cannot_be_sent_in_time_are_a_problem_for_a_minute(inbox, tmp_path):
    panel, clock = Panel(1, 2), Time()
    go_on = panel.answers[1] = anyio.Event()
    async with process(panel, inbox, tmp_path, max_concurrency=1) as (client, live, router, _):
        health = Health(client=client, live=live, inbox=inbox, router=router, clock=clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.bulk_invite, "m-1", [1]))
            await panel.began.wait()
            with pytest.raises(TransportTimeoutError, match="cannot be sent in time"):
                await client.generate_invite("m-2", 2, deadline=0.05)
            go_on.set()
        assert client.snapshot().too_late == 1
        for _ in range(2):
            report = await health.report()
            assert report.problems == ("callers wait in vain: 1 call so far ended unsent",)
            assert report.is_ready
        clock.now += 61
        assert (await health.report()).problems == ()


async def test_invites_that_reach_no_click_are_a_problem_if_they_are_many(inbox, tmp_path, monkeypatch):
    monkeypatch.setattr("sampling_async.health._ENOUGH_INVITED", 20)
    panel = Panel(1, 2, 3)
    monkeypatch.setattr("sampling_async.routing._offers.RequestSizer.most", lambda *_: 3)
    async with process(panel, inbox, tmp_path) as (client, _, router, health):
        await router.route(MEMBER, within=LONG)
        assert client.snapshot().unused_invites == 2
        assert "2 invites of 3 reached no click" in (await health.report()).problems
        await router.route(MEMBER, within=LONG, quota_ids=[2])
        assert client.snapshot().unused_invites == router.status.unused == 1
        assert (await health.report()).problems == ()


async def test_one_collection_asks_the_store_once(collected, store, inbox):
    async with inbox:
        health = Health(inbox=inbox, telemetry=collected.telemetry(), clock=Time())
        assert store.threads == []
        await anyio.to_thread.run_sync(collected.metrics)
    assert len(store.threads) == 1
    del health


async def test_a_store_that_is_away_gives_no_observation(collected, store, inbox):
    async with inbox:
        health = Health(inbox=inbox, telemetry=collected.telemetry())
        store.failure = StoreError("away")
        found = await anyio.to_thread.run_sync(values, collected)
    assert found == {"ready": {"": 0}}
    del health


async def test_a_store_that_hangs_holds_one_collection_up_once(collected, store, inbox):
    time = Time()
    async with inbox:
        health = Health(inbox=inbox, telemetry=collected.telemetry(), clock=time)
        with store.hanging():
            await health.report(within=0.001)
            time.now += 60
            found = await anyio.to_thread.run_sync(values, collected)
    assert found == {"ready": {"": 0}}
    assert len(store.threads) == 1


async def test_a_collection_in_the_event_loop_does_not_wait(collected, store, inbox):
    """As with a page of metrics that an async framework serves: it shows what was there the last time."""
    time = Time()
    async with inbox:
        health = Health(inbox=inbox, telemetry=collected.telemetry(), clock=time)
        with store.hanging():
            assert values(collected) == {}
        assert (await health.report(within=30)).is_ready
        time.now += 60
        with store.hanging():
            assert values(collected)["ready"] == {"": 1}
            time.now += 60
            assert values(collected) == {"ready": {"": 0}}
    assert threading.get_ident() not in store.threads


async def test_metrics_end_with_their_object(collected, inbox):
    async with inbox:
        health = Health(inbox=inbox, telemetry=collected.telemetry())
        await health.report()
        assert "ready" in await anyio.to_thread.run_sync(values, collected)
        del health
        gc.collect()
        assert await anyio.to_thread.run_sync(values, collected) == {}


async def test_a_report_is_json_while_facts_wait(new_address):
    inbox = Inbox(new_address(), secrets=SECRET)
    async with inbox:
        for kind, fields in (("completion", COMPLETION), ("terminate", b"?")):
            assert (await post(inbox, kind, fields)).status == 200
        shown = json.loads(json.dumps(asdict(await Health(inbox=inbox).report(within=30)), allow_nan=False))
    assert (shown["is_ready"], shown["inbox"]["pending"]) == (True, 2)
