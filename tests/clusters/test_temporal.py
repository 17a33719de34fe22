"""Temporal: a campaign as one activity, whose next attempt goes on from the ledger."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from datetime import timedelta

import pytest
from cli_kit import point_at
from durable_kit import Night

from sampling_async.campaign import Campaign, LedgerError

pytest.importorskip("temporalio", reason="without temporalio")
import recipe_temporal
from temporalio.client import WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import (
    Interceptor,
    Replayer,
    UnsandboxedWorkflowRunner,
    WorkflowInboundInterceptor,
    WorkflowOutboundInterceptor,
)

pytestmark = pytest.mark.asyncio  # Temporal runs on asyncio only


@pytest.fixture
def night(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_temporal, "BEAT", 0.05)
    night = Night(tmp_path)
    with night.sim.serve() as base_url:
        point_at(monkeypatch, night.sim, base_url)
        yield night


class Attempt:
    """An attempt at the activity, and its heartbeats."""

    def __init__(self, night) -> None:
        self.beats = []
        self.has_invited = asyncio.Event()
        self._environment = ActivityEnvironment()
        self._environment.on_heartbeat = self._on_beat
        self._night = night

    def _on_beat(self, pairs) -> None:
        self.beats.append(pairs)
        if pairs and pairs["invited"]:
            self.has_invited.set()

    async def run(self):
        return await self._environment.run(recipe_temporal.ask, self._night.panel, self._night.folder)

    def cancel(self) -> None:
        self._environment.cancel()


async def test_an_attempt_ends_with_an_error_and_the_next_one_goes_on(night):
    night.refuse_once(after=10)
    with pytest.raises(ApplicationError, match="403") as caught:
        await Attempt(night).run()
    assert not caught.value.non_retryable
    second = Attempt(night)
    pairs = await second.run()
    assert pairs["pending"] == 0
    night.check(pairs, runs=2)
    assert (night.ledger.parent / "report.html").exists()
    # It beats from the beginning, before there is a run, and then says how far it is.
    assert second.beats[0] is None
    shown = [beat["pending"] for beat in second.beats if beat]
    assert shown[0] > shown[-1]


async def test_a_cancelled_attempt_leaves_what_is_pending(night):
    first = Attempt(night)
    running = asyncio.create_task(first.run())
    await first.has_invited.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    summary = await Campaign(None, ledger=night.ledger).summary()
    assert (summary.state, summary.reason) == ("stopped", "it was cancelled")
    assert summary.pairs.pending > 0
    unknown = summary.pairs.unknown  # what was in flight
    pairs = await Attempt(night).run()
    assert (pairs["pending"], pairs["unknown"]) == (0, unknown)
    night.check(pairs, runs=2)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_an_attempt_beside_one_that_still_runs_is_refused(night):
    first = Attempt(night)
    running = asyncio.create_task(first.run())
    await first.has_invited.wait()
    with pytest.raises(LedgerError, match="in use by another run"):
        await Attempt(night).run()
    night.check(await running, runs=1)


async def test_an_attempt_that_does_not_see_the_folder_asks_nobody(night, tmp_path):
    night.folder = str(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="No such file"):
        await Attempt(night).run()
    assert len(night.requests) == 0


# --- The workflow


def payloads(*values):
    """Return values as Temporal keeps them in a history."""
    encoding = {"encoding": b64encode(b"json/plain").decode()}
    return {
        "payloads": [
            {"metadata": encoding, "data": b64encode(json.dumps(value).encode()).decode()} for value in values
        ]
    }


def history_of(done) -> WorkflowHistory:
    """Write by hand the history of a workflow with one activity."""
    queue, activity = {"name": "campaigns"}, {"activityId": "1", "activityType": {"name": "ask"}}
    started = {"workflowType": {"name": "AskForAPanel"}, "taskQueue": queue, "originalExecutionRunId": "run"}
    ended = {"workflowTaskCompletedEventId": "10", "result": payloads(done)}
    events = [
        ("WORKFLOW_EXECUTION_STARTED", {**started, "input": payloads("panel.parquet", "night")}),
        ("WORKFLOW_TASK_SCHEDULED", {"taskQueue": queue}),
        ("WORKFLOW_TASK_STARTED", {"scheduledEventId": "2"}),
        ("WORKFLOW_TASK_COMPLETED", {"scheduledEventId": "2", "startedEventId": "3"}),
        ("ACTIVITY_TASK_SCHEDULED", {**activity, "workflowTaskCompletedEventId": "4"}),
        ("ACTIVITY_TASK_STARTED", {"scheduledEventId": "5"}),
        ("ACTIVITY_TASK_COMPLETED", {"scheduledEventId": "5", "startedEventId": "6", "result": payloads(done)}),
        ("WORKFLOW_TASK_SCHEDULED", {"taskQueue": queue}),
        ("WORKFLOW_TASK_STARTED", {"scheduledEventId": "8"}),
        ("WORKFLOW_TASK_COMPLETED", {"scheduledEventId": "8", "startedEventId": "9"}),
        ("WORKFLOW_EXECUTION_COMPLETED", ended),
    ]
    written = []
    for number, (kind, attributes) in enumerate(events, 1):
        first, *others = kind.lower().split("_")
        name = f"{first}{''.join(map(str.title, others))}EventAttributes"
        event = {"eventId": str(number), "eventTime": "2026-01-15T00:00:00Z", "eventType": f"EVENT_TYPE_{kind}"}
        written.append({**event, name: attributes})
    return WorkflowHistory.from_json("night", {"events": written})


class Watched(Interceptor):
    """Keeps what a workflow calls and returns."""

    def __init__(self) -> None:
        self.called, self.returned = [], []

    def workflow_interceptor_class(self, input):  # noqa: A002  the name is Temporal's
        watched = self

        class Calls(WorkflowOutboundInterceptor):
            def start_activity(self, input):  # noqa: A002
                watched.called.append(input)
                return super().start_activity(input)

        class Returns(WorkflowInboundInterceptor):
            def init(self, outbound):
                super().init(Calls(outbound))

            async def execute_workflow(self, input):  # noqa: A002
                watched.returned.append(await super().execute_workflow(input))
                return watched.returned[-1]

        return Returns


async def test_the_workflow_runs_in_the_sandbox_of_temporal():
    """There is no server: Temporal's own core runs the workflow against a history."""
    replayer = Replayer(workflows=[recipe_temporal.AskForAPanel])
    assert (await replayer.replay_workflow(history_of({"planned": 3}))).replay_failure is None


async def test_the_workflow_calls_one_activity_and_returns_what_it_returns():
    watched = Watched()
    replayer = Replayer(
        workflows=[recipe_temporal.AskForAPanel],
        interceptors=[watched],
        workflow_runner=UnsandboxedWorkflowRunner(),  # so that what it does is seen here
    )
    await replayer.replay_workflow(history_of({"planned": 3, "invited": 2}))
    assert watched.returned == [{"planned": 3, "invited": 2}]
    (called,) = watched.called
    assert (called.activity, [*called.args]) == ("ask", ["panel.parquet", "night"])
    # A beat that is late must not end the attempt.
    assert called.heartbeat_timeout >= 10 * timedelta(seconds=recipe_temporal.BEAT)
    assert called.start_to_close_timeout is None
    assert called.retry_policy.maximum_attempts == 0
