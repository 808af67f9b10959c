"""Checks of arguments of public calls: a wrong value is an error that names the argument. Imports nothing heavy."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

from gdscache.errors import InvalidValueError, TokensError
from gdscache.limits import MAX_SECONDS


def seconds(value: Any, name: str = "seconds") -> float | None:
    """How long a call may wait; None: without limit. A negative number counts as 0: a remainder may have run out.

    Raises `InvalidValueError` for anything but a number that a wait can take: NaN, infinity and too large ones are
    refused.
    """
    if value is None:
        return None
    number = _number(value)
    if number is None or not number <= MAX_SECONDS:
        raise InvalidValueError(
            f"{name} is {shown(value)}", f"pass a number of seconds, at most {MAX_SECONDS:,}, or None: no limit"
        )
    return max(0.0, number)


def remaining(value: Any) -> Callable[[], float | None]:
    """The seconds that are left at each call, of as many from now on; None: without limit. Raises as `seconds`."""
    limit = seconds(value)
    end = None if limit is None else time.monotonic() + limit
    return lambda: None if end is None else max(0.0, end - time.monotonic())


def span(value: Any, name: str, most: int, least: float = 0.0, *, zero: bool = False) -> float:
    """A duration: more than `least` seconds, and at most `most`; with `zero`, or 0. Raises `InvalidValueError`."""
    number = _number(value)
    if number is None or not (least < number <= most or (zero and number == 0)):
        hint = f"pass a number of seconds, {'0, or ' if zero else ''}more than {least:g}, at most {most:,}"
        raise InvalidValueError(f"{name} is {shown(value)}", hint)
    return number


def whole(value: Any, name: str, least: int, most: int) -> int:
    """An integer (numpy's too, no boolean) from `least` to `most`. Raises `InvalidValueError`."""
    number = _integer(value)
    if number is None or not least <= number <= most:
        raise InvalidValueError(f"{name} is {shown(value)}", f"pass an integer from {least:,} to {most:,}")
    return number


def start_page(start: Any, page_tokens: int) -> int:
    """The page that begins with token `start`. Raises `TokensError` if none does."""
    number = _integer(start)
    if number is None or not 0 <= number < 1 << 63 or number % page_tokens:
        raise TokensError(
            f"start is {shown(start)}, a page has {page_tokens} tokens",
            f"pass an integer: 0 or a multiple of {page_tokens}",
        )
    return number // page_tokens


def hit_alone(start: Any, salt: Any) -> None:
    """Raises `InvalidValueError` if a start or a salt is given beside a hit."""
    if start or salt:
        message = f"a hit is given with start {shown(start)} and salt {shown(salt)}"
        raise InvalidValueError(message, "leave both out: a hit has its own")


def text(value: Any, name: str) -> str:
    """A text. Raises `InvalidValueError`: 1, True and 1.0 would be one key in a table, and three names on the SSD."""
    if not isinstance(value, str):
        raise InvalidValueError(f"{name} is {shown(value)}, which is not text", f"pass str({name}) if that is meant")
    return value


def shown(value: object) -> str:
    """A value for a message; of a large one its kind."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, (int, float, str, bytes, bool, type(None))):
        written = repr(value)
        return written if len(written) <= 60 else f"{written[:57]}..."
    return f"of type {type(value).__name__}"


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # RuntimeError: a tensor without data
        return None


def _number(value: Any) -> float | None:
    """A real number of Python or numpy as float; None for anything else, NaN and booleans included."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return None if number != number else number
