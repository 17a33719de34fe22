"""A client written by hand for speed: aiohttp, msgspec Structs, a semaphore and gather.

If nothing fails, it does the same work: it cuts chunks of 100 IDs, sends them in parallel, decodes every
response into models and matches the items to the IDs of the request. Errors are raised.
"""

from __future__ import annotations

import asyncio
from datetime import datetime  # noqa: TC003  msgspec reads the annotations at run time
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 100
SAMPLES = "/IPExternalSamplingService/ExternalSample"


class Invite(msgspec.Struct, frozen=True):
    """An invite of a member to a quota."""

    survey_id: int = msgspec.field(name="SurveyID")
    wave_id: int = msgspec.field(name="WaveID")
    quota_id: int = msgspec.field(name="QuotaID")
    partner_amount: float = msgspec.field(name="PartnerAmount")
    url: str = msgspec.field(name="URL")
    loi: int = msgspec.field(name="LOI")
    ir: int = msgspec.field(name="IR")
    member_amount: float | None = msgspec.field(name="MemberAmount", default=None)


class BulkItem(msgspec.Struct, frozen=True):
    """The result for one quota ID of a bulk invite."""

    quota_id: int = msgspec.field(name="QuotaID")
    invite: Invite | None = msgspec.field(name="Invite")
    result_code: int = msgspec.field(name="ResultCode")
    result: str = msgspec.field(name="Result")


class BulkAnswer(msgspec.Struct, frozen=True):
    """The response to a bulk invite."""

    invites: list[BulkItem] = msgspec.field(name="Invites")


class Price(msgspec.Struct, frozen=True):
    """What the operator pays for a complete."""

    amount: float = msgspec.field(name="Amount")
    currency_id: int = msgspec.field(name="CurrencyID")


class QuestionAndAnswers(msgspec.Struct, frozen=True):
    """A condition of a sub-quota."""

    question_id: int = msgspec.field(name="QuestionID")
    answer_ids: tuple[int, ...] = msgspec.field(name="AnswerIDs", default=())
    answer_values: tuple[str, ...] = msgspec.field(name="AnswerValues", default=())
    is_routable: bool = msgspec.field(name="IsRoutable", default=False)


class SubQuota(msgspec.Struct, frozen=True):
    """One target group of a layer."""

    sub_quota_id: int = msgspec.field(name="SubQuotaID")
    current_completes: int = msgspec.field(name="CurrentCompletes")
    max_target_completes: int = msgspec.field(name="MaxTargetCompletes")
    questions_and_answers: tuple[QuestionAndAnswers, ...] = msgspec.field(name="QuestionsAndAnswers")


class Layer(msgspec.Struct, frozen=True):
    """A group of sub-quotas."""

    layer_id: int = msgspec.field(name="LayerID")
    sub_quotas: tuple[SubQuota, ...] = msgspec.field(name="SubQuotas")


class Quota(msgspec.Struct, frozen=True):
    """An open quota."""

    quota_id: int = msgspec.field(name="QuotaID")
    completes_required: int = msgspec.field(name="CompletesRequired")
    estimated_completes_remaining: int = msgspec.field(name="EstimatedCompletesRemaining")
    layers: tuple[Layer, ...] = msgspec.field(name="Layers")


class SurveyWaveExclusion(msgspec.Struct, frozen=True):
    """Participations that exclude a member."""

    survey_id: int = msgspec.field(name="SurveyID")
    wave_id: int = msgspec.field(name="WaveID")
    participation_status_ids: tuple[int, ...] = msgspec.field(name="ParticipationStatusIDs", default=())


class Survey(msgspec.Struct, frozen=True):
    """A survey with its open quotas."""

    survey_id: int = msgspec.field(name="SurveyID")
    wave_id: int = msgspec.field(name="WaveID")
    loi: int = msgspec.field(name="LOI")
    ir: int = msgspec.field(name="IR")
    study_type_id: int = msgspec.field(name="StudyTypeID")
    scheduled_completion_date: datetime = msgspec.field(name="ScheduledCompletionDate")
    device_type_ids: tuple[int, ...] = msgspec.field(name="DeviceTypeIDs")
    is_survey_recontact: bool = msgspec.field(name="IsSurveyRecontact")
    completes_required: int = msgspec.field(name="CompletesRequired")
    estimated_completes_remaining: int = msgspec.field(name="EstimatedCompletesRemaining")
    price: Price = msgspec.field(name="Price")
    quotas: tuple[Quota, ...] = msgspec.field(name="Quotas")
    survey_name: str | None = msgspec.field(name="SurveyName", default=None)
    survey_wave_exclusions: tuple[SurveyWaveExclusion, ...] = msgspec.field(
        name="SurveyWaveExclusions", default=()
    )


class Quotas(msgspec.Struct, frozen=True):
    """The open inventory of a panel."""

    country_id: int = msgspec.field(name="CountryID")
    cache_expires: datetime = msgspec.field(name="CacheExpires")
    surveys: tuple[Survey, ...] = msgspec.field(name="Surveys")


bulk_answers = msgspec.json.Decoder(BulkAnswer)
invites = msgspec.json.Decoder(Invite)
quotas = msgspec.json.Decoder(Quotas)


def items_of(body: bytes, chunk: Sequence[int]) -> dict[int, BulkItem]:
    """Return the items of a response by their quota IDs, which must be those of the request."""
    items = {item.quota_id: item for item in bulk_answers.decode(body).invites}
    missing = [quota_id for quota_id in chunk if quota_id not in items]
    if missing:
        raise ValueError(f"{len(missing)} quota IDs were not answered")
    return items


class AiohttpClient:
    """Bulk invites over one session."""

    name = "aiohttp + msgspec"

    def __init__(self, url: str, panel_guid: str, api_key: str, width: int) -> None:
        self._path = f"{url}{SAMPLES}/{panel_guid}"
        self._headers = {"API_AUTH_KEY": api_key, "Accept": "application/json"}
        self._width = width

    async def __aenter__(self) -> Self:
        self._semaphore = asyncio.Semaphore(self._width)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._width),
            timeout=aiohttp.ClientTimeout(total=60),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        chunks = [quota_ids[start : start + CHUNK] for start in range(0, len(quota_ids), CHUNK)]
        answers = await asyncio.gather(*(self._ask(member_code, chunk) for chunk in chunks))
        return sum(item.invite is not None for answer in answers for item in answer.values())

    async def _ask(self, member_code: str, chunk: Sequence[int]) -> dict[int, BulkItem]:
        async with self._semaphore:
            return await self._post(member_code, chunk)

    async def _post(self, member_code: str, chunk: Sequence[int]) -> dict[int, BulkItem]:
        url = URL(f"{self._path}/{quote(member_code, safe='')}/Invites", encoded=True)
        body = msgspec.json.encode({"QuotaIDs": list(chunk)})
        async with self._session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            response.raise_for_status()
            return items_of(await response.read(), chunk)

    async def invite(self, member_code: str, quota_id: int) -> str:
        """Make one Generate Invite and return its link."""
        url = URL(f"{self._path}/{quote(member_code, safe='')}/Invite/{quota_id}", encoded=True)
        async with self._semaphore, self._session.get(url) as response:
            response.raise_for_status()
            found = invites.decode(await response.read())
        if found.quota_id != quota_id:
            raise ValueError("another quota was answered")
        return found.url

    async def quotas(self) -> Any:
        """Make one Get Quotas."""
        async with self._session.get(URL(f"{self._path}/Quotas", encoded=True)) as response:
            response.raise_for_status()
            return self.decode_quotas(await response.read())

    def decode_quotas(self, body: bytes) -> Any:
        """Get and decode an inventory."""
        return quotas.decode(body)


class AiohttpWorkers(AiohttpClient):
    """The same with a task for each place, which takes one chunk after the other: no semaphore, no gather."""

    name = "aiohttp + msgspec, a task a place"

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        chunks = (quota_ids[start : start + CHUNK] for start in range(0, len(quota_ids), CHUNK))
        answers: list[dict[int, BulkItem]] = []

        async def work() -> None:
            for chunk in chunks:
                answers.append(await self._post(member_code, chunk))  # noqa: PERF401  an await in each round

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._width):
                tasks.create_task(work())
        return sum(item.invite is not None for answer in answers for item in answer.values())
