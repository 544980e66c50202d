"""Sums of several values over threads.

A sum of one value over n threads takes log2(n) rounds of an exchange and an addition, after which
all threads have it. Of many values each sum is wanted once. So in every round a thread sends its
partner half of the values that it has, keeps the other half, and goes on with half as many: 28
exchanges for 32 values over 8 threads, not 96.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Threads between which sums are taken.

    emit: adds a line to the kernel. name: of the tensors that `find_partners` defines. shape: of a
    tensor whose dimension 1 has `count` such threads, each `distance` entries after the one before.
    """

    emit: Callable[[str], None]
    name: str
    shape: str
    count: int
    distance: int

    @property
    def rounds(self) -> int:
        return self.count.bit_length() - 1

    def find_partners(self) -> None:
        """Of each thread and round its partner, and whether it is the upper one of the two."""
        size = self.count * self.distance
        self.emit(f"{self.name}_number = tl.reshape(pair % {size}, {self.shape}).to(tl.int32)")
        for bit in range(self.rounds):
            distance = self.distance << bit
            self.emit(f"{self.name}_upper{bit} = ({self.name}_number & {distance}) != 0")
            self.emit(f"{self.name}_partner{bit} = {self.name}_number ^ {distance}")

    def sums(self, values: Sequence[str], name: str) -> list[str]:
        """The names of the sums that each thread has in the end. Of n values, a power of two,
        thread t has the sums from number t·n / count up to that of the next thread; where n is less
        than count, the sum of number t % n."""
        halvings = min(self.rounds, len(values).bit_length() - 1)
        rest = len(values) >> halvings
        # Round r divides the list in halves by bit r of a thread's number. So the list is in the
        # order of reversed bits, and thread t ends with its own block of `rest` values.
        found = [
            values[reversed_bits(position // rest, halvings) * rest + position % rest]
            for position in range(len(values))
        ]
        for bit in range(self.rounds):
            upper, partner = f"{self.name}_upper{bit}", f"{self.name}_partner{bit}"
            if bit < halvings:
                half = len(found) // 2
                pairs = zip(found[:half], found[half:], strict=True)
                texts = [f"scalar.halved({low}, {high}, {upper}, {partner})" for low, high in pairs]
            else:
                texts = [f"{value} + tl.gather({value}, {partner}, 1)" for value in found]
            found = [f"{name}_{bit}_{i}" for i in range(len(texts))]
            for target, text in zip(found, texts, strict=True):
                self.emit(f"{target} = {text}")
        return found


def reversed_bits(number: int, count: int) -> int:
    return sum((number >> bit & 1) << (count - 1 - bit) for bit in range(count))
