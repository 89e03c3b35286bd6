"""Images to classes by an exported model: which files are taken, what is done to them, what is refused."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file

from fedkper import run
from fedkper.export import imagefiles, predict
from fedkper.run import Execution
from terminal import TINY, fedkper, strict, write_data

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def images(place: Path) -> Pixels:
    """The test images of the run, [30, 8, 8, 3]."""
    data = write_data(place / "tiny.npz")
    words = ["run", "--dataset", data, *TINY, "--lr", 0.05, "--rounds", 20, "--out", place / "run"]
    assert fedkper(*words) == 0
    assert fedkper("export", place / "run", "--model", place / "m", "--format", "both") == 0
    return run.load(run.stored_experiment(place / "run"), Execution()).test_x


@pytest.fixture(scope="module")
def model(place: Path, images: Pixels) -> Path:
    return place / "m"


@pytest.fixture(scope="module")
def grey(place: Path, images: Pixels) -> Path:
    """A model of one channel."""
    arrays = dict(np.load(place / "tiny.npz"))
    arrays |= {k: v[..., 0] for k, v in arrays.items() if k.endswith("images")}
    np.savez(place / "grey.npz", **arrays)
    words = ["run", "--dataset", place / "grey.npz", *TINY, "--rounds", 1, "--out", place / "grey-run"]
    assert fedkper(*words) == 0
    assert fedkper("export", place / "grey-run", "--model", place / "g") == 0
    return place / "g"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def predicted(capsys: pytest.CaptureFixture[str]) -> Any:
    """Types `fedkper predict`. -> the rows, and what was said beside them"""

    def type_it(*words: object, code: int = 0) -> tuple[list[dict[str, str]], str]:
        capsys.readouterr()
        assert fedkper("predict", *words) == code
        said = capsys.readouterr()
        return list(csv.DictReader(io.StringIO(said.out))), said.err

    return type_it


def numbers(rows: list[dict[str, str]]) -> Any:
    return np.array([[float(v) for k, v in row.items() if k.startswith("p_")] for row in rows])


def one(model: Path, pixels: Pixels) -> Any:
    """The probabilities of one image."""
    return predict.load(model).probabilities(pixels[None])[0]


# --- what comes out ------------------------------------------------------------------------------------


def test_an_array_file_is_classified_in_order(
    model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    np.save("all.npy", images)
    np.savez("medmnist.npz", train_images=images[:2], test_images=images, test_labels=np.arange(30))
    rows, said = predicted(model, "all.npy", "medmnist.npz")
    assert said == ""
    assert [(r["file"], r["index"]) for r in rows] == [
        (file, str(at)) for file in ("all.npy", "medmnist.npz") for at in range(30)
    ]
    expected = predict.load(model).probabilities(images)
    np.testing.assert_allclose(numbers(rows), np.concatenate([expected, expected]), atol=1e-6)
    names = strict(model / "model.json")["classes"]
    assert [r["class"] for r in rows[:30]] == [names[k] for k in expected.argmax(1)]
    assert list(rows[0]) == ["file", "index", "class", *(f"p_{n}" for n in names)]
    assert len({r["class"] for r in rows}) > 1, "a model that always says the same proves nothing"


def test_both_formats_and_a_file_give_the_same(
    model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    np.save("all.npy", images)
    shutil.copytree(model, "onnx")
    about = strict(Path("onnx/model.json"))
    del about["files"]["model.safetensors"]
    Path("onnx/model.json").write_text(json.dumps(about))
    Path("onnx/model.safetensors").unlink()
    rows, _ = predicted(model, "all.npy")
    same, _ = predicted("onnx", "all.npy")
    np.testing.assert_allclose(numbers(same), numbers(rows), atol=2e-6)
    assert [r["class"] for r in same] == [r["class"] for r in rows]
    assert fedkper("predict", model, "all.npy", "--out", "p.csv") == 0
    assert list(csv.DictReader(Path("p.csv").read_text().splitlines())) == rows


def test_folders_are_searched_at_any_depth(model: Path, images: Pixels, here: Path, predicted: Any) -> None:
    Path("a/b").mkdir(parents=True)
    for name in ("a/2.PNG", "a/1.bmp", "a/b/3.tiff"):
        Image.fromarray(images[0]).save(name)
    Path("a/notes.txt").write_text("not an image")
    rows, said = predicted(model, "a", "a/1.bmp")  # named twice, read once
    assert [r["file"] for r in rows] == ["a/1.bmp", "a/2.PNG", "a/b/3.tiff"]
    assert said == ""
    np.testing.assert_allclose(numbers(rows), [one(model, images[0])] * 3, atol=1e-6)


def test_a_model_that_gives_no_number(model: Path, images: Pixels, here: Path, predicted: Any) -> None:
    shutil.copytree(model, "nan")
    weights = load_file("nan/model.safetensors")
    weights["head.bias"][1] = float("nan")
    save_file(weights, "nan/model.safetensors")
    about = strict(Path("nan/model.json"))
    about["files"]["model.safetensors"] = hashlib.sha256(
        Path("nan/model.safetensors").read_bytes()
    ).hexdigest()
    Path("nan/model.json").write_text(json.dumps(about))
    np.save("x.npy", images[:2])
    rows, said = predicted("nan", "x.npy")
    assert [set(list(r.values())[2:]) for r in rows] == [{""}, {""}]
    assert "2 without an answer" in said


# --- what is done to pictures --------------------------------------------------------------------------


def saved(image: Image.Image, name: str, **how: Any) -> str:
    image.save(name, **how)
    return name


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("p.png", "P", "palette turned into colours"),
        ("b.png", "1", "1 bit a pixel"),
        ("g.png", "L", "grey repeated as three channels"),
        ("a.png", "RGBA", "alpha channel dropped"),
        ("la.png", "LA", "alpha channel dropped"),
        ("c.png", "RGB", ""),
        ("c.tif", "RGB", ""),
        ("c.bmp", "RGB", ""),
    ],
)
def test_a_mode_is_converted_and_said(
    name: str, mode: str, said: str, model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    image = Image.fromarray(images[0]).convert(mode)
    rows, heard = predicted(model, saved(image, name))
    assert said in heard if said else heard == ""
    expected = np.array(image.convert("RGB"))
    np.testing.assert_allclose(numbers(rows)[0], one(model, expected), atol=1e-6)


def test_a_photograph_is_turned_as_its_camera_says(
    model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name in ("x.png", "x.tif"):
        rows, said = predicted(model, saved(Image.fromarray(images[0]), name, exif=exif))
        assert "1 picture: turned as their EXIF data say" in said
        turned = np.ascontiguousarray(np.rot90(images[0], -1))
        np.testing.assert_allclose(numbers(rows)[0], one(model, turned), atol=1e-6)


def test_a_size_is_changed_only_on_request(model: Path, images: Pixels, here: Path, predicted: Any) -> None:
    big = Image.fromarray(images[0]).resize((16, 16))
    saved(big, "big.png")
    saved(big.resize((16, 12)), "wide.png")
    rows, said = predicted(model, "big.png", "wide.png", code=1)
    assert rows == []
    assert "big.png: is 16 x 16 pixels, but the model takes 8 x 8; --resize" in said
    assert "wide.png: is 12 x 16 pixels" in said
    rows, said = predicted(model, "big.png", "wide.png", "--resize")
    assert "1 picture: resized to 8 x 8\n" in said
    assert "1 picture: resized to 8 x 8, which squeezes them" in said
    small = np.asarray(big.resize((8, 8), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(numbers(rows)[0], one(model, small), atol=1e-6)


def test_colour_for_a_model_of_grey_images(grey: Path, images: Pixels, here: Path, predicted: Any) -> None:
    plain = Image.fromarray(images[0][..., 0])
    names = [saved(plain, "l.png"), saved(plain.convert("RGB"), "equal.png")]
    rows, said = predicted(grey, *names, saved(Image.fromarray(images[0]), "colour.png"), code=1)
    assert "1 picture: three equal channels taken as grey" in said
    assert "colour.png: is in colour, but the model takes grey" in said
    np.testing.assert_allclose(numbers(rows), [one(grey, images[0][..., :1])] * 2, atol=1e-6)
    mixed = np.stack([images[0], np.repeat(images[0][..., :1], 3, axis=2)])
    np.save("mixed.npy", mixed)
    rows, said = predicted(grey, "mixed.npy", code=1)
    assert "mixed.npy, index 0: is in colour" in said
    assert [r["index"] for r in rows] == ["1"]


# --- what is refused -----------------------------------------------------------------------------------


def transparent(x: Pixels) -> Image.Image:
    image = Image.fromarray(x).convert("RGBA")
    image.putpixel((1, 1), (0, 0, 0, 3))
    return image


def deep(x: Pixels) -> Image.Image:
    return Image.fromarray(x[..., 0].astype(np.uint16) * 256)


BROKEN = {
    "alpha.png": (lambda x, n: transparent(x).save(n), "is transparent in places"),
    "key.png": (
        lambda x, n: Image.fromarray(x).save(n, transparency=tuple(map(int, x[0, 0]))),
        "transparent",
    ),
    "deep.png": (lambda x, n: deep(x).save(n), "more than 8 bits"),
    "deep.tif": (lambda x, n: deep(x).save(n), "more than 8 bits"),
    "float.tif": (lambda x, n: Image.fromarray(x[..., 0].astype(np.float32)).save(n), "more than 8 bits"),
    "cmyk.jpg": (lambda x, n: Image.fromarray(x).convert("CMYK").save(n), "colour space CMYK"),
    "pages.tif": (
        lambda x, n: Image.fromarray(x).save(n, save_all=True, append_images=[Image.fromarray(x)]),
        "holds 2 pages",
    ),
    "empty.jpg": (lambda x, n: Path(n).write_bytes(b""), "cannot be read as PNG"),
    "text.png": (lambda x, n: Path(n).write_text("<html>"), "cannot be read as PNG"),
    "gif.png": (lambda x, n: Image.fromarray(x).save(n, format="GIF"), "cannot be read as PNG"),
    "objects.npy": (
        lambda x, n: np.save(n, np.array([{}], object), allow_pickle=True),
        "cannot be read as a NumPy",
    ),
    "cut.npz": (lambda x, n: Path(n).write_bytes(b"PK\x03\x04"), "cannot be read as a NumPy"),
    "float.npy": (lambda x, n: np.save(n, x[None] / 255), "is float64; only uint8"),
    "one.npy": (lambda x, n: np.save(n, x[0]), "has the shape (8, 3)"),
    "none.npy": (lambda x, n: np.save(n, x[None][:0]), "has the shape (0, 8, 8, 3)"),
    "four.npy": (lambda x, n: np.save(n, np.zeros((1, 8, 8, 4), np.uint8)), "has the shape (1, 8, 8, 4)"),
    "many.npz": (lambda x, n: np.savez(n, a=x, b=x), "has no test_images, which is read, but: a, b"),
    "nothing.npz": (lambda x, n: np.savez(n), "has no test_images, which is read, but: nothing"),
    "size.npy": (lambda x, n: np.save(n, np.zeros((500, 9, 9, 3), np.uint8)), "is 9 x 9 pixels"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_and_the_others_get_their_line(
    name: str, model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    make, reason = BROKEN[name]
    make(images[0], name)
    saved(Image.fromarray(images[0]), "good.png")
    rows, said = predicted(model, name, "good.png", code=1)
    assert [r["file"] for r in rows] == ["good.png"]
    assert said.splitlines()[0].startswith(f"{name}: ")
    assert reason in said.splitlines()[0]
    assert said.splitlines()[-1] == "error: 1 not classified, as said above; 1 classified"
    assert "Traceback" not in said


def test_a_picture_of_16_bits_in_colour_is_not_cut_to_8(
    model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    """Which the reader would do without a word: the header is looked at."""
    saved(Image.fromarray(images[0]), "x.png")
    data = bytearray(Path("x.png").read_bytes())
    data[24] = 16
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    Path("x.png").write_bytes(data)
    _, said = predicted(model, "x.png", code=1)
    assert "more than 8 bits" in said


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "tif", "npy", "npz"])
def test_a_cut_file_is_never_a_traceback(
    ending: str, share: float, model: Path, images: Pixels, here: Path, predicted: Any
) -> None:
    name = f"x.{ending}"
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    if ending == "npy":
        np.save(name, noise[None])
    elif ending == "npz":
        np.savez(name, noise[None])
    else:
        Image.fromarray(noise).save(name)
    data = Path(name).read_bytes()
    Path(name).write_bytes(data[: int(len(data) * share)])
    rows, said = predicted(model, name, code=1)
    assert rows == []
    assert said.startswith(f"{name}: cannot be read")


def test_a_picture_of_many_pixels_is_not_unpacked(
    model: Path, images: Pixels, here: Path, predicted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    for edge in (8, 11):  # above the limit, and above twice the limit
        saved(Image.fromarray(np.zeros((edge, edge, 3), np.uint8)), "x.png")
        _, said = predicted(model, "x.png", code=1)
        assert "x.png: has more than 50 pixels" in said


def test_wrong_input_is_refused_before_anything(
    model: Path, images: Pixels, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Image.fromarray(images[0]), "x.png")
    Path("x.dcm").write_bytes(b"DICM")
    Path("empty").mkdir()
    for words, naming in [
        ([], "MODEL is missing"),
        ([model], "IMAGES is missing"),
        ([model, "nosuch.png"], "nosuch.png: no such file"),
        ([model, "x.dcm"], "x.dcm: not a picture by its ending"),
        ([model, "empty"], "empty: no picture is there"),
        (["empty", "x.png"], "holds no exported model"),
        ([model.parent / "run", "x.png"], "holds no exported model"),
        ([model, "x.png", "--out", "nosuch/p.csv"], "nosuch does not exist"),
        ([model, "x.png", "--out", "empty"], "is a folder"),
    ]:
        capsys.readouterr()
        assert fedkper("predict", *words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert naming in said.err


@pytest.mark.parametrize(
    ("text", "naming"),
    [("{", "damaged"), ("[]", "damaged"), ("{}", "export the model again"), (None, "another version")],
)
def test_a_damaged_description(
    text: str | None, naming: str, model: Path, images: Pixels, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, "m")
    text = json.dumps(strict(model / "model.json") | {"format": 2}) if text is None else text
    Path("m/model.json").write_text(text)
    saved(Image.fromarray(images[0]), "x.png")
    assert fedkper("predict", "m", "x.png") == 2
    assert naming in capsys.readouterr().err


@pytest.mark.parametrize("change", ["cut", "gone", "other"])
def test_weights_that_were_changed(
    change: str, model: Path, images: Pixels, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, "m")
    file = Path("m/model.safetensors")
    if change == "gone":
        file.unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        save_file({"head.bias": torch.zeros(3)}, file)
    saved(Image.fromarray(images[0]), "x.png")
    assert fedkper("predict", "m", "x.png") == 2
    assert "model.safetensors: " in capsys.readouterr().err


def test_an_onnx_model_without_the_extra(
    model: Path, images: Pixels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"fedkper\[onnx\]"):
        predict.load(model, "model.onnx")


def test_the_kinds_of_files_are_those_of_the_page() -> None:
    text = (Path(__file__).parents[1] / "docs" / "export.md").read_text()
    for name in (*imagefiles.ARRAYS, "PNG", "JPEG", "BMP", "TIFF"):
        assert name in text


@pytest.mark.realdata
def test_a_model_of_real_images(real: Callable[[str], Path], tmp_path: Path, predicted: Any) -> None:
    data_folder = real("breastmnist")
    small = ["--clients", 4, "--fraction", 0.5, "--rounds", 2, "--epochs", 1, "--batch", 64, "--alpha", 1]
    words = ["run", "--dataset", "breastmnist", *small, "--workers", 1, "--data", data_folder]
    assert fedkper(*words, "--out", tmp_path / "r") == 0
    assert fedkper("export", tmp_path / "r", "--model", tmp_path / "m", "--format", "both") == 0
    rows, said = predicted(tmp_path / "m", data_folder / "medmnist" / "breastmnist.npz")
    assert said == ""
    assert len(rows) == strict(tmp_path / "r" / "run.json")["data"]["test"]
    card = (tmp_path / "m" / "MODEL_CARD.md").read_text()
    assert "licence: CC BY 4.0" in card
    assert "citation: MedMNIST v2" in card
    labels = np.load(data_folder / "medmnist" / "breastmnist.npz")["test_labels"].ravel()
    names = strict(tmp_path / "m" / "model.json")["classes"]
    accuracy = np.mean([names.index(r["class"]) == y for r, y in zip(rows, labels, strict=True)])
    assert f"accuracy {accuracy:.4f}" in card
