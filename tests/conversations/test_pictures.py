"""Pictures in every form that rows have, and pictures that are broken, huge or odd."""

from __future__ import annotations

import base64
import http.server
import io
import json
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from jaxtune.conversations import pictures as picture_files
from jaxtune.conversations.messages import (
    ConversationError,
    column_pictures,
    for_template,
    pictures_of,
    read_messages,
    shows_pictures,
    with_pictures,
)
from jaxtune.conversations.pictures import (
    MOST_PIXELS,
    PICTURE,
    TAG,
    Picture,
    PictureAccess,
    PictureError,
    read_picture,
    rgb,
)
from tests.patience import wait_until

ACCESS = PictureAccess()


def drawn(width: int = 6, height: int = 4, mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def header_of(width: int, height: int) -> bytes:
    """A PNG that says it has this size, and has no pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a b.png").write_bytes(file_of(drawn()))
    return tmp_path


@pytest.mark.parametrize(
    "form",
    [
        lambda data, path: data,
        lambda data, path: bytearray(data),
        lambda data, path: str(path),
        lambda data, path: path,
        lambda data, path: "a b.png",
        lambda data, path: f"file://{path.parent}/a%20b.png",
        lambda data, path: {"bytes": data, "path": None},
        lambda data, path: {"bytes": None, "path": str(path)},
        lambda data, path: {"bytes": data, "path": "where it was made.png"},
        lambda data, path: {"path": "where it was made.png", "image_url": None, "bytes": data},
        lambda data, path: {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"},
        lambda data, path: base64.b64encode(data).decode(),
        lambda data, path: Image.open(path),
        lambda data, path: Image.open(io.BytesIO(data)),
        lambda data, path: np.asarray(Image.open(path)),
    ],
)
def test_every_form_is_the_same_picture(files, form):
    path = files / "a b.png"
    picture = read_picture(form(path.read_bytes(), path), PictureAccess(folders=(str(files),)))
    assert np.array_equal(np.asarray(picture.decoded()), np.asarray(drawn()))
    assert np.array_equal(np.asarray(Picture(data=picture.file_bytes()).decoded()), np.asarray(drawn()))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("https://example.org/a.png", "is remote, and fetched only with data.remote_images: true"),
        ("nowhere.png", "there is no file 'nowhere.png' in "),
        ("", "there is no file"),
        ("a\0b", "is no path"),
        ("x" * 5000, "is no path"),
        ("data:image/png,abc", "is no data URL with base64"),
        ("data:image/png;base64,!!!", "is no base64"),
        ({"bytes": None, "path": None}, "has none of"),
        (3, "is no picture but int"),
        (np.zeros((2, 2), np.float32), "is no picture but ndarray"),
        (np.zeros((2, 2, 5), np.uint8), r"is an array \(2, 2, 5\)"),
        (np.zeros((0, 2, 3), np.uint8), r"is an array \(0, 2, 3\)"),
    ],
)
def test_what_is_no_picture_is_told(value, why):
    with pytest.raises(PictureError, match=why):
        read_picture(value, ACCESS)


def test_a_server_opens_no_files(files):
    with pytest.raises(PictureError, match="send the picture as a data URL"):
        read_picture(str(files / "a b.png"), PictureAccess(files=False))


def _moving() -> bytes:
    return file_of(drawn(), "GIF", save_all=True, append_images=[drawn(seed=1)])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is no picture of a known kind"),
        (b"<html>404</html>", "is no picture of a known kind"),
        (file_of(drawn(60, 40))[:200], "cannot be decoded: .*truncated|broken"),
        (file_of(drawn(60, 40), "JPEG")[:500], "cannot be decoded"),
        (header_of(60_000, 60_000), "cannot be decoded: DecompressionBomb|at most"),
        (header_of(MOST_PIXELS // 8 + 1, 8), "at most 89,478,485 are decoded"),
        (header_of(64, 64), "cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no picture of a known kind"),
        (_moving(), "has several frames"),
        (file_of(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), "32-bit numbers"),
        (file_of(Image.fromarray(np.zeros((2, 2), np.int32)), "TIFF"), "32-bit numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_cannot_be_read_is_told(data, why):
    with pytest.raises(PictureError, match=why):
        Picture(data=data).decoded()


@pytest.mark.parametrize("data", [file_of(drawn(60, 40))[:200], _moving()])
@pytest.mark.parametrize("reads", [Picture.decoded, Picture.digest, Picture.file_bytes])
def test_an_image_in_memory_is_read_as_its_file(data, reads):
    """Pillow decodes one when its pixels are first asked for."""
    picture = Picture(image=Image.open(io.BytesIO(data)))
    with pytest.raises(PictureError, match="truncated|broken|several frames"):
        reads(picture)


class _Odd(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        target = {"/file": "file:///etc/passwd", "/ftp": "ftp://127.0.0.1/a.png"}.get(self.path)
        if self.path in ("/head", "/circle"):  # a head of a byte now and then, redirects without an end
            return self.trickle() if self.path == "/head" else self.redirect()
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.end_headers()
        for _ in range(0 if target else 100):
            self.wfile.write(b"\x89PNG")
            time.sleep(0.02)

    def trickle(self):
        for _ in range(200):
            self.wfile.write(b"H")
            time.sleep(0.02)

    def redirect(self):
        time.sleep(0.06)
        self.send_response(302)
        self.send_header("Location", "/circle")
        self.end_headers()

    def log_message(self, *arguments):
        """Says nothing, as pytest shows what tests print."""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/file", "cannot be fetched: .*not allowed"),
        ("/ftp", "cannot be fetched: .*unknown url type: ftp"),
        ("/a b.png", "cannot be fetched: URL can't contain control characters"),
        ("/slow", "took more than 0.1 seconds"),
        ("/head", "took more than 0.1 seconds"),
        ("/circle", "took more than 0.1 seconds"),
    ],
)
def test_a_page_that_is_no_picture_is_told(path, why, monkeypatch):
    if "0.1" in why:
        monkeypatch.setattr(picture_files, "_SECONDS", 0.1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        before = {*threading.enumerate()}
        with pytest.raises(PictureError, match=why):
            Picture(url=f"http://127.0.0.1:{server.server_port}{path}").fetched()
        left = [thread for thread in {*threading.enumerate()} - before if isinstance(thread, picture_files._Fetch)]
        wait_until(lambda: not any(thread.is_alive() for thread in left))
    finally:
        server.shutdown()
        server.server_close()


def test_a_file_that_goes_missing_is_told(files):
    picture = read_picture(str(files / "a b.png"), ACCESS)
    (files / "a b.png").unlink()
    with pytest.raises(PictureError, match="there is no file"):
        picture.decoded()
    with pytest.raises(PictureError, match="is not a regular file"):
        Picture(path="/dev/zero").decoded()


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "LA", "PA", "RGBA", "La", "RGBa"]
)
def test_every_mode_becomes_rgb(mode):
    image = rgb(Image.new(mode, (3, 2)) if mode in ("PA", "La", "RGBa") else drawn(mode=mode))
    assert image.mode == "RGB"


def test_colours_of_odd_pictures():
    clear = Image.new("RGBA", (2, 2), (200, 0, 0, 0))
    assert rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    assert rgb(Image.new("RGBA", (2, 2), (200, 0, 0, 255))).getpixel((0, 0)) == (200, 0, 0)
    keyed = Image.open(io.BytesIO(file_of(Image.new("RGB", (2, 2), (9, 9, 9)), transparency=(9, 9, 9))))
    assert rgb(keyed).getpixel((0, 0)) == (255, 255, 255)
    deep = Image.open(io.BytesIO(file_of(Image.fromarray(np.array([[0, 257 * 100, 65_535]], np.uint16)))))
    assert [rgb(deep).getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (100,) * 3, (255,) * 3]
    assert rgb(Image.new("CMYK", (1, 1), (0, 0, 0, 255))).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("turn", range(1, 9))
def test_turned_photographs_stand_upright(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    turned = Picture(data=file_of(drawn(), "PNG", exif=exif)).decoded()
    copy = Image.open(io.BytesIO(file_of(drawn(), "PNG", exif=exif)))
    assert turned.size == ((4, 6) if turn > 4 else (6, 4))
    assert np.array_equal(np.asarray(turned), np.asarray(ImageOps.exif_transpose(copy)))


def test_equal_pictures_have_one_digest(files):
    data = (files / "a b.png").read_bytes()
    assert Picture(data=data).digest() == Picture(path=str(files / "a b.png")).digest() != Picture(data=b"").digest()
    assert Picture(image=drawn()).digest() == Picture(image=drawn()).digest() != Picture(image=drawn(seed=1)).digest()
    assert "data" not in repr(Picture(data=data))


# --- in messages

DATA = f"data:image/png;base64,{base64.b64encode(file_of(drawn())).decode()}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": DATA},
        {"type": "image", "url": DATA},
        {"type": "image", "path": DATA},
        {"type": "image_url", "image_url": DATA},
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}},
        {"type": "input_image", "image_url": DATA},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA.partition(",")[2]}},
        {"image": DATA},
        {"type": "image", "image": drawn()},
        {"type": "image", "image": {"bytes": file_of(drawn())}},
        drawn(),
    ],
)
def test_parts(part):
    turns = [
        {"role": "user", "content": ["A", part, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": "C"},
    ]
    messages = read_messages(turns, pictures=ACCESS)
    assert messages[0]["content"] == f"A{PICTURE}B"
    [picture] = pictures_of(messages[0])
    assert np.array_equal(np.asarray(picture.decoded()), np.asarray(drawn()))
    assert read_messages(messages, pictures=ACCESS) == messages
    parts = for_template(messages, "")[0]["content"]
    assert parts == [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "B"}]
    with pytest.raises(ConversationError, match="only text can be read"):
        read_messages(turns)


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (
            [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
            r"messages\[0\].content\[0\]: there is no",
        ),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "only text can be read and pictures"),
        ([{"role": "user", "content": [PICTURE, {"type": "image"}]}], "stands for pictures"),
        ([{"role": "assistant", "content": [{"type": "image", "image": DATA}]}], "models write text"),
        ([{"role": "user", "content": [{"type": "image", "image": DATA, "max_pixels": 9}]}], "max_pixels = 9 of one"),
    ],
)
def test_parts_that_cannot_be_read(turns, why):
    with pytest.raises(ConversationError, match=why):
        read_messages(turns, pictures=ACCESS)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "run", "arguments": {"image": "nginx"}}]}
PART = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("cell", "shows"),
    [
        ([{"role": "user", "content": [PART]}], True),
        ([{"role": "user", "content": [{"type": "image"}, "What?"]}], True),
        ([{"from": "human", "value": PART}], True),
        ([{"role": "user", "content": "What?", "images": ["a.png"]}], True),
        (json.dumps([{"role": "user", "content": [PART]}]), True),
        ([json.dumps({"role": "user", "content": [PART]})], True),
        ({"messages": [{"role": "user", "content": [PART]}]}, True),
        ({"role": ["user", "assistant"], "content": [[PART], "A cat."]}, True),
        ([{"role": "user", "content": "Start nginx", "images": None}, CALL], False),
        (json.dumps([{"role": "user", "content": "Start nginx"}, CALL]), False),
        ([{"role": "tool", "content": {"image": "nginx"}}], False),
        ([{"role": "user", "content": '{"type": "image"}'}], False),
        ({"image": "a.png", "licence": "CC0"}, False),
        ([{"type": "function", "function": {"name": "run", "parameters": {"image": {"type": "string"}}}}], False),
        ('{"image": "a.png"', False),
        ([{"role": "?", "content": [PART]}], False),
        (["image"], False),
        (b"image", False),
        (None, False),
    ],
)
def test_which_cells_show_pictures(cell, shows):
    """Names of arguments and of columns with other things are none."""
    assert shows_pictures(cell) == shows


def test_a_tag_beside_a_picture_in_a_part_is_text():
    messages = read_messages([{"role": "user", "content": [file_part(), f"What is {TAG}?"]}], pictures=ACCESS)
    assert with_pictures(messages, []) == messages


def file_part() -> dict[str, object]:
    return {"type": "image", "image": file_of(drawn())}


def test_a_text_with_the_mark_has_no_picture():
    """Nor has JSON that says it has."""
    for pictures in ([], [None], ["x"], None):
        turn = {"role": "user", "content": PICTURE, "pictures": pictures}
        assert for_template(read_messages([turn]), "")[0]["content"] == PICTURE


def _column(count: int) -> list[Picture]:
    return column_pictures([file_of(drawn(seed=seed)) for seed in range(count)], ACCESS, "images")


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.lists(st.sampled_from(["a", "picture", "\n"]), max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_columns_fill_tags_and_parts_in_order(turns, as_tags):
    """Whatever the number of turns and pictures: each stands where its tag or part does."""
    count = sum(word == "picture" for turn in turns for word in turn)
    parts = [
        [{"type": "image"} if word == "picture" else {"type": "text", "text": word} for word in turn] for turn in turns
    ]
    tags = ["".join(TAG if word == "picture" else word for word in turn) for turn in turns]
    contents = tags if as_tags else parts
    messages = read_messages([{"role": "user", "content": content} for content in contents], pictures=ACCESS)
    column = _column(count)
    placed = with_pictures(messages, column)
    assert [picture for message in placed for picture in pictures_of(message)] == column
    assert [message["content"] for message in placed] == [tag.replace(TAG, PICTURE) for tag in tags]
    if count:
        with pytest.raises(ConversationError, match=f"there are {count + 1} pictures for"):
            with_pictures(messages, _column(count + 1))


def test_a_column_without_tags_comes_before_the_question():
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    placed = with_pictures(read_messages(turns), _column(2))
    assert [message["content"] for message in placed] == ["S", f"{PICTURE}{PICTURE}Q", "A"]
    assert with_pictures(read_messages(turns), []) == read_messages(turns)
    with pytest.raises(ConversationError, match="no user's message"):
        with_pictures(read_messages(turns[2:]), _column(1))
    tagged = read_messages([{"role": "user", "content": "Q"}, {"role": "assistant", "content": TAG}])
    with pytest.raises(ConversationError, match="models write text"):
        with_pictures(tagged, _column(1))
    without = read_messages([{"role": "user", "content": [{"type": "image"}]}], pictures=ACCESS)
    with pytest.raises(ConversationError, match="there are 0 pictures for 1 parts"):
        with_pictures(without, [])


def test_columns_have_a_picture_a_list_or_its_json(files):
    access = PictureAccess(folders=(str(files),))
    for cell in ("a b.png", ["a b.png"], json.dumps(["a b.png"]), {"path": "a b.png"}):
        assert len(column_pictures(cell, access, "image")) == 1
    with pytest.raises(ConversationError, match=r"images\[1\]: there is no file"):
        column_pictures(["a b.png", "b.png"], access, "images")


def test_a_turn_may_have_its_own_column():
    turn = {"role": "user", "content": "What?", "images": [DATA.partition(",")[2]]}
    [message] = read_messages([turn], pictures=ACCESS)
    assert message["content"] == f"{PICTURE}What?" and len(pictures_of(message)) == 1


@pytest.mark.parametrize("mode", ["I;16", "L", "RGB"])
def test_a_transparent_value_is_white(mode):
    """Of PNGs without an alpha channel."""
    kind, most = (np.uint16, 65535) if mode == "I;16" else (np.uint8, 255)
    values = np.array([[0, most, most // 5]], kind)
    values = np.repeat(values[..., None], 3, 2) if mode == "RGB" else values
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    with Image.open(file) as image:
        assert image.mode == mode
        assert np.asarray(rgb(image))[0, :, 0].tolist() == [255, 255, 51]
