"""The law book: what must hold for every method, and the specification's reference cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from federation import InOrder, Normed, Small, lane, lanes_of, repeated, run_site, site, task_of
from fedkper import rng, tree
from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce, entropy, kl
from fedkper.method import Method, Update, client_round, refusal, weights
from fedkper.methods import METHODS, parse
from fedkper.methods.fedavg import FedAvg
from fedkper.methods.fedkper import FedKPer
from fedkper.rounds import admit
from fedkper.runfiles import read_curves, read_events
from fedkper.task import SGD, Task
from golden import cases, check
from terminal import column

# A method whose strength is 0 is FedAvg, bit for bit.
STRENGTH_ZERO = [
    "fedkper:cap=0,aggregation=false",
    "fedkper:distillation=false,aggregation=false",
    "fedcurv:lam=0",
    "moon:mu=0",
    "fedprox:mu=0",
    "fedntd:beta=0",
    "ditto",
]

every_method = pytest.mark.parametrize("name", METHODS)
every_model = pytest.mark.parametrize("module", [Small, Normed], ids=["plain", "batchnorm"])


def rounds(
    name: str,
    module: type[nn.Module],
    count: int,
    sizes: tuple[int, ...] = (12, 7, 9),
    order: Any = None,
    **options: Any,
) -> tuple[tree.Tree, list[Update]]:
    """`count` rounds with all clients, each alone; the last round's updates in the order of the clients."""
    method, model = parse(name), lanes_of(module)
    shared, initial = method.init(model, model.init())
    owns = [initial] * len(sizes)
    updates: list[Update] = []
    for t in range(count):
        done = {}
        for k in order or range(len(sizes)):
            task = task_of(model, [sizes[k]], clients=[k], round=t, **options)
            done[k] = client_round(method, task, shared, owns[k])
        updates = [done[k] for k in range(len(sizes))]
        owns = [u.own for u in updates]
        shared = method.merge(shared, together(updates))
    return shared, updates


def together(updates: list[Update]) -> Update:
    return Update(
        tree.stack([u.shared for u in updates]),
        torch.cat([u.weight for u in updates]),
        tree.stack([u.own for u in updates]),
        torch.cat([u.samples for u in updates]),
        tree.stack([u.sums for u in updates]),
    )


def assert_close(a: tree.Tree, b: tree.Tree, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for key, leaf in a.items():
        torch.testing.assert_close(
            leaf, b[key], rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
        )


# --- the law book -------------------------------------------------------------------------------------


@every_method
def test_a_lane_that_diverged_changes_no_other(name: str) -> None:
    method, model, sizes = parse(name), lanes_of(), (12, 7, 9)
    shared, initial = method.init(model, model.init())
    own = repeated(initial, 3) if initial else {}
    task, received = task_of(model, sizes), repeated(shared, 3)
    sound = client_round(method, task, received, own)
    received = {k: v.clone() for k, v in received.items()}
    received["body.weight"][1, 0, 0] = float("nan")
    spoilt = client_round(method, task, received, own)
    assert not bool(tree.finite(lane(spoilt, 1).shared))
    for k in (0, 2):
        for field in ("shared", "own", "sums"):
            assert_close(getattr(lane(spoilt, k), field), getattr(lane(sound, k), field), 0)
        assert torch.equal(spoilt.weight[k], sound.weight[k])
        assert method.payload(lane(spoilt, k)) == method.payload(lane(sound, k))


@every_method
def test_lanes_together_equal_each_alone(name: str) -> None:
    method, model, sizes = parse(name), lanes_of(), (12, 7, 9, 1)
    shared, initial = method.init(model, model.init())
    own = repeated(initial, 4) if initial else {}
    for t in range(2):
        many = client_round(method, task_of(model, sizes, round=t), repeated(shared, 4), own)
        for k, n in enumerate(sizes):
            mine = {key: leaf[k : k + 1] for key, leaf in own.items()}
            alone = client_round(method, task_of(model, [n], clients=[k], round=t), shared, mine)
            for field in ("shared", "own", "sums"):
                assert_close(getattr(lane(many, k), field), getattr(alone, field), 2e-5)
            torch.testing.assert_close(many.weight[k : k + 1], alone.weight, rtol=1e-4, atol=1e-6)
        shared, own = method.merge(shared, many), many.own


@every_method
@every_model
def test_the_order_of_the_clients_changes_nothing(name: str, module: type[nn.Module]) -> None:
    shared, updates = rounds(name, module, 2)
    again, others = rounds(name, module, 2, order=[2, 0, 1])
    assert_close(again, shared, 0)
    for a, b in zip(updates, others, strict=True):
        assert_close(a.own, b.own, 0)


@every_method
@every_model
@pytest.mark.parametrize("sizes", [(1, 2, 7), (8, 9, 17)])
def test_tiny_clients_and_tail_batches(name: str, module: type[nn.Module], sizes: tuple[int, ...]) -> None:
    """Batches of 8: every client takes part, moves, and is counted with all its samples."""
    model = lanes_of(module)
    before = model.init()
    _, updates = rounds(name, module, 1, sizes=sizes, batch=8)
    for n, update in zip(sizes, updates, strict=True):
        assert refusal(update, update.shared) == ""
        assert int(update.samples) == n
        trained = tree.rest(update.shared)
        assert any(not torch.equal(leaf, before[k]) for k, leaf in trained.items() if k in before)


@every_method
@pytest.mark.parametrize("labels", [[1] * 6, [0, 1] * 3], ids=["one class", "two classes"])
def test_weights_are_finite_and_not_negative(name: str, labels: list[int]) -> None:
    method, model = parse(name), lanes_of()
    shared, own = method.init(model, model.init())
    update = client_round(method, task_of(model, [6], labels=[labels]), shared, own)
    assert bool(torch.isfinite(update.weight).all())
    assert bool((update.weight >= 0).all())
    assert weights(update).tolist() == [1.0]
    assert bool(tree.finite(method.merge(shared, update)))


@every_method
def test_what_stays_at_a_site_is_not_sent(name: str) -> None:
    _, updates = rounds(name, Small, 2)
    sent = {**updates[0].shared, **updates[0].sums}
    assert not updates[0].own.keys() & sent.keys()


@every_method
@every_model
def test_a_round_does_not_touch_what_it_was_given(name: str, module: type[nn.Module]) -> None:
    method, model = parse(name), lanes_of(module)
    shared, own = method.init(model, model.init())
    copies = [{k: v.clone() for k, v in t.items()} for t in (shared, own)]
    update = client_round(method, task_of(model, [9]), shared, own)
    method.merge(shared, update)
    assert_close(shared, copies[0], 0)
    assert_close(own, copies[1], 0)


@every_method
@every_model
def test_merging_keeps_names_shapes_and_types(name: str, module: type[nn.Module]) -> None:
    method, model = parse(name), lanes_of(module)
    template, _ = method.init(model, model.init())
    shared, _ = rounds(name, module, 1)
    assert {k: (v.shape, v.dtype) for k, v in shared.items()} == {
        k: (v.shape, v.dtype) for k, v in template.items()
    }


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if cls.pull is not Method.pull])
@every_model
def test_the_closed_forms_are_the_gradients_of_the_loss(name: str, module: type[nn.Module]) -> None:
    """What training adds without a backward pass is what one through the whole loss would give."""
    _, updates = rounds(name, module, 2)
    method, model = parse(name), lanes_of(module)
    shared = rounds(name, module, 2)[0]
    task = task_of(model, [9], clients=[2], round=2)
    theta, fixed = method.start(task, shared, updates[2].own)
    with rng.drawing(5):
        theta = {k: v + 0.05 * torch.randn_like(v) if v.is_floating_point() else v for k, v in theta.items()}
    b = next(iter(task.batches(1)))[0]

    def gradients(loss: Any) -> tree.Tree:
        copy = {k: v.detach().clone() for k, v in theta.items()}
        trained = {k: v.requires_grad_() for k, v in model.parameters(copy).items()}
        found = torch.autograd.grad(
            loss(task, copy, fixed, b).sum(),
            list(trained.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(trained, found, strict=True))

    whole, part = gradients(method.loss), gradients(method.objective)
    with torch.no_grad():
        assert_close(method.pull(task, fixed, theta, part), whole, 1e-4)


@every_method
@every_model
def test_the_loss_falls(name: str, module: type[nn.Module]) -> None:
    method, model = parse(name), lanes_of(module)
    shared, updates = rounds(name, module, 5, sizes=(24, 18, 20), sgd=SGD(0.02))
    task = task_of(model, [24], clients=[0])
    start = ce_on(model, model.init(), task)
    final = method.global_model(model, shared, together(updates))
    assert ce_on(model, model.init() | final, task) < 0.8 * start


def ce_on(model: Lanes, theta: tree.Tree, task: Task) -> float:
    logits = model({k: v for k, v in theta.items() if "/" not in k}, _pixels(task), train=False).logits
    return float(ce(logits, _batch(task.y)))


def _pixels(task: Task) -> Tensor:
    from fedkper.task import pixels

    return pixels(task.x)


def _batch(y: Tensor, dtype: torch.dtype = torch.float64) -> Batch:
    return Batch(torch.empty(0), y, torch.ones(y.shape, dtype=dtype), torch.arange(y.shape[1])[None])


@every_method
@pytest.mark.parametrize("workers", [1, 2])
def test_two_half_runs_are_one_run(name: str, workers: int, tmp_path: Any) -> None:
    run_site(site(name), tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(round: int, _: Any) -> None:
        if round == 2:
            raise Stop

    with pytest.raises(Stop):
        run_site(site(name), tmp_path / "halves", on_round=stop)
    run_site(site(name), tmp_path / "halves", workers)
    assert _numbers(tmp_path / "halves") == _numbers(tmp_path / "whole")
    for path in (tmp_path / "whole" / "checkpoint").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "halves" / "checkpoint" / path.name).read_bytes(), path.name


@every_method
@every_model
def test_a_run_in_lanes_gives_the_same_numbers(name: str, module: type[nn.Module], tmp_path: Any) -> None:
    """All clients of a round side by side, or in groups."""
    quiet = {"fraction": 0.9, "rounds": 3, "lr": 0.01}
    run_site(site(name, module, **quiet), tmp_path / "alone")
    for lanes in (2, 8):
        run_site(site(name, module, **quiet), tmp_path / f"{lanes}", lanes=lanes)
        for path in sorted((tmp_path / "alone" / "checkpoint").glob("*.safetensors")):
            assert_close(tree.load(tmp_path / f"{lanes}" / "checkpoint" / path.name), tree.load(path), 1e-4)
        ours, alone = (read_curves(tmp_path / f) for f in (f"{lanes}", "alone"))
        assert ours.global_acc == pytest.approx(alone.global_acc, abs=0.1)  # an answer on the edge may flip
        assert ours.sampled == alone.sampled


def _numbers(folder: Any) -> list[str]:
    """The two tables without the seconds, and the summary."""
    lines = [row.split(",") for row in (folder / "rounds.csv").read_text().splitlines()]
    timed = {i for i, column in enumerate(lines[0]) if column.endswith("seconds")}
    kept = [",".join(cell for i, cell in enumerate(row) if i not in timed) for row in lines]
    return [*kept, (folder / "clients.csv").read_text(), (folder / "summary.json").read_text()]


@pytest.mark.parametrize("name", STRENGTH_ZERO)
@every_model
def test_strength_zero_is_fedavg_bit_for_bit(name: str, module: type[nn.Module]) -> None:
    assert_close(tree.rest(rounds(name, module, 3)[0]), rounds("fedavg", module, 3)[0], 0)


# --- FedAvg ---------------------------------------------------------------------------------------------


def test_one_client_gives_its_model() -> None:
    shared, updates = rounds("fedavg", Small, 1, sizes=(9,))
    assert_close(shared, updates[0].shared, 0)


def test_equal_sizes_give_the_plain_mean() -> None:
    shared, updates = rounds("fedavg", Small, 1, sizes=(8, 8))
    assert_close(shared, {k: (v + updates[1].shared[k]) / 2 for k, v in updates[0].shared.items()}, 1e-6)


def test_one_full_batch_is_a_centralised_step() -> None:
    """Specification 4.1 (d): E = 1, one batch a client, no momentum."""
    plain = SGD(0.1, 0.0, 0.0)
    shared, _ = rounds("fedavg", Small, 1, sizes=(6, 10), epochs=1, batch=16, sgd=plain)
    model = lanes_of()
    theta = {k: v.requires_grad_() for k, v in model.init().items()}
    a, b = task_of(model, [6], clients=[0]), task_of(model, [10], clients=[1])
    union = _pixels(replace(a, x=torch.cat([a.x, b.x], 1)))
    loss = ce(model(theta, union).logits, _batch(torch.cat([a.y, b.y], 1), torch.float32))
    grads = torch.autograd.grad(loss.sum(), list(theta.values()))
    expected = {k: (v - 0.1 * g).detach() for (k, v), g in zip(theta.items(), grads, strict=True)}
    assert_close(shared, expected, 1e-6)


# --- reference cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", cases("fedkper_loss"))
def test_fedkper_loss(case: Any, dtype: str) -> None:
    given, kind = case["inputs"], getattr(torch, dtype)
    student = torch.tensor(given["z_local"], dtype=kind)[None].requires_grad_()
    teacher = torch.tensor(given["z_global"], dtype=kind)[None]
    y = torch.tensor(given["y"])[None]
    b = _batch(y, kind)
    method = FedKPer(tau=given.get("tau", 1.0), cap=given.get("cap", 10.0))

    class Constant:
        model = staticmethod(lambda theta, x: Outs(student))

    loss = method.loss(Constant(), {}, {"teacher/logits": teacher}, b)  # type: ignore[arg-type]
    check(float(loss.detach()), case, "loss", dtype)
    check(float(ce(student.detach(), b)), case, "ce_local", dtype)
    check(float(ce(teacher, b)), case, "ce_global", dtype)
    check(float(kl(teacher, student.detach(), b, method.tau)), case, "kl", dtype)
    gradient = torch.autograd.grad(loss.sum(), student)[0][0]
    check(gradient.numpy(), case, "grad_local_logits", dtype)


class Outs:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("case", cases("fedkper_lambda"))
def test_fedkper_lambda(case: Any) -> None:
    given = torch.tensor(case["inputs"]["ce_global"], dtype=torch.float64)
    check(FedKPer().trust(given).numpy(), case, "lambda")


@pytest.mark.parametrize("case", cases("label_diversity"))
def test_label_diversity(case: Any) -> None:
    check(float(entropy(torch.tensor([case["inputs"]["counts"]]))), case, "exact")


@pytest.mark.parametrize("case", cases("fedkper_weights"))
def test_fedkper_weights(case: Any) -> None:
    given = case["inputs"]
    accuracy = torch.tensor(given["train_accs"], dtype=torch.float64)
    scores = FedKPer().score(accuracy, torch.tensor(given["histograms"]))
    update = Update({}, scores, {}, torch.tensor(given["sizes"]))
    check(weights(update).numpy(), case, "weights")
    for got, expected in zip(scores.tolist(), case["expected"]["scores"], strict=True):
        assert np.isnan(got) if expected is None else got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", cases("weighted_average"))
def test_weighted_average(case: Any) -> None:
    params = [
        {k: torch.tensor(v, dtype=torch.float64)[None] for k, v in p.items()}
        for p in case["inputs"]["params"]
    ]
    merged = tree.weighted_mean(
        tree.stack(params), torch.tensor(case["inputs"]["weights"], dtype=torch.float64)
    )
    for key, expected in case["expected"].items():
        np.testing.assert_allclose(merged[key][0].numpy(), expected, rtol=1e-9, atol=1e-12)


class Linear(nn.Module):
    """Linear softmax, the model of the reference's whole rounds."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.only = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x)


MINI = {
    "fedavg": "fedavg",
    "fedkper": "fedkper",
    "fedkper_loss_only": "fedkper:aggregation=false",
    "fedkper_agg_only": "fedkper:distillation=false",
    "fedprox": "fedprox:mu={mu}",
    "fedntd": "fedntd:tau={tau},beta={beta}",
}


@pytest.mark.parametrize(
    "case", [c for c in cases("mini_round") if MINI[c.values[0]["inputs"]["algo"]].split(":")[0] in METHODS]
)
def test_whole_round(case: Any) -> None:
    given, expected = case["inputs"], case["expected"]
    method = parse(MINI[given["algo"]].format(**given))
    model = Lanes(Linear(4, 3))
    as_tree = {"only.weight": given["W"], "only.bias": given["b"]}
    shared = {k: torch.tensor(v, dtype=torch.float64)[None] for k, v in as_tree.items()}
    updates = []
    for client in given["clients"]:
        task = Task(
            model=model,
            x=torch.tensor(client["X"], dtype=torch.float64)[None],
            y=torch.tensor(client["y"])[None],
            n=torch.tensor([len(client["y"])]),
            classes=3,
            streams=[InOrder()],
            sgd=SGD(given["lr"], given["momentum"], given["weight_decay"]),
            epochs=given["epochs"],
            batch=given["batch"],
        )
        updates.append(client_round(method, task, shared, {}))
    for update, local in zip(updates, expected["local"], strict=True):
        np.testing.assert_allclose(update.shared["only.weight"][0], local["W"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(update.shared["only.bias"][0], local["b"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(weights(together(updates)), expected["weights"], rtol=1e-9, atol=1e-12)
    merged = method.merge(shared, together(updates))
    np.testing.assert_allclose(merged["only.weight"][0], expected["global"]["W"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(merged["only.bias"][0], expected["global"]["b"], rtol=1e-9, atol=1e-12)


# --- FedKPer at its edges -----------------------------------------------------------------------------------


def test_weights_in_the_limit_of_small_eps() -> None:
    method = FedKPer(eps=1e-8)
    counts = torch.tensor([[10, 10, 0], [20, 0, 0], [5, 5, 10]])
    score = method.score(torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64), counts)
    h = [np.log(2), 0, 0.5 * np.log(4) + 0.5 * np.log(2)]
    expected = np.array([h[0], h[1], 0.5 * h[2]]) / (h[0] + 0.5 * h[2])
    np.testing.assert_allclose(
        weights(Update({}, score, {}, torch.tensor([20, 20, 20]))), expected, atol=1e-4
    )
    np.testing.assert_allclose(expected, [4 / 7, 0, 3 / 7], atol=1e-9)


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [([0.9, 0.3], [0.75, 0.25]), ([0.0, 0.0], [0.2, 0.8])],
    ids=["one class", "all wrong"],
)
def test_single_class_sites(accuracy: list[float], expected: list[float]) -> None:
    score = FedKPer().score(
        torch.tensor(accuracy, dtype=torch.float64), torch.tensor([[20, 0, 0], [0, 80, 0]])
    )
    np.testing.assert_allclose(weights(Update({}, score, {}, torch.tensor([20, 80]))), expected, atol=1e-9)


def test_the_teacher_at_the_extremes() -> None:
    teacher, student = torch.tensor([[[200.0, 0, 0]]]), torch.tensor([[[0.0, 200, 0]]])
    b = _batch(torch.tensor([[0]]), torch.float32)
    assert float(kl(teacher, student, b)) == pytest.approx(200)
    assert float(FedKPer().trust(ce(teacher, b))) == 10.0
    wrong = _batch(torch.tensor([[1]]), torch.float32)
    assert float(FedKPer().trust(ce(teacher, wrong))) < 0.01
    huge = torch.tensor([[[1e4, -1e4, 0]]])
    assert bool(torch.isfinite(kl(huge, student, b)).all())
    assert float(kl(teacher, student * 0.5, b)) != pytest.approx(float(kl(student * 0.5, teacher, b)))


def test_the_first_step_of_a_round_is_fedavgs() -> None:
    sizes: dict[str, Any] = {"sizes": (4,), "batch": 4, "epochs": 1}
    assert_close(rounds("fedkper", Small, 1, **sizes)[0], rounds("fedavg", Small, 1, **sizes)[0], 1e-6)


# --- what the server accepts ---------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **values: Any) -> None:
        self.events.append({"event": kind, **values})


def _spoilt(update: Update, how: str) -> Update:
    shared = {k: v.clone() for k, v in update.shared.items()}
    if how in ("nan", "inf"):
        shared["body.weight"][0, 0, 0] = float(how)
    fields: dict[str, Any] = {
        "negative": {"samples": torch.tensor([-5])},
        "negative weight": {"weight": torch.tensor([-1.0])},
        "huge": {"samples": torch.tensor([10**18])},
        "nan weight": {"weight": torch.tensor([float("nan")])},
        "shape": {"shared": shared | {"body.bias": torch.zeros(1, 4)}},
        "missing": {"shared": {k: v for k, v in shared.items() if k != "body.bias"}},
    }
    return update._replace(**{"shared": shared, **fields.get(how, {})})


@every_method
@pytest.mark.parametrize(
    "how", ["nan", "inf", "negative", "negative weight", "huge", "nan weight", "shape", "missing"]
)
def test_a_spoilt_update_is_named_and_left_out(name: str, how: str) -> None:
    method, model = parse(name), lanes_of()
    template, _ = method.init(model, model.init())
    _, updates = rounds(name, Small, 1)
    log = Log()
    spoilt = {0: updates[0], 1: _spoilt(updates[1], how), 2: updates[2]}
    admitted = admit(spoilt, template, log, 1)  # type: ignore[arg-type]
    assert list(admitted) == [0, 2]
    assert [(e["event"], e["client"], e["round"]) for e in log.events] == [("rejected", 1, 2)]
    merged = method.merge(template, together(list(admitted.values())))
    assert_close(merged, method.merge(template, together([updates[0], updates[2]])), 0)
    assert bool(tree.finite(merged))


def test_a_merge_that_breaks_the_model_is_named_and_the_model_stays(tmp_path: Any) -> None:
    @dataclass(frozen=True)
    class Broken(FedAvg):
        def merge(self, shared: tree.Tree, update: Update) -> tree.Tree:
            return {k: v * float("nan") for k, v in shared.items()}

    one = replace(site("fedavg", rounds=2), method=Broken())
    run_site(one, tmp_path / "r")
    kept = [e for e in read_events(tmp_path / "r") if e["event"] == "kept"]
    assert [e["round"] for e in kept] == [1, 2]
    assert "what Broken.merge made of finite updates is not finite" in kept[0]["reason"]
    (accuracy,) = set(read_curves(tmp_path / "r").global_acc)
    assert accuracy is not None
    assert set(column(tmp_path / "r", "clients.csv", "weight")) <= {"", "0.0"}


def test_buffers_are_averaged_and_keep_their_types() -> None:
    updates = []
    for mean, variance, counter in ((0.0, 1.0, 10), (2.0, 3.0, 20)):
        theta = lanes_of(Normed).init()
        theta["norm.running_mean"] = torch.full_like(theta["norm.running_mean"], mean)
        theta["norm.running_var"] = torch.full_like(theta["norm.running_var"], variance)
        theta["norm.num_batches_tracked"] = torch.tensor([counter])
        updates.append(Update(theta, torch.tensor([5.0]), {}, torch.tensor([5])))
    merged = FedAvg().merge({}, together(updates))
    assert bool((merged["norm.running_mean"] == 1).all())
    assert bool((merged["norm.running_var"] == 2).all())
    assert merged["norm.num_batches_tracked"].dtype == torch.int64
    assert merged["norm.num_batches_tracked"][0].shape == ()
    assert int(merged["norm.num_batches_tracked"]) == 15
    assert_close(FedAvg().merge({}, together(updates[::-1])), merged, 0)
    module = tree_into(Normed(), merged)
    assert module.norm.num_batches_tracked.shape == ()


def tree_into(module: nn.Module, theta: tree.Tree) -> Any:
    module.load_state_dict({k: v[0] for k, v in theta.items()})
    return module.eval()
