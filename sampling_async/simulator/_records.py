"""The records of the ledger: invites and requests."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import get_args

from attrs import field, frozen

from sampling_async._contract.errors import Endpoint


@frozen
class LedgerEntry:
    """One invite of the ledger.

    Attributes:
        sequence_number: The place of the invite in the ledger, from 0.
        panel_guid: The panel of the member.
        member_code: The member invited.
        quota_id: The quota that the member was invited to.
        survey_id: The survey of the quota, with `wave_id`.
        wave_id: The wave of the survey.
        endpoint: `bulk_invite` or `generate_invite`.
        url: The link of the invite, different for every invite.
        request_number: The request that the invite was made for, see `RequestRecord.number`.
    """

    sequence_number: int
    panel_guid: str
    member_code: str
    quota_id: int
    survey_id: int
    wave_id: int
    endpoint: Endpoint
    url: str
    request_number: int


@frozen
class RequestRecord:
    """One request that reached the service.

    Attributes:
        number: The place of the request in the order of arrival, from 0. Requests no longer kept count too.
        endpoint: The endpoint of the request.
        member_code: The member that the request named, or None.
        quota_ids: The quota IDs that the request named, in its order.
        status: The HTTP status of the response; None if the connection was cut before it.
        is_processed: False if a fault kept the request from having any effect.
        time: When the request arrived: seconds of the simulator's clock since the simulator was made.
        query: The query parameters by name.
        headers: The headers by lower-case name. The value of `api_auth_key` is masked.
    """

    number: int
    endpoint: Endpoint
    member_code: str | None
    # Quota IDs and headers are kept in compact form; the properties below convert them when they are read.
    _quota_ids: array[int] = field(alias="quota_ids")
    status: int | None
    is_processed: bool
    time: float = 0.0
    query: Mapping[str, str] = field(factory=dict[str, str], repr=False)
    _headers: Sequence[tuple[bytes, bytes]] = field(default=(), alias="headers", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The headers by lower-case name. The value of `api_auth_key` is masked."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._headers}

    @property
    def quota_ids(self) -> tuple[int, ...]:
        """The quota IDs that the request named, in its order."""
        return tuple(self._quota_ids)


class Requests(tuple[RequestRecord, ...]):
    """The latest requests, oldest first. Call it to select some of them.

    sim.ledger.requests[-1]
    sim.ledger.requests(endpoint="bulk_invite", status=503)
    """

    __slots__ = ()

    def __call__(
        self,
        *,
        endpoint: Endpoint | None = None,
        member_code: str | None = None,
        quota_id: int | None = None,
        status: int | None = None,
    ) -> Requests:
        """Return the requests that fit all given arguments.

        Args:
            endpoint: The endpoint of the requests.
            member_code: The member that they named.
            quota_id: A quota ID that they named, alone or among others.
            status: The status of their responses.

        Raises:
            ValueError: There is no such endpoint.
        """
        if endpoint is not None and endpoint not in get_args(Endpoint):
            raise ValueError(
                f"there is no endpoint {endpoint!r}; the endpoints are {', '.join(get_args(Endpoint))}"
            )
        # In the sets, None stands for an argument that was not given.
        return Requests(
            record
            for record in self
            if endpoint in {None, record.endpoint}
            and member_code in {None, record.member_code}
            and status in {None, record.status}
            and (quota_id is None or quota_id in record.quota_ids)
        )
