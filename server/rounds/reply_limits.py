"""A bound on what a reply may cost before it has been read: a wrong or hostile one is dropped alone."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

from server.rounds.prepare import Prepared

SLACK_BYTES = 64 * 2**20

_most_bytes = 2**31


def _never() -> float:
    return math.inf


_closes: Callable[[], float] = _never


@contextmanager
def whole_by(closes: Callable[[], float]) -> Iterator[None]:
    """Within this block a reply is given up whose parts are not all here when the clock (`time.monotonic`) says
    `closes()`: an upload that trickles in must not hold up a round."""
    global _closes
    before, _closes = _closes, closes
    try:
        yield
    finally:
        _closes = before


def bound_replies(prepared: Prepared) -> None:
    """Take no more from one client than twice what the experiment's uploads hold, and some slack."""
    global _most_bytes
    model = prepared.model
    vector = model.vector.numel() * model.vector.element_size()
    buffers = sum(value.numel() * value.element_size() for value in model.buffers.values())
    vectors = max(len(prepared.strategy.payload), len(prepared.strategy.expects({})))
    _most_bytes = 2 * (vectors * vector + buffers) + SLACK_BYTES


class _Pulled(dict[str, bytes]):
    """The parts of a message, put together already."""

    whole: InflatableObject | None = None


def pull_within_bounds(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> _Pulled:
    """Flower's `pull_objects`, with three more reasons to give a message up: it is too large, too late, or nonsense.

    Raises ObjectPullError, which Flower's Grid turns into an error reply in place of this one message. Other errors
    would end the run, and replies that arrived with it would be lost.
    """
    taken, closes = 0, _closes

    def pull(object_id: str) -> bytes:
        nonlocal taken
        try:
            content = pull_object_fn(object_id)
        except ObjectUnavailableError:
            if time.monotonic() >= closes():
                raise ObjectPullError(object_id, "the reply was not here whole by the deadline") from None
            raise
        taken += len(content)
        if taken > _most_bytes:
            raise ObjectPullError(object_id, f"the reply holds more than {_most_bytes / 1e6:.0f} MB")
        return content

    root = object_ids[-1]  # Flower lists the parts before the whole.
    pulled = _Pulled(inflatable_utils.pull_objects(list(dict.fromkeys(object_ids)), pull, **options))
    try:
        pulled.whole = inflatable_utils.inflate_object_from_contents(root, pulled)
    except Exception as error:
        raise ObjectPullError(root, f"the reply cannot be put together: {type(error).__name__}: {error}") from None
    if not isinstance(pulled.whole, Message):
        raise ObjectPullError(root, f"the reply is a {type(pulled.whole).__name__}, not a message")
    return pulled


def guard_replies() -> None:
    """Put the bounds between Flower's Grid and the network, in this process."""
    grid: Any = importlib.import_module("flwr.superlink.grid.http_grid")
    grid.pull_objects = pull_within_bounds
    grid.inflate_object_from_contents = lambda object_id, pulled: pulled.whole
