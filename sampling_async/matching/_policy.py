"""What is not settled by the contract, or by what is known of a member, and how it is to be taken."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from attrs import field, frozen

from sampling_async._errors import InvalidRequestError

if TYPE_CHECKING:
    from attrs import Attribute


class Truth(IntEnum):
    """Whether a member matches; `POSSIBLE` where it cannot be known. Ordered, so that `min` is "and"."""

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
                f"{attribute.name} is one of {', '.join(map(repr, allowed))}, not {value!r}"
            )

    return check


@frozen(kw_only=True)
class MatchPolicy:
    """How to take what the contract leaves open.

    Attributes:
        subquota_rule: How many sub-quotas of a layer a member must fit: `exactly_one`, the contract; or
            `at_least_one`, as partners are told in practice. Where sub-quotas do not overlap it is the same.
        missing: What a question without an answer means: possible where the service asks it ("routable"),
            possible always ("possible", for estimates), or no ("no", for who invites only on what is known).
        truncated_postal: What a miss means in a postal list of 1000 entries or more, of which the service shows
            the first 1000 only.
        full: Whether a sub-quota that has its completes keeps its members out ("blocks"), or counts as open
            ("ignored", for estimates of what there was).
    """

    subquota_rule: SubQuotaRule = field(default="exactly_one", validator=_one_of(SubQuotaRule))
    missing: Missing = field(default="routable", validator=_one_of(Missing))
    truncated_postal: TruncatedPostal = field(default="possible", validator=_one_of(TruncatedPostal))
    full: Full = field(default="blocks", validator=_one_of(Full))
