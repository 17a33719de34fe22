"""The kinds of records, and why there is more than one.

- `attrs.frozen` is the rule: a public record that is kept, compared and shown.
- `FrozenStruct`, a Struct of msgspec that is an attrs class as well, is for public records that come by the
  hundred in one response: `Invite`, `InviteOutcome`, and the parts of an inventory. To create a frozen attrs
  object of eight fields takes a microsecond, ten times as long as a Struct, which msgspec fills from JSON
  directly. With `gc=False`, the garbage collector does not look at it. attrs and cattrs work with it, but type
  checkers do not know that: use `msgspec.structs.replace` in place of `attrs.evolve`.
- `value` is for private ones that are made for each request. They take no change by a type checker's word only,
  and so cost a third of a frozen one.
- `WireStruct` is JSON that is no record: the parts of a request, of a response or of a file around the records.
"""

from __future__ import annotations

from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

import attrs
import msgspec
from msgspec.structs import astuple, replace

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["FrozenStruct", "WireStruct", "astuple", "replace", "seen_by_attrs", "value"]

# attrs' own advice for values that are created often. Type checkers hold them frozen. At run time they are not:
# a frozen instance takes three times as long to create.
if TYPE_CHECKING:
    from attrs import frozen as value
else:
    from attrs import define as value


class _Text(str):
    """A text whose repr has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class FrozenStruct(msgspec.Struct, frozen=True):
    """A frozen Struct with the attributes of an attrs class, and the repr that they ask for."""

    __attrs_attrs__: ClassVar[tuple[Any, ...]]
    __attrs_types_resolved__: ClassVar[type]

    @recursive_repr()
    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__qualname__}({', '.join(shown)})"

    # Every Struct has this method for the library `rich`. That of msgspec hides nothing.
    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown: list[tuple[str, Any]] = []
        for each in self.__attrs_attrs__:
            value = getattr(self, each.name)
            if each.repr is not True:
                value = _Text(each.repr(value) if each.repr else "<hidden>")
            shown.append((each.name, value))
        return shown


class WireStruct(msgspec.Struct, gc=False):
    """JSON that msgspec reads and writes without help: the fields have the names of the wire."""


_Record = TypeVar("_Record", bound=FrozenStruct)


def seen_by_attrs(
    *, hides: str = "", **shown: Callable[[Any], str]
) -> Callable[[type[_Record]], type[_Record]]:
    """Let attrs see a Struct as a class of its own.

    Its repr hides one field, because it is secret, and shows others as the functions of their names say.
    """

    def described(record: type[_Record]) -> type[_Record]:
        types = get_type_hints(record)  # without the bounds that only msgspec understands
        fields = {
            field.name: attrs.field(
                type=types[field.name],
                default=attrs.NOTHING if field.required else field.default,
                repr=field.name != hides and shown.get(field.name, True),
            )
            for field in msgspec.structs.fields(record)
        }
        record.__attrs_attrs__ = attrs.fields(attrs.make_class(record.__name__, fields))
        record.__attrs_types_resolved__ = record  # or `attrs.resolve_types` would put the bounds back
        return record

    return described
