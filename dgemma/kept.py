"""Things under a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any


class Kept:
    """Things under a budget of bytes; what was used least recently goes first, what is too large does not come in."""

    def __init__(self, budget: int):
        self.budget, self.nbytes = budget, 0
        self._things: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: Any) -> bool:
        return key in self._things

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._things))  # from the least recently used on

    def room(self, nbytes: int) -> bool:
        """Make room for so many bytes; False, and nothing is let go, when they are more than the budget."""
        if nbytes > self.budget:
            return False
        while self.nbytes + nbytes > self.budget:
            self.drop(next(iter(self._things)))
        return True

    def put(self, key: Any, thing: Any, nbytes: int) -> None:
        """Keep a thing, as the one used last."""
        self.drop(key)
        if self.room(nbytes):
            self._things[key], self.nbytes = (thing, nbytes), self.nbytes + nbytes

    def get(self, key: Any) -> Any:
        """The thing of that key, used now; None when it is not kept."""
        if key not in self._things:
            return None
        self._things.move_to_end(key)
        return self._things[key][0]

    def peek(self, key: Any) -> Any:
        """The thing of that key, without using it; KeyError."""
        return self._things[key][0]

    def drop(self, key: Any) -> None:
        """Let go of a thing, if it is there."""
        self.nbytes -= self._things.pop(key, (None, 0))[1]
