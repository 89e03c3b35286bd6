"""What the specification says of each method alone: its terms, its state, its traffic and its scores."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from federation import InOrder, Normed, Small, images, lanes_of, repeated, run_site, site, task_of
from fedkper import execute, tree
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.errors import InputError, RunError
from fedkper.execute import Worker, logits
from fedkper.experiment import Experiment
from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce, entropy
from fedkper.lowrank import compressed, rank_for
from fedkper.method import Method, Update, client_round, weights
from fedkper.methods import METHODS, parse
from fedkper.methods.ditto import Ditto
from fedkper.methods.fedala import FedALA
from fedkper.methods.fedas import FedAS
from fedkper.methods.fedavg import FedAvg
from fedkper.methods.fedbabu import FedBABU
from fedkper.methods.fedcurv import FedCurv
from fedkper.methods.fedkd import FedKD
from fedkper.methods.fedkper import FedKPer
from fedkper.methods.fedntd import FedNTD
from fedkper.methods.fedprox import FedProx
from fedkper.methods.moon import MOON
from fedkper.models import CNN
from fedkper.record import Record
from fedkper.run import Execution, start
from fedkper.runfiles import read_curves, read_events
from fedkper.scores import Answers
from fedkper.site import Site, site_of
from fedkper.task import SGD, Task
from fedkper.tree import Tree, prefix, rest, sub
from golden import cases, check
from test_methods import Linear, Outs, assert_close, together

SPLITTING = ["fedas", "fedala", "fedper", "fedkd", "fedbabu"]
STATEFUL = ["fedcurv", "moon", "fedas", "fedala", "ditto", "fedper", "fedkd"]
PLAIN = SGD(0.1, 0.0, 0.0)

every_method = pytest.mark.parametrize("name", METHODS)
few_examples = settings(max_examples=40, deadline=None, derandomize=True)


class Played(NamedTuple):
    method: Method
    model: Lanes
    shared: Tree
    owns: dict[int, Tree]
    updates: list[Update]
    """the last round's"""


def played(
    name: str,
    schedule: Sequence[Sequence[int]],
    module: type[nn.Module] = Small,
    sizes: Sequence[int] = (12, 7, 9),
    **options: Any,
) -> Played:
    """A federation in which the clients of the schedule take part, round by round."""
    method, model = parse(name), lanes_of(module)
    shared, initial = method.init(model, model.init())
    owns = dict.fromkeys(range(len(sizes)), initial)
    updates: list[Update] = []
    for t, clients in enumerate(schedule):
        tasks = [task_of(model, [sizes[k]], clients=[k], round=t, **options) for k in clients]
        updates = [
            client_round(method, task, shared, owns[k]) for task, k in zip(tasks, clients, strict=True)
        ]
        owns |= {k: update.own for k, update in zip(clients, updates, strict=True)}
        shared = method.merge(shared, together(updates))
    return Played(method, model, shared, owns, updates)


def first_batch(task: Task) -> Batch:
    return next(iter(task.batches(1)))[0]


def batch_of(y: Sequence[int], dtype: torch.dtype = torch.float64) -> Batch:
    return Batch(
        torch.empty(0),
        torch.tensor([list(y)]),
        torch.ones(1, len(y), dtype=dtype),
        torch.arange(len(y))[None],
    )


def lane_of(values: Any) -> Tensor:
    """Numbers as one lane in double precision."""
    return torch.tensor(values, dtype=torch.float64)[None]


def noisy(theta: Tree, scale: float = 0.1, seed: int = 0) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    return {k: v + scale * torch.randn(v.shape, generator=draw, dtype=v.dtype) for k, v in theta.items()}


def distance(a: Tree, b: Tree) -> float:
    return float(tree.sqdist(a, b)) ** 0.5


class Fixed:
    """A task whose model always answers with the given logits."""

    def __init__(self, answer: Tensor) -> None:
        self.model = lambda theta, x: Outs(answer)


# --- reference cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("fedntd_loss"))
def test_fedntd_loss(case: Any) -> None:
    values = case["inputs"]
    student, teacher = lane_of(values["z_local"]).requires_grad_(), lane_of(values["z_global"])
    b = batch_of(values["y"])
    method = FedNTD(beta=values.get("beta", 1.0), tau=values.get("tau", 1.0))
    loss = method.loss(Fixed(student), {}, {"teacher/logits": teacher}, b)  # type: ignore[arg-type]
    check(float(loss.detach()), case, "loss")
    check(float(ce(student.detach(), b)), case, "ce")
    check(torch.autograd.grad(loss.sum(), student)[0][0].numpy(), case, "grad_local_logits")
    term = not_true_term(replace(method, beta=1.0), student, teacher, b)
    check(float(term.detach()), case, "ntd")
    check(torch.autograd.grad(term.sum(), student)[0][0].numpy(), case, "grad_ntd_only")


def not_true_term(method: FedNTD, student: Tensor, teacher: Tensor, b: Batch) -> Tensor:
    loss = method.loss(Fixed(student), {}, {"teacher/logits": teacher}, b)  # type: ignore[arg-type]
    return loss - ce(student, b)


class Vector(nn.Module):
    """Parameters of which the cross entropy does not depend."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 2, dtype=x.dtype) + 0 * self.w.sum()


def table_task(model: Lanes, x: Tensor, y: Sequence[int], classes: int, **fields: Any) -> Task:
    """One client with a table [N, F] in double precision, in the order in which it lies."""
    defaults: dict[str, Any] = {"streams": [InOrder()], "sgd": PLAIN, "epochs": 1, "batch": len(y)}
    n = torch.tensor([len(y)])
    return Task(model, x.double()[None], torch.tensor([list(y)]), n, classes, **(defaults | fields))


@pytest.mark.parametrize("case", cases("fedprox_term"))
def test_fedprox_term(case: Any) -> None:
    values = case["inputs"]
    method, model = FedProx(mu=values["mu"]), Lanes(Vector(7))
    task = table_task(model, torch.zeros(2, 1), [0, 1], 2)
    _, fixed = method.start(task, {"w": lane_of(values["w_global"])}, {})
    w, b = lane_of(values["w"]).requires_grad_(), first_batch(task)
    term = method.loss(task, {"w": w}, fixed, b) - FedAvg().loss(task, {"w": w}, {}, b)
    check(float(term.detach()), case, "value")
    check(torch.autograd.grad(term.sum(), w)[0][0].numpy(), case, "grad")


@pytest.mark.parametrize("case", cases("moon_loss"))
def test_moon_loss(case: Any) -> None:
    values = case["inputs"]
    method = MOON(mu=values["mu"], tau=values["tau"])
    f, f_global, f_previous = (lane_of(values[key]) for key in ("z", "z_global", "z_prev"))
    contrast = float(method.contrast(f, f_global, f_previous, batch_of([0] * f.shape[1])))
    check(contrast, case, "contrastive")
    check(values["ce"] + method.mu * contrast, case, "loss")


@pytest.mark.parametrize("case", cases("fedcurv_penalty"))
def test_fedcurv_penalty(case: Any) -> None:
    values = case["inputs"]
    fishers, thetas = (lane_of(values[key])[0] for key in ("fishers", "thetas"))
    u, v = {"w": fishers.sum(0)[None]}, {"w": (fishers * thetas).sum(0)[None]}
    w = lane_of(values["w"]).requires_grad_()
    reduced = values["lam"] * FedCurv().penalty({"w": w}, u, v)
    check(float(reduced.detach()), case, "value_reduced")
    check(float(reduced.detach()) + case["expected"]["constant"], case, "value_full")
    check(torch.autograd.grad(reduced.sum(), w)[0][0].numpy(), case, "grad")


@pytest.mark.parametrize("case", cases("linear_fisher"))
def test_linear_fisher(case: Any) -> None:
    values = case["inputs"]
    model = Lanes(Linear(4, 3))
    task = table_task(model, torch.tensor(values["X"]).double(), values["y"], 3, batch=values["batch"])
    task = replace(task, x=lane_of(values["X"]))
    theta = {"only.weight": lane_of(values["W"]), "only.bias": lane_of(values["b"])}
    fisher = task.fisher(theta, size=500)
    flat = torch.cat([fisher["only.weight"].flatten(), fisher["only.bias"].flatten()])
    check(flat.numpy(), case, "batch")
    trace = task.fisher_trace(theta)
    check(float(trace), case, "trace_sum_over_batches", str(trace.dtype).removeprefix("torch."))


def test_fisher_stops_after_more_than_size_samples() -> None:
    """Batches of 2: a size of 3 takes two of them, a size of 4 a third."""
    model = Lanes(Linear(4, 3))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    task = table_task(model, x, [0, 1, 2, 0, 1, 2], 3, batch=2)
    theta = {k: v.double() for k, v in noisy(model.init()).items()}
    parts = [replace(task, x=task.x[:, i : i + 2], y=task.y[:, i : i + 2], n=task.n - 4) for i in (0, 2, 4)]
    squares = [part.fisher(theta, 1)["only.weight"] for part in parts]
    for size, used in ((3, 2), (4, 3)):
        expected = torch.stack(squares[:used]).mean(0)
        torch.testing.assert_close(task.fisher(theta, size)["only.weight"], expected)


@pytest.mark.parametrize("case", cases("fedas_weights"))
def test_fedas_weights(case: Any) -> None:
    """Each site sends a unit vector, so that the merged body is the weights. The sizes must not matter."""
    traces = torch.tensor(case["inputs"]["traces"], dtype=torch.float64)
    body = {"body": torch.eye(len(traces), dtype=torch.float64)}
    update = Update(body, traces, {}, 10 + torch.arange(len(traces)))
    check(FedAS().merge({}, update)["body"][0].numpy(), case, "weights")


@pytest.mark.parametrize("case", cases("fedala_step"))
def test_fedala_step(case: Any) -> None:
    values = case["inputs"]
    old, received = {"w": lane_of(values["w_local"])}, {"w": lane_of(values["w_global"])}
    method, gap = FedALA(eta=values["eta"]), {"w": received["w"] - old["w"]}
    mix = method.updated({"w": lane_of(values["weights"])}, gap, {"w": lane_of(values["grad"])})
    check(mix["w"][0].numpy(), case, "weights")
    check(method.mixed(received, old, mix)["w"][0].numpy(), case, "params")


class GivenGradient(nn.Module):
    """Two classes whose cross entropy for label 0 has, at `at`, the gradient that the sample holds."""

    def __init__(self, at: Tensor) -> None:
        super().__init__()
        self.at = at
        self.v = nn.Parameter(at.clone())

    def forward(self, x: Tensor) -> Tensor:
        first = -2 * x @ (self.v - self.at)
        return torch.stack([first, torch.zeros_like(first)], -1)


@pytest.mark.parametrize("case", cases("ditto_step"))
def test_ditto_step(case: Any) -> None:
    values = case["inputs"]
    v, received = lane_of(values["v"]), {"v": lane_of(values["w_global"])}
    task = table_task(Lanes(GivenGradient(v[0])), torch.zeros(1, 3), [0], 2, sgd=SGD(values["lr"], 0.0, 0.0))
    task = replace(task, x=lane_of([values["grad"]]))
    method = Ditto(lam=values["lam"], epochs=1)
    update = client_round(method, task, received, {"personal/v": v})
    check(update.own["personal/v"][0].numpy(), case, "v")


@pytest.mark.parametrize("case", cases("fedkd_rank"))
def test_fedkd_rank(case: Any) -> None:
    energies = torch.tensor(case["inputs"]["energies"], dtype=torch.float64)
    squares = lane_of(case["inputs"]["singular_values"]).square().expand(len(energies), -1)
    check(rank_for(squares, energies).numpy(), case, "rank")


@pytest.mark.parametrize("case", cases("fedkd_energy"))
def test_fedkd_energy(case: Any) -> None:
    values = case["inputs"]
    method = FedKD(energy_start=values["t_start"], energy_end=values["t_end"])
    check([method.energy(t, values["T"]) for t in values["t"]], case, "energy")


def test_fedkd_reduction_mean_is_over_samples_and_classes() -> None:
    z_s, z_t, f_s, f_t = torch.randn(
        4, 1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    b = batch_of([0, 1, 2, 3, 4, 0])
    losses = FedKD(reduction="mean").losses(z_s, z_t, f_s, f_t, b)
    ce_s, ce_t = (nn.functional.cross_entropy(z[0], b.y[0]) for z in (z_s, z_t))
    hidden = nn.functional.mse_loss(f_s, f_t)
    each = nn.KLDivLoss(reduction="none", log_target=True)
    p, q = z_t[0].log_softmax(-1), z_s[0].log_softmax(-1)
    assert losses.student == pytest.approx(
        float(ce_s + (each(q, p).mean() + hidden) / (ce_s + ce_t)), rel=1e-5
    )
    assert losses.teacher == pytest.approx(
        float(ce_t + (each(p, q).mean() + hidden) / (ce_s + ce_t)), rel=1e-5
    )


@pytest.mark.parametrize("case", cases("fedkd_losses"))
def test_fedkd_losses(case: Any) -> None:
    values = case["inputs"]
    keys = ("z_student", "z_teacher", "h_student_proj", "h_teacher")
    z_s, z_t, f_s, f_t = (lane_of(values[key]).requires_grad_() for key in keys)
    losses = FedKD().losses(z_s, z_t, f_s, f_t, batch_of(values["y"]))
    check(float(losses.student.detach()), case, "loss_student")
    check(float(losses.teacher.detach()), case, "loss_teacher")
    # Nothing is detached: either loss moves both models.
    for loss in losses:
        gradients = torch.autograd.grad(loss.sum(), [z_s, z_t, f_s, f_t], retain_graph=True)
        assert all(float(g.norm()) > 0 for g in gradients)


# --- FedKPer ------------------------------------------------------------------------------------------


@few_examples
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 8), tau=st.sampled_from([1.0, 2.5]))
def test_fedkpers_gradient_sums_to_zero_and_is_that_of_a_mixed_target(
    seed: int, classes: int, tau: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(1, 5, classes, generator=draw, dtype=torch.float64) for _ in range(2))
    b = batch_of(torch.randint(classes, (5,), generator=draw).tolist())
    student.requires_grad_()
    teacher.requires_grad_()
    method = FedKPer(tau=tau)
    loss = method.loss(Fixed(student), {}, {"teacher/logits": teacher.detach()}, b)  # type: ignore[arg-type]
    gradient = torch.autograd.grad(loss.sum(), student)[0]
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(1, 5, dtype=torch.float64))
    trust = method.trust(ce(teacher, b)).detach()
    p, q = (student / tau).softmax(-1), (teacher / tau).softmax(-1)
    onehot = nn.functional.one_hot(b.y, classes)
    expected = ((student.softmax(-1) - onehot) + trust * tau * (p - q)) / 5
    torch.testing.assert_close(gradient, expected.detach())


def test_the_teacher_is_the_received_model_in_evaluation_mode_and_stays_so() -> None:
    model = lanes_of(Normed)
    task = task_of(model, [9], epochs=2, batch=4)
    received = model.init() | noisy(model.parameters(model.init()))
    received |= {"norm.running_mean": torch.full((1, 5), 0.3), "norm.running_var": torch.full((1, 5), 2.0)}
    method = FedKPer()
    theta, fixed = method.start(task, received, {})
    x = torch.cat([b.x[0, b.w[0] > 0] for b, _ in replace(task, streams=[InOrder()]).batches(1)])
    torch.testing.assert_close(fixed["teacher/logits"][0], model(received, x[None], train=False).logits[0])
    assert not fixed["teacher/logits"].requires_grad
    copies = [{k: v.clone() for k, v in t.items()} for t in (received, fixed)]
    task.fit(lambda t, b: method.loss(task, t, fixed, b), theta)
    assert_close(received, copies[0], 0)
    assert_close(fixed, copies[1], 0)


@pytest.mark.parametrize("module", [Small, Normed])
def test_a_teacher_that_answers_anew_gives_the_same_model(module: Any) -> None:
    model = lanes_of(module)
    task = task_of(model, [9, 6], epochs=2, batch=4)
    received = repeated(model.init() | noisy(model.parameters(model.init())), 2)
    trained = []
    for method in (FedKPer(), FedKPer(cached=False)):
        theta, fixed = method.start(task, received, {})
        trained.append(task.fit(lambda t, b, m=method, f=fixed: m.loss(task, t, f, b), theta))  # type: ignore[misc]
    assert_close(trained[0], trained[1], 1e-5)
    assert any(bool((trained[0][k] != received[k]).any()) for k in received)


def test_every_mini_batch_has_its_own_trust() -> None:
    """Two samples on which the teacher is right, one on which it is wrong, in batches of two."""
    teacher = torch.tensor([[[3.0, 0], [3.0, 0], [3.0, 0]]])
    student = torch.zeros(1, 2, 2)
    right = Batch(torch.empty(0), torch.tensor([[0, 0]]), torch.ones(1, 2), torch.tensor([[0, 1]]))
    short = Batch(torch.empty(0), torch.tensor([[1, 0]]), torch.tensor([[1.0, 0]]), torch.tensor([[2, 0]]))
    method, plain = FedKPer(), FedKPer(distillation=False)

    def added(method: FedKPer, b: Batch) -> float:
        task: Any = Fixed(student)
        losses = [m.loss(task, {}, {"teacher/logits": teacher}, b) for m in (method, plain)]
        return float(losses[0] - losses[1])

    ce_right, ce_wrong = math.log1p(math.exp(-3)), math.log1p(math.exp(3))
    divergence = added(FedKPer(cap=1e9), right) * ce_right
    assert added(method, right) == pytest.approx(10 * divergence, rel=1e-4)
    assert added(method, short) == pytest.approx(divergence / ce_wrong, rel=1e-4)


def test_fedkper_sends_a_model_and_one_number() -> None:
    model = lanes_of()
    task = task_of(model, [9])
    update = client_round(FedKPer(), task, model.init(), {})
    assert update.shared.keys() == model.init().keys()
    assert (update.own, update.sums, update.weight.shape) == ({}, {}, (1,))
    accuracy = float((task.predict(update.shared).logits.argmax(-1) == task.y).double().mean())
    assert float(update.weight) == pytest.approx(accuracy * (1e-6 + 1.0))  # three classes alike


def test_classes_are_those_of_the_data_set_not_of_the_site() -> None:
    model = lanes_of(classes=5)
    task = task_of(model, [6, 6, 6], classes=5, labels=[[0] * 6, [0, 1] * 3, [0, 1, 2, 3, 4, 0]])
    counts = task.label_counts()
    assert counts.tolist() == [[6, 0, 0, 0, 0], [3, 3, 0, 0, 0], [2, 1, 1, 1, 1]]
    assert task.predict(repeated(model.init(), 3)).logits.shape == (3, 6, 5)
    assert entropy(counts)[:2].tolist() == pytest.approx([0, math.log(2) / math.log(5)])


# --- terms that compare with the received model -------------------------------------------------------


def drift(name: str) -> float:
    """How far one client's model is from the received one after five steps."""
    model = lanes_of()
    received = noisy(model.init())
    method = parse(name)
    own = prefix("personal", noisy(received, 0.2, seed=1)) if name.startswith("ditto") else {}
    task = task_of(model, [20], epochs=1, batch=4, sgd=SGD(0.05, 0.0, 0.0))
    update = client_round(method, task, received, own)
    return distance(method.local_model(task, received, update), received)


@pytest.mark.parametrize("name", ["fedprox:mu={}", "ditto:epochs=1,lam={}"])
def test_the_distance_to_the_received_model_shrinks_as_the_pull_grows(name: str) -> None:
    drifts = [drift(name.format(strength)) for strength in (0, 0.1, 1, 10)]
    assert all(b < a for a, b in pairwise(drifts))
    assert drifts[-1] < 0.7 * drifts[0]


def test_fedproxs_term_has_the_gradient_of_a_spring() -> None:
    """Numerically, at a point away from the received model: mu (w - w_global)."""
    model, mu = lanes_of(), 0.7
    received = {k: v.double() for k, v in model.init().items()}
    task = table_task(model, torch.rand(6, 48), [0, 1, 2, 0, 1, 2], 3)
    method, b, w = FedProx(mu=mu), first_batch(task), noisy(received)
    _, fixed = method.start(task, received, {})

    def term(theta: Tree) -> float:
        return float(method.loss(task, theta, fixed, b) - FedAvg().loss(task, theta, {}, b))

    for name in w:
        for at in range(3):
            step = torch.zeros_like(w[name])
            step.view(-1)[at] = 1e-4
            slope = (term(w | {name: w[name] + step}) - term(w | {name: w[name] - step})) / 2e-4
            spring = mu * float((w[name] - received[name]).view(-1)[at])
            assert slope == pytest.approx(spring, abs=1e-3 * abs(spring) + 1e-9)
            assert slope != 0


@pytest.mark.parametrize("name", ["fedprox", "fedcurv", "moon", "fedntd", "fedkper"])
def test_each_term_has_a_gradient(name: str) -> None:
    run = played(name, [[0, 1, 2], [0, 1, 2]])
    task = task_of(run.model, [12], clients=[0], round=2)
    theta, fixed = run.method.start(task, run.shared, run.owns[0])
    theta = {k: v.requires_grad_() for k, v in noisy(rest(theta)).items()}
    b = first_batch(task)
    term = run.method.loss(task, theta, fixed, b) - FedAvg().loss(task, theta, {}, b)
    gradients = torch.autograd.grad(term.sum(), list(theta.values()), allow_unused=True)
    assert sum(float(g.norm()) for g in gradients if g is not None) > 1e-3


@pytest.mark.parametrize("name", ["fedprox:mu=5", "fedntd:beta=5"])
def test_the_first_step_of_a_round_is_fedavgs(name: str) -> None:
    one_step: dict[str, Any] = {"sizes": (4,), "batch": 4, "epochs": 1}
    assert_close(played(name, [[0]], **one_step).shared, played("fedavg", [[0]], **one_step).shared, 1e-6)
    two_steps = one_step | {"epochs": 2}
    pulled, free = played(name, [[0]], **two_steps).shared, played("fedavg", [[0]], **two_steps).shared
    assert distance(pulled, free) > 1e-5


@pytest.mark.parametrize(("name", "field"), [("fedprox", "mu"), ("ditto", "lam")])
def test_a_pull_that_would_diverge_is_named(name: str, field: str) -> None:
    reason = parse(f"{name}:{field}=400").check(SGD(0.01))
    assert all(part in reason for part in (f"{field}=400", "0.01", "3.8"))
    assert parse(f"{name}:{field}=370").check(SGD(0.01)) == ""
    assert parse(f"{name}:{field}=370").check(SGD(0.01, momentum=0.0)) != ""


@pytest.mark.parametrize("name", ["fedprox:mu=400", "ditto:lam=400"])
def test_a_run_with_a_pull_that_would_diverge_does_not_start(name: str, tmp_path: Path) -> None:
    experiment = Experiment(method=name, lr=0.01, rounds=1, epochs=0)
    with pytest.raises(InputError, match="400"):
        start(experiment, tmp_path / "run", Execution(workers=1))


@every_method
def test_the_defaults_are_stable(name: str) -> None:
    assert parse(name).check(SGD(0.01)) == ""


# --- FedCurv ------------------------------------------------------------------------------------------


def test_a_client_that_is_alone_has_no_penalty() -> None:
    """At its next visit exactly, later to rounding; so alone it trains as with FedAvg."""
    method, model = parse("fedcurv:lam=5"), lanes_of()
    shared, own = method.init(model, model.init())
    for t in range(4):
        task = task_of(model, [9], round=t)
        theta, fixed = method.start(task, shared, own)
        for at_home in fixed.values():
            torch.testing.assert_close(at_home, torch.zeros_like(at_home), atol=0 if t < 2 else 1e-6, rtol=0)
        w = noisy(theta)
        assert float(FedCurv().penalty(w, sub("U", fixed), sub("V", fixed)).abs()) < 1e-4
        update = client_round(method, task, shared, own)
        shared, own = method.merge(shared, update), update.own
    assert_close(rest(shared), played("fedavg", [[0]] * 4, sizes=(9,)).shared, 1e-4)


def test_fedcurv_has_no_penalty_in_its_first_round() -> None:
    curved = played("fedcurv:lam=50", [[0, 1, 2]])
    assert_close(rest(curved.shared), played("fedavg", [[0, 1, 2]]).shared, 0)
    assert distance(rest(played("fedcurv", [[0, 1, 2]] * 2).shared), played("fedavg", [[0, 1, 2]] * 2).shared)


def test_the_server_holds_each_clients_latest_information_once() -> None:
    """Also of clients that were not sampled since; and Fisher information is not negative."""
    run = played("fedcurv", [[0, 1], [1, 2], [0], [2, 1]])
    for big, small in (("U", "u"), ("V", "v")):
        for key, leaf in sub(big, run.shared).items():
            expected = sum(own[f"{small}/{key}"] for own in run.owns.values())
            torch.testing.assert_close(leaf, expected, rtol=1e-4, atol=1e-6)
    for own in run.owns.values():
        assert all(bool((f >= 0).all()) for f in sub("u", own).values())
        assert any(bool((f > 0).any()) for f in sub("u", own).values())


def test_a_download_changes_nothing_for_the_next_client() -> None:
    run = played("fedcurv", [[0, 1, 2], [0, 1, 2]])
    copy = {k: v.clone() for k, v in run.shared.items()}
    seen = []
    for k in (0, 1, 0):
        task = task_of(run.model, [9], clients=[k], round=2)
        theta, fixed = run.method.start(task, run.shared, run.owns[k])
        seen.append({k: v.clone() for k, v in fixed.items()})
        task.fit(lambda t, b, task=task, fixed=fixed: run.method.loss(task, t, fixed, b), theta)
        assert_close(run.shared, copy, 0)
    assert_close(seen[0], seen[2], 0)
    assert distance(seen[0], seen[1]) > 0


@few_examples
@given(seed=st.integers(0, 10**6), others=st.integers(1, 4))
def test_the_sums_have_the_gradient_of_the_quadratic_form(seed: int, others: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    fishers = torch.rand(others, 6, generator=draw, dtype=torch.float64)
    thetas = torch.randn(others, 6, generator=draw, dtype=torch.float64)
    w = torch.randn(1, 6, generator=draw, dtype=torch.float64).requires_grad_()
    u, v = fishers.sum(0)[None], (fishers * thetas).sum(0)[None]
    short = torch.autograd.grad(FedCurv().penalty({"w": w}, {"w": u}, {"w": v}).sum(), w)[0]
    long = torch.autograd.grad((fishers * (w - thetas).square()).sum(), w)[0]
    torch.testing.assert_close(short, long)
    torch.testing.assert_close(short, 2 * (u * w - v).detach())


# --- MOON ---------------------------------------------------------------------------------------------


def features(seed: int, samples: int = 4, width: int = 5) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(1, samples, width, generator=draw, dtype=torch.float64)


def test_the_first_participation_has_a_constant_term() -> None:
    method, model = MOON(), lanes_of()
    shared, own = method.init(model, model.init())
    shared = noisy(shared)  # the model has changed since the start
    task = task_of(model, [4], batch=4)
    _, fixed = method.start(task, shared, own)
    assert_close({"f": fixed["features/previous"]}, {"f": fixed["features/global"]}, 0)
    f = task.predict(noisy(shared)).features.requires_grad_()
    b = batch_of([0, 1, 2, 0], torch.float32)
    term = method.contrast(f, fixed["features/global"], fixed["features/previous"], b)
    assert float(term.detach()) == pytest.approx(math.log(2), rel=1e-6)
    assert float(torch.autograd.grad(term.sum(), f)[0].abs().max()) < 1e-7


def test_the_previous_model_is_the_clients_own() -> None:
    run = played("moon", [[0, 1], [2, 0], [1, 2]])
    for k, model_of_k in run.owns.items():
        task = task_of(run.model, [6], clients=[k], round=3)
        _, fixed = run.method.start(task, run.shared, model_of_k)
        expected = task.predict(sub("previous", model_of_k)).features
        torch.testing.assert_close(fixed["features/previous"], expected, rtol=0, atol=0)
        assert float((fixed["features/previous"] - fixed["features/global"]).abs().max()) > 1e-3


@few_examples
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3), tau=st.sampled_from([0.1, 0.5, 1.0]))
def test_the_contrast_knows_angles_only(seed: int, scale: float, tau: float) -> None:
    f, g, p, *_ = (v for v, _ in zip(features(seed), range(3), strict=False))
    method, b = MOON(tau=tau), batch_of([0] * 4)
    there, back = method.contrast(f, g, p, b), method.contrast(f, p, g, b)
    torch.testing.assert_close(method.contrast(scale * f, g, p, b), there)
    torch.testing.assert_close(method.contrast(f, scale * g, p, b), there)
    assert float(there + back) >= 2 * math.log(2) - 1e-12
    assert float(there) <= math.log1p(math.exp(2 / tau)) + 1e-12


def test_dead_features_and_small_temperatures_are_harmless() -> None:
    g, p = (v for v, _ in zip(features(3), range(2), strict=False))
    dead = torch.zeros_like(g).requires_grad_()
    term = MOON().contrast(dead, g, p, batch_of([0] * 4))
    assert float(term.detach()) == pytest.approx(math.log(2))
    assert bool(torch.autograd.grad(term.sum(), dead)[0].isfinite().all())
    assert float(MOON(tau=1e-4).contrast(-g, g, p, batch_of([0] * 4))) > 100


# --- FedNTD -------------------------------------------------------------------------------------------


@few_examples
@given(seed=st.integers(0, 10**6), classes=st.integers(3, 8), tau=st.sampled_from([0.5, 1.0, 3.0]))
def test_the_true_logit_does_not_matter(seed: int, classes: int, tau: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(1, 4, classes, generator=draw, dtype=torch.float64) for _ in range(2))
    b = batch_of(torch.randint(classes, (4,), generator=draw).tolist())
    method, true = FedNTD(tau=tau), nn.functional.one_hot(b.y, classes).bool()
    student.requires_grad_()
    term = not_true_term(method, student, teacher, b)
    gradient = torch.autograd.grad(term.sum(), student)[0]
    # The true logit's gradient is that of the cross entropy alone; what is left is its rounding.
    assert float(gradient[true].abs().max()) < 1e-15
    assert float(gradient[~true].abs().max()) > 1e-6
    for changed in (student.detach() + 50 * true, student.detach() + 7.5):
        torch.testing.assert_close(not_true_term(method, changed, teacher, b), term.detach())
        torch.testing.assert_close(not_true_term(method, student, teacher + (changed - student), b), term)
    assert float(not_true_term(method, teacher, teacher, b).abs()) < 1e-12
    assert float(term.detach()) > 0


def test_two_classes_leave_nothing_to_distil() -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 6, 2, generator=draw) * 20 for _ in range(2))
    b = batch_of([0, 1, 1, 0, 0, 1], torch.float32)
    student.requires_grad_()
    loss = FedNTD(beta=1e6).loss(Fixed(student), {}, {"teacher/logits": teacher}, b)  # type: ignore[arg-type]
    plain = ce(student, b)
    assert float(loss.detach()) == float(plain.detach())
    gradients = [torch.autograd.grad(part.sum(), student)[0] for part in (loss, plain)]
    assert torch.equal(gradients[0], gradients[1])


# --- FedAS --------------------------------------------------------------------------------------------


def alignment(task: Task, theta: Tree, goal: Tree) -> float:
    """Sum over the classes of the mean squared distance of features to the prototypes under `goal`."""
    f, p = task.predict(theta).features[0], task.predict(goal).features[0]
    classes = task.y[0].unique()
    return sum(
        float((f[task.y[0] == c] - p[task.y[0] == c].mean(0)).square().mean()) for c in classes.tolist()
    )


def test_alignment_lowers_its_loss_and_leaves_the_head_alone() -> None:
    run = played("fedas", [[0, 1, 2]])
    task = task_of(run.model, [12], clients=[0], batch=12, round=1)
    head, previous = rest(run.owns[0]), sub("previous", run.owns[0])
    body = noisy(run.shared)
    losses = []
    for lr in (0.0, 0.02, 0.1):
        theta, _ = FedAS(lr=lr).start(task, body, run.owns[0])
        losses.append(alignment(task, theta, previous | head))
        assert_close({k: theta[k] for k in head}, head, 0)
    assert losses[2] < losses[1] < losses[0]
    assert losses[0] == pytest.approx(alignment(task, body | head, previous | head))


def test_the_first_participation_is_not_aligned() -> None:
    method, model = FedAS(lr=1.0), lanes_of()
    shared, own = method.init(model, model.init())
    body = noisy(shared)
    theta, _ = method.start(task_of(model, [9]), body, own)
    assert_close(theta, body | rest(own), 0)


@pytest.mark.parametrize("module", [Small, Normed], ids=["plain", "batchnorm"])
def test_fedas_without_its_two_ideas_is_fedper(module: type[nn.Module]) -> None:
    schedule = [[0, 1, 2], [0, 2], [1, 2]]
    bare, fedper = (played(name, schedule, module) for name in ("fedas:fisher=false,epochs=0", "fedper"))
    assert_close(bare.shared, fedper.shared, 0)
    for k in range(3):
        assert_close(rest(bare.owns[k]), fedper.owns[k], 0)
    for a, b in zip(bare.updates, fedper.updates, strict=True):
        assert torch.equal(a.weight, b.weight)


def test_fedas_weighs_by_the_trace_over_all_parameters_after_training() -> None:
    run = played("fedas", [[0, 1, 2]])
    for k, update in enumerate(run.updates):
        task = task_of(run.model, [(12, 7, 9)[k]], clients=[k])
        torch.testing.assert_close(update.weight, task.fisher_trace(update.shared | rest(update.own)))
        assert float(update.weight) > 0
    assert_close(
        run.shared, tree.weighted_mean(together(run.updates).shared, together(run.updates).weight), 0
    )


def test_the_recorded_weights_are_those_that_were_used(tmp_path: Path, monkeypatch: Any) -> None:
    """FedAS counts all sites alike where every trace is 0, whatever their sizes."""
    monkeypatch.setattr(Task, "fisher_trace", lambda task, theta: torch.zeros(len(task.n)))
    run_site(site("fedas", rounds=1), tmp_path / "run")
    with open(tmp_path / "run" / "clients.csv") as file:
        recorded = [float(row["weight"]) for row in csv.DictReader(file) if row["sampled"] == "1"]
    assert recorded == [0.5, 0.5]


def test_sites_without_a_usable_weight_count_by_their_samples(tmp_path: Path) -> None:
    """FedKPer with eps = 0, where every site has one class only; and the events say so."""
    federation = site("fedkper:eps=0", rounds=1)
    federation = replace(federation, train_y=torch.zeros_like(federation.train_y))
    run_site(federation, tmp_path / "run")
    assert [event["event"] for event in read_events(tmp_path / "run")] == ["fallback"]
    with open(tmp_path / "run" / "clients.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["sampled"] == "1"]
    samples = [int(row["samples"]) for row in rows]
    assert [float(row["weight"]) for row in rows] == pytest.approx([n / sum(samples) for n in samples])


# --- FedALA -------------------------------------------------------------------------------------------


@few_examples
@given(seed=st.integers(0, 10**6), eta=st.sampled_from([0.0, 0.1, 1.0, 1e4]))
def test_mixing_weights_stay_between_0_and_1(seed: int, eta: float) -> None:
    mix, gap, grad, *_ = ({"w": 10 * v} for v, _ in zip(features(seed), range(3), strict=False))
    moved = FedALA(eta=eta).updated({"w": mix["w"].sigmoid()}, gap, grad)["w"]
    assert float(moved.min()) >= 0
    assert float(moved.max()) <= 1


def test_mixing_weights_are_learned_within_their_bounds() -> None:
    run = played("fedala:eta=100", [[0, 1, 2], [0, 1], [0, 2], [0]])
    for own in run.owns.values():
        mixes = torch.cat([w.flatten() for w in sub("mix", own).values()])
        assert 0 <= float(mixes.min()) < 1
        assert float(mixes.max()) <= 1
    assert sub("mix", run.owns[0]).keys() == {"head.weight", "head.bias"}


def test_fedala_that_does_not_learn_is_fedavg() -> None:
    schedule = [[0, 1, 2], [0, 1], [0, 2]]
    fedavg = played("fedavg", schedule).shared
    assert_close(played("fedala:eta=0", schedule).shared, fedavg, 1e-6)
    assert distance(played("fedala", schedule).shared, fedavg) > 1e-4


def test_nothing_to_mix_starts_as_received() -> None:
    """The site's own model is the received one: for any mixing weights."""
    method, model = FedALA(most=2), lanes_of()
    received = noisy(model.init())
    mix = {k: torch.rand(v.shape, generator=torch.Generator().manual_seed(1)) for k, v in received.items()}
    mix = {k: v for k, v in mix.items() if k.startswith("head")}
    own = prefix("local", received) | prefix("mix", mix) | {"seen/visits": torch.tensor([1])}
    theta, fixed = method.start(task_of(model, [9]), received, own)
    assert_close(theta, received, 0)
    assert_close(sub("mix", fixed), mix, 0)


def test_the_body_starts_as_received_and_the_head_between_old_and_received() -> None:
    run = played("fedala", [[0, 1, 2], [0, 1, 2]])
    task = task_of(run.model, [12], clients=[0], round=2)
    old = sub("local", run.owns[0])
    theta, fixed = run.method.start(task, run.shared, run.owns[0])
    for key, leaf in theta.items():
        if key.startswith("head"):
            low, high = torch.minimum(old[key], run.shared[key]), torch.maximum(old[key], run.shared[key])
            assert bool(((low - 1e-6 <= leaf) & (leaf <= high + 1e-6)).all())
            expected = old[key] + (run.shared[key] - old[key]) * fixed[f"mix/{key}"]
            torch.testing.assert_close(leaf, expected)
            assert float((leaf - run.shared[key]).abs().max()) > 1e-4
        else:
            assert torch.equal(leaf, run.shared[key])


@pytest.mark.parametrize(
    ("visits", "threshold", "spoilt", "epochs"),
    [(0, 0.1, False, 0), (1, 1e9, False, 11), (1, 0.0, False, 50), (1, 0.1, True, 50), (2, 0.0, False, 1)],
    ids=["no model yet", "settled at once", "never settled", "NaN", "later visits"],
)
def test_epochs_of_the_mixing(
    visits: int, threshold: float, spoilt: bool, epochs: int, monkeypatch: Any
) -> None:
    method, model = FedALA(threshold=threshold), lanes_of()
    shared, own = method.init(model, model.init())
    received = {k: v * float("nan") for k, v in shared.items()} if spoilt else noisy(shared)
    own |= {"seen/visits": torch.tensor([visits])}
    asked, plan = [], Task.plan

    def counted(self: Task, *args: Any) -> Any:
        asked.append(args)
        return plan(self, *args)

    monkeypatch.setattr(Task, "plan", counted)
    method.start(task_of(model, [9]), received, own)
    assert len(asked) == epochs


def test_the_mixing_uses_a_share_of_the_data_but_a_batch_at_least() -> None:
    task = task_of(lanes_of(), [20], batch=4)

    def used(share: float) -> list[int]:
        return sorted(i for b, _ in task.batches(1, "mixing", share) for i in b.i[0, b.w[0] > 0].tolist())

    assert len(used(0.8)) == 16
    assert used(0.8) == used(0.8)
    assert len(used(0.01)) == 4
    assert used(0.8) != sorted(
        i
        for b, _ in replace(task_of(task.model, [20], round=1), batch=4).batches(1, "mixing", 0.8)
        for i in b.i[0].tolist()
    )


# --- Ditto and FedPer ---------------------------------------------------------------------------------


def test_ditto_without_a_pull_is_training_alone() -> None:
    """Continued from visit to visit, whatever the federation does meanwhile."""
    run = played("ditto:lam=0", [[0, 1], [1, 2], [0, 2]])
    model = lanes_of()
    alone = model.init()
    for t in (0, 2):
        task = task_of(model, [12], clients=[0], round=t)
        alone = task.fit(lambda v, b: ce(model(v, b.x).logits, b), alone, 5, "personal")
    assert_close(sub("personal", run.owns[0]), alone, 0)


def test_a_strong_pull_forgets_where_the_personal_model_was() -> None:
    """lr x lam = 1: one plain step lands on the received model less lr times the gradient."""
    model = lanes_of()
    received, lr = model.init(), 1e-3
    task = task_of(model, [8], batch=8, sgd=SGD(lr, 0.0, 0.0))
    ends = []
    for seed in (1, 2):
        own = prefix("personal", noisy(received, seed=seed))
        ends.append(sub("personal", client_round(Ditto(lam=1 / lr, epochs=1), task, received, own).own))
        v = {k: leaf.requires_grad_() for k, leaf in sub("personal", own).items()}
        loss = ce(model(v, first_batch(task).x).logits, first_batch(task))
        grads = torch.autograd.grad(loss.sum(), list(v.values()))
        expected = {k: received[k] - lr * g for k, g in zip(v, grads, strict=True)}
        assert_close(ends[-1], expected, 1e-6)
    assert distance(ends[0], ends[1]) < 0.1 * distance(noisy(received, seed=1), noisy(received, seed=2))


@pytest.mark.parametrize("module", [Small, Normed], ids=["plain", "batchnorm"])
def test_fedper_whose_heads_are_averaged_is_fedavg(module: type[nn.Module]) -> None:
    fedper, fedavg = played("fedper", [[0, 1, 2]], module), played("fedavg", [[0, 1, 2]], module)
    for mine, theirs in zip(fedper.updates, fedavg.updates, strict=True):
        assert_close(mine.shared | mine.own, theirs.shared, 0)
    probed = fedper.method.global_model(fedper.model, fedper.shared, together(fedper.updates))
    assert_close(probed, fedavg.shared, 0)


@pytest.mark.parametrize("name", ["fedper", "fedas"])
def test_bodies_are_common_and_heads_are_not(name: str) -> None:
    run = played(name, [[0, 1, 2], [0, 1, 2]])
    heads = [rest(run.owns[k]) for k in range(3)]
    assert heads[0].keys() == {"head.weight", "head.bias"}
    assert distance(heads[0], heads[1]) > 1e-3
    assert run.shared.keys() == {"body.weight", "body.bias"}
    probe = run.method.global_model(run.model, run.shared, together(run.updates))
    stacked = tree.stack(heads)
    assert_close(
        {k: probe[k] for k in stacked}, tree.weighted_mean(stacked, together(run.updates).weight), 1e-6
    )
    initial = parse(f"{name}:head_probe=initial").global_model(run.model, run.shared, together(run.updates))
    assert_close(initial, run.shared | {k: v for k, v in run.model.init().items() if k in stacked}, 0)


# --- FedBABU ------------------------------------------------------------------------------------------


def test_the_common_head_never_moves() -> None:
    model = lanes_of()
    first = {k: v for k, v in model.init().items() if k.startswith("head")}
    run = played("fedbabu", [[0, 1, 2]] * 3, sgd=SGD(0.1, 0.9, 0.1))
    assert run.shared.keys() == {"body.weight", "body.bias"}
    served = run.method.global_model(run.model, run.shared, together(run.updates))
    assert {k: torch.equal(served[k], v) for k, v in first.items()} == dict.fromkeys(first, True)
    for k, update in enumerate(run.updates):
        assert update.own == {}
        task = task_of(run.model, [9], clients=[k])
        _, fixed = run.method.start(task, run.shared, {})
        untuned = run.method.untuned_model(task, update)
        assert untuned is not None
        for key, leaf in first.items():
            assert torch.equal(fixed[key], leaf)
            assert torch.equal(untuned[key], leaf)


@pytest.mark.parametrize("module", [Small, Normed], ids=["plain", "batchnorm"])
def test_fine_tuning_works_on_a_copy(module: type[nn.Module]) -> None:
    run = played("fedbabu", [[0, 1, 2]], module)
    task = task_of(run.model, [9], clients=[2], round=1)
    update = client_round(run.method, task, run.shared, {})
    kept = [run.shared, update.shared, run.model.init()]
    copies = [{k: v.clone() for k, v in t.items()} for t in kept]
    tuned = run.method.local_model(task, run.shared, update)
    for now, before in zip([run.shared, update.shared, run.model.init()], copies, strict=True):
        assert_close(now, before, 0)
    received = run.shared | run.model.split(run.model.init())[1]
    assert_close(FedBABU(epochs=0).local_model(task, run.shared, update), received, 0)
    for part in run.model.split(tuned):
        assert distance(run.model.parameters(part), received) > 1e-3
    assert_close(run.method.local_model(task, run.shared, update), tuned, 0)


# --- FedKD --------------------------------------------------------------------------------------------


def squeezed(matrix: Tensor, energy: float) -> tuple[Tensor, int]:
    """One matrix or kernel, compressed, and the rank that is reported."""
    done, ranks = compressed({"layer.weight": matrix[None]}, torch.tensor([energy]))
    assert done["layer.weight"].shape == matrix[None].shape
    assert done["layer.weight"].dtype == matrix.dtype
    return done["layer.weight"][0], int(ranks.get("layer.weight", torch.tensor([-1]))[0])


def spectrum(rows: int, columns: int, values: Sequence[float], seed: int = 0) -> Tensor:
    """A matrix with the given singular values."""
    draw = np.random.default_rng(seed)
    u, v = (np.linalg.qr(draw.normal(size=(n, len(values))))[0] for n in (rows, columns))
    return torch.from_numpy((u * np.array(values)) @ v.T).float()


def kernel(rank: int = 32) -> Tensor:
    return spectrum(64, 32 * 9, 0.8 ** np.arange(rank)).reshape(64, 32, 3, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param(torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0)), id="kernel"),
        pytest.param(kernel(), id="kernel of low rank"),
        pytest.param(kernel().permute(1, 0, 2, 3), id="strided kernel"),
        pytest.param(torch.tensor([[3.0]]), id="1x1"),
        pytest.param(torch.zeros(6, 9), id="zero"),
        pytest.param(spectrum(9, 6, [2.0]), id="rank 1"),
        pytest.param(spectrum(6, 9, [5, 3, 1e-3]), id="wide"),
        pytest.param(1e-4 * spectrum(30, 20, [5, 3, 1, 0.1]), id="small numbers"),
    ],
)
def test_full_energy_rebuilds(matrix: Tensor) -> None:
    done, rank = squeezed(matrix, 1.0)
    assert float((done - matrix).abs().max()) < 1e-5
    assert 0 <= rank <= min(len(matrix), matrix[0].numel())


def test_what_compression_does_to_particular_tensors() -> None:
    assert squeezed(spectrum(9, 6, [2.0]), 1.0)[1] == 1
    assert squeezed(spectrum(9, 6, [2.0]), 0.9)[1] == 1
    assert squeezed(torch.zeros(6, 9), 0.9)[1] == 0
    kept, rank = squeezed(kernel(), 0.9)
    squares = np.linalg.svd(kernel().flatten(1).numpy(), compute_uv=False) ** 2
    assert rank == 1 + int((squares.cumsum() < 0.9 * squares.sum()).sum())
    assert float(kept.square().sum()) >= 0.9 * squares.sum() * (1 - 1e-5)
    tensors = {"a.bias": torch.randn(1, 7), "count": torch.tensor([[[2, 3]]]), "one": torch.ones(1, 1, 1)}
    done, ranks = compressed(tensors, torch.tensor([0.5]))
    assert_close(done, tensors, 0)
    assert ranks.keys() == {"one"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(value: float) -> None:
    broken = kernel().clone()
    broken[3, 1, 0, 0] = value
    with pytest.raises(RunError, match=r"conv2\.weight"):
        compressed({"fc.weight": torch.ones(1, 4, 4), "conv2.weight": broken[None]}, torch.tensor([0.9]))


@few_examples
@given(
    rows=st.integers(1, 14),
    columns=st.integers(1, 14),
    energy=st.sampled_from([0.3, 0.5, 0.9, 0.95, 0.98, 1.0]),
    decay=st.floats(0.2, 1.0),
    seed=st.integers(0, 10**6),
)
def test_the_smallest_rank_that_keeps_the_energy(
    rows: int, columns: int, energy: float, decay: float, seed: int
) -> None:
    least = min(rows, columns)
    matrix = spectrum(rows, columns, decay ** np.arange(least), seed)  # type: ignore[arg-type]
    squares = np.linalg.svd(matrix.double().numpy(), compute_uv=False) ** 2
    done, rank = squeezed(matrix, energy)
    if rank * (rows + columns + 1) >= rows * columns:
        assert rank == least
        assert torch.equal(done, matrix)
    else:
        goal = energy * squares.sum()
        assert squares[:rank].sum() >= goal * (1 - 1e-6)
        assert rank == 1 or squares[: rank - 1].sum() < goal * (1 + 1e-6)
        lost = float((done - matrix).double().square().sum())
        assert lost == pytest.approx(squares[rank:].sum(), rel=1e-3, abs=1e-9)
        assert np.linalg.matrix_rank(done.double().numpy(), tol=1e-5) <= rank


@pytest.mark.parametrize(
    ("rows", "columns", "most"),
    [(32, 75, 22), (32, 25, 13), (64, 800, 59), (512, 3136, 440), (8, 512, 7), (11, 512, 10)],
)
def test_the_largest_rank_that_saves_bytes(rows: int, columns: int, most: int) -> None:
    """Of the paper's layers; two factors and the singular values are sent, or the whole matrix."""
    for rank in (most, most + 1):
        matrix = torch.eye(rows, columns) * (torch.arange(columns) < rank)
        done, ranks = compressed({"w": matrix[None]}, torch.tensor([0.999]))
        sent = FedKD().payload(Update(done, torch.ones(1), {}, torch.ones(1).long(), prefix("rank", ranks)))
        factors, whole = 4 * rank * (rows + columns + 1), 4 * rows * columns
        assert sent == (factors if rank == most else whole)
        assert (factors < whole) == (rank == most)


def test_lanes_keep_their_own_energy() -> None:
    both = torch.stack([spectrum(12, 9, [3, 2, 1]), spectrum(12, 9, [3, 2, 1])])
    _, ranks = compressed({"w": both}, torch.tensor([0.5, 0.999]))
    assert ranks["w"].tolist() == [1, 3]


@pytest.mark.parametrize("energy", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("module", [Small, Normed], ids=["plain", "batchnorm"])
def test_a_payload_is_never_above_the_whole_model(energy: float, module: type[nn.Module]) -> None:
    run = played(f"fedkd:energy_start={energy},energy_end={energy}", [[0, 1, 2]], module)
    whole = tree.nbytes(run.model.init())
    for update in run.updates:
        assert 0 < run.method.payload(update) <= whole
        assert not [key for key in (*update.shared, *update.sums) if "teacher" in key or "projection" in key]


def test_an_unchanged_model_sends_no_matrix() -> None:
    run = played("fedkd", [[0, 1, 2]] * 2, sgd=SGD(0.0, 0.0, 0.0))
    assert_close(rest(run.shared), run.model.init(), 0)
    vectors = sum(tree.nbytes({k: v}) for k, v in run.model.init().items() if v.dim() == 2)
    for update in run.updates:
        assert [int(rank) for rank in update.sums.values()] == [0, 0]
        assert vectors <= run.method.payload(update) <= vectors + 4  # and the energy
        assert all(float(v.abs().max()) == 0 for v in rest(update.shared).values())


def test_the_students_mean_update_is_compressed_again() -> None:
    run = played("fedkd:energy_start=0.5,energy_end=0.5", [[0, 1, 2]])
    before = run.model.init()
    update = together(run.updates)
    mean = rest(tree.weighted_mean(update.shared, torch.ones(3)))
    expected, ranks = compressed(mean, torch.tensor([0.5]))
    assert_close({k: run.shared[k] - before[k] for k in before}, expected, 1e-6)
    assert int(ranks["body.weight"]) < 5


def test_student_teacher_and_projection_are_clipped_apart() -> None:
    method, model = FedKD(clip=0.01), lanes_of()
    shared, own = method.init(model, model.init())
    task = task_of(model, [4], batch=4, epochs=1, sgd=SGD(0.1, 0.0, 0.0))
    theta, fixed = method.start(task, shared, own)
    theta = noisy(theta)  # else the projection's gradient is 0
    trained = task.fit(lambda t, b: method.loss(task, t, fixed, b), theta, sgd=method.sgd(task))
    for part in (rest, lambda t: sub("teacher", t), lambda t: sub("projection", t)):
        assert distance(part(trained), part(theta)) == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert FedKD().sgd(task).clip == 10
    assert FedKD(clip=0).sgd(replace(task, sgd=SGD(0.1, clip=3.0))).clip == 3


# --- any model ----------------------------------------------------------------------------------------


class Unnamed(nn.Sequential):
    """A user's model; no part of it is called head."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 3))


class Convolutions(nn.Module):
    """A user's model without any linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).mean((2, 3))


class DeepHead(nn.Module):
    """A head of two layers, which only its name can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(48, 7)
        self.top = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.trunk(x.flatten(1)).relu())


def small_cnn() -> nn.Module:
    return CNN((8, 8, 3), 3)


every_model = pytest.mark.parametrize(
    ("module", "edge", "head"),
    [
        (small_cnn, 8, {"head.weight", "head.bias"}),
        (Small, 4, {"head.weight", "head.bias"}),
        (Normed, 4, {"head.weight", "head.bias"}),
        (Unnamed, 4, {"3.weight", "3.bias"}),
    ],
    ids=["cnn", "small", "batchnorm", "unnamed"],
)


def one_round(name: str, model: Lanes, edge: int = 4, n: int = 9, batch: int = 4) -> Update:
    """One client's round on noise, its merge and its three scores."""
    method = parse(name)
    shared, own = method.init(model, model.init())
    x = torch.randint(256, (1, n, edge, edge, 3), generator=torch.Generator().manual_seed(0))
    task = replace(task_of(model, [n], epochs=1, batch=batch, sgd=SGD(0.01)), x=x.to(torch.uint8))
    update = client_round(method, task, shared, own)
    merged = method.merge(shared, update)
    scored = [
        method.global_model(model, merged, update),
        method.local_model(task, shared, update),
        method.untuned_model(task, update) or method.local_model(task, shared, update),
    ]
    for theta in scored:
        assert theta.keys() == model.init().keys()
        assert task.predict(theta).logits.shape == (1, n, 3)
        assert bool(tree.finite(theta))
    return update


@every_method
@every_model
def test_every_method_runs_every_model(name: str, module: Any, edge: int, head: set[str]) -> None:
    assert bool(tree.finite(one_round(name, lanes_of(module), edge).shared))


@every_model
def test_head_and_body_are_disjoint_and_complete(module: Any, edge: int, head: set[str]) -> None:
    model = lanes_of(module)
    body, top = model.split(model.init())
    assert top.keys() == head
    assert not body.keys() & top.keys()
    assert body.keys() | top.keys() == model.module.state_dict().keys()


@every_method
def test_a_model_without_a_linear_layer(name: str) -> None:
    """Refused with its parameters' names by the methods that need a head; the others do not care."""
    model = lanes_of(Convolutions)
    if name not in SPLITTING:
        one_round(name, model)
        return
    with pytest.raises(InputError) as refused:
        parse(name).init(model, model.init())
    assert all(key in str(refused.value) for key in model.init())


@pytest.mark.parametrize("name", SPLITTING)
def test_the_head_can_be_named(name: str) -> None:
    model = Lanes(DeepHead(), head="top")
    body, head = model.split(model.init())
    assert body.keys() == {"trunk.weight", "trunk.bias"}
    assert head.keys() == {"top.0.weight", "top.0.bias", "top.2.weight", "top.2.bias"}
    x = torch.rand(1, 2, 3, 4, 4)
    trunk = nn.functional.linear(x.flatten(2), body["trunk.weight"][0], body["trunk.bias"][0])
    torch.testing.assert_close(model(model.init(), x).features, trunk.relu())
    update = one_round(name, model)
    if name in ("fedper", "fedas", "fedbabu"):
        assert update.shared.keys() == body.keys()
    nothing = Lanes(DeepHead(), head="nowhere")
    with pytest.raises(InputError, match=r"top\.2\.weight"):
        parse(name).init(nothing, nothing.init())


@every_method
def test_running_statistics_are_averaged_by_every_method(name: str) -> None:
    method, model = parse(name), lanes_of(Normed)
    shared, own = method.init(model, model.init())
    update = client_round(method, task_of(model, [8]), shared, own)
    updates = []
    for mean, variance, counter in ((0.0, 1.0, 10), (2.0, 3.0, 20)):
        numbers = {
            "norm.running_mean": torch.full((1, 5), mean),
            "norm.running_var": torch.full((1, 5), variance),
            "norm.num_batches_tracked": torch.tensor([counter]),
        }
        if name == "fedkd":  # sends what it changed
            numbers = {k: v - shared[k] for k, v in numbers.items()}
        updates.append(update._replace(shared=update.shared | numbers, weight=torch.ones(1)))
    merged = method.merge(shared, together(updates))
    assert merged["norm.running_mean"].tolist() == [[1.0] * 5]
    assert merged["norm.running_var"].tolist() == [[2.0] * 5]
    assert (merged["norm.num_batches_tracked"].dtype, merged["norm.num_batches_tracked"].tolist()) == (
        torch.int64,
        [15],
    )
    swapped = method.merge(shared, together(updates[::-1]))
    assert_close(swapped, merged, 0)
    x = torch.rand(1, 5, 3, 4, 4)
    scores = [
        model(method.global_model(model, m, together(ups)), x, train=False).logits
        for m, ups in ((merged, updates), (swapped, updates[::-1]))
    ]
    assert torch.equal(scores[0], scores[1])


@every_method
@pytest.mark.parametrize("classes", [1, 3])
def test_two_rounds_of_tiny_sites(name: str, classes: int) -> None:
    """Sites beside each other, around a batch of 8, with one class or all."""
    sizes = (1, 2, 7, 8, 9)
    method, model = parse(name), lanes_of()
    shared, initial = method.init(model, model.init())
    own = repeated(initial, 5) if initial else {}
    labels = [[i % classes for i in range(n)] for n in sizes]
    for t in range(2):
        task = task_of(model, sizes, batch=8, round=t, labels=labels)
        update = client_round(method, task, repeated(shared, 5), own)
        for part in (update.shared, update.own, update.sums):
            assert bool(tree.finite(part).all())
        assert bool((update.weight.isfinite() & (update.weight >= 0)).all())
        assert update.samples.tolist() == list(sizes)
        assert float(weights(update).sum()) == pytest.approx(1)
        local = method.local_model(task, repeated(shared, 5), update)
        assert bool(tree.finite(local).all())
        shared, own = method.merge(shared, update), update.own
    assert bool(tree.finite(shared))


# --- traffic and state --------------------------------------------------------------------------------

ALL, HEAD = 4 * 1_663_944, 4 * 4_104
VISITS = 8
SENT = {
    "fedcurv": 3 * ALL,
    "fedkper": ALL + 4,
    "fedas": ALL - HEAD + 4,
    "fedper": ALL - HEAD,
    "fedbabu": ALL - HEAD,
}
KEPT = {
    "fedcurv": 2 * ALL,  # its own part of the sums, to subtract it
    "moon": ALL + VISITS,
    "fedas": ALL + VISITS,
    "fedala": ALL + HEAD + VISITS,
    "ditto": ALL,
    "fedper": HEAD,
    "fedkd": ALL + 4 * 512 * 512,
}


@pytest.fixture(scope="module")
def paper_model() -> Lanes:
    return lanes_of(CNN, shape=(28, 28, 3), classes=8)


@every_method
def test_traffic_and_state_with_the_papers_model(name: str, paper_model: Lanes) -> None:
    assert tree.nbytes(paper_model.init()) == ALL == 6_655_776
    method = parse(f"{name}:epochs=1" if name == "ditto" else name)
    shared, own = method.init(paper_model, paper_model.init())
    x = torch.randint(256, (1, 2, 28, 28, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    task = replace(task_of(paper_model, [2], classes=8, epochs=1, sgd=SGD(0.01)), x=x)
    update = client_round(method, task, shared, own)
    assert tree.nbytes(update.own) == tree.nbytes(own) == KEPT.get(name, 0)
    assert {k: v.shape for k, v in update.own.items()} == {k: v.shape for k, v in own.items()}
    if name == "fedkd":
        assert 0 < method.payload(update) < ALL / 2  # a step on two images has a low rank
    else:
        assert method.payload(update) == SENT.get(name, ALL)
        assert tree.nbytes(shared) == SENT.get(name, ALL) // 8 * 8  # down: without the weight


def test_traffic_in_the_record_is_the_sum_over_the_sites(tmp_path: Path) -> None:
    federation = site("fedkper", rounds=1)
    run_site(federation, tmp_path / "run")
    size = tree.nbytes(federation.model.init())
    with open(tmp_path / "run" / "rounds.csv") as file:
        (line,) = csv.DictReader(file)
    assert (int(line["down_bytes"]), int(line["up_bytes"])) == (2 * size, 2 * (size + 4))


class Visit(NamedTuple):
    round: int
    client: int
    given: Tree
    returned: Tree
    pixels: list[int]


def marked(name: str, **fields: Any) -> Site:
    """A Site in which every pixel of client k's images is 40 k."""
    federation = site(name, **fields)
    x = torch.full_like(federation.train_x, 255)
    for k, index in enumerate(federation.train_index):
        x[index] = 40 * k
    return replace(federation, train_x=x)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_clients_state_is_its_own_and_waits_unchanged(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    visits: list[Visit] = []
    train = Worker._train

    def noted(self: Worker, clients: list[int], round: int, owns: list[Tree]) -> list[Update]:
        updates = train(self, clients, round, owns)
        ((client,), task, _), (own,), (update,) = self.trained[-1], owns, updates
        visits.append(Visit(round, client, own, update.own, task.x.unique().tolist()))
        return updates

    def stored(done: int, _: Any) -> None:
        """After every round, the checkpoint has for each client what it returned at its last visit."""
        last = {v.client: v.returned for v in visits}
        folder = tmp_path / "run" / "checkpoint"
        names = json.loads((folder / f"state-{done:06d}.json").read_text())["own"]
        assert sorted(int(file[4:10]) for file in names) == sorted(last)
        for file in names:
            assert_close(tree.load(folder / file), last[int(file[4:10])], 0)

    monkeypatch.setattr(Worker, "_train", noted)
    federation = marked(name, rounds=6)
    run_site(federation, tmp_path / "run", on_round=stored)
    initial = federation.method.init(federation.model, federation.model.init())[1]
    last: dict[int, Visit] = {}
    pauses = []
    for visit in visits:
        assert visit.pixels == [40 * visit.client]
        before = last.get(visit.client)
        assert_close(visit.given, before.returned if before else initial, 0)
        if before:
            pauses.append(visit.round - before.round)
            assert distance(visit.returned, visit.given) > 0
        last[visit.client] = visit
    assert pauses
    assert max(pauses) > 1


# --- scores -------------------------------------------------------------------------------------------


def opposed(name: str) -> Site:
    """Two clients with the same images, on which they disagree: one calls 1 what the other calls 0."""
    x, y = images(60, classes=2, seed=5)
    test_x, test_y = images(20, classes=2, seed=6)
    dataset = Dataset(
        "opposed",
        ("no", "yes"),
        np.concatenate([x, x]),
        np.concatenate([y, 1 - y]),
        np.concatenate([test_x, test_x]),
        np.concatenate([test_y, 1 - test_y]),
    )
    dealt = Partitioning(kind="iid", clients=2, min_size=1)
    index = np.arange(60)
    partition = Partition(dealt, dataset.hash, (index[:40], index[:40] + 60), (index[40:], index[40:] + 60))
    experiment = Experiment(method=name, clients=2, fraction=1.0, rounds=4, epochs=5, batch=4, lr=0.01)
    return site_of(experiment, dataset, partition, lanes_of(classes=2))


@every_method
def test_which_model_a_score_belongs_to(name: str, tmp_path: Path) -> None:
    federation = opposed(name)
    run_site(federation, tmp_path / "run")
    curves = read_curves(tmp_path / "run")
    local, on_local = curves.local_acc[-1], curves.global_on_local[-1]
    assert min(local[0], local[1]) > 0.9  # type: ignore[type-var]
    assert curves.global_acc[-1] == 0.5
    assert on_local[0] + on_local[1] == pytest.approx(1.0)  # type: ignore[operator]

    method, model = federation.method, federation.model
    record = Record.open(tmp_path / "run")
    done, shared, visits, _ = record.restore()
    before = tree.load(record.checkpoints / f"shared-{done - 1:06d}.safetensors")
    tasks = [federation.task([k], done - 1) for k in range(2)]
    owns = [tree.load(record.own_path(k, done - 1)) if visits else {} for k in range(2)]
    updates = [client_round(method, task, before, own) for task, own in zip(tasks, owns, strict=True)]
    for k, update in enumerate(updates):
        if visits:
            assert_close(update.own, tree.load(record.own_path(k, done)), 0)
        theta = method.local_model(tasks[k], before, update)
        assert score(federation, theta, k) == local[k]
    assert_close(method.merge(before, together(updates)), shared, 0)
    theta = method.global_model(model, shared, together(updates))
    assert [score(federation, theta, k) for k in range(2)] == on_local
    answers = logits(model, theta, federation.test_x[None])[0]
    assert Answers(answers, federation.test_y).accuracy() == curves.global_acc[-1]
    record.close()


def score(federation: Site, theta: Tree, client: int) -> float | None:
    index = federation.test_index[client]
    answers = logits(federation.model, theta, federation.train_x[index][None])[0]
    return Answers(answers, federation.train_y[index]).accuracy()


@every_method
def test_evaluation_disturbs_nothing(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Never, once or twice: the states are the same, bit for bit."""

    def twice(f: Any) -> Any:
        return lambda *args: (f(*args), f(*args))[1]

    run_site(site(name, Normed, rounds=3), tmp_path / "once")
    with monkeypatch.context() as patch:
        for f in ("local_logits", "global_logits", "global_on_local_logits"):
            patch.setattr(Worker, f, twice(getattr(Worker, f)))
        run_site(site(name, Normed, rounds=3), tmp_path / "twice")
    with monkeypatch.context() as patch:
        patch.setattr(METHODS[name], "local_model", lambda *args: {})
        patch.setattr(METHODS[name], "untuned_model", lambda *args: None)
        patch.setattr(execute, "logits", lambda model, theta, images: torch.zeros(*images.shape[:2], 3))
        run_site(site(name, Normed, rounds=3), tmp_path / "never")
    for path in (tmp_path / "once" / "checkpoint").glob("*.safetensors"):
        for how in ("twice", "never"):
            assert path.read_bytes() == (tmp_path / how / "checkpoint" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", ["fedper", "fedas"])
def test_the_head_probe_changes_no_later_round(name: str, tmp_path: Path) -> None:
    for probe in ("mean", "initial"):
        run_site(site(f"{name}:head_probe={probe}", rounds=3), tmp_path / probe)
    for path in (tmp_path / "mean" / "checkpoint").glob("*.safetensors"):
        same = path.read_bytes() == (tmp_path / "initial" / "checkpoint" / path.name).read_bytes()
        assert same is not path.name.startswith("scored"), path.name
