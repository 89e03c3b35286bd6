"""Reading MedMNIST files: layouts, damage, downloads, and the real files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedkper.data import medmnist, npz, sets
from fedkper.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (50, 28, 28), dtype=np.uint8)
Y = np.arange(50) % 5
RGB = RNG.integers(0, 256, (50, 28, 28, 3), dtype=np.uint8)


def parts(images: NDArray[Any] = X, labels: NDArray[Any] = Y, **more: Any) -> dict[str, Any]:
    """Rows 0-29 train, 30-39 val, 40-49 test; an entry of None in `more` removes its key."""
    arrays = {
        f"{split}_{kind}": values[a:b]
        for split, a, b in (("train", 0, 30), ("val", 30, 40), ("test", 40, 50))
        for kind, values in (("images", images), ("labels", labels))
    }
    return {k: v for k, v in (arrays | more).items() if v is not None}


def save(path: Path, images: NDArray[Any] = X, labels: NDArray[Any] = Y, **more: Any) -> Path:
    np.savez_compressed(path, **parts(images, labels, **more))
    return path


def refused(path: Path | str, *words: str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        medmnist.load(str(path), **{"folder": "nowhere", **options})
    message = str(caught.value)
    for word in (Path(path).name, *words):
        assert word in message
    assert "\n" not in message
    return message


# Layouts of labels and images


@pytest.mark.parametrize(
    "labels",
    [
        Y[:, None].astype(np.uint8),
        Y.astype(np.int64),
        np.eye(5, dtype=np.uint8)[Y],
        np.eye(5, dtype=bool)[Y],
        np.eye(5, dtype=np.float32)[Y],
        Y.astype(np.float16),
        Y.astype(">u8")[:, None],
    ],
)
def test_label_layouts_give_one_task(tmp_path: Path, labels: NDArray[Any]) -> None:
    data = medmnist.load(str(save(tmp_path / "set.npz", labels=labels)), tmp_path)
    assert data.train_y.dtype == np.int64
    assert data.train_y.tolist() == Y[:30].tolist()
    assert data.test_y.tolist() == Y[40:].tolist()
    assert np.bincount(data.train_y).tolist() == [6] * 5
    assert data.classes == ("0", "1", "2", "3", "4")
    assert data.name == "set"
    assert data.notices == ()
    assert "mapping" not in data.source
    assert np.array_equal(data.train_x, X[:30, :, :, None])
    assert np.array_equal(data.test_x, X[40:, :, :, None])


def test_binary_floats(tmp_path: Path) -> None:
    data = medmnist.load(str(save(tmp_path / "f.npz", labels=(Y % 2).astype(np.float32))), tmp_path)
    assert data.train_y.tolist() == (Y[:30] % 2).tolist()
    assert np.bincount(data.test_y).tolist() == [6, 4]


def test_multi_label_is_refused(tmp_path: Path) -> None:
    labels = (RNG.random((50, 14)) < 0.1).astype(np.uint8)
    labels[::3] = 0
    refused(save(tmp_path / "d.npz", labels=labels), "multi-label", "train_labels", "row 0")
    two = np.eye(5)[Y]
    two[45, :2] = 1
    refused(save(tmp_path / "e.npz", labels=two), "multi-label", "test_labels", "row 5", "sums to 2")
    refused("chestmnist", "multi-label")
    refused(tmp_path / "chestmnist_64.npz", "multi-label")
    refused("organmnist3d", "3-D")


@pytest.mark.parametrize(
    ("values", "mapping"),
    [
        ([1, 2, 3, 4, 5], {"1": 0, "2": 1, "3": 2, "4": 3, "5": 4}),
        ([0, 1, 2, 3, 7], {"0": 0, "1": 1, "2": 2, "3": 3, "7": 4}),
        ([-1, 1], {"-1": 0, "1": 1}),
        ([0, 255], {"0": 0, "255": 1}),
        ([10**15, 10**15 + 1], {"1000000000000000": 0, "1000000000000001": 1}),
    ],
)
def test_other_numbers_are_mapped_in_order(
    tmp_path: Path, values: list[int], mapping: dict[str, int]
) -> None:
    number = Y % len(values)
    data = medmnist.load(str(save(tmp_path / "e.npz", labels=np.array(values)[number])), tmp_path)
    assert data.source["mapping"] == mapping
    assert data.train_y.tolist() == number[:30].tolist()
    assert data.test_y.tolist() == number[40:].tolist()
    assert data.classes == tuple(mapping)
    assert f"{values[0]} -> 0, {values[1]} -> 1" in data.notices[0]
    assert ("without a label" in data.notices[0]) == (255 in values)
    json.dumps(data.source)


def test_class_only_in_test_is_kept(tmp_path: Path) -> None:
    labels = np.where(np.arange(50) < 40, np.arange(50) % 2, 2)
    data = medmnist.load(str(save(tmp_path / "t.npz", labels=labels)), tmp_path)
    assert data.classes == ("0", "1", "2")
    assert np.bincount(data.train_y, minlength=3).tolist() == [15, 15, 0]
    assert data.test_y.tolist() == [2] * 10
    assert data.notices == ("t.npz: no train image of class 2.", "t.npz: no test image of class 0, 1.")


def test_absent_one_hot_column_keeps_its_number(tmp_path: Path) -> None:
    labels = np.eye(4, dtype=np.uint8)[np.where(Y % 2, 3, 1)]
    data = medmnist.load(str(save(tmp_path / "o.npz", labels=labels)), tmp_path)
    assert data.classes == ("0", "1", "2", "3")
    assert sorted(set(data.train_y.tolist())) == [1, 3]
    assert "mapping" not in data.source


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.where(np.arange(50) == 17, -1, Y), ("train_labels", "row 17", "-1", "negative")),
        (np.where(np.arange(50) == 44, -3, Y), ("test_labels", "row 4", "-3")),
        (np.zeros(50, int), ("only one class",)),
        (np.where(np.arange(50) == 3, 0.5, Y), ("train_labels", "row 3", "0.5")),
        (np.where(np.arange(50) == 3, np.nan, Y), ("train_labels", "row 3", "nan")),
        (np.where(np.arange(50) == 41, np.inf, Y), ("test_labels", "row 1", "inf")),
        (np.where(np.arange(50) == 3, 2**64 - 1, Y.astype(np.uint64)), ("row 3",)),
        (np.full((50, 2), 0.5), ("row 0", "not one class number")),
        (np.full((50, 2), [np.nan, 1.0]), ("row 0", "nan")),
        (Y.astype(str), ("labels are <U", "not numbers")),
        (Y.astype(complex), ("complex128",)),
        (Y.astype("datetime64[D]"), ("datetime64",)),
        (np.zeros((50, 2, 2)), ("(30, 2, 2)",)),
        (np.zeros((50, 0)), ("(30, 0)",)),
    ],
)
def test_labels_without_a_clear_class_are_refused(
    tmp_path: Path, labels: NDArray[Any], words: tuple[str, ...]
) -> None:
    refused(save(tmp_path / "bad.npz", labels=labels), *words)


def test_class_names_in_the_file(tmp_path: Path) -> None:
    names = np.array(["cyst", "normal", "tumour"])
    few = medmnist.load(str(save(tmp_path / "a.npz", labels=Y % 2, classes=names)), tmp_path)
    assert few.classes == ("cyst", "normal", "tumour")
    assert "no train image of class tumour" in few.notices[0]
    one = medmnist.load(str(save(tmp_path / "h.npz", labels=0 * Y + 1, classes=names)), tmp_path)
    assert (one.classes, set(one.train_y), set(one.test_y)) == (("cyst", "normal", "tumour"), {1}, {1})
    assert "no train image of class cyst, tumour" in one.notices[0]
    refused(save(tmp_path / "i.npz", labels=0 * Y + 3, classes=names), "row 0", "outside the classes 0 to 2")
    refused(save(tmp_path / "j.npz", labels=0 * Y, classes=names[:1]), "only one class")
    one_based = medmnist.load(str(save(tmp_path / "b.npz", labels=Y % 3 + 1, classes=names)), tmp_path)
    assert one_based.classes == ("cyst", "normal", "tumour")
    assert one_based.source["mapping"] == {"1": 0, "2": 1, "3": 2}
    refused(save(tmp_path / "c.npz", classes=names), "outside the classes 0 to 2", "row 3", "label 3")
    refused(save(tmp_path / "d.npz", labels=np.eye(5)[Y], classes=names), "one-hot with [5] columns")
    refused(save(tmp_path / "e.npz", classes=np.array(["a", "a"])), "classes", "different class names")
    refused(save(tmp_path / "f.npz", classes=np.array([], dtype="U1")), "classes")
    refused(save(tmp_path / "g.npz", classes=np.arange(5)), "classes", "int64")


def test_one_hot_widths_differ(tmp_path: Path) -> None:
    path = save(tmp_path / "w.npz", labels=np.eye(5)[Y], test_labels=np.eye(6)[Y[40:]])
    refused(path, "one-hot", "[5, 6]")


@pytest.mark.parametrize(
    ("images", "channels"), [(X, 1), (X[..., None], 1), (RGB, 3), (np.asfortranarray(RGB), 3)]
)
def test_image_layouts(tmp_path: Path, images: NDArray[np.uint8], channels: int) -> None:
    data = medmnist.load(str(save(tmp_path / "x.npz", images=images)), tmp_path)
    assert data.shape == (28, 28, channels)
    assert data.train_x.flags.c_contiguous
    assert np.array_equal(data.test_x.reshape(10, -1), images[40:].reshape(10, -1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": X / 255}, ("train_images", "float64", "only uint8")),
        ({"images": np.where(X < 99, np.nan, X).astype("f4")}, ("train_images", "NaN", "only uint8")),
        ({"images": X.astype(np.uint16)}, ("train_images", "uint16")),
        ({"images": RGB.transpose(0, 3, 1, 2)}, ("(30, 3, 28, 28)", "last axis")),
        ({"images": np.zeros((50, 4, 4, 4), np.uint8)}, ("(30, 4, 4, 4)",)),
        ({"images": np.zeros((50, 784), np.uint8)}, ("(30, 784)",)),
        ({"images": np.zeros((50, 0, 9), np.uint8)}, ("0 images",)),
        ({"train_images": X[:0], "train_labels": Y[:0]}, ("train_images", "0 images")),
        ({"test_images": X[:0], "test_labels": Y[:0]}, ("test_images", "0 images")),
        ({"train_labels": Y[:29]}, ("train_labels", "29 labels for 30 images")),
        ({"test_labels": Y[:11]}, ("test_labels", "11 labels for 10 images")),
        ({"test_labels": np.array(3)}, ("test_labels", "()")),
        ({"test_images": X[40:, :20]}, ("test_images", "(20, 28, 1)", "(28, 28, 1)")),
        ({"test_images": RGB[40:]}, ("test_images", "(28, 28, 3)")),
        ({"test_labels": None}, ("test_labels: missing", "val_labels")),
        ({"train_images": None, "x_train": X}, ("train_images: missing", "x_train")),
        ({"train_site": np.arange(29)}, ("train_site", "(29,)", "30 train images")),
        ({"train_site": np.array([{}] * 30, dtype=object)}, ("train_site", "pickle")),
        ({"classes": np.array([{}] * 5, dtype=object)}, ("classes", "pickle")),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(save(tmp_path / "bad.npz", **change), *words)


def test_further_columns(tmp_path: Path) -> None:
    site, patient = np.array(["north", "süd"] * 15), np.arange(30)[:, None]
    more = {"train_site": site, "train_patient": patient, "train_age": np.linspace(0, 1, 30), "other": X}
    data = medmnist.load(str(save(tmp_path / "c.npz", **more)), tmp_path)
    assert set(data.columns) == {"site", "patient"}
    assert data.columns["site"].tolist() == site.tolist()
    assert data.columns["patient"].tolist() == list(range(30))
    assert data.notices == ("c.npz: train_age was left out: float64 (30,), not [N] text or integers.",)


def test_validation_split_is_optional_and_unread(tmp_path: Path) -> None:
    path = save(tmp_path / "v.npz", val_images=np.zeros(3), val_labels=None)
    assert len(medmnist.load(str(path), tmp_path).train_x) == 30


def test_constant_images_are_counted(tmp_path: Path) -> None:
    images = X.copy()
    images[[3, 5]], images[49] = 0, 200
    notices = medmnist.load(str(save(tmp_path / "k.npz", images=images)), tmp_path).notices
    assert notices == (
        "k.npz: 2 of 30 train images are constant (all pixels equal).",
        "k.npz: 1 of 10 test images are constant (all pixels equal).",
    )


# Published sets


def test_table() -> None:
    assert len(sets.SETS) == 11
    assert "chestmnist" not in sets.SETS
    blood, organ = sets.SETS["bloodmnist"], sets.SETS["organcmnist"]
    assert (blood.counts, blood.channels, len(blood.classes)) == ((11959, 1712, 3421), 3, 8)
    assert (organ.counts, organ.counts_2x) == ((12975, 2392, 8216), (13000, 2392, 8268))
    assert sets.SETS["organsmnist"].counts_2x == (13940, 2452, 8829)
    assert organ.classes[3] == "heart"
    assert len(organ.classes) == 11
    assert sum(sum(info.counts) for info in sets.SETS.values()) == 595_842
    assert blood.md5[28] == "7053d0359d879ad8a5505303e11de1dc"
    assert blood.address(64) == "https://zenodo.org/records/10519652/files/bloodmnist_64.npz?download=1"
    digests = [digest for info in sets.SETS.values() for digest in info.md5.values()]
    assert len(set(digests)) == 44
    assert all(len(digest) == 32 and int(digest, 16) for digest in digests)
    assert [i.name for i in sets.SETS.values() if i.task == "binary"] == ["pneumoniamnist", "breastmnist"]
    assert sets.SETS["retinamnist"].task == "ordinal"
    assert sets.SETS["dermamnist"].licence == "CC BY-NC 4.0"


def test_rows(tmp_path: Path) -> None:
    save(tmp_path / "octmnist.npz")
    rows = medmnist.rows(tmp_path)
    assert [row["name"] for row in rows] == list(sets.SETS)
    assert [row["name"] for row in rows if row["present"]] == ["octmnist"]
    assert (rows[2]["classes"], rows[2]["train"], rows[2]["val"], rows[2]["test"]) == (4, 97477, 10832, 1000)


def test_other_checksum_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "medmnist").mkdir()
    path = save(tmp_path / "medmnist" / "bloodmnist.npz", images=RGB)
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    data = medmnist.load("BloodMNIST", tmp_path, offline=True)
    assert data.name == "bloodmnist"
    assert data.classes[7] == "platelet"
    assert md5 in data.notices[0]
    assert "30 train and 10 test images instead of 11959 train and 3421 test" in data.notices[0]
    assert "class immature" not in data.notices[1]
    assert "no train image of class monocyte, neutrophil, platelet" in data.notices[1]
    assert data.source["md5"] == md5 == medmnist.checksum(path)
    assert data.source["official"] is False
    assert data.source["counts"] == {"train": 30, "test": 10}
    assert data.source["counts_official"] == {"train": 11959, "test": 3421}
    assert data.source["counts_equal_those_of"] is None
    assert "Acevedo" in data.source["citation"]
    assert str(tmp_path) not in json.dumps(data.source)


def test_official_file_has_no_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "organcmnist.npz", labels=np.arange(50) % 10)
    organ = sets.SETS["organcmnist"]
    known = replace(organ, md5={**organ.md5, 28: medmnist.checksum(path)}, counts_2x=(30, 10, 10))
    monkeypatch.setitem(sets.FILES, "organcmnist", (known, 28))
    data = medmnist.load("organcmnist", tmp_path)
    assert data.source["official"] is True
    assert data.source["counts_equal_those_of"] == "medmnist 2.x"
    assert not any("checksum" in notice for notice in data.notices)


def test_label_outside_a_published_set(tmp_path: Path) -> None:
    for wrong in (8, 255):
        labels = np.where(np.arange(50) == 43, wrong, Y)[:, None].astype(np.uint8)
        path = save(tmp_path / "bloodmnist.npz", images=RGB, labels=labels)
        refused(path, "test_labels", "row 3", f"label {wrong}", "0 to 7")
    path = save(tmp_path / "bloodmnist.npz", images=RGB, labels=np.where(Y % 2, 1, -1))
    refused(path, "row 0", "label -1")


def test_another_set_under_a_published_name(tmp_path: Path) -> None:
    refused(save(tmp_path / "bloodmnist.npz"), "1 channel(s)", "bloodmnist has 3")
    refused(save(tmp_path / "octmnist.npz", images=X[:, :20, :20]), "20 x 20", "size 28")
    names = np.array(["a", "b", "c", "d"])
    refused(save(tmp_path / "octmnist.npz", labels=Y % 4, classes=names), "not the classes of octmnist")


def test_larger_sizes(tmp_path: Path) -> None:
    big = np.repeat(np.repeat(X, 3, axis=1), 3, axis=2)[:, :64, :64]
    save(tmp_path / "octmnist_64.npz", images=big, labels=Y % 4)
    save(tmp_path / "own_64.npz", images=big)
    for data in (
        medmnist.load("octmnist", tmp_path, size=64),
        medmnist.load("octmnist_64", tmp_path),
        medmnist.load(str(tmp_path / "octmnist_64.npz"), "nowhere"),
    ):
        assert data.shape == (64, 64, 1)
        assert data.name == "octmnist_64"
        assert data.classes[3] == "normal"
        assert data.source["md5_official"] == "e229e9440236b774d9f0dfef9d07bdaf"
    assert medmnist.load("own", tmp_path, size=64).shape == (64, 64, 1)
    assert medmnist.find("octmnist", tmp_path) is None
    refused("octmnist", "size 32", "28, 64, 128, 224", folder=tmp_path, size=32)
    refused("octmnist_64", "size 64", "size 128", folder=tmp_path, size=128)
    refused(tmp_path / "own_64.npz", "64 x 64", "size 128", size=128)


# Missing files


def test_missing_file_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        medmnist.load("organsmnist", tmp_path / "data", size=128, offline=True)
    message = str(caught.value)
    assert "organsmnist_128.npz is missing" in message
    assert str(tmp_path / "data") in message
    assert "ded0c5fa01a95dc4978b956f613e9b8e" in message
    assert "https://zenodo.org/records/10519652/files/organsmnist_128.npz?download=1" in message
    assert not (tmp_path / "data").exists()


def test_unknown_names(tmp_path: Path) -> None:
    refused("bloodmist", "bloodmnist", str(tmp_path), folder=tmp_path)
    refused("tissuemnist_30k", "tissuemnist", folder=tmp_path)
    refused("zzz", "--dataset zzz", "pathmnist", "organsmnist", folder=tmp_path)
    refused(tmp_path / "gone.npz", "is not there")
    refused(tmp_path / "bloodmnist.npz", "is not there", folder=tmp_path)
    refused("some/where", "'.npz'", folder=tmp_path)
    refused("x" * 5000, "is not there", folder=tmp_path)
    refused("", "is not there", folder=tmp_path)


def test_own_file_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "medmnist").mkdir()
    path = save(tmp_path / "medmnist" / "tissuemnist_30k.npz")
    monkeypatch.chdir(tmp_path)
    for name in ("tissuemnist_30k", "tissuemnist_30k.npz", "medmnist/tissuemnist_30k.npz", str(path)):
        data = medmnist.load(name, ".")
        assert data.name == "tissuemnist_30k"
        assert data.source["licence"] is None
        assert data.notices == ()


# Damage


def contents(path: Path) -> tuple[bytes, ...]:
    data = medmnist.load(str(path), "nowhere")
    arrays = (data.train_x, data.train_y, data.test_x, data.test_y, *data.columns.values())
    return (*(array.tobytes() for array in arrays), *(name.encode() for name in data.classes))


def whole(tmp_path: Path, write: Callable[..., None]) -> tuple[bytes, tuple[bytes, ...]]:
    path = tmp_path / "whole.npz"
    arrays = parts(X[:, :6, :6], classes=np.array(list("abcde")), train_site=np.arange(30))
    write(path, **arrays)
    return path.read_bytes(), contents(path)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_cut_files(tmp_path: Path, write: Callable[..., None]) -> None:
    data, _ = whole(tmp_path, write)
    path = tmp_path / "cut.npz"
    for end in {0, 1, 2, 3, 4, 30, len(data) - 60, len(data) - 1, *range(5, len(data), 97)}:
        path.write_bytes(data[:end])
        refused(path)


@pytest.mark.parametrize("flip", [0xFF, 0x01, 0x04])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_flipped_bytes_never_change_the_data(tmp_path: Path, write: Callable[..., None], flip: int) -> None:
    data, good = whole(tmp_path, write)
    path = tmp_path / "flipped.npz"
    ends = range(len(data) - 900, len(data))  # names, sizes and checksums of the archive
    refusals = 0
    for place in {*range(0, len(data), 29), *ends, len(data) // 3}:
        damaged = bytearray(data)
        damaged[place] ^= flip
        path.write_bytes(damaged)
        try:
            read = contents(path)
        except InputError:
            refusals += 1
        else:
            assert read == good, place
    assert refusals > 300


def test_damaged_header_of_an_array(tmp_path: Path) -> None:
    """An array header that claims fewer rows must not pass: only the zip checksum shows it."""
    path = tmp_path / "h.npz"
    np.savez(path, **parts())
    path.write_bytes(path.read_bytes().replace(b"(30, 28, 28)", b"(20, 28, 28)").replace(b"(30,)", b"(20,)"))
    refused(path, "zip checksum is wrong", "train_images")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"   \n", "empty"),
        (b"<html><body>503</body></html>", "web page"),
        (b"\n<!DOCTYPE html>", "web page"),
        (b"hello", "not an npz archive"),
        (b"PK\x03\x04", "cut or damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not an npz archive"),
    ],
)
def test_other_files_named_npz(tmp_path: Path, data: bytes, word: str) -> None:
    for name in ("x.npz", "bloodmnist.npz"):
        (tmp_path / name).write_bytes(data)
        message = refused(tmp_path / name, word)
        assert ("7053d0359d879ad8a5505303e11de1dc" in message) == (name == "bloodmnist.npz")


def test_single_array_and_folder_and_odd_archives(tmp_path: Path) -> None:
    with open(tmp_path / "one.npz", "wb") as stream:
        np.save(stream, X)
    refused(tmp_path / "one.npz", "single array")
    (tmp_path / "folder.npz").mkdir()
    refused(tmp_path / "folder.npz", "is not there")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        for key in npz.NEEDED:
            archive.writestr(f"{key}.npy", "text")
    refused(tmp_path / "text.npz", "not a NumPy array", "train_images")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**15, 28, 28)}
    )
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        for key in npz.NEEDED:
            archive.writestr(f"{key}.npy", header.getvalue())
    refused(tmp_path / "huge.npz", "cannot be read")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user whom file rights bind")
def test_unreadable_file(tmp_path: Path) -> None:
    path = save(tmp_path / "locked.npz")
    path.chmod(0)
    refused(path, "cannot be read")


class Trap:
    """A pickle whose loading creates a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = pickle.dumps(Trap(marker))
    pickle.loads(code)
    assert marker.exists()  # the trap works
    marker.unlink()
    bare = tmp_path / "bare.npz"
    bare.write_bytes(code)
    refused(bare, "pickle")
    refused(save(tmp_path / "object.npz", train_images=np.array([Trap(marker)], dtype=object)), "pickle")
    refused(save(tmp_path / "label.npz", test_labels=np.array([Trap(marker)] * 10, dtype=object)), "pickle")
    with zipfile.ZipFile(tmp_path / "members.npz", "w") as archive:
        for key in npz.NEEDED:
            archive.writestr(f"{key}.npy", code)
    refused(tmp_path / "members.npz", "not a NumPy array")
    assert not marker.exists()


# Downloads, from a server on this machine


class Server:
    """Answers each request with the next of `answers` (status, body); the last one is repeated."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.paths: list[str] = []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.paths.append(self.path)
            status, body = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(sets, "ADDRESS", f"http://127.0.0.1:{http.server_port}/files")
        yield state
        http.shutdown()
        thread.join(10)


@pytest.fixture
def octmnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small file that counts as the official one."""
    body = save(tmp_path / "made.npz", labels=Y % 4).read_bytes()
    known = replace(sets.SETS["octmnist"], md5={28: hashlib.md5(body).hexdigest()})
    monkeypatch.setitem(sets.FILES, "octmnist", (known, 28))
    return body


def test_download(tmp_path: Path, server: Server, octmnist: bytes) -> None:
    server.answers = [(200, octmnist)]
    folder = tmp_path / "new" / "data"
    data = medmnist.load("octmnist", folder)
    assert data.source["official"] is True
    assert data.notices == ()
    assert (folder / "octmnist.npz").read_bytes() == octmnist
    medmnist.load("octmnist", folder, offline=True)
    medmnist.load("octmnist", folder)
    assert server.paths == ["/files/octmnist.npz?download=1"]


def test_broken_download_is_fetched_again(tmp_path: Path, server: Server, octmnist: bytes) -> None:
    server.answers = [(200, octmnist[:-60]), (200, octmnist)]
    assert medmnist.load("octmnist", tmp_path / "data").source["official"] is True
    assert len(server.paths) == 2


@pytest.mark.parametrize(
    ("answer", "word"),
    [((200, b"<html>"), "hash"), ((503, b"busy"), "503"), ((404, b"gone"), "404"), ((200, b""), "hash")],
)
def test_failed_download_leaves_nothing(
    tmp_path: Path, server: Server, octmnist: bytes, answer: tuple[int, bytes], word: str
) -> None:
    server.answers = [answer]
    message = refused("octmnist", word, str(tmp_path / "data"), folder=tmp_path / "data")
    assert "octmnist.npz is missing" in message
    assert hashlib.md5(octmnist).hexdigest() in message
    assert f"{sets.ADDRESS}/octmnist.npz" in message
    assert list((tmp_path / "data").iterdir()) == []
    assert len(server.paths) == 2


def test_unreachable_server(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "ADDRESS", "http://127.0.0.1:9/files")
    refused("octmnist", "cannot be reached", "c68d92d5b585d8d81f7112f81e2d0842", folder=tmp_path)
    (tmp_path / "taken").write_text("a file")
    refused("octmnist", "was not downloaded", "taken", folder=tmp_path / "taken")
    assert server.paths == []


# The real files


@pytest.mark.realdata
def test_real_bloodmnist(real: Callable[[str], Path]) -> None:
    data = medmnist.load("bloodmnist", real("bloodmnist"), offline=True)
    assert data.train_x.shape == (11959, 28, 28, 3)
    assert data.test_x.shape == (3421, 28, 28, 3)
    assert data.source["counts_equal_those_of"] == "medmnist 3.0.2"
    if not data.source["official"]:  # dealt out otherwise than in the official file
        assert np.bincount(data.train_y).tolist() == [852, 2181, 1085, 2026, 849, 993, 2330, 1643]
        assert np.bincount(data.test_y).tolist() == [244, 624, 311, 579, 243, 284, 666, 470]
        assert len(data.notices) == 1
        assert "MD5" in data.notices[0]


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("pneumoniamnist", [1214, 3494], [234, 390]),
        ("breastmnist", [147, 399], [42, 114]),
        (
            "tissuemnist_30k",
            [6587, 1060, 776, 1823, 1772, 676, 5352, 2955],
            [1882, 303, 221, 521, 506, 193, 1529, 845],
        ),
    ],
)
def test_real_grey_sets(real: Callable[[str], Path], name: str, train: list[int], test: list[int]) -> None:
    data = medmnist.load(name, real(name), offline=True)
    assert data.shape == (28, 28, 1)
    assert np.bincount(data.train_y).tolist() == train
    assert np.bincount(data.test_y).tolist() == test
    assert len(data.classes) == len(train)
