"""Reads one file in MedMNIST's form (npz) and checks it: images, labels, class names, further columns."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkper.data.sets import Info
from fedkper.errors import InputError

NEEDED = ("train_images", "train_labels", "test_images", "test_labels")

Raw = dict[str, NDArray[Any]]
Labels = NDArray[np.int64]
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class _File:
    """What is read, and as what."""

    path: Path
    info: Info | None
    size: int

    def error(self, key: str, what: str, remedy: str = "") -> InputError:
        """A fault of one key, or of the whole file if `key` is empty."""
        again = "Get a complete copy of the file, or write it again with numpy.savez_compressed"
        if self.info:
            again = (
                f"Delete the file so that it is downloaded again, or fetch it: {self.info.where(self.size)}"
            )
        place = f"{self.path}, {key}" if key else f"{self.path}"
        return InputError(f"{place}: {what}. {remedy or again}.")


class Content(NamedTuple):
    """What a file holds, checked, with the labels numbered from 0."""

    train_x: Images
    """[N, H, W, channels]"""
    train_y: Labels
    test_x: Images
    test_y: Labels
    classes: tuple[str, ...]
    mapping: dict[str, int]
    """Old label -> new, if labels were renumbered."""
    columns: Raw
    """Further columns of the train split, [N] each."""
    notices: list[str]


def read(path: Path, info: Info | None, size: int, trusted: bool) -> Content:
    """The file of the published set `info`, or of any other set, with images of side `size`.

    Every member's zip checksum is compared unless the file is `trusted`. Raises InputError for every fault.
    """
    file = _File(path, info, size)
    raw = _arrays(file, trusted)
    train_x, test_x = _splits(file, raw)
    train_y, test_y, classes, mapping = _targets(file, raw, len(train_x), len(test_x))
    columns, left_out = _columns(file, raw, len(train_x))
    notices = _label_notices(train_y, test_y, classes, mapping) + _constant(train=train_x, test=test_x)
    return Content(train_x, train_y, test_x, test_y, classes, mapping, columns, notices + left_out)


def _arrays(file: _File, trusted: bool) -> Raw:
    """The arrays of the train and test split and `classes`; every member is checked unless `trusted`."""
    _sniff(file)
    try:
        # NumPy stops reading where a header says that its array ends: a damaged header would go unnoticed.
        broken = None if trusted else _broken_member(file.path)
        archive = np.load(file.path, allow_pickle=False)
    except Exception as error:  # damaged bytes make the zip reader fail in many ways
        raise file.error("", f"the file is cut or damaged ({cause(error)})") from None
    with archive:
        if broken:
            raise file.error(broken.removesuffix(".npy"), "the zip checksum is wrong: the file is damaged")
        missing = [key for key in NEEDED if key not in archive.files]
        if missing:
            what = f"missing; the file has the keys: {', '.join(archive.files) or 'none'}"
            raise file.error(", ".join(missing), what, "Save the arrays under the names of MedMNIST")
        keys = [key for key in archive.files if key in (*NEEDED, "classes") or key.startswith("train_")]
        return {key: _member(file, archive, key) for key in keys}


def _sniff(file: _File) -> None:
    """Name the usual things that are not an npz archive."""
    with open(file.path, "rb") as stream:
        start = stream.read(64).lstrip()
    if start.startswith(b"PK"):
        return
    what = "not an npz archive"
    if not start:
        what = "the file is empty"
    elif start.startswith(b"<"):
        what = "a web page, not data: a download went wrong"
    elif start.startswith(b"\x93NUMPY"):
        what = "a single array, not an npz archive of several"
    elif start.startswith(b"\x80"):
        what = "a pickle, which is never loaded because it could run a program"
    raise file.error("", what)


def _broken_member(path: Path) -> str | None:
    """First member whose checksum is wrong; ValueError if the directory of the archive has lost entries."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
        # zipfile does not compare its entries with the number of entries that ends the archive.
        stream.seek(-(22 + len(archive.comment)), os.SEEK_END)
        count = int.from_bytes(stream.read(12)[10:], "little")
        if count not in (len(archive.infolist()), 0xFFFF):  # 0xFFFF: the number is elsewhere (zip64)
            raise ValueError(f"{len(archive.infolist())} of {count} members are left")
        return archive.testzip()


def _member(file: _File, archive: Any, key: str) -> NDArray[Any]:
    try:
        value = archive[key]
    except Exception as error:
        if "allow_pickle" not in str(error):
            raise file.error(key, f"cannot be read ({cause(error)})") from None
        what = "holds Python objects (a pickle), which are never loaded because they could run a program"
        raise file.error(key, what, "Save it as an array of numbers or text") from None
    if not isinstance(value, np.ndarray):
        raise file.error(key, "not a NumPy array")
    return value


def cause(error: Exception) -> str:
    """An error of a library in one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Checking what was read


def _splits(file: _File, raw: Raw) -> tuple[Images, Images]:
    """Images of both splits, [N, H, W, channels], of one shape."""
    train, test = (_images(file, key, raw[key]) for key in ("train_images", "test_images"))
    (h, w, c), info, size = train.shape[1:], file.info, file.size
    if train.shape[1:] != test.shape[1:]:
        what = f"(H, W, channels) is {test.shape[1:]}, but {train.shape[1:]} in train_images"
        raise file.error("test_images", what, "Bring both splits to one size and one number of channels")
    if (info or size != 28) and (h, w) != (size, size):
        what = f"images of {h} x {w}, but size {size} was asked for"
        raise file.error("train_images", what, "Ask for the size in the file, or rename the file")
    if info and c != info.channels:
        what = f"images with {c} channel(s), but {info.name} has {info.channels}"
        raise file.error("train_images", what, "Rename the file if it is a set of your own")
    return train, test


def _images(file: _File, key: str, images: NDArray[Any]) -> Images:
    """uint8 [N, H, W], [N, H, W, 1] or [N, H, W, 3] as [N, H, W, channels]."""
    if images.dtype != np.uint8:
        nan = int(np.isnan(images).sum()) if images.dtype.kind == "f" else 0
        what = f"pixels are {images.dtype}{f' with {nan} NaN' if nan else ''}; only uint8 (0 to 255) is read"
        raise file.error(key, what, "Scale the pixels to 0 to 255 and save them as uint8")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        what = f"the shape is {images.shape}, not [N, H, W], [N, H, W, 1] or [N, H, W, 3]"
        raise file.error(key, what, "Save 2-D images with the 1 or 3 channels on the last axis")
    if 0 in images.shape:
        raise file.error(key, f"0 images: the shape is {images.shape}", "Both splits need images")
    return np.ascontiguousarray(images)


def _labels(file: _File, key: str, labels: NDArray[Any], count: int) -> tuple[Labels, int | None]:
    """Class numbers [N], and the number of columns if the labels are one-hot."""
    if labels.dtype.kind not in "biuf":
        raise file.error(key, f"labels are {labels.dtype}, not numbers", "Number the classes from 0")
    if labels.ndim not in (1, 2) or labels.shape[-1] == 0:
        what = f"the shape is {labels.shape}, not (N,), (N, 1) or one-hot (N, classes)"
        raise file.error(key, what, "Save one class number per image")
    if len(labels) != count:
        what = f"{len(labels)} labels for {count} images"
        raise file.error(key, what, "Save exactly one label per image, in the order of the images")
    table = labels.reshape(count, -1).astype(np.float64 if labels.dtype.kind == "f" else labels.dtype)
    if table.shape[1] == 1:
        whole = np.isfinite(table) & (table < 2**53) & (table > -(2**53)) & (np.floor(table) == table)
        _check_rows(file, key, table, whole)
        return table[:, 0].astype(np.int64), None
    sums = np.where(np.isfinite(table), table, 0).sum(axis=1, dtype=np.float64)
    row = int(np.argmax(np.abs(sums - 1) > 1e-6))
    if abs(sums[row] - 1) > 1e-6:
        what = f"multi-label: row {row} (from 0) of {table.shape[1]} columns sums to {sums[row]:g}, not 1"
        raise file.error(key, what, "Keep exactly one class per image")
    _check_rows(file, key, table, (table == 0) | (table == 1))
    return table.argmax(axis=1).astype(np.int64), table.shape[1]


def _check_rows(file: _File, key: str, table: NDArray[Any], good: NDArray[np.bool_]) -> None:
    bad = np.flatnonzero(~good.all(axis=1))
    if bad.size:
        what = f"row {bad[0]} (from 0) is {table[bad[0]].tolist()}, not one class number"
        raise file.error(key, what, "Give every image one class number, or remove the image")


def _names(file: _File, raw: Raw) -> tuple[str, ...] | None:
    """Class names of the table or of the array `classes`, if there are any."""
    info, array = file.info, raw.get("classes")
    if array is None:
        return info.classes if info else None
    names = tuple(array.ravel().tolist())
    if array.dtype.kind != "U" or array.ndim != 1 or not 0 < len(set(names) - {""}) == len(names):
        what = f"{array.dtype} {array.shape} is not a list of different class names"
        raise file.error("classes", what, "Save the names as a text array in the order of their numbers")
    if info and names != info.classes:
        raise file.error("classes", f"not the classes of {info.name}", "Rename the file if it is another set")
    return names


def _targets(
    file: _File, raw: Raw, train: int, test: int
) -> tuple[Labels, Labels, tuple[str, ...], dict[str, int]]:
    """Class numbers of both splits from 0, class names, and the mapping if labels were renumbered."""
    a, width_a = _labels(file, "train_labels", raw["train_labels"], train)
    b, width_b = _labels(file, "test_labels", raw["test_labels"], test)
    names = _names(file, raw)
    widths = {width for width in (width_a, width_b) if width}
    if len(widths | ({len(names)} if names and widths else set())) > 1:
        what = f"one-hot with {sorted(widths)} columns for {len(names) if names else 'as many'} classes"
        raise file.error("train_labels, test_labels", what, "Use one column per class in both splits")
    values = [int(value) for value in np.union1d(a, b)]
    if len(values) == 1 and len(raw.get("classes", ())) < 2:
        what = f"only one class: every label is {values[0]}"
        remedy = "Classification needs at least two: name the classes in the text array `classes`"
        raise file.error("train_labels, test_labels", what, remedy)
    known = len(names) if names else max(widths, default=None)
    fits = values[0] >= 0 and values[-1] < (known or len(values))
    mapping: dict[str, int] = {}
    if not fits:
        _refuse_labels(file, a, b, values, known)
        mapping = {str(value): number for number, value in enumerate(values)}
        a, b = np.searchsorted(values, a).astype(np.int64), np.searchsorted(values, b).astype(np.int64)
    return a, b, names or tuple(map(str, range(known) if known else values)), mapping


def _refuse_labels(file: _File, a: Labels, b: Labels, values: list[int], known: int | None) -> None:
    """Raise InputError unless labels that are not 0 to C-1 can be renumbered without a doubt."""
    negative = values[0] < 0 and values != [-1, 1]  # -1 against 1 is a usual coding of two classes
    if not negative and not file.info and known in (None, len(values)):
        return
    for key, labels in (("train_labels", a), ("test_labels", b)):
        bad = np.flatnonzero((labels < 0) | (labels >= (known or np.inf)))
        if bad.size:
            fault = f"outside the classes 0 to {known - 1}" if known else "negative"
            what = f"row {bad[0]} (from 0) has the label {labels[bad[0]]}: {fault}; {bad.size} such row(s)"
            raise file.error(key, what, "Correct these labels, or remove images that have no label")


def _label_notices(a: Labels, b: Labels, names: tuple[str, ...], mapping: dict[str, int]) -> list[str]:
    notices = []
    if mapping:
        pairs = ", ".join(f"{old} -> {new}" for old, new in mapping.items())
        doubt = "; 255 often marks an image without a label" if "255" in mapping else ""
        notices.append(f"labels were renumbered: {pairs}{doubt}.")
    for split, labels in (("train", a), ("test", b)):
        empty = np.flatnonzero(np.bincount(labels, minlength=len(names)) == 0)
        if empty.size:
            notices.append(f"no {split} image of class {', '.join(names[i] for i in empty)}.")
    return notices


def _columns(file: _File, raw: Raw, count: int) -> tuple[Raw, list[str]]:
    """Further columns of the train split, [N] text or integers, and a notice for each one left out."""
    columns, notices = {}, []
    for key in [key for key in raw if key not in (*NEEDED, "classes")]:
        array, name = raw[key], key.removeprefix("train_")
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim == 0 or len(array) != count:
            what = f"the shape is {array.shape} for {count} train images"
            raise file.error(key, what, "Save one value per train image, or leave the key out")
        if array.ndim == 1 and array.dtype.kind in "iuU" and name:
            columns[name] = array
        else:
            notices.append(f"{key} was left out: {array.dtype} {array.shape}, not [N] text or integers.")
    return columns, notices


def _constant(**splits: Images) -> list[str]:
    notices = []
    for split, images in splits.items():
        flat = images.reshape(len(images), -1)
        count = int((flat.max(axis=1) == flat.min(axis=1)).sum())
        if count:
            notices.append(f"{count} of {len(images)} {split} images are constant (all pixels equal).")
    return notices
