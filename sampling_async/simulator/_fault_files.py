"""Faults as JSON, for a simulator that runs in another process."""

from __future__ import annotations

import inspect
import json
import math
from ast import literal_eval
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sampling_async import DecodeError
from sampling_async._contract.records import wire_name
from sampling_async.simulator._faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KINDS: Final = tuple(sorted(name for name, made in vars(Fault).items() if isinstance(made, classmethod)))
"""The constructors of `Fault`."""

_STATUSES: Final = range(200, 600)


def read_faults(body: bytes | str) -> tuple[Fault, ...]:
    """Read faults from JSON: an array of objects, each a constructor of `Fault` with its arguments.

        [{"Fault": "status", "Status": 503, "RetryAfter": 1, "On": {"Endpoint": "bulk_invite", "Every": 10}},
         {"Fault": "refusal", "ResultCode": 39, "On": {"MemberCode": "m000007"}},
         {"Fault": "cut", "When": "after", "On": {"Probability": 0.01}}]

    "On" has the arguments of `Fault.on`. Keys are spelled in the service's style (`RetryAfter`). Python's
    spelling (`retry_after`) is accepted too.

    Raises:
        DecodeError: The JSON holds something else; `path` names the place, such as `$[0].On.Every`.
    """
    faults: Any = _parsed(body)
    if not isinstance(faults, list):
        raise DecodeError("$", f"expected an array of faults, found {_kind(faults)}")
    return tuple(_fault(each, f"$[{at}]") for at, each in enumerate(faults))


def _parsed(body: bytes | str) -> Any:
    # json.loads calls this for NaN and Infinity, which it accepts although JSON does not have them.
    def refuse(_: str) -> NoReturn:
        raise DecodeError("$", "expected finite numbers")

    try:
        return json.loads(body, parse_constant=refuse)
    except json.JSONDecodeError as exc:
        rule = f"expected JSON, found a syntax error in line {exc.lineno}, column {exc.colno}"
    except UnicodeDecodeError:
        rule = "expected UTF-8, found other bytes"
    except (RecursionError, ValueError):
        rule = "expected JSON, found too many nested levels or a number with too many digits"
    raise DecodeError("$", rule)


def _fault(value: Any, path: str) -> Fault:
    if not isinstance(value, dict):
        raise DecodeError(path, f"expected an object, found {_kind(value)}")
    given = {str(key): each for key, each in value.items()}
    by_name = {_folded(key): key for key in given}
    if "fault" not in by_name:
        raise DecodeError(path, f'expected "Fault", one of {", ".join(_KINDS)}')
    kind_key = by_name["fault"]
    kind, on = given.pop(kind_key), given.pop(by_name["on"]) if "on" in by_name else None
    if kind not in _KINDS:
        raise DecodeError(f"{path}.{kind_key}", f"expected one of {', '.join(_KINDS)}, not {kind!r:.40}")
    make: Callable[..., Fault] = getattr(Fault, kind)
    fault = _called(make, given, path, others=("On",))
    if on is None:
        return fault
    on_path = f"{path}.{by_name['on']}"
    if not isinstance(on, dict):
        raise DecodeError(on_path, f"expected an object, found {_kind(on)}")
    return _called(fault.on, {str(key): each for key, each in on.items()}, on_path)


def _called(
    make: Callable[..., Fault], given: Mapping[str, Any], path: str, *, others: tuple[str, ...] = ()
) -> Fault:
    parameters = inspect.signature(make).parameters
    names = {_folded(name): name for name in parameters}
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(_folded(key))
        if name is None:
            known = ", ".join([*map(wire_name, parameters), *others]) or "nothing"
            raise DecodeError(f"{path}.{key[:40]}", f"this key is not known here; the known keys are {known}")
        arguments[name] = _argument(name, str(parameters[name].annotation), value, f"{path}.{key}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise DecodeError(path, f"expected {wire_name(name)!r}")
    try:
        return make(**arguments)
    except ValueError as exc:
        # Refused below, outside the handler, so that the error does not carry this one as its context.
        rule = str(exc)
    raise DecodeError(path, rule)


def _argument(name: str, annotation: str, value: Any, path: str) -> Any:
    """Check a value against the annotation of its parameter, and return it as an argument.

    Annotations are strings here, because `_faults` postpones their evaluation.
    """
    if annotation.startswith("Literal["):
        choices: list[str] = literal_eval(annotation.removeprefix("Literal"))
        if value not in choices:
            raise DecodeError(path, f"expected one of {', '.join(choices)}, found {_kind(value)}")
        return value
    kinds = annotation.split(" | ")
    if value is None and "None" in kinds:
        return None
    given: Any = value
    # For isinstance() true and false are whole numbers, so they are excluded.
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if "bool" in kinds:
        wanted, fits = "true or false", isinstance(value, bool)
    elif "int" in kinds:
        wanted, fits = "a whole number", is_number and isinstance(value, int)
        if name == "status":
            wanted, fits = "a status from 200 to 599", fits and value in _STATUSES
    elif "float" in kinds:
        wanted = "a number of at least 0" + (", or text" if "str" in kinds else "")
        fits = (is_number and math.isfinite(given) and given >= 0) or (
            "str" in kinds and isinstance(value, str)
        )
    else:
        wanted, fits = "text", isinstance(value, str)
    if not fits:
        raise DecodeError(path, f"expected {wanted}, found {_kind(value)}")
    # JSON has no bytes, so a body is given as text.
    return str(value).encode() if "bytes" in kinds else value


def _folded(key: str) -> str:
    return key.replace("_", "").casefold()


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float() | str():
            return f"{value!r:.40}"
        case list():
            return "an array"
        case _:
            return "an object"
