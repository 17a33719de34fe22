"""The options of `simulate` about notifications: where they are sent, and how badly."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

from attrs import frozen

from sampling_async import InvalidRequestError
from sampling_async._cli._options import option

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_option: Final = partial(option, panel="Notifications of the simulated service")


@frozen(kw_only=True)
class Notify:
    """Where the simulated service sends notifications."""

    notify: Annotated[
        str | None,
        _option(
            "URL|FILE",
            "Send notifications: to the URLs in a file, as `notifications serve` prints them, or to a URL:"
            " {kind} in it is replaced, or the kind is appended.",
        ),
    ] = None
    notify_badly: Annotated[
        bool, _option("", "Send some of them late, twice, forged or in other spellings.", "--notify-badly")
    ] = False
    survey_seconds: Annotated[float, _option("SECONDS", "How long a member's survey takes.", min=0)] = 1.0

    def urls(self) -> dict[str, str] | None:
        """Return the URL of each kind; None if nothing is sent."""
        from sampling_async.notifications import Kind  # noqa: PLC0415  slow to load

        if self.notify is None:
            return None
        kinds = [str(kind) for kind in Kind if kind.setting]
        if _is_web_address(self.notify):
            url = self.notify if "{kind}" in self.notify else f"{self.notify.rstrip('/')}/{{kind}}"
            return {kind: url.replace("{kind}", kind) for kind in kinds}
        try:
            found: Any = json.loads(Path(self.notify).read_bytes())
        except OSError as exc:
            raise InvalidRequestError(
                f"--notify {self.notify}: no http URL, and no file: {exc.strerror}"
            ) from None
        except ValueError:
            found = None
        is_right = isinstance(found, dict) and found.keys() <= set(kinds)
        if not is_right or not all(isinstance(url, str) and _is_web_address(url) for url in found.values()):
            raise InvalidRequestError(
                f"{self.notify}: expected one JSON object of URLs by kind, as `notifications serve` prints it"
            )
        urls: dict[str, str] = found
        return urls

    def notifying(self) -> Any:
        """Return what notifications the simulator sends, and how badly; None if none are sent."""
        from sampling_async.simulator import Notifying  # noqa: PLC0415  an extra, and slow to load

        if self.notify is None:
            return None
        if not self.notify_badly:
            return Notifying(survey_seconds=self.survey_seconds)
        return Notifying(
            survey_seconds=self.survey_seconds,
            late=0.1,
            late_seconds=5.0,
            repeated=0.1,
            forged=0.02,
            drifted=0.2,
            corrected=0.02,
            terminated_late=0.02,
            reconciled=0.02,
        )


def sending(simulator: Any, urls: dict[str, str] | None) -> AbstractContextManager[None]:
    if urls is None:
        return nullcontext()
    simulator.notification_urls = urls
    block: AbstractContextManager[None] = simulator.notifications.sending_to(urls)
    return block


def _is_web_address(text: str) -> bool:
    try:
        return urlsplit(text).scheme in {"http", "https"}
    except ValueError:  # a bracket that is not closed
        return False
