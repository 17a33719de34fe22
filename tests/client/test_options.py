"""Options of the wrong type: refused at once, by name, with the way out, and nothing is sent."""

from __future__ import annotations

from functools import partial

import doubles
import httpx
import pytest

from sampling_async import (
    BodyLimits,
    InvalidRequestError,
    Journal,
    OutagePolicy,
    RetryPolicy,
    SamplingClient,
    Timeouts,
)
from sampling_async.campaign import Campaign, Limits
from sampling_async.matching import (
    Allocate,
    Counts,
    LiveIndex,
    MatchPolicy,
    PanelMatcher,
    QuestionKinds,
    QuotaIndex,
)
from sampling_async.notifications import Inbox, SqliteStore
from sampling_async.simulator import Fault, Simulator

SECRET = "a-secret-of-24-characters"

CLIENT = partial(SamplingClient, "https://sampling.example", panel_guid=doubles.PANEL, api_key=doubles.KEY)
CAMPAIGN = partial(Campaign, None, "panel.csv", ledger="night.ledger")
INBOX = partial(Inbox, "notifications.db", secrets=SECRET)
MATCHER = partial(PanelMatcher, QuotaIndex([]))


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (CLIENT, {"timeouts": 30}, r"timeouts must be a Timeouts, such as Timeouts\(read=30\), not 30"),
        (CLIENT, {"timeouts": 0}, "timeouts must be a Timeouts"),
        (CLIENT, {"timeouts": httpx.Timeout(3)}, r"timeouts must be a Timeouts.*not Timeout\(timeout=3\)"),
        (CLIENT, {"timeouts": Timeouts}, "timeouts must be a Timeouts"),
        (CLIENT, {"retry": 3}, r"retry must be a RetryPolicy, such as RetryPolicy\(max_attempts=3\), not 3"),
        (CLIENT, {"retry": False}, "retry must be a RetryPolicy"),
        (CLIENT, {"retry": OutagePolicy()}, "retry must be a RetryPolicy"),
        (
            CLIENT,
            {"outage": 5.0},
            r"outage must be an OutagePolicy, such as .*, not 5.0",
        ),
        (CLIENT, {"limits": 2**20}, r"limits must be a BodyLimits, such as BodyLimits\(decoded=2\*\*26\)"),
        (
            CLIENT,
            {"transport": httpx.HTTPTransport()},
            "transport must be an httpx.AsyncBaseTransport",
        ),
        (CLIENT, {"transport": httpx.MockTransport}, "transport must be an httpx.AsyncBaseTransport"),
        (CLIENT, {"transport": "http://host"}, "transport must be an httpx.AsyncBaseTransport"),
        (CLIENT, {"allow_http": "false"}, "allow_http must be True or False, not 'false'"),
        (CLIENT, {"on_attempt": "print"}, "on_attempt must be a function, not 'print'"),
        (CLIENT, {"on_outcome": []}, "on_outcome must be a function"),
        (CLIENT, {"clock": 1.0}, "clock must be a function"),
        (CLIENT, {"sleep": None}, "sleep must be a function, not None"),
        (CLIENT, {"random": 0.5}, "random must be a function"),
        (RetryPolicy, {"retry_ambiguous": "no"}, "RetryPolicy.retry_ambiguous must be True or False, not 'no'"),
        (RetryPolicy, {"retry_ambiguous_reads": 1}, "RetryPolicy.retry_ambiguous_reads must be True or False"),
        (partial(Campaign, "panel.csv", None), {"ledger": "n"}, "client must be a SamplingClient, or None"),
        (partial(Campaign, None, None), {"ledger": 5}, "ledger must be a str or a path object"),
        (CAMPAIGN, {"allocate": 5}, r"allocate must be an Allocate, such as Allocate\(per_member=5\), not 5"),
        (CAMPAIGN, {"limits": 100}, r"limits must be a Limits, such as Limits\(max_invites=1000\), not 100"),
        (CAMPAIGN, {"lessons": [9]}, "lessons must be rules by result code"),
        (CAMPAIGN, {"columns": ["age"]}, "columns must be names by column"),
        (CAMPAIGN, {"kinds": {}}, "kinds must be a QuestionKinds"),
        (CAMPAIGN, {"policy": "possible"}, "policy must be a MatchPolicy"),
        (CAMPAIGN, {"clock": 0}, "clock must be a function"),
        (
            partial(QuotaIndex, []),
            {"policy": "no"},
            r"policy must be a MatchPolicy, such as",
        ),
        (QuestionKinds, {"postal": 1001042}, "must be several question IDs, such as .1001042., not 1001042"),
        (QuestionKinds, {"ids": "1001568"}, "a question ID must be a whole number, not '1'"),
        (QuestionKinds, {"age": [1001538]}, "age must be age bands by question ID"),
        (QuestionKinds, {"age": {1001538: 5}}, "bands must be years by answer ID, such as"),
        (QuestionKinds, {"age": {1001538: {7: "18-24"}}}, "age band 7 must be its first and its last year"),
        (Allocate, {"room": 100}, "room must be numbers by ID, such as {17: 100}, not 100"),
        (Allocate, {"survey_room": [1]}, "survey_room must be numbers by ID"),
        (Allocate, {"value": 2.5}, "value must be numbers by ID"),
        (partial(Journal, "night.journal"), {"settled": [("m", 1)]}, "settled must be SettledPairs"),
        (CLIENT().serve_snapshots, {"path": None}, "path must be a str or a path object"),
        (partial(QuotaIndex, []), {"rank": "price"}, "rank must be a function"),
        (partial(LiveIndex, "watch"), {}, "watch must be a QuotaWatch, which client.watch_quotas.. returns"),
        (partial(PanelMatcher, []), {}, "index must be a QuotaIndex"),
        (MATCHER, {"output": Counts}, r"output must be one of Counts\(\), TopK\(n\)"),
        (MATCHER, {"output": 5}, "output must be one of .*, not 5"),
        (INBOX, {"handling": 5}, "handling must be a HandlerPolicy, not 5"),
        (INBOX, {"clock": 5}, "clock must be a function"),
        (
            INBOX,
            {"require_signature": 1, "shared_secrets": SECRET},
            "require_signature must be True or False, not 1",
        ),
        (INBOX, {"networks": "198.51.100.0/24"}, "networks must be a list of networks.*not '198.51.100.0/24'"),
        (INBOX, {"trusted_proxies": "unix"}, "trusted_proxies must be a list of networks"),
        (partial(Inbox, 5), {"secrets": SECRET}, "a path, a SqliteStore or a PostgresStore, not 5"),
        (partial(Inbox, SqliteStore), {"secrets": SECRET}, "store must be a path"),
        (partial(Inbox, "n.db"), {"secrets": 5}, "secrets must be a text, several, or a mapping"),
        (INBOX, {"basic": SECRET}, "basic a list of pairs"),
        (Simulator, {"latency": 0.1}, r"latency must be a Latency, such as Latency\(workers=4\), not 0.1"),
        (Simulator, {"surveys": "5"}, "surveys must be a whole number of at least 0, not '5'"),
        (Simulator, {"faults": Fault.status(503)}, "faults must be several Faults, such as"),
        (Simulator, {"notifying": "https://partner.example"}, "notifying must be a Notifying"),
    ],
)
def test_an_option_of_another_type_is_refused_with_the_way_out(make, given, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        make(**given)
    assert SECRET not in str(caught.value)


def test_options_of_the_right_type_are_taken():
    CLIENT(
        timeouts=Timeouts(read=3),
        retry=RetryPolicy(max_attempts=1),
        outage=OutagePolicy(patience=5),
        limits=BodyLimits(),
        transport=httpx.MockTransport(lambda _: httpx.Response(200)),
        on_attempt=print,
    )
    CAMPAIGN(limits=Limits(max_invites=3), policy=MatchPolicy(missing="no"))
    MATCHER(output=Counts())


@pytest.mark.anyio
async def test_the_run_of_a_campaign_says_that_it_needs_its_block(tmp_path):
    async with CLIENT(transport=httpx.MockTransport(lambda _: httpx.Response(500))) as client:
        run = Campaign(client, None, ledger=tmp_path / "night.ledger").run()
        for use in (lambda: aiter(run), lambda: run.members, lambda: run.requests):
            with pytest.raises(InvalidRequestError, match=r"async with campaign\.run\(\) as run"):
                use()
        for wait in (run.__anext__, run.summary):
            with pytest.raises(InvalidRequestError, match=r"async with campaign\.run\(\) as run"):
                await wait()
