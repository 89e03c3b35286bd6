"""FedAvg: local SGD, then the mean of the clients' models weighted by their numbers of samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas (2017), Communication-efficient learning of deep networks
from decentralized data, AISTATS. Specification 4.1:

    theta^{t+1} = sum_k (n_k / sum_j n_j) theta_k^t        over the clients k sampled in round t
"""

from __future__ import annotations

from dataclasses import dataclass

from fedkper.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Nothing differs: the base class is federated averaging."""
