"""MedMNIST files (npz): the published single-label 2-D sets, and any other file in the same format.

`load` finds or downloads a file, checks everything that it reads, and returns a `Dataset`. Counts, class
names, licences, addresses and checksums: package medmnist 3.0.2; counts of 2.x: specification 3.1.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedkper.data.dataset import Dataset
from fedkper.errors import InputError

SIZES = (28, 64, 128, 224)
ADDRESS = "https://zenodo.org/records/10519652/files"
MEDMNIST = "MedMNIST v2: Yang et al., Scientific Data 10:41 (2023)"
NEEDED = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Info:
    """Facts of one published set."""

    name: str
    modality: str
    classes: tuple[str, ...]
    channels: int
    counts: tuple[int, int, int]
    """Images of train, val, test in medmnist 3.0.2."""
    md5: dict[int, str]
    """Checksum of the official file of every image size."""
    source: str
    """Short citation of the source images."""
    licence: str = "CC BY 4.0"
    counts_2x: tuple[int, int, int] | None = None
    """Counts in medmnist 2.x where they differ."""
    ordinal: bool = False

    @property
    def citation(self) -> str:
        """The set and its source images, to cite where results are shown."""
        return f"{MEDMNIST}; source images: {self.source}"

    @property
    def task(self) -> str:
        """'binary', 'multi-class' or 'ordinal' (all are trained as single-label classification)."""
        return "ordinal" if self.ordinal else "binary" if len(self.classes) == 2 else "multi-class"

    def file(self, size: int = 28) -> str:
        """Name of the official file: bloodmnist.npz (28 x 28), bloodmnist_64.npz and so on."""
        return f"{self.name}.npz" if size == 28 else f"{self.name}_{size}.npz"

    def address(self, size: int = 28) -> str:
        """Public download address of the official file."""
        return f"{ADDRESS}/{self.file(size)}?download=1"

    def where(self, size: int = 28) -> str:
        """Address and checksum of the official file, for messages."""
        return f"public address {self.address(size)}, MD5 {self.md5[size]}"


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split("|"))


def _md5(digests: str) -> dict[int, str]:
    return dict(zip(SIZES, digests.split(), strict=True))


_KERMANY = "Kermany et al., Cell 172:1122-1131 (2018)"
_LITS = "Bilic et al., Medical Image Analysis 84:102680 (2023); Xu et al., IEEE TMI 38:1885-1898 (2019)"
_ORGANS = _split(
    "bladder|femur-left|femur-right|heart|kidney-left|kidney-right|liver|lung-left|lung-right|pancreas|spleen"
)

# One line per fact; the formatter would give every argument its own line.
# fmt: off
_TABLE = (
    Info("pathmnist", "colon pathology",
         _split("adipose|background|debris|lymphocytes|mucus|smooth muscle|normal colon mucosa|"
         "cancer-associated stroma|colorectal adenocarcinoma epithelium"),
         3, (89996, 10004, 7180),
         _md5("a8b06965200029087d5bd730944a56c1 55aa9c1e0525abe5a6b9d8343a507616 "
              "ac42d08fb904d92c244187169d1fd1d9 2c51a510bcdc9cf8ddb2af93af1eadec"),
         "Kather et al., PLOS Medicine 16:e1002730 (2019)"),
    Info("dermamnist", "dermatoscope",
         _split("actinic keratoses and intraepithelial carcinoma|basal cell carcinoma|"
         "benign keratosis-like lesions|dermatofibroma|melanoma|melanocytic nevi|vascular lesions"),
         3, (7007, 1003, 2005),
         _md5("0744692d530f8e62ec473284d019b0c7 b70a2f5635c6199aeaa28c31d7202e1f "
              "2defd784463fa5243564e855ed717de1 8974907d8e169bef5f5b96bc506ae45d"),
         "Tschandl et al., Scientific Data 5:180161 (2018); Codella et al., arXiv:1902.03368 (2019)",
         licence="CC BY-NC 4.0"),
    Info("octmnist", "retinal OCT",
         _split("choroidal neovascularization|diabetic macular edema|drusen|normal"), 1, (97477, 10832, 1000),
         _md5("c68d92d5b585d8d81f7112f81e2d0842 e229e9440236b774d9f0dfef9d07bdaf "
              "0a97e76651ace45c5d943ee3f65b63ae abc493b6d529d5de7569faaef2773ba3"),
         _KERMANY),
    Info("pneumoniamnist", "chest X-ray",
         _split("normal|pneumonia"), 1, (4708, 524, 624),
         _md5("28209eda62fecd6e6a2d98b1501bb15f 8f4eceb4ccffa70c672198ea285246c6 "
              "05b46931834c231683c68f40c47b2971 d6a3c71de1b945ea11211b03746c1fe1"),
         _KERMANY),
    Info("retinamnist", "fundus camera",
         _split("0|1|2|3|4"), 3, (1080, 120, 400),
         _md5("bd4c0672f1bba3e3a89f0e4e876791e4 afda852cc34dcda56f86ad2b2457dbcc "
              "e48e916a24454daf90583d4e6efb1a18 eae7e3b6f3fcbda4ae613ebdcbe35348"),
         "DeepDRiD: Liu et al., Patterns 3:100512 (2022)", ordinal=True),
    Info("breastmnist", "breast ultrasound",
         _split("malignant|normal, benign"), 1, (546, 78, 156),
         _md5("750601b1f35ba3300ea97c75c52ff8f6 742edef2a1fd1524b2efff4bd7ba9364 "
              "363e4b3f8d712e9b5de15470a2aaadf1 b56378a6eefa9fed602bb16d192d4c8b"),
         "Al-Dhabyani et al., Data in Brief 28:104863 (2020)"),
    Info("bloodmnist", "blood cell microscope",
         _split("basophil|eosinophil|erythroblast|"
         "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)|lymphocyte|monocyte|"
         "neutrophil|platelet"),
         3, (11959, 1712, 3421),
         _md5("7053d0359d879ad8a5505303e11de1dc 2b94928a2ae4916078ca51e05b6b800b "
              "adace1e0ed228fccda1f39692059dd4c b718ff6835fcbdb22ba9eacccd7b2601"),
         "Acevedo et al., Data in Brief 30:105474 (2020)"),
    Info("tissuemnist", "kidney cortex microscope",
         _split("Collecting Duct, Connecting Tubule|Distal Convoluted Tubule|Glomerular endothelial cells|"
         "Interstitial endothelial cells|Leukocytes|Podocytes|Proximal Tubule Segments|"
         "Thick Ascending Limb"),
         1, (165466, 23640, 47280),
         _md5("ebe78ee8b05294063de985d821c1c34b 123ece2eba09d0aa5d698fda57103344 "
              "61b955355d7425a89687b06cca3ce0c2 b077128c4a949f0a4eb01517f9037b9c"),
         "BBBC051: Ljosa et al., Nature Methods 9:637 (2012); Woloshuk et al., Cytometry A 99:707-721 (2021)",
         licence="CC BY 4.0 (source images CC BY 3.0)"),
    Info("organamnist", "abdominal CT, axial",
         _ORGANS, 1, (34561, 6491, 17778),
         _md5("68e3f8846a6bd62f0c9bf841c0d9eacc 2dcccc29b88e6da5a01161ef20cda288 "
              "eeae80d0a227a8d099027e1b3cfd3b60 50747347e05c87dd3aaf92c49f9f3170"),
         _LITS),
    Info("organcmnist", "abdominal CT, coronal",
         _ORGANS, 1, (12975, 2392, 8216),
         _md5("b9ceb9546e10131b32923c5bbeaea2b1 3ce34a8724ea6f548e6db4744d03b6a9 "
              "773c1f009daa3fe5d9a2a201b2a7ed94 050f5e875dc056f6768abf94ec9995d1"),
         _LITS, counts_2x=(13000, 2392, 8268)),
    Info("organsmnist", "abdominal CT, sagittal",
         _ORGANS, 1, (13932, 2452, 8827),
         _md5("9ab87b696fb54e2a387ebe992d6ed5f1 53a6d115339d874c25e309a994ff46d3 "
              "ded0c5fa01a95dc4978b956f613e9b8e b354719e553fbbb2513d5533f52a4cb1"),
         _LITS, counts_2x=(13940, 2452, 8829)),
)
# fmt: on

SETS: dict[str, Info] = {info.name: info for info in _TABLE}
"""Every published set that `load` knows by name."""

_VOLUMES = "its images are 3-D volumes; fedkper reads 2-D images"
REFUSED: dict[str, str] = {
    "chestmnist": "it is multi-label (14 findings per image); fedkper needs exactly one class per image",
    **{
        f"{part}mnist3d": _VOLUMES for part in ("organ", "nodule", "adrenal", "fracture", "vessel", "synapse")
    },
}
"""Published sets that cannot be used, and why."""

_FILES = {info.file(size)[:-4]: (info, size) for info in _TABLE for size in SIZES}


def load(name: str, folder: str | Path, size: int = 28, offline: bool = False) -> Dataset:
    """Read a set: train split, test split and further columns of the train split.

    `name` is a published set ('bloodmnist'), a file in `folder` or `folder`/medmnist without its ending
    ('tissuemnist_30k'), or a path that ends in '.npz'. `size` is the side of the images: 28, 64, 128 or 224
    for a published set. A published set that is missing is downloaded into `folder` unless `offline`.
    Another checksum than the official one is accepted, with a notice, and recorded in `source`.
    Raises InputError for an unknown or missing set, a failed download and every fault in the file.
    """
    info, size = _known(name, size)
    path = find(name, folder, size) or _fetch(name, info, size, Path(folder), offline)
    file = _File(path, info, size)
    md5 = checksum(path)
    official = info is not None and md5 == info.md5[size]
    raw = _read(file, trusted=official)
    train_x, test_x = _splits(file, raw)
    train_y, test_y, classes, mapping = _targets(file, raw, len(train_x), len(test_x))
    columns, left_out = _columns(file, raw, len(train_x))
    source: dict[str, Any] = {"file": path.name, "md5": md5, "official": official}
    source |= _record(file, len(train_x), len(test_x)) | ({"mapping": mapping} if mapping else {})
    notices = _provenance(source) + _label_notices(train_y, test_y, classes, mapping)
    notices += _constant(train=train_x, test=test_x) + left_out
    notices = [f"{path.name}: {notice}" for notice in notices]
    stem = info.file(size)[:-4] if info else path.stem
    return Dataset(stem, classes, train_x, train_y, test_x, test_y, columns, source, tuple(notices))


def find(name: str, folder: str | Path, size: int = 28) -> Path | None:
    """Path of the file of a set, or None if it is neither in `folder` nor in `folder`/medmnist.

    A `name` that ends in '.npz' is tried as a path first. Raises InputError for a set that cannot be used
    and for an image size that a published set does not have.
    """
    info, size = _known(name, size)
    if name.endswith(".npz"):
        file = name
    else:
        file = info.file(size) if info else f"{name}.npz" if size == 28 else f"{name}_{size}.npz"
    places = [Path(name)] if name.endswith(".npz") else []
    places += [Path(folder) / file, Path(folder) / "medmnist" / file]
    return next((place for place in places if os.path.isfile(place)), None)


def checksum(path: str | Path) -> str:
    """MD5 of a file in hexadecimal. Raises InputError if the file cannot be read."""
    try:
        with open(path, "rb") as stream:
            # A fingerprint to compare with the published one, no protection against an attacker.
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Check the path and its rights."
        ) from None


def rows(folder: str | Path, size: int = 28) -> list[dict[str, Any]]:
    """One row of plain values per published set; `present` says whether `find` has its file in `folder`."""
    return [
        {
            "name": info.name,
            "modality": info.modality,
            "task": info.task,
            "classes": len(info.classes),
            "channels": info.channels,
            **dict(zip(("train", "val", "test"), info.counts, strict=True)),
            "licence": info.licence,
            "present": find(info.name, folder, size) is not None,
        }
        for info in _TABLE
    ]


def _known(name: str, size: int) -> tuple[Info | None, int]:
    """The published set behind a name or a file name, and the image size; (None, size) for any other."""
    stem = Path(name).name.removesuffix(".npz").lower()
    refused = REFUSED.get(stem.removesuffix("_64").removesuffix("_128").removesuffix("_224"))
    if refused:
        raise InputError(f"{name} cannot be used: {refused}. Choose one of: {', '.join(SETS)}.")
    if Path(name).name != name and not name.endswith(".npz"):
        raise InputError(f"data set '{name}': a path has to end in '.npz'. Name the file itself.")
    info, own = _FILES.get(stem, (None, 28))
    if own != 28 and size not in (28, own):
        raise InputError(f"{name} has size {own}, but size {size} was asked for. Leave out one of the two.")
    size = own if own != 28 else size
    if info and size not in SIZES:
        raise InputError(f"{name}: size {size} does not exist. Choose one of {', '.join(map(str, SIZES))}.")
    return info, size


# Getting the file


def _fetch(name: str, info: Info | None, size: int, folder: Path, offline: bool) -> Path:
    """Download a published set into `folder`, or say what to put where."""
    if info is None or name.endswith(".npz"):
        near = difflib.get_close_matches(Path(name).stem.lower(), SETS, n=3) or list(SETS)
        raise InputError(
            f"data set '{name}' is not there: no such file in {folder} or {folder / 'medmnist'}. "
            f"Name a file by its path, which ends in '.npz', or a published set: {', '.join(near)}."
        )
    import requests  # here and below: only a download pays for these imports

    reason = "downloads are switched off"
    for _ in range(0 if offline else 2):  # a broken download is fetched once more
        try:
            return _download(info, size, folder)
        except requests.ConnectionError:  # asking an unreachable server again only costs time
            reason = "the server cannot be reached"
            break
        except (OSError, ValueError) as error:
            reason = _cause(error)
    raise InputError(
        f"{info.file(size)} is missing and was not downloaded: {reason}. "
        f"Put the file into the folder {folder}: {info.where(size)}."
    )


def _download(info: Info, size: int, folder: Path) -> Path:
    import pooch

    # pooch writes under a temporary name and renames only after the checksum is right.
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        fetcher = pooch.HTTPDownloader(
            progressbar=_Bar(progress, info.file(size)),
            chunk_size=2**18,
            timeout=(5, 60),
            headers={"User-Agent": "fedkper"},  # the archive limits clients that do not name themselves
        )
        known = f"md5:{info.md5[size]}"
        return Path(pooch.retrieve(info.address(size), known, info.file(size), folder, downloader=fetcher))


class _Bar:
    """The progress bar that pooch drives, drawn by rich."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._task = progress, progress.add_task(title, total=None)

    def _set_total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    total = property(fset=_set_total)

    def update(self, count: int) -> None:
        self._progress.update(self._task, advance=count)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.refresh()


# Reading the file

Raw = dict[str, NDArray[Any]]
Labels = NDArray[np.int64]
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class _File:
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


def _read(file: _File, trusted: bool) -> Raw:
    """The arrays of the train and test split and `classes`; every member is checked unless `trusted`."""
    _sniff(file)
    try:
        # NumPy stops reading where a header says that its array ends: a damaged header would go unnoticed.
        broken = None if trusted else _broken_member(file.path)
        archive = np.load(file.path, allow_pickle=False)
    except Exception as error:  # damaged bytes make the zip reader fail in many ways
        raise file.error("", f"the file is cut or damaged ({_cause(error)})") from None
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
            raise file.error(key, f"cannot be read ({_cause(error)})") from None
        what = "holds Python objects (a pickle), which are never loaded because they could run a program"
        raise file.error(key, what, "Save it as an array of numbers or text") from None
    if not isinstance(value, np.ndarray):
        raise file.error(key, "not a NumPy array")
    return value


def _cause(error: Exception) -> str:
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
    if len(values) == 1:
        what = f"only one class: every label is {values[0]}"
        raise file.error("train_labels, test_labels", what, "Classification needs at least two classes")
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


# Where it came from


def _record(file: _File, train: int, test: int) -> dict[str, Any]:
    """The part of `source` that compares with the published set; JSON values."""
    info, counts = file.info, {"train": train, "test": test}
    if info is None:
        return {"counts": counts, "counts_official": None, "licence": None, "citation": None}
    releases = {"medmnist 3.0.2": info.counts, "medmnist 2.x": info.counts_2x}
    same = [release for release, c in releases.items() if c and (c[0], c[2]) == (train, test)]
    return {
        "counts": counts,
        "counts_official": {"train": info.counts[0], "test": info.counts[2]},
        "counts_equal_those_of": same[0] if same else None,
        "md5_official": info.md5[file.size],
        "address": info.address(file.size),
        "licence": info.licence,
        "citation": info.citation,
    }


def _provenance(source: dict[str, Any]) -> list[str]:
    """The notice about a file of a published set that is not the official one."""
    if source["official"] or "md5_official" not in source:
        return []
    counts = "{train} train and {test} test images"
    what = f"it has {counts.format_map(source['counts'])}"
    if source["counts_equal_those_of"]:
        what += f" as in {source['counts_equal_those_of']}"
    else:
        what += f" instead of {counts.format_map(source['counts_official'])}"
    return [
        f"the checksum (MD5 {source['md5']}) is not that of the official file ({source['md5_official']}); "
        f"{what}. Results need not equal published ones."
    ]
