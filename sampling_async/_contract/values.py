"""Values of which each request has several."""

from __future__ import annotations

from typing import TYPE_CHECKING

# attrs' own advice for values that are created often. Type checkers hold them frozen. At run time they are not:
# a frozen instance takes three times as long to create.
if TYPE_CHECKING:
    from attrs import frozen as value
else:
    from attrs import define as value

__all__ = ["value"]
