"""The service itself: the five endpoints, without HTTP, time and faults.

A quota ID asked for a member gets the first result code that applies:

    12 NO_MEMBER_FOUND          the panel has no such member
    10 NO_QUOTA_ID              there is no such quota
     9 QUOTA_NOT_LIVE           the quota was closed
    28 QUOTA_FULL               the quota, or its survey, needs no more completes
    38 SURVEY_TAKEN             the member holds an invite of this survey and wave, to this quota or to another
                                one, since a member can be targeted to one quota of a survey only
    31 DEVICETYPE_NOT_SUPPORTED_FOR_SURVEY
    17 NO_RECONTACT_GID         a recontact survey, and the member is not on the quota's list
    30 EXCLUDED_SURVEY_TAKEN    a past participation is among the survey's wave exclusions
    16 MEMBER_DOES_NOT_MATCH_QUOTA
    41 SUB_QUOTA_FULL           the member matches, but the sub-quota of some layer is full
     1 SUCCESS

Every invite counts as a complete at once, so quotas and sub-quotas fill as invites are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from sampling_async._contract.errors import Endpoint
from sampling_async._contract.records import Invite, RecontactMembers, ResultCode
from sampling_async.simulator._answers import JSON, PLAINTEXT, Answer, BulkItem, refusal
from sampling_async.simulator._panels import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async._contract.records import Survey
    from sampling_async.simulator._ledger import Ledger
    from sampling_async.simulator._live import LiveInventory, LiveQuota
    from sampling_async.simulator._members import SimulatedMember
    from sampling_async.simulator._outbox import Outbox
    from sampling_async.simulator._panels import MemberState, PanelState

BULK_LIMIT: Final = 100
"""The largest number of quota IDs in a bulk invite."""


@frozen
class Call:
    """A request as the service sees it.

    `quota_ids` is None if they could not be read: not JSON, not a list of whole numbers, or not a number in the
    path. `refused` maps quota IDs to the result codes that faults set for them; the key None is for all others.
    """

    endpoint: Endpoint
    panel_guid: str | None
    api_key: str | None
    member_code: str | None = None
    quota_ids: tuple[int, ...] | None = ()
    query: Mapping[str, str] = field(factory=dict[str, str])
    request_number: int = 0
    refused: Mapping[int | None, int] = field(factory=dict["int | None", int])

    def refusal(self, quota_id: int | None = None) -> int | None:
        """Return the result code that a fault sets for a quota ID, or for the whole call; None if none does."""
        code = self.refused.get(quota_id)
        return self.refused.get(None) if code is None else code


class Service:
    """The state behind the endpoints. Every change of it happens under one lock.

    Simulators that are served need the lock: they handle requests in another thread than the test's.
    """

    def __init__(
        self, inventory: LiveInventory, ledger: Ledger, outbox: Outbox, *, recontact_page_size: int
    ) -> None:
        self._inventory = inventory
        self._ledger = ledger
        self._outbox = outbox
        self.notification_urls: Mapping[str, str] | None = None
        self._recontact_page_size = recontact_page_size
        self._panels: dict[str, PanelState] = {}
        self._keys: dict[str, PanelState] = {}
        self.lock = Lock()

    def register(self, panel: PanelState) -> None:
        """Register a panel with its Guid and key."""
        self._panels[panel.panel.panel_guid.lower()] = panel
        self._keys[panel.panel.api_key.lower()] = panel

    def panel(self, panel_guid: str) -> PanelState:
        """Return a registered panel.

        Raises:
            KeyError: No panel has this Guid.
        """
        return self._panels[panel_guid.lower()]

    def answer(self, call: Call) -> Answer:
        """Respond to a call: check its key and panel, then do what it asks."""
        holder = self._keys.get((call.api_key or "").lower())
        if holder is None:
            return Answer(b'{"Message":"Authorization has been denied for this request."}', 403)
        if not call.panel_guid:
            return refusal(ResultCode.NO_PANEL_GUID)
        panel = self._panels.get(call.panel_guid.strip("{}").lower())
        if panel is None:
            return refusal(ResultCode.PANEL_DOES_NOT_EXIST)
        if panel is not holder:
            return Answer(b'{"Message":"The key belongs to another panel."}', 403)
        with self.lock:
            return self._endpoint(panel, call)

    def _endpoint(self, panel: PanelState, call: Call) -> Answer:
        if call.refused and call.endpoint != "bulk_invite":
            code = call.refusal(call.quota_ids[0] if call.quota_ids else None)
            if code is not None:
                return refusal(code, content_type=PLAINTEXT if call.endpoint == "generate_invite" else JSON)
        match call.endpoint:
            case "get_quotas":
                return self._get_quotas(call)
            case "bulk_invite":
                return self._bulk_invite(panel, call)
            case "generate_invite":
                return self._generate_invite(panel, call)
            case "get_settings":
                return Answer(settings_of(panel.panel.panel_guid, self.notification_urls))
            case "recontact_members":
                return self._recontact_members(panel, call)

    def _get_quotas(self, call: Call) -> Answer:
        wanted = call.query.get("includeRoutables", "true").strip().lower()
        if wanted not in {"true", "false"}:
            return refusal(ResultCode.PANEL_INVALID_ES_REQUEST)
        return Answer(self._inventory.body(include_routables=wanted == "true"))

    def _bulk_invite(self, panel: PanelState, call: Call) -> Answer:
        quota_ids = call.quota_ids
        if quota_ids is None or len(quota_ids) > BULK_LIMIT:
            return refusal(ResultCode.PANEL_INVALID_ES_REQUEST)
        if not quota_ids:
            return refusal(ResultCode.NO_QUOTA_ID)
        state = panel.state(call.member_code or "")
        if state is None:
            nobody = ResultCode.NO_MEMBER_FOUND
            return Answer([BulkItem(quota_id, call.refusal(quota_id) or nobody) for quota_id in quota_ids])
        return Answer([self._invite(panel, state, quota_id, call) for quota_id in quota_ids])

    def _generate_invite(self, panel: PanelState, call: Call) -> Answer:
        state = panel.state(call.member_code or "")
        if not call.quota_ids:
            code, invite = ResultCode.NO_QUOTA_ID, None
        elif state is None:
            code, invite = ResultCode.NO_MEMBER_FOUND, None
        else:
            _, code, invite = self._invite(panel, state, call.quota_ids[0], call)
        if invite is not None:
            return Answer(invite)
        # The body is JSON as everywhere; only this endpoint labels it application/plaintext.
        return refusal(code, content_type=PLAINTEXT)

    def _recontact_members(self, panel: PanelState, call: Call) -> Answer:
        quota = self._inventory.get(call.quota_ids[0]) if call.quota_ids else None
        if quota is None:
            return refusal(ResultCode.NO_QUOTA_ID)
        codes = panel.recontact_codes(quota.quota.quota_id)
        if codes is None:
            return refusal(ResultCode.SURVEY_NOT_FOR_RECONTACT)
        # At most nine digits and not 0: such a number fits 32 bits.
        asked = call.query.get("maxResults", str(self._recontact_page_size))
        if not (asked.isascii() and asked.isdecimal() and len(asked) < 10 and int(asked)):  # noqa: PLR2004  32 bits
            return refusal(ResultCode.PANEL_INVALID_ES_REQUEST)
        last = call.query.get("lastMemberCodeReceived")
        # The page begins after the last code received, even if that code is no longer on the list.
        start = bisect_right(codes, last) if last is not None else 0
        page = codes[start : start + int(asked)]
        return Answer(RecontactMembers(len(page), start + len(page) < len(codes), page))

    def code(self, panel: PanelState, member_code: str, quota_id: int) -> int:
        """Return the result code that a request would get now, without making an invite."""
        with self.lock:
            state = panel.state(member_code)
            quota = self._inventory.get(quota_id)
            if state is None:
                return ResultCode.NO_MEMBER_FOUND
            return ResultCode.NO_QUOTA_ID if quota is None else self._code(panel, state, quota)

    def _code(self, panel: PanelState, state: MemberState, quota: LiveQuota) -> int:
        if not quota.is_live:
            return ResultCode.QUOTA_NOT_LIVE
        if quota.is_full:
            return ResultCode.QUOTA_FULL
        if quota.survey.position in state.taken:
            return ResultCode.SURVEY_TAKEN
        # 0 means that the code has not been computed yet.
        code = state.settled[quota.position] or _settle(panel, state, quota)
        if code == ResultCode.SUCCESS and quota.places(state.fits[quota.position]) is None:
            return ResultCode.SUB_QUOTA_FULL
        return code

    def _invite(self, panel: PanelState, state: MemberState, quota_id: int, call: Call) -> BulkItem:
        """Invite a member to a quota if the result code is ResultCode.SUCCESS, and return the item."""
        refused = call.refusal(quota_id) if call.refused else None
        if refused is not None:
            return BulkItem(quota_id, refused)
        quota = self._inventory.get(quota_id)
        if quota is None:
            return BulkItem(quota_id, ResultCode.NO_QUOTA_ID)
        code = self._code(panel, state, quota)
        if code != ResultCode.SUCCESS:
            return BulkItem(quota_id, code)
        # `places` is not None here: `_code` has just returned SUCCESS, and the lock is still held.
        quota.take(quota.places(state.fits[quota.position]) or ())
        self._inventory.moved(quota)
        state.taken.add(quota.survey.position)
        url = self._ledger.record_invite(
            quota,
            panel_guid=panel.panel.panel_guid,
            member_code=state.member.member_code,
            endpoint=call.endpoint,
            request_number=call.request_number,
        )
        self._outbox.invited(quota, state.member.member_code, url)
        self._outbox.moved(quota.survey)
        return BulkItem(quota_id, ResultCode.SUCCESS, _invite_to(quota.survey.survey, quota_id, url))


def _settle(panel: PanelState, state: MemberState, quota: LiveQuota) -> int:
    """Compute the result code that does not depend on the counts, and remember it."""
    member, survey = state.member, quota.survey.survey
    fits = quota.targets.fit(member.profile)
    if member.device_type_id not in survey.device_type_ids:
        code = ResultCode.DEVICETYPE_NOT_SUPPORTED_FOR_SURVEY
    elif survey.is_survey_recontact and not panel.is_wanted(quota.quota.quota_id, member.member_code):
        code = ResultCode.NO_RECONTACT_GID
    elif _is_excluded(member, survey):
        code = ResultCode.EXCLUDED_SURVEY_TAKEN
    elif fits is None:
        code = ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA
    else:
        code = ResultCode.SUCCESS
        state.fits[quota.position] = fits
    state.settled[quota.position] = code
    return code


def _is_excluded(member: SimulatedMember, survey: Survey) -> bool:
    return any(
        past.survey_id == exclusion.survey_id
        and exclusion.wave_id in {0, past.wave_id}
        and past.status_id in exclusion.participation_status_ids
        for exclusion in survey.survey_wave_exclusions
        for past in member.participations
    )


def _invite_to(survey: Survey, quota_id: int, url: str) -> Invite:
    return Invite(
        survey_id=survey.survey_id,
        wave_id=survey.wave_id,
        quota_id=quota_id,
        partner_amount=survey.price.amount,
        url=url,
        loi=survey.loi,
        ir=survey.ir,
        member_amount=0.0,
    )


def recontact_quota_ids(inventory: Iterable[LiveQuota]) -> tuple[int, ...]:
    """Return the IDs of the quotas of recontact surveys."""
    return tuple(quota.quota.quota_id for quota in inventory if quota.survey.survey.is_survey_recontact)
