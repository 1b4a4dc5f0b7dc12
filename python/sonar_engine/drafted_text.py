"""Which characters of a sequence's text came from accepted drafts."""

from __future__ import annotations

from collections import deque

Ranges = list[tuple[int, int]]  # half-open, in Unicode code points, ascending, never touching


def append_range(ranges: Ranges, start: int, end: int) -> None:
    """Adds `[start, end)` behind the others; it joins the last one where they touch."""
    if ranges and ranges[-1][1] == start:
        start = ranges.pop()[0]
    ranges.append((start, end))


class DraftedText:
    """Follows text from the tokens that spell it to the moment it goes out, which a stop string may delay.

    What several tokens spell together, such as a character of several bytes, is drafted when all of them were.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, bool]] = deque()  # (characters, drafted) that are not out, oldest first
        self._all_drafted = True  # of the tokens in a character that is not finished

    def push(self, num_chars: int, drafted: bool, unfinished: bool) -> None:
        """A token was taken and made `num_chars` characters certain; `unfinished`: it also began one."""
        all_drafted = self._all_drafted and drafted
        if num_chars:
            self._held.append((num_chars, all_drafted))
            all_drafted = drafted
        self._all_drafted = all_drafted or not unfinished

    def flush(self, num_chars: int) -> None:
        """What was left of an unfinished character came out at the end."""
        if num_chars:
            self._held.append((num_chars, self._all_drafted))

    def release(self, num_chars: int) -> Ranges:
        """The next `num_chars` characters go out: their drafted ranges, counted from the first of them."""
        ranges: Ranges = []
        start = 0
        while start < num_chars:
            length, drafted = self._held.popleft()
            end = min(start + length, num_chars)
            if end - start < length:
                self._held.appendleft((start + length - end, drafted))
            if drafted:
                append_range(ranges, start, end)
            start = end
        return ranges
