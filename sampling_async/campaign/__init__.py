"""Campaigns: invites for a whole panel are requested, and every pair is accounted for. See `Campaign`.

It needs the extra `panel`: `pip install 'sampling-async[panel]'`.
"""

from sampling_async._contract import panel_extra as _panel_extra  # noqa: F401  first  # pyright: ignore[reportUnusedImport]
from sampling_async._protocol.lessons import LESSONS, Lesson, Rule
from sampling_async.campaign._campaign import Campaign
from sampling_async.campaign._comparison import CampaignComparison, ComparedNight, compare
from sampling_async.campaign._files import InviteFormat
from sampling_async.campaign._ledger import erase_from_ledger
from sampling_async.campaign._ledger_file import LedgerError
from sampling_async.campaign._limits import Limits
from sampling_async.campaign._planning import Cost, Plan
from sampling_async.campaign._run import CampaignRun
from sampling_async.campaign._summary import (
    CampaignState,
    CodeCount,
    Conversion,
    CurrencySums,
    Ends,
    Labels,
    MemberGroup,
    Moment,
    Pairs,
    QuotaFill,
    Summary,
    Wait,
    WaitKind,
)

__all__ = [
    "LESSONS",
    "Campaign",
    "CampaignComparison",
    "CampaignRun",
    "CampaignState",
    "CodeCount",
    "ComparedNight",
    "Conversion",
    "Cost",
    "CurrencySums",
    "Ends",
    "InviteFormat",
    "Labels",
    "LedgerError",
    "Lesson",
    "Limits",
    "MemberGroup",
    "Moment",
    "Pairs",
    "Plan",
    "QuotaFill",
    "Rule",
    "Summary",
    "Wait",
    "WaitKind",
    "compare",
    "erase_from_ledger",
]
