"""The personalised methods against the oracle: four rounds, every number of every client, to 1e-9."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
from federation import InOrder, lane, repeated
from fedkper.lanes import Lanes
from fedkper.method import Method, Update, client_round, weights
from fedkper.methods import parse
from fedkper.task import SGD, Task
from fedkper.tree import lanes, stack
from oracle import BODY, HEAD, Data, Oracle, Params, Setting, Visit

INPUTS, WIDTH, CLASSES = 10, 12, 3
LABELS = ([0, 1, 2, 0, 1], [2, 1, 0, 0, 2, 1, 1], [0, 2, 2, 0])  # no class 1 at the last client
VISITS = ((0, 1), (1, 2), (0, 2), (1, 2))
EPOCHS, BATCH, MOMENTUM, DECAY = 2, 3, 0.9, 0.01
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def a_model(seed: int = 0) -> Params:
    draw = np.random.default_rng(seed)
    shapes = {
        "body.weight": (WIDTH, INPUTS),
        "body.bias": (WIDTH,),
        "head.weight": (CLASSES, WIDTH),
        "head.bias": (CLASSES,),
    }
    return {k: draw.normal(0, 0.3, shape) for k, shape in shapes.items()}


def some_data(scale: float) -> list[Data]:
    draw = np.random.default_rng(7)
    return [Data(scale * draw.normal(0, 1, (len(y), INPUTS)), np.array(y)) for y in LABELS]


def settings(lr: float) -> list[Setting]:
    rounds = len(VISITS)
    return [Setting(lr * 0.9**t, MOMENTUM, DECAY, EPOCHS, BATCH, t, rounds) for t in range(rounds)]


class Round(NamedTuple):
    visits: dict[int, Visit]
    owns: list[Params]
    shared: Params
    scored: Params


def expected(method: Oracle, data: list[Data], lr: float) -> list[Round]:
    shared, initial = method.first()
    owns, rounds = [initial] * len(data), []
    for s in settings(lr):
        visits = {k: method.visit(shared, owns[k], data[k], s) for k in VISITS[s.round]}
        owns = [visits[k].own if k in visits else own for k, own in enumerate(owns)]
        shared = method.merge(shared, list(visits.values()), s)
        rounds.append(Round(visits, owns, shared, method.scored(shared, list(visits.values()))))
    return rounds


def tree(params: Params) -> dict[str, Tensor]:
    return {k: torch.from_numpy(np.array(v))[None] for k, v in params.items()}


def together(updates: list[Update]) -> Update:
    return Update(
        stack([u.shared for u in updates]),
        torch.cat([u.weight for u in updates]),
        stack([u.own for u in updates]),
        torch.cat([u.samples for u in updates]),
        stack([u.sums for u in updates]),
    )


def task_of(model: Lanes, data: list[Data], s: Setting) -> Task:
    """One task for some clients, padded to the longest with numbers that must not matter."""
    longest = max(len(d.y) for d in data)
    x = torch.full((len(data), longest, INPUTS), 99.0, dtype=torch.float64)
    y = torch.zeros(len(data), longest, dtype=torch.int64)
    for row, d in enumerate(data):
        x[row, : len(d.y)] = torch.from_numpy(d.x)
        y[row, : len(d.y)] = torch.from_numpy(d.y)
    return Task(
        model=model,
        x=x,
        y=y,
        n=torch.tensor([len(d.y) for d in data]),
        classes=CLASSES,
        streams=[InOrder() for _ in data],
        sgd=SGD(s.lr, s.momentum, s.decay),
        epochs=s.epochs,
        batch=s.batch,
        round=s.round,
        rounds=s.rounds,
    )


def computed(
    method: Method, initial: Params, data: list[Data], lr: float, side_by_side: bool
) -> Iterator[dict[str, Any]]:
    """The same from the package, each client alone or all clients of a round side by side."""
    module = TwoLayers()
    module.load_state_dict({k: torch.from_numpy(v) for k, v in initial.items()})
    model = Lanes(module)
    shared, own = method.init(model, model.init())
    owns = [own] * len(data)
    for s in settings(lr):
        sampled = VISITS[s.round]
        updates, local, untuned = {}, {}, {}
        for group in [sampled] if side_by_side else [(k,) for k in sampled]:
            task, received = task_of(model, [data[k] for k in group], s), repeated(shared, len(group))
            update = client_round(method, task, received, stack([owns[k] for k in group]))
            scored, before = method.local_model(task, received, update), method.untuned_model(task, update)
            for row, k in enumerate(group):
                updates[k], local[k] = lane(update, row), lanes(scored, [row])
                untuned[k] = None if before is None else lanes(before, [row])
        owns = [updates[k].own if k in updates else own for k, own in enumerate(owns)]
        every = together(list(updates.values()))
        shared = method.merge(shared, every)
        yield {
            "sent": {k: u.shared for k, u in updates.items()},
            "share": weights(every).numpy(),
            "owns": owns,
            "shared": shared,
            "scored": method.global_model(model, shared, every),
            "local": local,
            "untuned": untuned,
        }


def same(got: dict[str, Tensor], wanted: Params, where: str) -> None:
    assert got.keys() == wanted.keys(), where
    for k, v in wanted.items():
        np.testing.assert_allclose(got[k][0].numpy(), v, **CLOSE, err_msg=f"{where}: {k}")


def without_energy(received: dict[str, Tensor]) -> dict[str, Tensor]:
    """FedKD's server state also carries the energy of the round, which is not part of the model."""
    return {k: v for k, v in received.items() if k != "energy/kept"}


# --- the comparison --------------------------------------------------------------------------------


class Case(NamedTuple):
    text: str
    """The method as the package reads it."""
    name: str
    """The oracle's class, and its fields."""
    fields: dict[str, Any]
    branches: set[str] = set()  # noqa: RUF012
    """What the oracle must have come through, so that the comparison means something."""
    scale: float = 1
    """Of the inputs."""
    lr: float = 0.1


CASES = [
    Case("fedper", "FedPer", {}),
    Case("fedper:head_probe=initial", "FedPer", {"probe": "initial"}),
    Case("fedas", "FedAS", {}, {"aligned", "2 prototypes", "3 prototypes"}),
    Case(
        "fedas:epochs=2,lr=0.3,head_probe=initial",
        "FedAS",
        {"align_epochs": 2, "align_lr": 0.3, "probe": "initial"},
        {"aligned", "2 prototypes", "3 prototypes"},
    ),
    Case("fedala", "FedALA", {}, {"settled", "one epoch", "cut at 1"}),
    Case(
        "fedala:threshold=0.01",
        "FedALA",
        {"threshold": 0.01},
        {"settled late", "one epoch", "cut at 0", "cut at 1"},
    ),
    Case(
        "fedala:share=0.8,eta=3.0,threshold=0.0001,most=50",
        "FedALA",
        {"share": 0.8, "eta": 3.0, "threshold": 1e-4, "most": 50},
        {"settled late", "one epoch", "cut at 0", "cut at 1"},
    ),
    Case(
        "fedala:share=0.2,eta=1.0,threshold=0.000000001,most=13",
        "FedALA",
        {"share": 0.2, "eta": 1.0, "threshold": 1e-9, "most": 13},
        {"gave up", "one epoch"},
    ),
    Case("ditto", "Ditto", {}),
    Case("ditto:lam=0.5,epochs=2", "Ditto", {"lam": 0.5, "personal_epochs": 2}),
    Case("ditto:lam=0", "Ditto", {"lam": 0.0}),
    Case("fedkd", "FedKD", {}, {f"{part} not clipped" for part in ("student", "teacher", "projection")}),
    Case(
        "fedkd:energy_start=0.6,energy_end=0.8,clip=0.05",
        "FedKD",
        {"energy_start": 0.6, "energy_end": 0.8, "clip": 0.05},
        {f"{part} clipped" for part in ("student", "teacher", "projection")}
        | {f"{what} {part}.weight cut" for what in ("sent", "merged") for part in ("body", "head")},
        scale=3,
    ),
    Case(
        "fedkd:energy_start=1.0,energy_end=1.0,clip=10",
        "FedKD",
        {"energy_start": 1.0, "energy_end": 1.0, "clip": 10.0},
        {"student clipped", "student not clipped", "teacher clipped", "teacher not clipped"}
        | {f"{what} {part}.weight dense" for what in ("sent", "merged") for part in ("body", "head")},
        scale=3,
        lr=0.05,
    ),
    Case("fedbabu", "FedBABU", {}),
    Case("fedbabu:epochs=2", "FedBABU", {"tuning_epochs": 2}),
    Case("fedbabu:epochs=0", "FedBABU", {"tuning_epochs": 0}),
]


@pytest.mark.parametrize("side_by_side", [False, True], ids=["alone", "side by side"])
@pytest.mark.parametrize("case", CASES, ids=[c.text for c in CASES])
def test_four_rounds(case: Case, side_by_side: bool) -> None:
    initial, data = a_model(), some_data(case.scale)
    reference = getattr(oracle, case.name)(initial, **case.fields)
    rounds = expected(reference, data, case.lr)
    assert case.branches <= {k for k, times in reference.taken.items() if times}, reference.taken
    results = computed(parse(case.text), initial, data, case.lr, side_by_side)
    for t, (wanted, got) in enumerate(zip(rounds, results, strict=True)):
        for k, visit in wanted.visits.items():
            at = f"round {t}, client {k}"
            same(without_energy(got["sent"][k]), visit.sent, f"{at}, sent")
            same(got["local"][k], visit.local, f"{at}, local model")
            assert (got["untuned"][k] is None) == (visit.untuned is None), at
            if visit.untuned is not None:
                same(got["untuned"][k], visit.untuned, f"{at}, before fine-tuning")
        raw = np.array([v.weight for v in wanted.visits.values()])
        np.testing.assert_allclose(got["share"], raw / raw.sum(), **CLOSE, err_msg=f"round {t}, weights")
        for k, own in enumerate(wanted.owns):
            same(got["owns"][k], own, f"round {t}, client {k}, own state")
        same(without_energy(got["shared"]), wanted.shared, f"round {t}, shared")
        same(got["scored"], wanted.scored, f"round {t}, global model")


def test_alignment_and_mixing_make_a_difference() -> None:
    """The oracle's branches matter by far more than the tolerance."""
    initial, data = a_model(), some_data(1)
    for name, strong, weak in (
        ("FedAS", {}, {"align_lr": 0.0}),
        ("FedALA", {}, {"eta": 0.0}),
        ("FedKD", {"energy_start": 0.6, "energy_end": 0.6}, {"energy_start": 1.0, "energy_end": 1.0}),
        ("FedKD", {"clip": 0.05}, {}),
        ("Ditto", {"lam": 0.5}, {}),
    ):
        a, b = (
            expected(getattr(oracle, name)(initial, **fields), data, 0.1)[-1] for fields in (strong, weak)
        )
        moved = [
            np.abs(a.visits[k].local[p] - b.visits[k].local[p]).max() for k in a.visits for p in BODY + HEAD
        ]
        assert max(moved) > 1e-4, name


def test_equal_traces_of_nothing_count_equally() -> None:
    """4.6 (a): if every trace is zero, the bodies are averaged uniformly, whatever the numbers of samples."""
    method, bodies = parse("fedas"), [oracle.pick(a_model(seed), BODY) for seed in (1, 2)]
    updates = [
        Update(tree(b), torch.zeros(1), {}, torch.tensor([n])) for b, n in zip(bodies, (5, 7), strict=True)
    ]
    visits = [Visit(b, 0.0, {}, {}) for b in bodies]
    s = settings(0.1)[0]
    wanted = oracle.FedAS(a_model()).merge(bodies[0], visits, s)
    same(method.merge(tree(bodies[0]), together(updates)), wanted, "merged")


# --- the oracle's own gradients ----------------------------------------------------------------------


def by_differences(f: Any, w: Params) -> Params:
    out = {k: np.zeros_like(v) for k, v in w.items()}
    for k, v in w.items():
        for i in np.ndindex(v.shape):
            step = np.zeros_like(v)
            step[i] = 1e-5
            out[k][i] = (f(w | {k: v + step}) - f(w | {k: v - step})) / 2e-5
    return out


def test_gradient_of_the_cross_entropy() -> None:
    x, y = some_data(1)[0]
    wanted = by_differences(lambda w: oracle.cross_entropy(oracle.logits(w, x), y), a_model())
    for k, g in oracle.plain(a_model(), x, y).items():
        np.testing.assert_allclose(g, wanted[k], atol=1e-8)


def test_gradient_of_both_losses() -> None:
    x, y = some_data(1)[1]
    w = oracle.named("student", a_model(1)) | oracle.named("teacher", a_model(2))
    w["projection/weight"] = np.eye(WIDTH) + np.random.default_rng(3).normal(0, 0.1, (WIDTH, WIDTH))
    wanted = by_differences(lambda w: oracle.both_losses(w, x, y), w)
    got = oracle.both_gradients(w, x, y)
    assert got.keys() == w.keys()
    for k, g in got.items():
        np.testing.assert_allclose(g, wanted[k], atol=1e-7, err_msg=k)
