"""The randomness of training: a seed is a function of (run, purpose, round, client) (specification 3.5).

That of partitions and schedules is in sample.py. Nothing draws from a global generator, so the order of
execution, the number of workers and an extra evaluation change no number, and equalities such as "FedProx
with mu = 0 is FedAvg" hold bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


def seed(run: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed, independent between any two different argument lists."""
    digest = hashlib.blake2b(f"{run}/{purpose}/{round}/{client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def drawing(value: int) -> Iterator[None]:
    """For code that only knows the global generator (initialisation, dropout): seeded, then put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(value)
        yield


class Stream(NamedTuple):
    """The randomness of one client in one round, a separate sequence for each purpose."""

    run: int
    round: int
    client: int

    def seed(self, purpose: str) -> int:
        return seed(self.run, purpose, self.round, self.client)

    def orders(self, purpose: str, n: int, epochs: int) -> list[Tensor]:
        """The order of n samples in each epoch, drawn on the CPU on every device."""
        generator = torch.Generator().manual_seed(self.seed(purpose))
        return [torch.randperm(n, generator=generator) for _ in range(epochs)]
