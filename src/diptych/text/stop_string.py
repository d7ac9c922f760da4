"""Finds a stop string in text that comes character by character (Knuth, Morris and Pratt)."""

from __future__ import annotations


class StopString:
    """`num_matched` characters at the end of the text are the start of `text`.

    The work is constant per character on average, however long the stop string is: its table of
    borders grows only as far as it was matched.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0, 0]  # entry k: the longest proper border of text[:k]

    def push(self, char: str) -> bool:
        """Take a character; true if the stop string ends with it."""
        if self.num_matched == len(self.text):  # it ended before this character: go on
            self.num_matched = self._border(self.num_matched)
        self.num_matched = self._extend(self.num_matched, char)
        return self.num_matched == len(self.text)

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._border(matched)
        return matched + 1 if self.text[matched] == char else 0

    def _border(self, length: int) -> int:
        while len(self._borders) <= length:
            known = len(self._borders) - 1
            self._borders.append(self._extend(self._borders[known], self.text[known]))
        return self._borders[length]
