"""A client as good engineers write it in an afternoon: httpx, tenacity, pydantic, gather.

The comparison is meant to be fair: the client matches results by quota ID and not by position, a failed chunk
does not affect the others, reads and writes have timeouts, concurrency is bounded, retries wait with jitter.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from peers.common import Address, Options, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from types import TracebackType

CHUNK = 100
TIMEOUT = 60.0
SAMPLES = "/IPExternalSamplingService/ExternalSample"


class Model(BaseModel):
    """A model whose fields have the names of the contract."""

    model_config = ConfigDict(populate_by_name=True, extra="ignore")


class Invite(Model):
    """An invite of a member to a quota."""

    quota_id: int = Field(alias="QuotaID")
    url: str = Field(alias="URL")


class BulkItem(Model):
    """The result for one quota ID of a bulk invite."""

    quota_id: int = Field(alias="QuotaID")
    invite: Invite | None = Field(alias="Invite")
    result_code: int = Field(alias="ResultCode")
    result: str = Field(alias="Result")


class BulkAnswer(Model):
    """The response to a bulk invite."""

    invites: list[BulkItem] = Field(alias="Invites")


class Quota(Model):
    """An open quota."""

    quota_id: int = Field(alias="QuotaID")
    remaining: int = Field(alias="EstimatedCompletesRemaining")


class Survey(Model):
    """A survey with its open quotas."""

    survey_id: int = Field(alias="SurveyID")
    quotas: list[Quota] = Field(alias="Quotas")


class Quotas(Model):
    """The response to Get Quotas."""

    surveys: list[Survey] = Field(alias="Surveys")


class RecontactPage(Model):
    """A page of member codes."""

    member_codes: list[str] = Field(alias="MemberCodes")
    has_additional_members: bool = Field(alias="HasAdditionalMembers")


class Setting(Model):
    """One setting of the partner."""

    name: str = Field(alias="Name")
    value: str | None = Field(alias="Value")


SETTINGS = TypeAdapter(list[Setting])


def worth_retrying(exc: BaseException) -> bool:
    """Return whether an error may be temporary."""
    if isinstance(exc, httpx.HTTPStatusError):
        return exc.response.status_code == 429 or exc.response.status_code >= 500
    return isinstance(exc, httpx.TransportError)


class NaiveClient:
    """The five requests, with retries, a semaphore and models."""

    def __init__(self, address: Address, options: Options) -> None:
        self._panel = address.panel_guid
        self._semaphore = asyncio.Semaphore(options.concurrency)
        self._backoff = 0.5 if options.backoff is None else options.backoff
        pool = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
        self.client = httpx.AsyncClient(
            base_url=address.url,
            headers={"API_AUTH_KEY": address.api_key},
            timeout=options.read or TIMEOUT,
            limits=pool,
            transport=options.transport,
            proxy=options.proxy,
            verify=ssl.create_default_context(cadata=options.authority) if options.authority else True,
        )

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.client.__aexit__(exc_type, exc, traceback)

    @property
    def permits(self) -> int:
        """The number of requests that could start now."""
        return self._semaphore._value  # noqa: SLF001  it has no other way to tell

    async def _request(self, method: str, path: str, **arguments: Any) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_exception(worth_retrying),
            wait=wait_random_exponential(multiplier=self._backoff, max=20),
            stop=stop_after_attempt(3),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                async with self._semaphore:
                    response = await self.client.request(method, path, **arguments)
                response.raise_for_status()
        return response.content

    async def _invite_chunk(self, member_code: str, quota_ids: Sequence[int]) -> BulkAnswer:
        path = f"{SAMPLES}/{self._panel}/{quote(member_code, safe='')}/Invites"
        body = await self._request("POST", path, json={"QuotaIDs": list(quota_ids)})
        return BulkAnswer.model_validate_json(body)

    async def bulk_invite(self, member_code: str, quota_ids: Sequence[int]) -> list[Outcome]:
        """Request invites of one member. If a chunk fails, its IDs are `failed`."""
        chunks = [quota_ids[start : start + CHUNK] for start in range(0, len(quota_ids), CHUNK)]
        answers = await asyncio.gather(
            *(self._invite_chunk(member_code, chunk) for chunk in chunks), return_exceptions=True
        )
        outcomes: list[Outcome] = []
        for chunk, answer in zip(chunks, answers, strict=True):
            if isinstance(answer, BaseException):
                outcomes += [Outcome(member_code, quota_id, "failed") for quota_id in chunk]
                continue
            items = {item.quota_id: item for item in answer.invites}
            outcomes += [self._outcome(member_code, quota_id, items.get(quota_id)) for quota_id in chunk]
        return outcomes

    @staticmethod
    def _outcome(member_code: str, quota_id: int, item: BulkItem | None) -> Outcome:
        if item is None:
            return Outcome(member_code, quota_id, "failed")
        if item.invite is not None:
            return Outcome(member_code, quota_id, "invited", item.invite.url)
        return Outcome(member_code, quota_id, "rejected")

    async def invite_all(self, requests: Iterable[tuple[str, Sequence[int]]]) -> list[Outcome]:
        """Request invites of many members concurrently."""
        results = await asyncio.gather(*(self.bulk_invite(member, ids) for member, ids in requests))
        return [outcome for result in results for outcome in result]

    async def invite(self, member_code: str, quota_id: int) -> Invite:
        """Make one Generate Invite."""
        path = f"{SAMPLES}/{self._panel}/{quote(member_code, safe='')}/Invite/{quota_id}"
        return Invite.model_validate_json(await self._request("GET", path))

    async def quotas(self) -> Quotas:
        """Make one Get Quotas."""
        return Quotas.model_validate_json(await self._request("GET", f"{SAMPLES}/{self._panel}/Quotas"))

    async def settings(self) -> list[Setting]:
        """Make one Get Settings."""
        path = "/IntegratedPanelService/api/Settings"
        body = await self._request("GET", path, params={"partnerGUID": self._panel})
        return SETTINGS.validate_json(body)

    async def recontact(
        self, quota_id: int, *, page_size: int | None = None, after: str | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the member codes of a recontact quota, page by page."""
        path = f"{SAMPLES}/{self._panel}/Recontact/{quota_id}/MemberCodes"
        while True:
            asked = {"maxResults": page_size, "lastMemberCodeReceived": after}
            params = {name: value for name, value in asked.items() if value is not None}
            page = RecontactPage.model_validate_json(await self._request("GET", path, params=params))
            for member_code in page.member_codes:
                yield member_code
            if not page.has_additional_members:
                return
            after = page.member_codes[-1]
