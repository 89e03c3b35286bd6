"""Who takes part in a round, and the private random streams of the federation.

Nothing here reads or moves numpy's global generator: a split, a schedule or a shuffled batch depends on its
own key only, whatever else draws numbers (specification 3.5). The legacy `RandomState` is used on purpose:
numpy promises that its numbers never change, which it does not promise for `default_rng`.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from fedkper.errors import InputError

RULES = ("official", "seeded")
MAX_SEED = 2**32 - 1


def stream(purpose: str, *numbers: int) -> np.random.RandomState:
    """An independent random stream for (purpose, numbers), for example ("local split", seed, client).

    Two different keys give unrelated streams; the same key gives the same
    stream.
    """
    digest = hashlib.sha256("/".join(map(str, (purpose, *numbers))).encode()).digest()
    return np.random.RandomState(np.random.MT19937(int.from_bytes(digest, "big")))


def clients_per_round(clients: int, fraction: float) -> int:
    """How many of `clients` take part in a round: max(1, floor(fraction * clients + 1e-9)).

    The 1e-9 undoes binary rounding: 0.29 * 100 is 28.999... in floating point and means 29.
    0.1 of 20, 30 and 50 clients gives 2, 3 and 5; 0.1 of 5 gives 1.
    Raises InputError unless clients >= 1 and 0 < fraction <= 1.
    """
    if clients < 1:
        raise InputError(f"--clients {clients}: a federation needs at least 1 client")
    if not 0 < fraction <= 1:
        raise InputError(
            f"--fraction {fraction}: the share of clients per round must be greater than 0 and at most 1"
        )
    return max(1, math.floor(fraction * clients + 1e-9))


def sampled_clients(
    round: int, clients: int, fraction: float, rule: str = "official", seed: int = 1
) -> list[int]:
    """The clients of one round in the order drawn, without repeats.

    `round` counts from 0. Rule "official": the schedule of the official code, which seeds with the round
    number, so it is the same for every seed and method and explains the small deviations over seeds in the
    paper's Table 1 (specification 1.5). Rule "seeded": a schedule of its own for every `seed`, for honest
    variance.
    Raises InputError for values out of range (see `clients_per_round`).
    """
    count = clients_per_round(clients, fraction)
    if not 0 <= round <= MAX_SEED:
        raise InputError(f"round {round}: rounds count from 0 to {MAX_SEED}")
    if rule == "official":
        rng = np.random.RandomState(round)
    elif rule == "seeded":
        if not 0 <= seed <= MAX_SEED:
            raise InputError(f"--seed {seed}: must be between 0 and {MAX_SEED}")
        rng = stream("client sampling", seed, round)
    else:
        raise InputError(f"--sampling {rule!r} is not known: use one of {', '.join(RULES)}")
    return [int(k) for k in rng.choice(clients, count, replace=False)]
