"""FedKPer: federated learning for medicine that generalises, personalises and does not forget."""

__version__ = "0.1.0"
