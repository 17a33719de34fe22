"""The truth values of matching, and the policy for questions that the contract leaves open."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from attrs import field, frozen

from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from attrs import Attribute


class Truth(IntEnum):
    """Whether a member matches; `POSSIBLE` if that is not known.

    The values are ordered: `min` is "and", `max` is "or".
    """

    NO = 0
    POSSIBLE = 1
    CERTAIN = 2


SubQuotaRule: TypeAlias = Literal["exactly_one", "at_least_one"]
Missing: TypeAlias = Literal["routable", "possible", "no"]
TruncatedPostal: TypeAlias = Literal["possible", "no"]
Full: TypeAlias = Literal["blocks", "ignored"]


def _one_of(choices: Any) -> Any:
    allowed: Final = get_args(choices)

    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if value not in allowed:
            raise InvalidRequestError(
                f"{attribute.name} must be one of {', '.join(map(repr, allowed))}, not {value!r}"
            )

    return check


@frozen(kw_only=True)
class MatchPolicy:
    """Rules for the cases that the contract leaves open.

    Attributes:
        subquota_rule: How many sub-quotas of a layer a member must fit. `exactly_one` is the contract;
            `at_least_one` is what partners are told in practice. Both give the same result if the sub-quotas do
            not overlap.
        missing: What a question without an answer means. "routable": possible if the service asks the question,
            else no. "possible": always possible, for estimates. "no": always no, to invite only members whose
            answers are known.
        truncated_postal: What a miss means in a postal list of 1000 entries or more: "possible" or "no". The
            service shows only the first 1000 entries of a list.
        full: What a sub-quota that has all its completes does. "blocks": a member who fits it does not match.
            "ignored": it counts as open, for estimates of the inventory before it filled up.
    """

    subquota_rule: SubQuotaRule = field(default="exactly_one", validator=_one_of(SubQuotaRule))
    missing: Missing = field(default="routable", validator=_one_of(Missing))
    truncated_postal: TruncatedPostal = field(default="possible", validator=_one_of(TruncatedPostal))
    full: Full = field(default="blocks", validator=_one_of(Full))
