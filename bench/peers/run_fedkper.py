"""fedkper itself: its simulation on the arrays that the peers get."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from task import METHOD, ROUNDS, Given, report

from fedkper import models
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.execute import cores
from fedkper.experiment import Experiment
from fedkper.record import Record
from fedkper.simulate import simulate
from fedkper.site import site_of


def main() -> None:
    method, _, precision = METHOD.partition("-")
    with np.load(os.environ["PEERS_DATA"]) as file:
        arrays = dict(file)
    names = tuple(f"class {c}" for c in range(8))
    images = (arrays[k] for k in ("train_x", "train_y", "test_x", "test_y"))
    dataset = Dataset("peers", names, *images)
    parts = tuple(arrays["train_parts"]), tuple(arrays["test_parts"])
    partition = Partition(Partitioning(), dataset.hash, *parts)
    experiment = Experiment(
        method=method, rounds=ROUNDS, lr_decay=1.0, precision="bf16" if precision else "float32"
    )
    model = models.build("cnn", dataset.shape, 8, experiment.seed, precision=experiment.precision)
    model.module.load_state_dict({k: torch.from_numpy(arrays[f"init/{k}"]) for k in model.names})

    def on_round(round: int, line: dict[str, Any]) -> None:
        report(round=round, accuracy=line["global_acc"])

    with tempfile.TemporaryDirectory() as folder:
        record = Record.create(Path(folder) / "run")
        simulate(site_of(experiment, dataset, partition, model), record, cores(), on_round=on_round)
        _, shared, *_ = record.restore()
        report(moved=Given().moved({k: leaf[0] for k, leaf in shared.items()}))
        record.close()


if __name__ == "__main__":
    main()
