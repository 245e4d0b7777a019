"""Parses lists of nonces on the command line, such as "0,1,2", "0-99" or "5,10-19"."""

import re
from collections import Counter

from cli.terminal import UsageError

MAX_NONCE = 2**63 - 1  # protocol.md, section 4
MAX_COUNT = 1_000_000  # more than any job may have; "0-9999999999" is a typing error
ITEM = re.compile(r"(-?[0-9]+)(?:\s*-\s*(-?[0-9]+))?")


class NonceListError(UsageError):
    """A list of nonces is invalid. The text names the invalid item."""


def parse_nonces(text: str, max_count: int = MAX_COUNT) -> list[int]:
    """Returns the nonces that `text` lists, in the same order. A range "a-b" includes a and b.

    Raises NonceListError if an item is neither a whole number nor an ascending range, a nonce is
    outside 0 .. 2**63-1 or repeated, the list is empty, or there are more than `max_count` nonces.
    """
    if not text.strip():
        raise NonceListError("No nonces given; write for example 0,1,2 or 0-99.")
    nonces: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        first, last = parse_item(item)
        if len(nonces) + last - first + 1 > max_count:
            raise NonceListError(f'"{text}" holds more than {max_count:,} nonces; split it up.')
        nonces.extend(range(first, last + 1))
    if len(set(nonces)) < len(nonces):
        repeated = next(nonce for nonce, n in Counter(nonces).items() if n > 1)
        raise NonceListError(f"Nonce {repeated} is given twice; give each nonce once.")
    return nonces


def parse_item(item: str) -> tuple[int, int]:
    """Returns the first and last nonce of an item such as "5" or "10-19"."""
    match = ITEM.fullmatch(item)
    if match is None:
        what = (
            f'"{shortened(item)}" is no nonce'
            if item
            else "There is an empty place between two commas"
        )
        raise NonceListError(f"{what}; write whole numbers and ranges, for example 0,1,2 or 0-99.")
    ends = [part for part in match.groups() if part is not None]
    # Longer than any 63-bit number; int() refuses thousands of digits, zeros too.
    too_long = [part for part in ends if len(part.lstrip("-0")) > 19]
    numbers = [] if too_long else [int(part.lstrip("-0") or "0") for part in ends]
    if too_long or any(number > MAX_NONCE for number in numbers):
        raise NonceListError(f'"{shortened(item)}" is beyond the largest nonce, {MAX_NONCE}.')
    if any(part.startswith("-") for part in ends):
        raise NonceListError(f'"{item}" is negative; nonces begin at 0.')
    first, last = numbers[0], numbers[-1]
    if last < first:
        raise NonceListError(f'The range "{item}" runs backwards; write {last}-{first}.')
    return first, last


def shortened(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
