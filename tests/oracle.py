"""Six personalised methods computed a second time, by hand, from the specification alone: numpy, float64.

The model is a linear body and a linear head: f = B x + b, z = H f + h, softmax cross entropy. Batches are
consecutive slices, the last may be short. Nothing of the package is used here.

Every method has `first`, what the server and each client begin with; `visit`, one client's round; `merge`,
the server's next state; and `scored`, the model scored as "global". `taken` counts the branches that ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Params = dict[str, np.ndarray]
Gradient = Callable[[Params, np.ndarray, np.ndarray], Params]

BODY = ("body.weight", "body.bias")
HEAD = ("head.weight", "head.bias")


class Setting(NamedTuple):
    lr: float
    momentum: float
    decay: float
    epochs: int
    batch: int
    round: int
    rounds: int


class Data(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Visit(NamedTuple):
    sent: Params
    weight: float
    own: Params
    local: Params
    untuned: Params | None = None


# --- the model and its optimiser --------------------------------------------------------------------------


def pick(params: Params, names: tuple[str, ...]) -> Params:
    return {k: params[k] for k in names}


def named(prefix: str, params: Params) -> Params:
    return {f"{prefix}/{k}": v for k, v in params.items()}


def inside(prefix: str, params: Params) -> Params:
    return {k.removeprefix(prefix + "/"): v for k, v in params.items() if k.startswith(prefix + "/")}


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return x @ w["body.weight"].T + w["body.bias"]


def logits(w: Params, x: np.ndarray) -> np.ndarray:
    return features(w, x) @ w["head.weight"].T + w["head.bias"]


def log_softmax(z: np.ndarray) -> np.ndarray:
    shifted = z - z.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def cross_entropy(z: np.ndarray, y: np.ndarray) -> float:
    return float(-log_softmax(z)[np.arange(len(y)), y].mean())


def cross_entropy_slope(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """d mean cross entropy / d z."""
    return (np.exp(log_softmax(z)) - np.eye(z.shape[1])[y]) / len(y)


def backward(w: Params, x: np.ndarray, dz: np.ndarray, df: np.ndarray | float = 0.0) -> Params:
    """The gradient of a loss with slope dz at the logits and, besides, df at the features."""
    df = dz @ w["head.weight"] + df
    return {
        "body.weight": df.T @ x,
        "body.bias": df.sum(0),
        "head.weight": dz.T @ features(w, x),
        "head.bias": dz.sum(0),
    }


def plain(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """The gradient of the mean cross entropy."""
    return backward(w, x, cross_entropy_slope(logits(w, x), y))


def batches(data: Data, epochs: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for _ in range(epochs):
        for i in range(0, len(data.y), size):
            yield data.x[i : i + size], data.y[i : i + size]


def descend(
    w: Params,
    gradient: Gradient,
    data: Data,
    epochs: int,
    size: int,
    lr: float,
    momentum: float,
    decay: float,
) -> Params:
    """torch's SGD, its velocity empty at first. A parameter without a gradient stays as it is."""
    w, velocity = dict(w), {}
    for x, y in batches(data, epochs, size):
        for k, slope in gradient(w, x, y).items():
            velocity[k] = momentum * velocity.get(k, 0.0) + slope + decay * w[k]
            w[k] = w[k] - lr * velocity[k]
    return w


def train(w: Params, gradient: Gradient, data: Data, s: Setting, epochs: int | None = None) -> Params:
    epochs = s.epochs if epochs is None else epochs
    return descend(w, gradient, data, epochs, s.batch, s.lr, s.momentum, s.decay)


def mean(trees: list[Params], weights: list[float]) -> Params:
    share = np.asarray(weights, np.float64) / np.sum(weights)
    return {k: sum(a * t[k] for a, t in zip(share, trees, strict=True)) for k in trees[0]}


# --- the methods --------------------------------------------------------------------------------------------


class Oracle:
    def __init__(self, initial: Params) -> None:
        self.initial = initial
        self.taken: Counter[str] = Counter()

    def merge(self, shared: Params, visits: list[Visit], s: Setting) -> Params:
        return mean([v.sent for v in visits], [v.weight for v in visits])

    def scored(self, shared: Params, visits: list[Visit]) -> Params:
        return shared


@dataclass
class FedPer(Oracle):
    """4.9: body shared and averaged by n_k, head private, trained together."""

    initial: Params
    probe: str = "mean"

    def __post_init__(self) -> None:
        super().__init__(self.initial)

    def first(self) -> tuple[Params, Params]:
        return pick(self.initial, BODY), pick(self.initial, HEAD)

    def visit(self, shared: Params, own: Params, data: Data, s: Setting) -> Visit:
        w = train(shared | own, plain, data, s)
        return Visit(pick(w, BODY), len(data.y), pick(w, HEAD), w)

    def scored(self, shared: Params, visits: list[Visit]) -> Params:
        if self.probe == "initial":
            return shared | pick(self.initial, HEAD)
        return shared | mean([pick(v.own, HEAD) for v in visits], [v.weight for v in visits])


@dataclass
class FedAS(FedPer):
    """4.6: the received body is aligned to the prototypes of the client's previous one; Fisher weights."""

    align_epochs: int = 1
    align_lr: float = 0.01

    def first(self) -> tuple[Params, Params]:
        body = pick(self.initial, BODY)
        return body, pick(self.initial, HEAD) | named("previous", body) | {"seen/visits": np.array(0)}

    def visit(self, shared: Params, own: Params, data: Data, s: Setting) -> Visit:
        body = shared
        if own["seen/visits"] > 0:
            body = self.aligned(shared, inside("previous", own), data, s)
            self.taken["aligned"] += 1
        w = train(body | pick(own, HEAD), plain, data, s)
        trace = 0.0
        for x, y in batches(data, 1, s.batch):
            trace += sum(float((g * g).sum()) for g in plain(w, x, y).values())
        body = pick(w, BODY)
        own = pick(w, HEAD) | named("previous", body) | {"seen/visits": own["seen/visits"] + 1}
        return Visit(body, trace, own, w)

    def aligned(self, received: Params, previous: Params, data: Data, s: Setting) -> Params:
        old = features(previous, data.x)
        prototypes = {c: old[data.y == c].mean(0) for c in set(data.y.tolist())}
        self.taken[f"{len(prototypes)} prototypes"] += 1

        def gradient(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
            f = features(w, x)
            df = np.zeros_like(f)
            for c in set(y.tolist()):
                # d mean((f_c - p_c)^2) over the class's samples in the batch and over the features
                df[y == c] = 2 * (f[y == c] - prototypes[c]) / f[y == c].size
            return {"body.weight": df.T @ x, "body.bias": df.sum(0)}

        return descend(received, gradient, data, self.align_epochs, s.batch, self.align_lr, 0.0, 0.0)

    def merge(self, shared: Params, visits: list[Visit], s: Setting) -> Params:
        traces = [v.weight for v in visits]
        return mean([v.sent for v in visits], traces if sum(traces) > 0 else [1.0] * len(traces))


@dataclass
class FedALA(Oracle):
    """4.7: from its second visit on, a client starts from a learned mix of its own and the global head."""

    initial: Params
    share: float = 0.8
    eta: float = 1.0
    threshold: float = 0.1
    most: int = 50

    def __post_init__(self) -> None:
        super().__init__(self.initial)

    def first(self) -> tuple[Params, Params]:
        ones = {k: np.ones_like(v) for k, v in pick(self.initial, HEAD).items()}
        return self.initial, named("local", self.initial) | named("mix", ones) | {"seen/visits": np.array(0)}

    def visit(self, shared: Params, own: Params, data: Data, s: Setting) -> Visit:
        start, mix, visits = shared, inside("mix", own), int(own["seen/visits"])
        if visits > 0:
            old = inside("local", own)
            mix = self.mixed(shared, old, mix, data, s, first=visits == 1)
            start = self.start(shared, old, mix)
        w = train(start, plain, data, s)
        own = named("local", w) | named("mix", mix) | {"seen/visits": np.array(visits + 1)}
        return Visit(w, len(data.y), own, w)

    def start(self, shared: Params, old: Params, mix: Params) -> Params:
        return shared | {k: old[k] + (shared[k] - old[k]) * mix[k] for k in HEAD}

    def mixed(self, shared: Params, old: Params, mix: Params, data: Data, s: Setting, first: bool) -> Params:
        used = min(len(data.y), max(s.batch, int(self.share * len(data.y))))
        subset = Data(data.x[:used], data.y[:used])
        losses: list[float] = []
        while True:
            for x, y in batches(subset, 1, s.batch):
                w = self.start(shared, old, mix)
                loss, g = cross_entropy(logits(w, x), y), plain(w, x, y)
                raw = {k: mix[k] - self.eta * g[k] * (shared[k] - old[k]) for k in HEAD}
                self.taken["cut at 0"] += any((v < 0).any() for v in raw.values())
                self.taken["cut at 1"] += any((v > 1).any() for v in raw.values())
                mix = {k: np.clip(v, 0, 1) for k, v in raw.items()}
            losses.append(loss)
            if not first:
                self.taken["one epoch"] += 1
                return mix
            if len(losses) > 10 and np.std(losses[-10:]) < self.threshold:
                self.taken["settled"] += 1
                self.taken["settled late"] += len(losses) > 11
                return mix
            if len(losses) == self.most:
                self.taken["gave up"] += 1
                return mix


@dataclass
class Ditto(Oracle):
    """4.8: FedAvg, and beside it a personal model that is pulled towards the received one."""

    initial: Params
    lam: float = 1.0
    personal_epochs: int = 5

    def __post_init__(self) -> None:
        super().__init__(self.initial)

    def first(self) -> tuple[Params, Params]:
        return self.initial, named("personal", self.initial)

    def visit(self, shared: Params, own: Params, data: Data, s: Setting) -> Visit:
        def pulled(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
            return {k: g + self.lam * (v[k] - shared[k]) for k, g in plain(v, x, y).items()}

        w = train(shared, plain, data, s)
        v = train(inside("personal", own), pulled, data, s, self.personal_epochs)
        return Visit(w, len(data.y), named("personal", v), v)


@dataclass
class FedKD(Oracle):
    """4.10: a private teacher and a shared student learn from each other; updates are compressed."""

    initial: Params
    energy_start: float = 0.95
    energy_end: float = 0.98
    clip: float = 10.0

    def __post_init__(self) -> None:
        super().__init__(self.initial)

    def first(self) -> tuple[Params, Params]:
        width = len(self.initial["body.bias"])
        return self.initial, named("teacher", self.initial) | {"projection/weight": np.eye(width)}

    def visit(self, shared: Params, own: Params, data: Data, s: Setting) -> Visit:
        w = train(named("student", shared) | own, self.clipped, data, s)
        update = {k: v - shared[k] for k, v in inside("student", w).items()}
        own = {k: v for k, v in w.items() if not k.startswith("student/")}
        return Visit(self.compressed(update, s, "sent"), 1.0, own, inside("teacher", own))

    def merge(self, shared: Params, visits: list[Visit], s: Setting) -> Params:
        update = self.compressed(mean([v.sent for v in visits], [1.0] * len(visits)), s, "merged")
        return {k: v + update[k] for k, v in shared.items()}

    def clipped(self, w: Params, x: np.ndarray, y: np.ndarray) -> Params:
        gradient = both_gradients(w, x, y)
        for part in ("student", "teacher", "projection"):
            mine = [k for k in gradient if k.startswith(part + "/")]
            norm = float(np.sqrt(sum((gradient[k] ** 2).sum() for k in mine)))
            if norm > self.clip:
                self.taken[f"{part} clipped"] += 1
                gradient |= {k: gradient[k] * self.clip / norm for k in mine}
            else:
                self.taken[f"{part} not clipped"] += 1
        return gradient

    def compressed(self, update: Params, s: Setting, what: str) -> Params:
        energy = self.energy_start + s.round / s.rounds * (self.energy_end - self.energy_start)
        out = {}
        for k, m in update.items():
            rank = smallest_rank(m, energy) if m.ndim == 2 else None
            if rank is None or rank * sum(m.shape) >= m.size:
                out[k] = m
                self.taken[f"{what} {k} dense"] += 1
            else:
                u, sigma, v = np.linalg.svd(m, full_matrices=False)
                out[k] = u[:, :rank] @ np.diag(sigma[:rank]) @ v[:rank]
                self.taken[f"{what} {k} cut"] += 1
        return out


def smallest_rank(m: np.ndarray, energy: float) -> int:
    """The smallest rank whose leading squared singular values hold `energy` of their sum."""
    squares = np.linalg.svd(m, compute_uv=False) ** 2
    total, rank = squares.sum(), 0
    while rank < len(squares) and squares[:rank].sum() < energy * total - 1e-12 * total:
        rank += 1
    return rank


def both_losses(w: Params, x: np.ndarray, y: np.ndarray) -> float:
    """L_s + L_t of a student, a teacher and a projection."""
    student, teacher = inside("student", w), inside("teacher", w)
    ls, lt = log_softmax(logits(student, x)), log_softmax(logits(teacher, x))
    ces, cet = cross_entropy(ls, y), cross_entropy(lt, y)
    hidden = ((features(teacher, x) - features(student, x) @ w["projection/weight"].T) ** 2).mean()
    into_student = (np.exp(lt) * (lt - ls)).sum(1).mean()
    into_teacher = (np.exp(ls) * (ls - lt)).sum(1).mean()
    loss_student = ces + (into_student + hidden) / (ces + cet)
    loss_teacher = cet + (into_teacher + hidden) / (ces + cet)
    return float(loss_student + loss_teacher)


def both_gradients(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """The gradient of `both_losses`, which is D + N / D with D both cross entropies and N the other terms."""
    student, teacher, projection = inside("student", w), inside("teacher", w), w["projection/weight"]
    fs, ft = features(student, x), features(teacher, x)
    zs, zt = logits(student, x), logits(teacher, x)
    ls, lt = log_softmax(zs), log_softmax(zt)
    s, t = np.exp(ls), np.exp(lt)
    gap = lt - ls
    off = fs @ projection.T - ft
    into_student, into_teacher = (t * gap).sum(1, keepdims=True), (-s * gap).sum(1, keepdims=True)
    d = cross_entropy(zs, y) + cross_entropy(zt, y)
    n = into_student.mean() + into_teacher.mean() + 2 * (off**2).mean()

    # Each KL: its second distribution feels the difference, its first the log ratio around its mean.
    dn_zs = ((s - t) + s * (-gap - into_teacher)) / len(y)
    dn_zt = ((t - s) + t * (gap - into_student)) / len(y)
    dn_off = 4 * off / off.size
    direct = 1 - n / d**2
    dzs = cross_entropy_slope(zs, y) * direct + dn_zs / d
    dzt = cross_entropy_slope(zt, y) * direct + dn_zt / d
    return {
        **named("student", backward(student, x, dzs, dn_off @ projection / d)),
        **named("teacher", backward(teacher, x, dzt, -dn_off / d)),
        "projection/weight": dn_off.T @ fs / d,
    }


@dataclass
class FedBABU(Oracle):
    """4.11: one random head for all, never trained with the body; fine-tuning of a copy for scoring only."""

    initial: Params
    tuning_epochs: int = 5

    def __post_init__(self) -> None:
        super().__init__(self.initial)

    def first(self) -> tuple[Params, Params]:
        return pick(self.initial, BODY), {}

    def visit(self, shared: Params, own: Params, data: Data, s: Setting) -> Visit:
        def body_only(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
            return pick(plain(w, x, y), BODY)

        received = shared | pick(self.initial, HEAD)
        w = train(received, body_only, data, s)
        tuned = train(received, plain, data, s, self.tuning_epochs)
        return Visit(pick(w, BODY), len(data.y), {}, tuned, w)

    def scored(self, shared: Params, visits: list[Visit]) -> Params:
        return shared | pick(self.initial, HEAD)
