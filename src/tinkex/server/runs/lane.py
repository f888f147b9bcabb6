"""The order of a run's operations, without a clock or threads."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """The operations of one run, released in the order of their numbers.

    Example:
        >>> lane = Lane[str]()
        >>> lane.offer(2, "b"), lane.offer(1, "a")
        ([], ['a', 'b'])
    """

    def __init__(self, first: int = 1) -> None:
        self.next = first
        self._waiting: dict[int, T] = {}
        self._held: dict[int, int] = {}
        self.held_bytes = 0
        """Bytes of the operations that wait for a missing number, or are on their way to do so."""

    def offer(self, number: int, item: T) -> list[T]:
        """Take an operation in; returns those whose turn has come. A number that has passed is
        refused.
        """
        if number < self.next or number in self._waiting:
            raise ValueError(f"request number {number} has been used; the next one is {self.next}")
        self._waiting[number] = item
        return self._release()

    def _release(self) -> list[T]:
        released = []
        while self.next in self._waiting:
            released.append(self._waiting.pop(self.next))
            self.let_go(self.next)
            self.next += 1
        return released

    def hold(self, number: int, size: int) -> None:
        """Count the bytes of an operation that is about to be offered, until its turn has come."""
        self._held[number] = size
        self.held_bytes += size

    def let_go(self, number: int) -> None:
        """Count an operation's bytes no more."""
        self.held_bytes -= self._held.pop(number, 0)

    @property
    def free(self) -> int:
        """The first number that nothing has been offered under."""
        return max(self._waiting, default=self.next - 1) + 1

    @property
    def missing(self) -> int | None:
        """The number that holds others up, if any are held up."""
        return self.next if self._waiting else None

    def give_up(self) -> list[T]:
        """Stop waiting for the missing numbers; returns the operations that waited, which must now
        fail.
        """
        abandoned = [self._waiting[number] for number in sorted(self._waiting)]
        for number in self._waiting:
            self.let_go(number)
        self.next = self.free
        self._waiting.clear()
        return abandoned
