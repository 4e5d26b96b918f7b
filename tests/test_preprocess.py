"""Preprocessing: the reference's patches bit for bit, every kind of source, and one clear line for each bad one."""

import base64
import io
import struct
import subprocess
import sys
import threading
import urllib.parse
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dgemma.errors import ImageError, OptionError
from dgemma.vision import BUDGETS, load_image, preprocess
from dgemma.vision.preprocess import PIXEL_LIMIT


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth random RGB picture: compresses well, and shows every flip and swap."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(source) -> np.ndarray:
    return np.asarray(load_image(source))


def refusal(source, budget: int = 280, label: str = "image 2") -> str:
    """The message for a bad picture; always one line, and never a warning beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError) as caught:
            preprocess(source, budget=budget, label=label)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


# -- the reference's patches ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("size", [(1, 1), (48, 48), (400, 300), (211, 977), (1501, 40), (3, 120), (768, 768)])
def test_patches_are_the_references(reference, budget, size):
    image = picture(*size)
    ours = preprocess(image, budget=budget)
    theirs = reference(image, max_soft_tokens=budget, return_tensors=None)
    count = len(ours.pixels)
    assert ours.pixels.dtype == np.float32 and ours.positions.dtype == np.int32
    assert ours.soft_tokens == theirs["num_soft_tokens_per_image"][0] == count // 9 <= budget
    assert np.array_equal(ours.pixels, theirs["pixel_values"][0][:count])
    assert np.array_equal(ours.positions, theirs["image_position_ids"][0][:count])
    assert (theirs["image_position_ids"][0][count:] == -1).all()
    assert ours.size == size and ours.grid == (ours.resized[0] // 16, ours.resized[1] // 16)
    assert ours.grid[0] * ours.grid[1] == count


def test_another_patch_and_pooling_size(reference):
    ours = preprocess(picture(90, 70), budget=70, patch_size=8, pooling=2)
    theirs = reference(
        picture(90, 70), max_soft_tokens=70, patch_size=8, pooling_kernel_size=2, return_tensors=None
    )
    assert np.array_equal(ours.pixels, theirs["pixel_values"][0][: len(ours.pixels)])
    assert ours.soft_tokens == len(ours.pixels) // 4


def test_longest_shape_that_a_budget_can_hold(reference):
    ours = preprocess(picture(70, 1), budget=70)
    theirs = reference(picture(70, 1), max_soft_tokens=70, return_tensors=None)
    assert ours.soft_tokens == 70 and np.array_equal(ours.pixels, theirs["pixel_values"][0])


def test_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['torchvision'] = None\n"
        "import numpy as np; from dgemma.vision import preprocess\n"
        "assert 'transformers' not in sys.modules\n"
        "print(preprocess(np.zeros((48, 48), np.uint8), budget=70).soft_tokens)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "64", done.stderr


# -- sources ----------------------------------------------------------------------------------------------------------


def test_every_source_gives_the_same_pixels(tmp_path):
    image = picture(60, 40)
    data = encoded(image)
    (tmp_path / "a picture.png").write_bytes(data)
    base = base64.b64encode(data).decode()
    array = np.asarray(image)
    sources = [
        tmp_path / "a picture.png",
        str(tmp_path / "a picture.png"),
        data,
        bytearray(data),
        memoryview(data),
        image,
        array,
        array[:, ::1].astype(np.float64) / 255,
        array.astype(np.uint16) * 257,
        array.astype(">u2") * 257,
        np.asfortranarray(array),
        f"data:image/png;base64,{base}",
        f"DATA:image/png;name=x;BASE64,{base.rstrip('=')}",
        f"data:image/png;base64,{base[:70]}\n {base[70:]}",
        "data:image/png;base64," + urllib.parse.quote(base, safe=""),
        "data:image/png," + urllib.parse.quote_from_bytes(data),
    ]
    for source in sources:
        result = load_image(source)
        assert type(result) is Image.Image and result.mode == "RGB"
        assert np.array_equal(np.asarray(result), array), str(source)[:60]


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF", "ICO", "JPEG2000", "QOI"])
def test_lossless_formats(kind):
    flat = Image.new("RGB", (32, 32), (10, 200, 30))
    options = {"lossless": True} if kind == "WEBP" else {"sizes": [(32, 32)]} if kind == "ICO" else {}
    assert np.array_equal(pixels(encoded(flat, kind, **options)), np.asarray(flat))


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "WEBP"])
def test_lossy_formats(kind):
    image = picture(64, 48)
    assert np.abs(pixels(encoded(image, kind)).astype(int) - np.asarray(image)).mean() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    upright = picture(40, 24)
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),  # a viewer turns it clockwise: it is stored turned the other way
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    stored = Image.fromarray(np.ascontiguousarray(undo(np.asarray(upright))))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, exif=exif)
    for source in (data, Image.open(io.BytesIO(data)), load_image(data), encoded(stored, "TIFF", exif=exif)):
        assert np.array_equal(pixels(source), np.asarray(upright))
    assert preprocess(data, budget=70).size == (40, 24)


def test_damaged_exif_is_no_reason_to_refuse():
    image = picture(40, 24)
    for exif in (b"Exif\x00\x00junk", b"Exif\x00\x00II*\x00\xff\xff\xff\x7f", b"\x00" * 20):
        assert pixels(encoded(image, "PNG", exif=exif)).shape == (24, 40, 3)


def test_transparency_is_flattened_onto_white():
    solid, half, clear = (200, 0, 0, 255), (200, 0, 0, 128), (200, 0, 0, 0)
    rgba = Image.new("RGBA", (3, 1))
    for x, value in enumerate((solid, half, clear)):
        rgba.putpixel((x, 0), value)
    want = [[200, 0, 0], [227, 127, 127], [255, 255, 255]]
    sources = [rgba, encoded(rgba), np.asarray(rgba), rgba.convert("RGBa"), encoded(rgba, "WEBP", lossless=True, exact=True)]
    for source in sources:
        assert np.abs(pixels(source)[0].astype(int) - want).max() <= 1


def test_transparent_grey_and_palettes():
    grey = Image.merge("LA", (Image.new("L", (2, 1), 40), Image.frombytes("L", (2, 1), b"\xff\x00")))
    assert pixels(encoded(grey))[0].tolist() == [[40] * 3, [255] * 3]
    palette = Image.frombytes("P", (3, 1), bytes([0, 1, 2]))
    palette.putpalette([9, 8, 7, 50, 60, 70, 1, 2, 3])
    assert pixels(palette)[0].tolist() == [[9, 8, 7], [50, 60, 70], [1, 2, 3]]
    assert pixels(palette.convert("PA"))[0].tolist() == [[9, 8, 7], [50, 60, 70], [1, 2, 3]]
    for mark in (1, b"\xff\x00\xff"):  # one clear entry, or an alpha for each
        for kind in ("PNG", "GIF") if mark == 1 else ("PNG",):
            data = encoded(palette, kind, transparency=mark)
            assert pixels(data)[0].tolist() == [[9, 8, 7], [255, 255, 255], [1, 2, 3]]
    keyed = encoded(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert pixels(keyed)[0].tolist() == [[255, 255, 255]]


def test_sixteen_and_thirty_two_bit_grey():
    ramp = np.array([[0, 128, 129, 32896, 65407, 65535]], dtype=np.uint16)
    want = np.round(ramp / 257).astype(np.uint8)
    sixteen = Image.fromarray(ramp)
    assert sixteen.mode == "I;16"
    pgm = b"P5 6 1 65535\n" + ramp.astype(">u2").tobytes()
    big = Image.frombytes("I;16B", (6, 1), ramp.astype(">u2").tobytes())
    integers = Image.fromarray(ramp.astype(np.int32))
    for source in (sixteen, encoded(sixteen), encoded(sixteen, "TIFF"), pgm, big, integers, encoded(integers, "TIFF")):
        assert np.array_equal(pixels(source)[..., 0], want)
    for values in ([0.0, 0.5, 1.0], [0.0, 127.6, 255.0]):
        floats = Image.fromarray(np.array([values], dtype=np.float32))
        assert floats.mode == "F"
        assert pixels(encoded(floats, "TIFF"))[0, :, 1].tolist() == [0, 128, 255]


def test_other_colour_spaces_and_one_bit():
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    for mode in ("CMYK", "YCbCr", "HSV", "RGBX"):
        assert np.abs(pixels(red.convert(mode))[0, 0].astype(int) - [255, 0, 0]).max() <= 2, mode
    assert np.abs(pixels(encoded(red.convert("CMYK"), "JPEG"))[0, 0].astype(int) - [255, 0, 0]).max() <= 4
    assert pixels(encoded(Image.new("1", (2, 2), 1))).tolist() == [[[255] * 3] * 2] * 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(data)[0, 0].astype(int) - [255, 0, 0]).max() <= 2


def test_arrays():
    grey = np.array([[0, 7], [200, 255]], dtype=np.uint8)
    want = np.repeat(grey[..., None], 3, axis=2)
    assert np.array_equal(pixels(grey), want) and np.array_equal(pixels(grey[..., None]), want)
    assert pixels(np.array([[True, False]])).tolist() == [[[255] * 3, [0] * 3]]
    assert pixels(np.array([[0.0, 0.5, 1.0]], dtype=np.float16))[0, :, 0].tolist() == [0, 128, 255]
    assert pixels(np.array([[0, 65535, 32896]], dtype=np.uint16))[0, :, 0].tolist() == [0, 255, 128]


def test_a_callers_picture_is_left_as_it_was():
    array = np.linspace(0, 1, 48).reshape(4, 4, 3)
    before = array.copy()
    preprocess(array, budget=70)
    assert np.array_equal(array, before)
    exif = Image.Exif()
    exif[0x0112] = 6
    for image in (picture(8, 6), Image.open(io.BytesIO(encoded(picture(8, 6), exif=exif)))):
        bytes_before, info, size, mode = image.tobytes(), dict(image.info), image.size, image.mode
        result = load_image(image)
        result.putpixel((0, 0), (1, 2, 3))
        assert result is not image and image.tobytes() == bytes_before
        assert (image.info, image.size, image.mode) == (info, size, mode)


def test_threads_leave_the_filters_of_warnings_alone():
    before = list(warnings.filters)
    data = encoded(picture(64, 64))
    threads = [threading.Thread(target=lambda: [load_image(data) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -70, 71, 280.0, "280", None, True])
def test_bad_budget(budget):
    with pytest.raises(OptionError) as caught:
        preprocess(picture(8, 8), budget=budget)
    assert str(caught.value) == f"image budget {budget!r}: allowed are 70, 140, 280, 560, 1120 soft tokens an image"


def test_missing_directory_and_not_a_file(tmp_path):
    missing = tmp_path / "nowhere.png"
    assert refusal(missing) == refusal(str(missing)) == f"{missing}: no such image file"
    assert refusal(tmp_path / "x.png" / "y.png") == f"{tmp_path}/x.png/y.png: no such image file"
    (tmp_path / "x.png").write_bytes(b"")
    assert refusal(tmp_path / "x.png" / "y.png") == f"{tmp_path}/x.png/y.png: no such image file"
    assert refusal(tmp_path) == f"{tmp_path}: is a directory; give one image file"
    assert refusal("/dev/zero") == "/dev/zero: is not a regular file; give an image file"
    assert refusal("") == "image 2: no such image file"
    assert refusal("a\0b.png") == "a?b.png: not a file name"
    assert refusal("two\nlines.png") == "two?lines.png: no such image file"
    assert "File name too long" in refusal("x" * 5000)


def test_no_permission(tmp_path, monkeypatch):
    path = tmp_path / "locked.png"
    path.write_bytes(encoded(picture(8, 8)))

    def locked(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", locked)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)"


def test_empty(tmp_path):
    path = tmp_path / "empty.png"
    path.touch()
    assert refusal(path) == f"{path}: is empty; give a complete image file"
    assert refusal(b"") == refusal("data:image/png;base64,") == "image 2: is empty; give a complete image file"


def test_not_an_image(tmp_path):
    path = tmp_path / "notes.png"
    for content in (b"hello", b"%PDF-1.7 ...", b"<svg/>", b"\x89PNG", bytes(100), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\xff\xd8\xff"):
        path.write_bytes(content)
        message = refusal(path)
        assert message.startswith(f"{path}: ") and ("not an image" in message or "damaged" in message), message
    path.write_bytes(b"hello")
    assert "not an image, or one without pixels; allowed formats are PNG, JPEG, " in refusal(path)


def test_postscript_is_never_run(monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was called"))
    assert "not an image" in refusal(encoded(picture(16, 16), "EPS"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "progressive", "GIF", "BMP", "TIFF", "WEBP", "JPEG2000", "PPM"])
def test_truncated(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    data = encoded(noise, "JPEG", progressive=True) if kind == "progressive" else encoded(noise, kind)
    for part in (0.02, 0.3, 0.5, 0.9, 0.97):
        message = refusal(data[: max(3, int(len(data) * part))])
        assert "damaged or incomplete image (" in message or "not an image" in message
    assert "damaged or incomplete image (" in refusal(data[: int(len(data) * 0.9)]) or kind == "WEBP"


def test_noise_after_a_good_header_never_escapes_as_another_error():
    generator = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "ICO", "QOI"):
        for _ in range(30):
            data = bytearray(encoded(picture(16, 16), kind))
            for place in generator.integers(0, len(data), 12):
                data[place] = generator.integers(256)
            try:
                load_image(bytes(data))
            except ImageError:
                pass


def test_no_pixels():
    assert refusal(np.zeros((0, 5, 3), np.uint8)) == "image 2: 5x0 has no pixels; both sides must be at least 1"
    assert refusal(np.zeros((5, 0))) == "image 2: 0x5 has no pixels; both sides must be at least 1"
    assert refusal(Image.new("RGB", (0, 4))) == "image 2: 0x4 has no pixels; both sides must be at least 1"
    assert "not an image, or one without pixels" in refusal(b"P6 0 0 255\n")
    assert "not an image, or one without pixels" in refusal(png_header(0, 8))


def test_too_long_and_thin(tmp_path):
    path = tmp_path / "line.png"
    path.write_bytes(encoded(Image.new("RGB", (1, 10_000))))
    for budget in BUDGETS:
        assert refusal(path, budget) == (
            f"{path}: 1x10000 pixels is too long and thin; at a budget of {budget} soft tokens the longer side may be at "
            f"most {budget} times the shorter"
        )
    assert "281x1 pixels is too long and thin" in refusal(picture(281, 1))
    assert preprocess(picture(281, 1), budget=560).soft_tokens <= 560


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def test_decompression_bomb_is_refused_by_its_header(tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(50_000, 50_000))
    allowed = "is too large; at most 178 megapixels, make it smaller"
    assert refusal(path) == f"{path}: 2,500,000,000 pixels {allowed}"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a caller may have lifted Pillow's limit: ours stands
    assert refusal(path) == f"{path}: 50,000x50,000 pixels {allowed}"
    monkeypatch.undo()
    message = refusal(png_header(10_000, 10_000))  # 100 megapixels: allowed, though Pillow would warn, and truncated
    assert "damaged or incomplete" in message and "exceeds" not in message
    huge = np.broadcast_to(np.uint8(0), (PIXEL_LIMIT // 1000 + 1, 1000))
    assert refusal(huge) == f"image 2: 1,000x178,957 pixels {allowed}"


def test_bad_arrays():
    assert refusal(np.zeros((3, 8, 8), np.uint8)) == (
        "image 2: an array of shape 3x8x8; allowed are HxW and HxWx1, x3 or x4, channels last"
    )
    assert "an array of shape 8x8x2;" in refusal(np.zeros((8, 8, 2), np.uint8))
    assert "an array of shape 1x8x8x3;" in refusal(np.zeros((1, 8, 8, 3), np.uint8))
    assert "an array of shape scalar;" in refusal(np.array(3.0))
    for dtype in (np.int64, np.int8, np.uint32, complex, object, "U3"):
        message = refusal(np.zeros((4, 4), dtype))
        assert message.endswith("; allowed are bool, uint8, uint16 and floats from 0 to 1")
    assert "image 2: an array of int64;" in refusal(np.zeros((4, 4), np.int64))
    for value in (np.nan, np.inf, -np.inf):
        array = np.full((4, 4), 0.5)
        array[1, 2] = value
        assert refusal(array) == "image 2: pixels that are not finite (NaN or infinite); allowed are 0 to 1"
        assert "not finite" in refusal(encoded(Image.fromarray(array.astype(np.float32)), "TIFF"))
    assert refusal(np.array([[-0.5, 254.9]])) == (
        "image 2: float pixels from -0.5 to 254.9; allowed are 0 to 1, or uint8 from 0 to 255"
    )
    assert "float pixels from -0.5 to 0.5;" in refusal(np.array([[-0.5, 0.5]]))
    assert "float pixels from 0 to 1.5;" in refusal(np.array([[0, 1.5]]))


def test_grey_beyond_sixteen_bits():
    allowed = "allowed are integers 0 to 65535 and floats 0 to 1 or 0 to 255"
    assert refusal(Image.fromarray(np.array([[0, 70_000]], np.int32))) == f"image 2: 32-bit grey from 0 to 70000; {allowed}"
    assert "from -1 to 0;" in refusal(Image.fromarray(np.array([[-1.0, 0.0]], np.float32)))


def test_malformed_data_urls_and_addresses():
    for url in ("data:image/png;base64", "data:"):
        assert refusal(url) == "image 2: malformed data: URL, no comma; write data:image/png;base64,...."
    for url in ("data:image/png;base64,####", "data:image/png;base64,AAAAA", "data:;base64,aGk\u00e9"):
        assert refusal(url) == "image 2: malformed data: URL, its base64 cannot be decoded"
    assert "not an image" in refusal("data:text/plain,hello%20there")
    assert refusal("https://example.org/cat.png") == (
        "https://example.org/cat.png: pictures are not fetched from the network; download it and give the file"
    )
    assert "not fetched from the network" in refusal("HTTP://example.org/" + "x" * 3000)


@pytest.mark.parametrize("source", [None, 3, [1, 2], object()])
def test_other_types(source):
    assert refusal(source) == (
        f"image 2: {type(source).__name__} is not a picture; allowed are a path, a data: URL, bytes, a PIL image or a numpy array"
    )


def test_a_closed_picture():
    image = Image.open(io.BytesIO(encoded(picture(8, 8))))
    image.close()
    assert "damaged or incomplete image (" in refusal(image)


def test_relative_paths_are_named_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("photos/cat.png")) == "photos/cat.png: no such image file"
