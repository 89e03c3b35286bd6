"""Pictures from files as a model takes them, uint8 [H, W, channels]; each change is said, or refused.

PNG, JPEG, BMP, TIFF: through pillow; .npy and .npz: uint8 arrays [N, H, W] or [N, H, W, channels]. The rules:

size            refused, or with `resize` brought to the model's (bicubic, as MedMNIST was made)
grey, colour    grey is repeated as three channels; three equal channels become grey; real colour is refused
alpha           dropped where nothing is transparent, else refused: the colour behind is not known
palette, 1 bit  turned into the colours they stand for
EXIF            a photograph is turned as its orientation says
16 bit, float   refused: which range becomes 0 to 255 decides the picture
pages           a file with several is refused
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from fedkper.errors import InputError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
ARRAYS = (".npy", ".npz")
# The array of a .npz that is classified: MedMNIST's test split, or the only one there is.
TEST = "test_images"
_OPAQUE = 255
_BITS_PER_SAMPLE = 258  # TIFF's tag

Pixels = NDArray[np.uint8]


class Picture(NamedTuple):
    """One picture of a file, or why there is none."""

    file: str
    at: int | None
    """its place in an array file, from 0"""
    pixels: Pixels | None
    """[H, W, channels] as the model takes it"""
    fault: str = ""
    changes: tuple[str, ...] = ()
    """what was done to it, each in a few words"""


class _Fault(Exception):
    """Why a picture cannot be used."""


def found(paths: Iterable[Path]) -> list[Path]:
    """The files that are named, and those of a known kind in and below the folders that are, sorted.

    Raises InputError for a path that does not exist, for a file of another kind, and if there is no file.
    """
    files: list[Path] = []
    kinds = ", ".join((*PICTURES, *ARRAYS))
    for path in paths:
        if os.path.isdir(path):
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in PICTURES + ARRAYS)
            files += [p for p in inside if p.is_file()]
        elif not os.path.exists(path):
            raise InputError(f"{path}: no such file or folder")
        elif path.suffix.lower() not in PICTURES + ARRAYS:
            raise InputError(f"{path}: not a picture by its ending; {kinds} are read")
        else:
            files.append(path)
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no picture is there ({kinds})")
    return list(dict.fromkeys(files))


def read(file: Path, shape: tuple[int, int, int], resize: bool) -> Iterator[Picture]:
    """The pictures in one file, for a model of `shape` (H, W, channels); a fault ends a file."""
    try:
        if file.suffix.lower() in PICTURES:
            pixels, changes = _opened(file)
            pixels, more = _fitted(pixels, shape, resize)
            yield Picture(str(file), None, pixels, changes=(*changes, *more))
            return
        images = _array(file)
        _fitted(images[0], (*shape[:2], images.shape[3]), resize)  # a wrong size is said once
        for index, image in enumerate(images):
            yield _one(str(file), index, image, shape, resize)
    except _Fault as fault:
        yield Picture(str(file), None, None, str(fault))


def _one(file: str, index: int, image: Pixels, shape: tuple[int, int, int], resize: bool) -> Picture:
    try:
        pixels, changes = _fitted(image, shape, resize)
    except _Fault as fault:
        return Picture(file, index, None, str(fault))
    return Picture(file, index, pixels, changes=changes)


def _opened(file: Path) -> tuple[Pixels, tuple[str, ...]]:
    """A picture file as uint8 [H, W, 1 or 3]."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata; what matters is checked here
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=("PNG", "JPEG", "BMP", "TIFF")) as image:
                if getattr(image, "n_frames", 1) > 1:
                    raise _Fault(f"holds {getattr(image, 'n_frames', 0)} pages; save each as a file")
                if _deep(image, file):
                    raise _Fault(
                        "has more than 8 bits a channel; bring its range to 0 to 255 and save 8 bits"
                    )
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
                plain, changes = _colours(ImageOps.exif_transpose(image))
                changes = ("turned as their EXIF data say", *changes) if turned else changes
    except _Fault:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise _Fault(f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels; cut it into tiles") from None
    except Exception as error:  # a damaged file makes the decoders fail in many ways
        reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
        raise _Fault(f"cannot be read{f' ({reason})' if reason else ' as PNG, JPEG, BMP or TIFF'}") from None
    pixels = np.asarray(plain)
    return (pixels[..., None] if pixels.ndim == 2 else pixels), changes


def _deep(image: Image.Image, file: Path) -> bool:
    """Whether a channel has more than 8 bits, which pillow may cut without a word."""
    if image.mode.startswith(("I", "F")):
        return True
    if image.format == "PNG":
        with open(file, "rb") as stream:
            return int(struct.unpack("25B", stream.read(25))[24]) > 8  # IHDR: the bit depth
    if image.format == "TIFF":
        bits: Any = image.tag_v2.get(_BITS_PER_SAMPLE, 1)  # type: ignore[attr-defined]
        return any(b > 8 for b in (bits if isinstance(bits, tuple) else (bits,)))
    return False


def _colours(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """A picture in mode L or RGB."""
    changes: tuple[str, ...] = ()
    if image.mode == "1":
        return image.convert("L"), ("of 1 bit a pixel, turned into 0 and 255",)
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA" if image.mode == "PA" or image.has_transparency_data else "RGB")
        changes = ("palette turned into colours",)
    elif image.mode in ("L", "RGB") and image.has_transparency_data:  # one colour stands for "nothing"
        image = image.convert("LA" if image.mode == "L" else "RGBA")
    if image.mode in ("LA", "RGBA"):
        if image.getextrema()[-1][0] < _OPAQUE:  # type: ignore[index]
            raise _Fault("is transparent in places; put it on the background it belongs to")
        return image.convert(image.mode[:-1]), (*changes, "alpha channel dropped, nothing was transparent")
    if image.mode not in ("L", "RGB"):
        raise _Fault(f"is in the colour space {image.mode}; save it as RGB or grey")
    return image, changes


def _array(file: Path) -> Pixels:
    """The pictures of a .npy or .npz file: [N, H, W, channels]."""
    try:
        with open(file, "rb") as stream:  # NumPy leaves a damaged file open
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                where, images = "the array", content
            else:
                keys = content.files
                if TEST not in keys and len(keys) != 1:
                    raise _Fault(f"has no {TEST}, which is read, but: {', '.join(keys) or 'nothing'}")
                where = TEST if TEST in keys else keys[0]
                images = np.asarray(content[where])
    except _Fault:
        raise
    except Exception as error:  # damaged bytes make the zip reader fail in many ways
        raise _Fault(f"cannot be read as a NumPy file ({' '.join(str(error).split())[:120]})") from None
    if images.dtype != np.uint8:
        raise _Fault(f"{where} is {images.dtype}; only uint8 (0 to 255) is read")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise _Fault(f"{where} has the shape {images.shape}, not [N, H, W], [N, H, W, 1] or [N, H, W, 3]")
    found: Pixels = images
    return found


def _fitted(pixels: Pixels, shape: tuple[int, int, int], resize: bool) -> tuple[Pixels, tuple[str, ...]]:
    """[H, W, 1 or 3] as [H, W, channels] of the model."""
    changes: list[str] = []
    height, width, channels = shape
    if pixels.shape[2] == 3 and channels == 1:
        if not (pixels == pixels[..., :1]).all():
            raise _Fault("is in colour, but the model takes grey; save it as grey")
        pixels = pixels[..., :1]
        changes.append("three equal channels taken as grey")
    elif pixels.shape[2] == 1 and channels == 3:
        pixels = pixels.repeat(3, axis=2)
        changes.append("grey repeated as three channels")
    if pixels.shape[2] != channels:
        raise _Fault(f"has {pixels.shape[2]} channel(s), but the model takes {channels}")
    if pixels.shape[:2] != (height, width):
        have, want = f"{pixels.shape[0]} x {pixels.shape[1]}", f"{height} x {width}"
        if not resize:
            raise _Fault(f"is {have} pixels, but the model takes {want}; --resize changes its size")
        squeezed = pixels.shape[0] * width != pixels.shape[1] * height
        image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
        small = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        pixels = small[..., None] if channels == 1 else small
        changes.append(f"resized to {want}" + (", which squeezes them" if squeezed else ""))
    return pixels, tuple(changes)
