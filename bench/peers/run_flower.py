"""Flower's simulation: one Ray actor a core."""

from __future__ import annotations

import logging
from typing import Any

from flower_app import client_app, server_app
from flwr.simulation import run_simulation
from task import CORES

if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    ray: dict[str, Any] = {"num_cpus": CORES, "include_dashboard": False, "log_to_driver": False}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=20,
        backend_config={"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
