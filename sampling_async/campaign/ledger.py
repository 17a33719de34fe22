"""The ledger of a campaign and the files of its folder, for what the command line does beside `Campaign`."""

from sampling_async.campaign._files import check_partitions, require_own_folder, write_files
from sampling_async.campaign._ledger import CampaignLedger, with_ledger
from sampling_async.campaign._planning import plan_of
from sampling_async.campaign._summing import summary_of

__all__ = [
    "CampaignLedger",
    "check_partitions",
    "plan_of",
    "require_own_folder",
    "summary_of",
    "with_ledger",
    "write_files",
]
