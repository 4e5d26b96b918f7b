"""From a picture of any kind to patches: files, bytes, `data:` URLs, PIL images and arrays; no weights, no mlx.

The size, the filter, the patches and their scale are those of transformers' `Gemma4ImageProcessorPil`, bit for bit
(tests/test_preprocess.py). Only the order differs: the picture is resized while it is still PIL's, and the padding is
never made. A photograph of 12 megapixels takes 0.15 s so, and 0.5 s through the processor itself.
"""

import base64
import binascii
import functools
import hashlib
import io
import math
import os
import re
import stat
import threading
import urllib.parse
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from dgemma.errors import ImageError, OptionError

BUDGETS = (70, 140, 280, 560, 1120)

# Pillow warns above 89.5 megapixels and refuses twice as many; this is that refusal, held whatever the caller has set.
PIXEL_LIMIT = 178_956_970

# Named, because Pillow would hand an EPS to Ghostscript, and because formats without a signature (TGA, PCX) take noise
# for a picture.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "QOI")

SOURCES = "a path, a data: URL, bytes, a PIL image or a numpy array"

EXIF_ORIENTATION = 0x0112

# What undoes each value of EXIF's orientation; 1 is upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# `warnings.catch_warnings` swaps a list of the whole process: two threads inside it could leave it swapped.
_quiet = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Patches:
    """One picture as the vision tower reads it; real patches only, in reading order.

    pixels       float32 [N, P], 0 to 1; P = patch * patch * 3: rows, columns, then red, green, blue
    positions    int32 [N, 2], (x, y) of each patch in the grid
    soft_tokens  rows that the picture takes in a prompt: N / pooling²
    size         (width, height) of the picture, upright, in pixels
    resized      (width, height) that the patches cover, in pixels
    """

    pixels: np.ndarray
    positions: np.ndarray
    soft_tokens: int
    size: tuple[int, int]
    resized: tuple[int, int]

    def __post_init__(self) -> None:
        for array in (self.pixels, self.positions):  # the digest below stands for them
            array.flags.writeable = False

    @property
    def grid(self) -> tuple[int, int]:
        """(columns, rows) of patches."""
        x, y = self.positions[-1]
        return int(x) + 1, int(y) + 1

    @functools.cached_property
    def digest(self) -> str:
        """What tells it from other pictures: a SHA-256 of grid and pixels, and so of content, budget and shape."""
        return hashlib.sha256(repr(self.grid).encode() + self.pixels.tobytes()).hexdigest()


def preprocess(source, *, budget: int = 280, patch_size: int = 16, pooling: int = 3, label: str = "image") -> Patches:
    """Resize a picture to at most `budget` soft tokens, aspect kept, and cut it into patches.

    source: whatever `load_image` takes; Patches are taken as they are. Raises OptionError for another budget, ImageError for a picture that cannot be
    read or is longer than `budget` times its shorter side: no grid of soft tokens could hold its shape (there the
    reference squeezes it).
    """
    if type(budget) is not int or budget not in BUDGETS:
        allowed = ", ".join(map(str, BUDGETS))
        raise OptionError(f"image budget {budget!r}: allowed are {allowed} soft tokens an image")
    if isinstance(source, Patches):
        return _checked(source, patch_size, pooling, label)
    image = load_image(source, label=label)
    short, long = sorted(image.size)
    if long > budget * short:
        raise ImageError(
            f"{_name(source, label)}: {image.width}x{image.height} pixels is too long and thin; at a budget of {budget} "
            f"soft tokens the longer side may be at most {budget} times the shorter"
        )
    pixels, positions, resized = _cut(image, budget * pooling**2, patch_size, pooling)
    soft_tokens = len(pixels) // pooling**2
    return Patches(pixels=pixels, positions=positions, soft_tokens=soft_tokens, size=image.size, resized=resized)


def _checked(patches: Patches, patch_size: int, pooling: int, label: str) -> Patches:
    """Patches that were cut for a model with the same eyes; ImageError for others."""
    pixels, positions = patches.pixels, patches.positions
    if type(patches.soft_tokens) is not int or pixels.shape != (patches.soft_tokens * pooling**2, patch_size**2 * 3):
        raise ImageError(f"{label}: patches of another model (shape {pixels.shape}); give the picture itself")
    columns, rows = patches.grid if positions.shape == (len(pixels), 2) and len(pixels) else (0, 0)
    whole = columns * rows == len(pixels) > 0 and columns % pooling == rows % pooling == 0
    if not whole or pixels.dtype != np.float32 or not np.array_equal(positions, _grid(columns, rows)):
        raise ImageError(f"{label}: patches that are no whole picture of float32; give the picture itself")
    return patches


def load_image(source, *, label: str = "image") -> Image.Image:
    """Read a picture: upright (EXIF), first frame, transparency over white, as a new PIL image of mode RGB.

    source: a path, a `data:` URL, encoded bytes, a PIL image (left as it is), or an array [H, W] or [H, W, 1|3|4] of
    bool, uint8, uint16 or floats from 0 to 1. Grey of 16 bits is scaled from 0..65535, floats from 0..1 or 0..255.
    `label` names a source that has no file name ("image 2") in messages. Raises ImageError.
    """
    name = _name(source, label)
    if isinstance(source, np.ndarray):
        return _rgb(_from_array(source, name), name)
    if isinstance(source, Image.Image):
        return _decode(source, name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _open(io.BytesIO(source), name)
    if isinstance(source, str) and _scheme(source) == "data":
        return _open(io.BytesIO(_data_url(source, name)), name)
    if isinstance(source, str) and _scheme(source):
        raise ImageError(f"{name}: pictures are not fetched from the network; download it and give the file")
    if isinstance(source, (str, Path)):
        return _from_file(source, name)
    raise ImageError(f"{name}: {type(source).__name__} is not a picture; allowed are {SOURCES}")


# -- naming -----------------------------------------------------------------------------------------------------------


def _scheme(source: str) -> str:
    """The scheme of a URL ("data", "https"), or "" for a path."""
    found = re.match(r"(data):|([a-z][a-z0-9+.-]+)://", source, re.IGNORECASE)
    return (found[1] or found[2]).lower() if found else ""


def _name(source, label: str) -> str:
    """What messages call a source: its path or address, printable and short, else `label`."""
    if not isinstance(source, (str, Path)) or _scheme(str(source)) == "data":
        return label
    return _one_line(source) or label


def _one_line(text, limit: int = 120) -> str:
    """`text` without line breaks and control characters, its middle cut out when it is long."""
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    return line if len(line) <= limit else f"{line[: limit // 2]}...{line[-limit // 2 :]}"


# -- reading ----------------------------------------------------------------------------------------------------------


def _from_file(path, name: str) -> Image.Image:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ImageError(f"{name}: is a directory; give one image file")
        if not stat.S_ISREG(mode):
            raise ImageError(f"{name}: is not a regular file; give an image file")
        with open(path, "rb") as file:
            return _open(file, name)
    except (FileNotFoundError, NotADirectoryError):
        raise ImageError(f"{name}: no such image file") from None
    except OSError as error:
        raise ImageError(f"{name}: cannot be read ({_one_line(error.strerror or error)})") from None
    except ValueError:  # a NUL in the path
        raise ImageError(f"{name}: not a file name") from None


def _data_url(url: str, name: str) -> bytes:
    """The bytes of a `data:` URL, base64 (padding optional, as in browsers) or percent-encoded."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ImageError(f"{name}: malformed data: URL, no comma; write data:image/png;base64,....")
    body = urllib.parse.unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return body
    body = b"".join(body.split()).rstrip(b"=")
    try:
        return base64.b64decode(body + b"=" * (-len(body) % 4), validate=True)
    except binascii.Error:
        raise ImageError(f"{name}: malformed data: URL, its base64 cannot be decoded") from None


@functools.cache
def _formats() -> tuple[str, ...]:
    """FORMATS that this Pillow was built with: Image.open fails on the name of an absent one."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _open(file, name: str) -> Image.Image:
    """Decode an open binary file."""
    if not file.read(1):
        raise ImageError(f"{name}: is empty; give a complete image file")
    file.seek(0)
    with _pillow(name):
        image = Image.open(file, formats=_formats())
    return _decode(image, name)


def _decode(image: Image.Image, name: str) -> Image.Image:
    """Load the pixels of an opened image, turn it upright, make it RGB."""
    _check_size(image.width, image.height, name)
    with _pillow(name):
        image.load()
        turn = UPRIGHT.get(_orientation(image))
        result = _rgb(image if turn is None else image.transpose(turn), name)
        result.info = {}  # or its EXIF would turn it once more when it is loaded again
        return result


@contextmanager
def _pillow(name: str):
    """Pillow's warnings are dropped in here, and whatever it raises leaves as one ImageError."""
    try:
        with _quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImageError:
        raise
    except UnidentifiedImageError:
        allowed = ", ".join(_formats())
        raise ImageError(f"{name}: not an image, or one without pixels; allowed formats are {allowed}") from None
    except Image.DecompressionBombError as error:
        seen = re.search(r"(\d+) pixels", str(error))
        raise _too_large(name, f"{int(seen[1]):,} pixels" if seen else "its size") from None
    except Exception as error:  # noqa: BLE001: on damaged files decoders raise whatever they happen to raise
        reason = _one_line(error) or type(error).__name__
        raise ImageError(f"{name}: damaged or incomplete image ({reason}); give a complete image file") from None


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:  # noqa: BLE001: a damaged note about the picture is no reason to refuse the picture
        return 1


def _check_size(width: int, height: int, name: str) -> None:
    if not width or not height:
        raise ImageError(f"{name}: {width}x{height} has no pixels; both sides must be at least 1")
    if width * height > PIXEL_LIMIT:
        raise _too_large(name, f"{width:,}x{height:,} pixels")


def _too_large(name: str, seen: str) -> ImageError:
    return ImageError(f"{name}: {seen} is too large; at most {PIXEL_LIMIT // 10**6} megapixels, make it smaller")


# -- pixels to RGB ----------------------------------------------------------------------------------------------------


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """A new RGB image of 8 bits a channel from any mode; transparency over white."""
    if image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("I", "F"):
        return Image.fromarray(_grey(np.asarray(image), name)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(layer, mask=layer)
        return white
    return image.convert("RGB")  # a copy, where it is RGB already


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    """An array [H, W] or [H, W, 1|3|4] as a PIL image of mode L, RGB or RGBA."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        shape = "x".join(map(str, array.shape)) or "scalar"
        raise ImageError(f"{name}: an array of shape {shape}; allowed are HxW and HxWx1, x3 or x4, channels last")
    _check_size(array.shape[1], array.shape[0], name)
    if array.dtype == bool:
        array = array * np.uint8(255)
    elif array.dtype.kind == "f":
        array = _unit_floats(array, name)
    elif array.dtype.kind == "u" and array.dtype.itemsize == 2:
        array = _eight_bits(array)
    elif array.dtype != np.uint8:
        raise ImageError(f"{name}: an array of {array.dtype}; allowed are bool, uint8, uint16 and floats from 0 to 1")
    if array.shape[2:] == (1,):
        array = array[..., 0]
    return Image.fromarray(np.ascontiguousarray(array))


def _eight_bits(grey: np.ndarray) -> np.ndarray:
    """uint16 0..65535 -> uint8 0..255, rounded to the nearest."""
    return ((grey.astype(np.uint32) * 255 + 32895) >> 16).astype(np.uint8)


def _unit_floats(values: np.ndarray, name: str) -> np.ndarray:
    """Floats 0..1 -> uint8."""
    low, high = _range(values, name)
    if low < 0 or high > 1:
        raise ImageError(f"{name}: float pixels from {low:.4g} to {high:.4g}; allowed are 0 to 1, or uint8 from 0 to 255")
    return (values * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def _grey(values: np.ndarray, name: str) -> np.ndarray:
    """PIL's 32-bit grey (int32 0..65535, as 16-bit PGM opens; float32 0..1 or 0..255) -> uint8."""
    low, high = _range(values, name)
    if low >= 0 and values.dtype.kind == "i" and high <= 65535:
        return _eight_bits(values)
    if low >= 0 and values.dtype.kind == "f" and high <= 255:
        return (values * np.float32(255 if high <= 1 else 1) + np.float32(0.5)).astype(np.uint8)
    raise ImageError(
        f"{name}: 32-bit grey from {low:.6g} to {high:.6g}; allowed are integers 0 to 65535 and floats 0 to 1 or 0 to 255"
    )


def _range(values: np.ndarray, name: str) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():  # min and max hand NaN on
        raise ImageError(f"{name}: pixels that are not finite (NaN or infinite); allowed are 0 to 1")
    return low, high


# -- RGB to patches ---------------------------------------------------------------------------------------------------


def _cut(image: Image.Image, max_patches: int, patch_size: int, pooling: int):
    """RGB image -> float32 [N, P], int32 [N, 2], (width, height) after resizing."""
    width, height = _fitted(image.size, max_patches, patch_size, pooling)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    rows, columns = height // patch_size, width // patch_size
    pixels = np.asarray(image).reshape(rows, patch_size, columns, patch_size, 3)
    patches = pixels.swapaxes(1, 2).reshape(rows * columns, -1)  # uint8 [N, P]
    return (patches * (1 / 255)).astype(np.float32), _grid(columns, rows), (width, height)


def _grid(columns: int, rows: int) -> np.ndarray:
    """(x, y) of each patch in reading order, int32 [N, 2]."""
    y, x = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    return np.stack([x, y], axis=1)


def _fitted(size: tuple[int, int], max_patches: int, patch_size: int, pooling: int) -> tuple[int, int]:
    """The (width, height) to resize to: whole tiles of pooling x pooling patches, as many as fit, the aspect kept.

    A picture too slender for two tiles a side becomes a strip of one, at most `max_patches` long.
    """
    tile, most = patch_size * pooling, max_patches // pooling**2
    scale = math.sqrt(max_patches * patch_size**2 / (size[0] * size[1]))
    tiles = [math.floor(scale * side / tile) for side in size]
    for side, other in ((0, 1), (1, 0)):
        if tiles[side] == 0:
            tiles[side], tiles[other] = 1, min(size[other] // size[side], most)
    return tiles[0] * tile, tiles[1] * tile
