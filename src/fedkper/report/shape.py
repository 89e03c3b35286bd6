"""What a report shows, as plain values: its parts, the columns of its tables, and how much at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedkper import __version__
from fedkper.report import forgot, sites
from fedkper.report.chart import LineChart, Reliability
from fedkper.report.verdict import Verdict

# What is shown at most; a page says what it left out. The worst and the leading come first.
SETTINGS, METHODS, DRAWN, CLIENTS, CLASSES, EVENTS, WARNINGS = 12, 60, 6, 40, 30, 12, 60

COLUMNS = {
    "global_acc": ("global accuracy", "on patients of no client, mean over rounds"),
    "global_bwt": (
        "backward transfer",
        "accuracy lost at clients since they last trained; 0 is no forgetting",
    ),
    "global_consistency": ("global consistency", "1 is a global accuracy that never falls back"),
    "local_acc": (
        "local accuracy",
        "of each client’s own model on its own patients, mean over clients, rounds",
    ),
    "worst_client_acc": ("worst client", "the lowest local accuracy of a round, mean over rounds"),
    "local_consistency": ("local consistency", "1 is a local accuracy that never falls back"),
    "balance": ("balance", "mean of global and local accuracy"),
}
SCORE_COLUMNS = {
    "global_balanced_acc": ("balanced accuracy", "mean recall of the classes"),
    "global_f1": ("macro F1", "mean F1 of the classes"),
    "global_auc": ("AUC", "area under the ROC curve, one class against the rest, mean over classes"),
    "global_ece": ("calibration error", "expected distance of confidence and accuracy; lower is better"),
}
SPREAD_COLUMNS = {
    "mean": ("mean", "over clients"),
    "std_clients": ("deviation", "standard deviation over clients; lower is fairer"),
    "percentile10": ("10th percentile", "a tenth of the clients is at or below this"),
    "worst": ("lowest", "the client with the lowest accuracy"),
}
PRICE = {
    "down_bytes": "down a round",
    "up_bytes": "up a round",
    "total_bytes": "in all",
    "train_seconds": "training a round",
    "merge_seconds": "merging a round",
    "eval_seconds": "scoring a round",
    "total_seconds": "in all",
}
CHARTS = {
    "global_acc": ("Patients of no client", "global accuracy"),
    "local_acc": ("A client’s own patients", "local accuracy"),
    "global_bwt": ("Forgetting", "backward transfer"),
    "worst_client_acc": ("The worst-off client of a round", "worst client"),
}


@dataclass(frozen=True)
class Cell:
    """A number of a table; None has a reason. `title` is for hovering."""

    value: float | None
    deviation: float | None = None
    reason: str = ""
    title: str = ""


@dataclass(frozen=True)
class Row:
    """A line of a table of methods."""

    name: str
    note: str
    cells: Mapping[str, Cell]
    number: int
    """of its colour"""


@dataclass(frozen=True)
class Matrix:
    """Confusion of the global model on the global test set, over the last rounds of all seeds."""

    name: str
    classes: tuple[tuple[int, str], ...]
    counts: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]
    recall: tuple[float | None, ...]
    unanswered: int


@dataclass(frozen=True)
class Heat:
    """A table of shares, clients by classes; a cell is (right, samples)."""

    name: str
    model: str
    rows: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True)
class Section:
    """A setting: runs that differ in method and seed only."""

    key: str
    title: str
    real: bool
    """whether its runs are those of a real federation"""
    full: bool
    """otherwise only the answer and the table are shown"""
    facts: tuple[tuple[str, str], ...]
    deviations: tuple[str, ...]
    verdict: Verdict
    several: bool
    """whether some method has more than one seed"""
    rows: tuple[Row, ...]
    left_out: int
    """methods beyond METHODS"""
    scores: tuple[Row, ...]
    price: tuple[Row, ...]
    spread: Mapping[str, tuple[Row, ...]]
    partitions: tuple[tuple[str, str, Cell, Cell, int], ...]
    """(method, partition seed, global accuracy, local accuracy, runs)"""
    charts: tuple[LineChart, ...]
    forgotten: tuple[forgot.Fall, ...]
    recalls: tuple[forgot.Recalls, ...]
    classes: tuple[str, ...]
    holdings: sites.Holdings | None
    clients: tuple[sites.ClientRow, ...]
    clients_in_all: int
    shown: tuple[str, ...]
    """methods in the table of clients: the leading one and the reference"""
    auc_clients: tuple[tuple[str, int, int, Cell], ...]
    """(method, clients with an AUC, clients, mean); empty where not recorded"""
    heats: tuple[Heat, ...]
    matrices: tuple[Matrix, ...]
    calibration: tuple[tuple[str, Reliability], ...]
    warnings: tuple[tuple[str, str], ...]
    """(what, text)"""
    commands: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]

    @property
    def has_scores(self) -> bool:
        """Whether any of SCORE_COLUMNS was recorded."""
        return any(cell.value is not None for row in self.scores for cell in row.cells.values())


@dataclass(frozen=True)
class Report:
    title: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    runs: int
    real: int
    """of them, those of real federations"""
    version: str = __version__
