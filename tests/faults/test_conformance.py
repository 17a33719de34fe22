"""The table of `conformance.json`: every fault with every call. The file itself explains the format."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from doubles import until
from fault_server import ENDPOINTS, RIGHT, WORDS, FaultServer, fault_of, refused
from kit import QUICK, assert_idle, call, client_of

from sampling_async import (
    BadRequestError,
    BulkInviteResult,
    DecodeError,
    ForbiddenError,
    SamplingClient,
    SamplingError,
    ServerError,
    Timeouts,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
)

TABLE = json.loads(Path(__file__).with_name("conformance.json").read_text("utf-8"))
KINDS = {
    TransportError: "transport",
    TransportTimeoutError: "timeout",
    DecodeError: "decode",
    BadRequestError: "bad_request",
    ForbiddenError: "forbidden",
    ServerError: "server",
    UnexpectedStatusError: "unexpected_status",
}


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: f"{row['fault']}-{row['call']}")
async def test_a_fault_has_the_result_in_the_table(row):
    fault = TABLE["faults"][row["fault"]]
    spoiled = fault_of(fault["instructions"])
    with FaultServer(*[spoiled] * (fault["times"] or 0), then=RIGHT if fault["times"] else spoiled) as server:
        url = refused() if fault.get("address") == "refused" else server.url
        timeouts = QUICK if ["silence"] in fault["instructions"] else Timeouts()
        async with client_of(url, timeouts=timeouts) as client:
            if fault.get("warm_up"):
                await call(client, row["call"], member_code="warm")
                if ["till_next"] not in fault["instructions"]:
                    await server.has_done(1)
                server.ledger.received.clear()
                server.ledger.processed.clear()
            seen = await _seen(client, row["call"], server)
            assert_idle(client)
        expected = dict(row["expect"])
        requests = expected.pop("requests")
        least, most = requests if isinstance(requests, list) else (requests, requests)
        await server.has_received(least)
        await until(lambda: len(server.ledger.processed) >= expected["processed"])
    assert seen | {"processed": len(server.ledger.processed)} == expected
    assert least <= len(server.ledger.received) <= most


async def _seen(client: SamplingClient, endpoint: str, server: FaultServer) -> dict[str, object]:
    try:
        result = await call(client, endpoint)
    except SamplingError as error:
        again = endpoint != "generate_invite" or error.delivery != "unknown"
        kind = KINDS[type(error)]
        return {"outcome": "error", "error": kind, "delivery": error.delivery, "may_send_again": again}
    seen = {"outcome": "answered", "error": None, "delivery": None, "may_send_again": False}
    if not isinstance(result, BulkInviteResult):
        return seen
    assert server.ledger.lies(result) == []
    statuses = [outcome.status for outcome in result]
    if statuses != ["invited", "rejected"]:
        assert statuses[0] == statuses[1]
        unknown = statuses[0] == "unknown"
        seen |= {"outcome": statuses[0], "error": KINDS[type(result[0].error)]}
        seen |= {"delivery": "unknown" if unknown else None, "may_send_again": result.resendable() == (2, 3)}
    return seen


def test_the_table_is_complete():
    """It has each fault with each call once; every word is explained and known to the server."""
    pairs = Counter((row["fault"], row["call"]) for row in TABLE["rows"])
    assert pairs == Counter({(fault, call): 1 for fault in TABLE["faults"] for call in ENDPOINTS})
    assert len(TABLE["faults"]) >= 20
    explained = {name.partition(" ")[0] for name in TABLE["words"]}
    used = {step[0] for fault in TABLE["faults"].values() for step in fault["instructions"]}
    assert used <= explained <= set(WORDS)
