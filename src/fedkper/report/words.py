"""Numbers as a reader reads them: per cent, percentage points, bytes, seconds."""

from __future__ import annotations


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def points(value: float) -> str:
    """A difference of shares in percentage points, with a true minus sign."""
    text = f"{abs(100 * value):.1f}"
    return text if value >= 0 or text == "0.0" else f"−{text}"


def signed(value: float) -> str:
    """A difference in percentage points with its sign."""
    text = points(value)
    return f"+{text}" if value > 0 and text != "0.0" else text


def size(value: float) -> str:
    """Bytes as a person reads them: 13.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"
