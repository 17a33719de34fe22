"""The records of the contract, as frozen values.

Field names are the contract's names in snake_case, and lists are tuples. `_json` reads and writes them.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

from attrs import field, frozen, validators
from msgspec import Meta

from sampling_async._contract.checks import count_of, is_id
from sampling_async._contract.errors import DecodeError  # noqa: TC001  resolved by `attrs.resolve_types`
from sampling_async._contract.frames import ROWS, arrow, batch_of, html_table, stream_of, table_of
from sampling_async._contract.structs import FrozenStruct, astuple, seen_by_attrs
from sampling_async._contract.timing import CallResult, CallResultInSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

INT64_MAX: Final = 2**63 - 1

# msgspec takes the wire's names and the bounds of numbers from the class that it fills.
Int64: TypeAlias = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""A whole number. Whoever creates a record may give any int: only msgspec heeds the bounds, when it reads."""

Double: TypeAlias = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
"""A number with or without a fraction, likewise."""

Link: TypeAlias = Annotated[str, Meta(min_length=1)]
"""A text that is not empty, likewise."""

_ACRONYMS: Final = {"id": "ID", "ids": "IDs", "loi": "LOI", "ir": "IR", "guid": "GUID", "url": "URL"}


def wire_name(attribute: str) -> str:
    """Return the contract's name of an attribute: `SubQuotaID` for `sub_quota_id`."""
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in attribute.split("_"))


T = TypeVar("T")


def safe_repr(described: Callable[[T], str]) -> Callable[[T], str]:
    """Decorate a `__repr__` that an object may get before it has all its attributes.

    A report of an error in `__init__` prints the object, and is lost if the repr fails too (Python 3.11).
    """

    @wraps(described)
    def guarded(self: T) -> str:
        try:
            return described(self)
        except AttributeError:
            return f"<{type(self).__name__}: not made>"

    return guarded


def hidden(_value: object) -> str:
    """Return a placeholder for a value that must not be printed: a member code, an invite link, a secret."""
    return "<hidden>"


def counted(what: str) -> Callable[[Collection[object]], str]:
    """Return a repr of a tuple or mapping that says how many values it has."""
    return lambda values: f"<{len(values)} {what}>"


_SHOWN: Final = 5  # of a long list of IDs or texts, a repr shows so many
_IN_NOTEBOOKS: Final = 10  # how many surveys a notebook shows


def first(values: tuple[object, ...]) -> str:
    """Return a repr of a tuple that shows its first five values."""
    if len(values) <= _SHOWN:
        return repr(values)
    return f"({', '.join(f'{value!r:.60}' for value in values[:_SHOWN])}, <{len(values) - _SHOWN} more>)"


def decimal_of(amount: float) -> Decimal:
    """Return an amount as the service wrote it: 0.1 and not 0.1000000000000000055."""
    return Decimal(str(amount))


@seen_by_attrs()
class Price(FrozenStruct, frozen=True, gc=False, rename=wire_name):
    """The price that the operator pays for a complete ("Price object").

    `amount` is in units of a currency. `currency_id` is the ID of that currency in the reference data.
    """

    amount: Double
    currency_id: Int64

    @property
    def amount_decimal(self) -> Decimal:
        """`amount` as a Decimal, with the digits that the service wrote."""
        return decimal_of(self.amount)


@seen_by_attrs(answer_ids=first, answer_values=first)
class QuestionAndAnswers(FrozenStruct, frozen=True, gc=False, rename=wire_name):
    """One condition of a sub-quota ("QuestionAndAnswers object"): at least one answer must match.

    Each item of `answer_values` is one value, even if the wire packed several into one text: an age range
    (`"18-34"`), a DMA or MSA answer ID, a postal code or its beginning. The service exposes only the first 1000
    postal codes, so a member whose code is missing from a list of that length may still match. `is_routable` is
    True if the service asks members who have not answered the question; it is False if the body does not say.
    """

    question_id: Int64
    answer_ids: tuple[Int64, ...] = ()
    answer_values: tuple[str, ...] = ()
    is_routable: bool = False


@seen_by_attrs(questions_and_answers=counted("questions"))
class SubQuota(FrozenStruct, frozen=True, gc=False, rename=wire_name):
    """One target group of a layer ("SubQuota object"). It is open while its completes are below the maximum."""

    sub_quota_id: Int64
    current_completes: Int64
    max_target_completes: Int64
    questions_and_answers: tuple[QuestionAndAnswers, ...]


@seen_by_attrs(sub_quotas=counted("sub-quotas"))
class Layer(FrozenStruct, frozen=True, gc=False, rename=wire_name):
    """A group of sub-quotas ("Layer object"). A member must match exactly one of them."""

    layer_id: Int64
    sub_quotas: tuple[SubQuota, ...]


@seen_by_attrs(layers=counted("layers"))
class Quota(FrozenStruct, frozen=True, gc=False, rename=wire_name):
    """An open quota ("Quota object"). A member must match all its layers. Its counts are completes."""

    quota_id: Int64
    completes_required: Int64
    estimated_completes_remaining: Int64
    layers: tuple[Layer, ...]


@seen_by_attrs(participation_status_ids=first)
class SurveyWaveExclusion(FrozenStruct, frozen=True, gc=False, rename=wire_name):
    """Participations that exclude a member from a survey (item of SurveyWaveExclusions).

    `wave_id` 0 means any wave of the survey. The written contract does not describe this item; its fields are
    those seen in real bodies.
    """

    survey_id: Int64
    wave_id: Int64
    participation_status_ids: tuple[Int64, ...] = ()

    def excludes(self, past: Participation) -> bool:
        """Return whether a member with this participation is excluded."""
        return (
            past.survey_id == self.survey_id
            and self.wave_id in {0, past.wave_id}
            and past.status_id in self.participation_status_ids
        )


@frozen
class Participation:
    """One participation of a member in a survey, to compare with `SurveyWaveExclusion`.

    Partners make these records from their own data; no body contains one. `status_id` is 1 (started), 3
    (terminated), 9 (qualified) or 10 (quota full).
    """

    survey_id: int = field(validator=is_id)
    wave_id: int | None = field(validator=validators.optional(is_id))
    status_id: int = field(default=9, validator=is_id)


@seen_by_attrs(device_type_ids=first, quotas=counted("quotas"), survey_wave_exclusions=counted("exclusions"))
class Survey(FrozenStruct, frozen=True, weakref=True, rename=wire_name):
    """A survey with open quotas ("Survey object"). The pair of `survey_id` and `wave_id` is unique.

    `loi` is in minutes, `ir` in percent. `scheduled_completion_date` has no zone if the wire gave none; for
    many open surveys this date has passed. `survey_name` is None if the body does not give one.
    """

    survey_id: Int64
    wave_id: Int64
    loi: Int64
    ir: Int64
    study_type_id: Int64
    scheduled_completion_date: datetime
    device_type_ids: tuple[Int64, ...]
    is_survey_recontact: bool
    completes_required: Int64
    estimated_completes_remaining: Int64
    price: Price
    quotas: tuple[Quota, ...]
    survey_name: str | None = None
    survey_wave_exclusions: tuple[SurveyWaveExclusion, ...] = ()


PartialKey: TypeAlias = tuple[int | None, int | None]
"""The ID and the wave of a survey that lacks a value; None for what cannot be read."""

_UNREADABLE: Final[PartialKey] = (None, None)


class _Incomplete(CallResultInSlots):
    """An inventory that may lack surveys. What it lacks is no field: not compared, written or pickled."""

    __slots__ = ("_left_out", "_left_out_ids")

    _left_out: tuple[DecodeError, ...]
    _left_out_ids: frozenset[PartialKey]

    @property
    def left_out(self) -> tuple[DecodeError, ...]:
        """Why surveys of the response are not in it, one error for each; its `path` names the place."""
        return getattr(self, "_left_out", ())


def leave_out(
    quotas: Quotas, errors: Iterable[DecodeError], ids: Iterable[PartialKey] = (_UNREADABLE,)
) -> Quotas:
    """Note on a new inventory which surveys it lacks, by their IDs and waves, and return it."""
    errors = tuple(errors)
    object.__setattr__(quotas, "_left_out", errors)  # records are frozen
    object.__setattr__(quotas, "_left_out_ids", frozenset(ids if errors else ()))
    return quotas


def may_list(quotas: Quotas, survey_id: int, wave_id: int) -> bool:
    """Return whether a survey that is not in an inventory may be one that was left out of it."""
    ids: frozenset[PartialKey] = getattr(quotas, "_left_out_ids", frozenset())
    return not ids.isdisjoint(((survey_id, wave_id), (survey_id, None), (None, wave_id), _UNREADABLE))


@frozen
class Quotas(_Incomplete):
    """The open inventory of a panel ("Quotas response").

    Do not depend on `cache_expires`: real services use it for "expires" and also for "last updated". A survey
    that lacks a value is not in `surveys`: `left_out` has a `DecodeError` for each.

    Data frames read it as a table with a row for each quota: `polars.DataFrame(quotas)`,
    `pyarrow.table(quotas)`.
    """

    country_id: int
    cache_expires: datetime
    surveys: tuple[Survey, ...] = field(repr=counted("surveys"))

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with a row for each quota. It needs the extra `panel`.

        The price is in units of the currency, `loi` is in minutes, `ir` in percent. Columns of the survey whose
        names a quota has too begin with `survey_`. `scheduled_completion_date` has no zone: a date with one is
        in UTC, others stand as the service wrote them. `question_ids` are all that its layers ask about.

        Raises:
            ImportError: pyarrow is missing.
        """
        return table_of(_quota_schema(), self._batches())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export `to_arrow` to another library, by the Arrow C stream interface."""
        return stream_of(_quota_schema(), self._batches(), requested_schema)

    def _batches(self) -> Iterator[Any]:
        schema, rows = _quota_schema(), quota_rows(self, self.surveys)
        while some := list(islice(rows, ROWS)):
            yield batch_of(schema, {name: [row[name] for row in some] for name in schema.names})

    def _repr_html_(self) -> str:
        """Return a small table for notebooks: the surveys with the most room."""
        most = sorted(self.surveys, key=lambda each: -each.estimated_completes_remaining)[:_IN_NOTEBOOKS]
        quotas = sum(len(survey.quotas) for survey in self.surveys)
        first = f", the first {len(most)} by room" if len(most) < len(self.surveys) else ""
        return html_table(
            f"{count_of(len(self.surveys), 'survey')} with {count_of(quotas, 'quota')},"
            f" {len(self.left_out):,} left out{first}",
            ("survey", "wave", "name", "LOI", "IR %", "price", "completes remaining", "quotas"),
            (
                (
                    str(survey.survey_id),
                    str(survey.wave_id),
                    survey.survey_name or "",
                    survey.loi,
                    survey.ir,
                    survey.price.amount,
                    survey.estimated_completes_remaining,
                    len(survey.quotas),
                )
                for survey in most
            ),
        )


def quota_rows(quotas: Quotas, surveys: Iterable[Survey]) -> Iterator[dict[str, object]]:
    """Yield the rows of a table of quotas, of some of the surveys of an inventory."""
    for survey in surveys:
        due = survey.scheduled_completion_date
        with suppress(OverflowError):  # services write the first and the last moment that they know of
            due = due if due.utcoffset() is None else due.astimezone(UTC)
        due = due.replace(tzinfo=None)
        for quota in survey.quotas:
            subs = [sub for layer in quota.layers for sub in layer.sub_quotas]
            asked = dict.fromkeys(each.question_id for sub in subs for each in sub.questions_and_answers)
            yield {
                "survey_id": survey.survey_id,
                "wave_id": survey.wave_id,
                "quota_id": quota.quota_id,
                "completes_required": quota.completes_required,
                "estimated_completes_remaining": quota.estimated_completes_remaining,
                "layers": len(quota.layers),
                "sub_quotas": len(subs),
                "question_ids": list(asked),
                "survey_name": survey.survey_name,
                "country_id": quotas.country_id,
                "loi": survey.loi,
                "ir": survey.ir,
                "price": survey.price.amount,
                "currency_id": survey.price.currency_id,
                "study_type_id": survey.study_type_id,
                "device_type_ids": survey.device_type_ids,
                "is_survey_recontact": survey.is_survey_recontact,
                "scheduled_completion_date": due,
                "survey_completes_required": survey.completes_required,
                "survey_estimated_completes_remaining": survey.estimated_completes_remaining,
            }


QUOTA_COLUMNS: Final = (
    "survey_id",
    "wave_id",
    "quota_id",
    "completes_required",
    "estimated_completes_remaining",
    "layers",
    "sub_quotas",
    "question_ids",
    "survey_name",
    "country_id",
    "loi",
    "ir",
    "price",
    "currency_id",
    "study_type_id",
    "device_type_ids",
    "is_survey_recontact",
    "scheduled_completion_date",
    "survey_completes_required",
    "survey_estimated_completes_remaining",
)
"""The columns of `quota_rows`."""


def _quota_schema() -> Any:
    pa = arrow()
    types = {
        **dict.fromkeys(("question_ids", "device_type_ids"), pa.list_(pa.int64())),
        "survey_name": pa.string(),
        "price": pa.float64(),
        "is_survey_recontact": pa.bool_(),
        "scheduled_completion_date": pa.timestamp("us"),
    }
    return pa.schema({name: types.get(name, pa.int64()) for name in QUOTA_COLUMNS})


@seen_by_attrs(hides="url")
class Invite(CallResult, FrozenStruct, frozen=True, gc=False, omit_defaults=True, rename=wire_name):
    """An invite of one member to one quota ("Invite object").

    The price, LOI (minutes) and IR (percent) are those of the moment when the invite was made. They replace the
    ones from Get Quotas. `member_amount` is None if the service leaves it out. If it leaves out one of
    `wave_id`, `partner_amount`, `loi` and `ir`, or gives null, the value is 0, and the link is valid. In a bulk
    the outcome's `anomaly` says so, and `generate_invite` logs a warning. `url` identifies the member, so the
    repr hides it. Only invites of `generate_invite` have a `timing`.
    """

    survey_id: Int64
    wave_id: Int64
    quota_id: Int64
    partner_amount: Double
    url: Link
    loi: Int64
    ir: Int64
    member_amount: Double | None = None

    @property
    def partner_amount_decimal(self) -> Decimal:
        """`partner_amount` as a Decimal, with the digits that the service wrote."""
        return decimal_of(self.partner_amount)

    @property
    def member_amount_decimal(self) -> Decimal | None:
        """`member_amount` as a Decimal, likewise; None if there is none."""
        return None if self.member_amount is None else decimal_of(self.member_amount)


class InviteOfCall(Invite, frozen=True, gc=True, dict=True):
    """The invite of a call of its own, with room for its timing. Else it is equal to any other."""

    def __eq__(self, other: object) -> bool:
        return astuple(self) == astuple(other) if isinstance(other, Invite) else NotImplemented

    # Python derives it from `__eq__`, but a Struct has one of its own, which compares the classes.
    __ne__ = object.__ne__

    def __hash__(self) -> int:
        return hash(Invite(*astuple(self)))

    def __reduce__(self) -> tuple[type[Invite], tuple[Any, ...]]:
        return Invite, astuple(self)


InviteOfCall.__qualname__ = Invite.__qualname__  # in its repr
InviteOfCall.__attrs_types_resolved__ = InviteOfCall  # as for `Invite`, whose attributes it has


@frozen
class RecontactMembers(CallResultInSlots):
    """One page of the members to invite again for a recontact quota ("Recontact members response").

    `max_results` may repeat the requested number, so count `member_codes` instead. The repr hides the codes.
    """

    max_results: int
    has_additional_members: bool
    member_codes: tuple[str, ...] = field(repr=counted("hidden"))


OPEN_AGE: Final = 99  # an age range that ends here or above has no upper limit

AGE_BANDS: Final[Mapping[int, tuple[int, int]]] = {
    2006351: (13, 17),
    2006352: (18, 24),
    2006353: (25, 29),
    2006354: (30, 34),
    2006355: (35, 39),
    2006356: (40, 44),
    2006357: (45, 49),
    2006358: (50, 54),
    2006359: (55, 59),
    2006360: (60, 64),
    2006361: (65, OPEN_AGE),
}
"""The answer IDs of the age question as an operator publishes them: first and last year."""

REFERENCE_DATA_KEY: Final = "Reference Data API Auth Key"


@frozen(repr=False)
class Setting:
    """One partner setting ("Setting object"). `value` is None if it is not set.

    The value of the Reference Data API Auth Key is a secret, so the repr hides it.
    """

    name: str
    description: str = ""
    value: str | None = None

    @property
    def is_secret(self) -> bool:
        """Whether the value is the key of the reference data interface, which must not be shown."""
        return folded(self.name) == folded(REFERENCE_DATA_KEY)

    def __repr__(self) -> str:
        value = "<hidden>" if self.is_secret and self.value else repr(self.value)
        return f"Setting(name={self.name!r}, description={self.description!r}, value={value})"


def folded(name: str) -> str:
    """Return a setting's name in lower case and without blanks; case and blanks vary between services."""
    return "".join(name.split()).casefold()


RECORDS: Final[tuple[type[Any], ...]] = (
    Price,
    QuestionAndAnswers,
    SubQuota,
    Layer,
    Quota,
    SurveyWaveExclusion,
    Survey,
    Quotas,
    Invite,
    RecontactMembers,
    Setting,
)
"""The records that bodies have, inner ones before outer ones."""
