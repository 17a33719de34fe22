"""A client as most engineers write it in an afternoon: httpx, pydantic models, a semaphore and gather.

If nothing fails, it does the same work: it cuts chunks of 100 IDs, sends them in parallel, decodes every
response into models and matches the items to the IDs of the request. The pool has as many connections as the
semaphore has places. Errors are raised.
"""

from __future__ import annotations

import asyncio
from datetime import datetime  # noqa: TC003  pydantic reads the annotations at run time
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 100
SAMPLES = "/IPExternalSamplingService/ExternalSample"


class Model(BaseModel):
    """A model whose fields have the names of the contract."""

    model_config = ConfigDict(frozen=True)


class Invite(Model):
    """An invite of a member to a quota."""

    survey_id: int = Field(alias="SurveyID")
    wave_id: int = Field(alias="WaveID")
    quota_id: int = Field(alias="QuotaID")
    partner_amount: float = Field(alias="PartnerAmount")
    url: str = Field(alias="URL")
    loi: int = Field(alias="LOI")
    ir: int = Field(alias="IR")
    member_amount: float | None = Field(alias="MemberAmount", default=None)


class BulkItem(Model):
    """The result for one quota ID of a bulk invite."""

    quota_id: int = Field(alias="QuotaID")
    invite: Invite | None = Field(alias="Invite")
    result_code: int = Field(alias="ResultCode")
    result: str = Field(alias="Result")


class BulkAnswer(Model):
    """The response to a bulk invite."""

    invites: list[BulkItem] = Field(alias="Invites")


class Price(Model):
    """What the operator pays for a complete."""

    amount: float = Field(alias="Amount")
    currency_id: int = Field(alias="CurrencyID")


class QuestionAndAnswers(Model):
    """A condition of a sub-quota."""

    question_id: int = Field(alias="QuestionID")
    answer_ids: tuple[int, ...] = Field(alias="AnswerIDs", default=())
    answer_values: tuple[str, ...] = Field(alias="AnswerValues", default=())
    is_routable: bool = Field(alias="IsRoutable", default=False)


class SubQuota(Model):
    """One target group of a layer."""

    sub_quota_id: int = Field(alias="SubQuotaID")
    current_completes: int = Field(alias="CurrentCompletes")
    max_target_completes: int = Field(alias="MaxTargetCompletes")
    questions_and_answers: tuple[QuestionAndAnswers, ...] = Field(alias="QuestionsAndAnswers")


class Layer(Model):
    """A group of sub-quotas."""

    layer_id: int = Field(alias="LayerID")
    sub_quotas: tuple[SubQuota, ...] = Field(alias="SubQuotas")


class Quota(Model):
    """An open quota."""

    quota_id: int = Field(alias="QuotaID")
    completes_required: int = Field(alias="CompletesRequired")
    estimated_completes_remaining: int = Field(alias="EstimatedCompletesRemaining")
    layers: tuple[Layer, ...] = Field(alias="Layers")


class SurveyWaveExclusion(Model):
    """Participations that exclude a member."""

    survey_id: int = Field(alias="SurveyID")
    wave_id: int = Field(alias="WaveID")
    participation_status_ids: tuple[int, ...] = Field(alias="ParticipationStatusIDs", default=())


class Survey(Model):
    """A survey with its open quotas."""

    survey_id: int = Field(alias="SurveyID")
    wave_id: int = Field(alias="WaveID")
    loi: int = Field(alias="LOI")
    ir: int = Field(alias="IR")
    study_type_id: int = Field(alias="StudyTypeID")
    scheduled_completion_date: datetime = Field(alias="ScheduledCompletionDate")
    device_type_ids: tuple[int, ...] = Field(alias="DeviceTypeIDs")
    is_survey_recontact: bool = Field(alias="IsSurveyRecontact")
    completes_required: int = Field(alias="CompletesRequired")
    estimated_completes_remaining: int = Field(alias="EstimatedCompletesRemaining")
    price: Price = Field(alias="Price")
    quotas: tuple[Quota, ...] = Field(alias="Quotas")
    survey_name: str | None = Field(alias="SurveyName", default=None)
    survey_wave_exclusions: tuple[SurveyWaveExclusion, ...] = Field(alias="SurveyWaveExclusions", default=())


class Quotas(Model):
    """The open inventory of a panel."""

    country_id: int = Field(alias="CountryID")
    cache_expires: datetime = Field(alias="CacheExpires")
    surveys: tuple[Survey, ...] = Field(alias="Surveys")


class HttpxClient:
    """Bulk invites over one client."""

    name = "httpx + pydantic"

    def __init__(self, url: str, panel_guid: str, api_key: str, width: int) -> None:
        self._path = f"{SAMPLES}/{panel_guid}"
        self._semaphore = asyncio.Semaphore(width)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"API_AUTH_KEY": api_key},
            timeout=60,
            # The more connections are idle in the pool, the more work it does. A dozen of 64 are enough for a
            # service that responds at once, and then a request costs a quarter.
            limits=httpx.Limits(max_connections=width, max_keepalive_connections=width, keepalive_expiry=1),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        chunks = [quota_ids[start : start + CHUNK] for start in range(0, len(quota_ids), CHUNK)]
        answers = await asyncio.gather(*(self._ask(member_code, chunk) for chunk in chunks))
        return sum(item.invite is not None for answer in answers for item in answer.values())

    async def _ask(self, member_code: str, chunk: Sequence[int]) -> dict[int, BulkItem]:
        path = f"{self._path}/{quote(member_code, safe='')}/Invites"
        async with self._semaphore:
            response = await self._client.post(path, json={"QuotaIDs": list(chunk)})
        response.raise_for_status()
        answer = BulkAnswer.model_validate_json(response.content)
        items = {item.quota_id: item for item in answer.invites}
        missing = [quota_id for quota_id in chunk if quota_id not in items]
        if missing:
            raise ValueError(f"{len(missing)} quota IDs were not answered")
        return items

    async def quotas(self) -> Any:
        """Make one Get Quotas."""
        response = await self._client.get(f"{self._path}/Quotas")
        response.raise_for_status()
        return self.decode_quotas(response.content)

    def decode_quotas(self, body: bytes) -> Any:
        """Get and decode an inventory."""
        return Quotas.model_validate_json(body)
