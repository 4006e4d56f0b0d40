"""Pictures of conversations, from what people and programs write to RGB pixels."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import functools
import hashlib
import http.client
import io
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from jaxtune.system.files import read_plain

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE = "\uf8f0"  # a character for private use that stands for a picture in a message's content
TAG = "<image>"  # stands for a picture in the text of rows with a column of pictures
MOST_PIXELS = 89_478_485  # of a picture, read from its header before it is decoded; from here on Pillow warns
MOST_BYTES = 128 * 2**20  # of a picture's file
# Kinds that are tried. Others run programs (EPS), or hold no photographs or drawings.
_KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA", "QOI", "ICO")
_BASE64 = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")  # how JPEG, PNG, GIF and WebP files begin in base64
# A file's content comes before its name: rows of `datasets` have both, and the file is only where they were made.
_PAYLOADS = ("image", "image_url", "bytes", "base64", "data", "source", "url", "path", "file")
_SIZES = ("max_pixels", "min_pixels", "resized_height", "resized_width")
_SECONDS = 30.0  # for a remote picture
_ORIENTATION = 0x0112  # EXIF's tag


class PictureError(ValueError):
    """A picture that cannot be read."""


class Size(NamedTuple):
    """Of a picture, in pixels."""

    width: int
    height: int


@dataclasses.dataclass(frozen=True)
class PictureAccess:
    """Where pictures may be read from. Pictures that are written into a conversation itself always may."""

    folders: tuple[str, ...] = (".",)
    """In which relative paths are looked for, in order."""
    files: bool = True
    asked: list[str] | None = None
    """Gets the paths at which files are looked for."""
    remote: bool = False
    """Whether http and https addresses are fetched."""
    contents: Mapping[str, bytes | str] | None = None
    """What was fetched from addresses before, or why it was not; None: they are fetched when they are needed."""
    remote_option: str = "data.remote_images: true"
    """What allows it, for messages."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture that is not decoded yet: one of these is set."""

    data: bytes | None = dataclasses.field(default=None, repr=False)
    """Of its file."""
    path: str | None = None
    url: str | None = None
    image: Image | None = dataclasses.field(default=None, repr=False)

    def fetched(self, most_bytes: int = MOST_BYTES) -> Picture:
        """The picture with the bytes behind its address; itself without one. Raises PictureError."""
        if self.url is None:
            return self
        return Picture(data=_Fetch(self.url, most_bytes).content())

    def file_bytes(self) -> bytes:
        """Its file's content, of an image in memory as PNG. Raises PictureError."""
        if self.image is not None:
            stream = io.BytesIO()
            self.decoded().save(stream, "PNG", compress_level=1)
            return stream.getvalue()
        if self.data is not None:
            return self.data
        if self.path is None:
            return self.fetched().file_bytes()
        try:
            return read_plain(self.path, MOST_BYTES)
        except FileNotFoundError:
            raise PictureError(f"there is no file {self.path}") from None
        except OSError as error:
            raise PictureError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def decoded(self) -> Image:
        """The picture in RGB, upright, on white where it is transparent. Raises PictureError for one that is broken, of
        more than MOST_PIXELS, or moves.
        """
        return self._read(rgb)

    def size(self) -> Size:
        """Of the picture upright, by its header alone. Raises PictureError as `decoded`."""
        return self._read(_upright_size)

    def _read[T](self, read: Callable[[Image], T]) -> T:
        """What `read` makes of the picture, whose pixels may not be decoded yet."""
        from PIL import Image

        name = self.path or "the picture"
        data = self.file_bytes() if self.image is None else b""
        Image.init()
        kinds = [kind for kind in _KINDS if kind in Image.OPEN]  # a build of Pillow may lack some
        try:
            if self.image is not None:
                _require_still(self.image, name)
                return read(self.image)
            with Image.open(io.BytesIO(data), formats=kinds) as image:
                _require_still(image, name)
                return read(image)
        except PictureError:
            raise
        except Image.UnidentifiedImageError:
            raise PictureError(f"{name} is no picture of a known kind ({', '.join(kinds)}), or broken") from None
        except Exception as error:  # decoders raise errors of many kinds
            raise PictureError(f"{name} cannot be decoded: {type(error).__name__}: {error}") from None

    def digest(self) -> bytes:
        """16 bytes by which equal pictures are known. Raises PictureError."""
        if self.image is not None:
            return hashlib.blake2b(f"{self.image.size}".encode() + self.decoded().tobytes(), digest_size=16).digest()
        return hashlib.blake2b(self.file_bytes(), digest_size=16).digest()


def _require_still(image: Image, name: str) -> None:
    """Raises PictureError for an image that moves or is too large."""
    if image.width * image.height > MOST_PIXELS:
        raise PictureError(f"{name} has {image.width:,} x {image.height:,} pixels; at most {MOST_PIXELS:,} are decoded")
    if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: a photograph with previews
        raise PictureError(f"{name} has several frames; only still pictures can be read: keep one frame")


def _upright_size(image: Image) -> Size:
    turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    return Size(image.height, image.width) if turned else Size(image.width, image.height)


class _Fetch(threading.Thread):
    """Of one address, in a thread: names, redirects, heads and bytes have one limit of time together."""

    def __init__(self, url: str, most_bytes: int):
        super().__init__(daemon=True)
        self._url, self._most_bytes, self._data, self._error = url, most_bytes, bytearray(), ""
        self._is_over, self._sockets = False, list[socket.socket]()

    def content(self) -> bytes:
        """Raises PictureError."""
        self.start()
        self.join(_SECONDS)
        self._is_over = True
        for opened in self._sockets:  # the thread ends when it waits for one
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        if self.is_alive():
            raise PictureError(f"{_short(self._url)} took more than {_SECONDS:g} seconds")
        if self._error:
            raise PictureError(f"{_short(self._url)} {self._error}")
        return bytes(self._data)

    def run(self) -> None:
        try:
            with _web(self._connection).open(self._url, timeout=_SECONDS) as reply:
                while piece := reply.read1(2**20):
                    self._data += piece
                    if len(self._data) > self._most_bytes:
                        self._error = f"has more than {self._most_bytes:,} bytes"
                        return
        except Exception as error:  # of many kinds
            self._error = f"cannot be fetched: {error}"

    def _connection(self, kind: Callable[..., http.client.HTTPConnection], host: str, **options: Any):
        """One of http.client, whose socket is known from when it is open."""
        connection = kind(host, **options)
        connect = connection.connect

        def known() -> None:
            if self._is_over:
                raise TimeoutError
            connect()
            self._sockets.append(connection.sock)

        connection.connect = known
        return connection


def _web(make: Callable[..., http.client.HTTPConnection]) -> urllib.request.OpenerDirector:
    """Of http and https alone, wherever an address redirects to. make: connections, of their class."""

    class Http(urllib.request.HTTPHandler):
        def do_open(self, http_class, req, **options):
            return super().do_open(functools.partial(make, http_class), req, **options)

    class Https(urllib.request.HTTPSHandler):
        def do_open(self, http_class, req, **options):
            return super().do_open(functools.partial(make, http_class), req, **options)

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        Http,
        Https,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def rgb(image: Image) -> Image:
    """An image of any mode upright in RGB, 8 bits a channel, on white where it is transparent. Raises PictureError for
    32-bit numbers.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode in ("I", "F"):
        raise PictureError("a picture of 32-bit numbers has no known white: write it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):  # 16 bits, which Pillow cuts off at 255
        values, transparent = np.asarray(image, np.int64), image.info.get("transparency")
        image = Image.fromarray(np.where(values == transparent, 255, values // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        straight = {"La": "LA"}.get(image.mode)
        colours = (image.convert(straight) if straight else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image.convert("RGB")


def is_picture_part(part: object) -> bool:
    """Whether a part of a message's content is a picture, with or without its payload."""
    if not isinstance(part, Mapping):
        return _is_image(part)
    kind = part.get("type")
    if kind is None:
        return any(part.get(key) is not None for key in ("image", "image_url"))
    return kind in ("image", "image_url", "input_image")


def picture_of_part(part: object, access: PictureAccess) -> Picture | None:
    """The picture of a part for which `is_picture_part` holds; None if it only marks the place of one. Raises
    PictureError.
    """
    if not isinstance(part, Mapping):
        return read_picture(part, access)
    if sizes := [key for key in _SIZES if part.get(key) is not None]:
        raise PictureError(
            f"{sizes[0]} = {part[sizes[0]]!r} of one picture; its size is the same rule for all: leave it out"
        )
    payload = next((part[key] for key in _PAYLOADS if part.get(key) is not None), None)
    return None if payload is None else read_picture(payload, access)


def read_picture(value: object, access: PictureAccess) -> Picture:
    """A picture of bytes, a path, an address, base64, a mapping with one of them, an array or an image of Pillow.

    Raises PictureError for another form, a file that is not there, or what `access` does not allow. Reads no pixels.
    """
    if isinstance(value, Mapping):
        payload = next((value[key] for key in _PAYLOADS if value.get(key) is not None), None)
        if payload is None:
            raise PictureError(f"has none of {', '.join(_PAYLOADS)}")
        return read_picture(payload, access)
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture(data=bytes(value))
    if isinstance(value, str | Path):
        return _of_text(str(value), access)
    if _is_image(value):
        return _of_image(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        from PIL import Image

        if value.size and (value.ndim == 2 or value.shape[2] in (3, 4)):
            return Picture(image=Image.fromarray(value))
        raise PictureError(f"is an array {value.shape}: a picture's is (height, width) or (height, width, 3 or 4)")
    raise PictureError(
        f"is no picture but {type(value).__name__}: give a path, bytes, a data URL or an image of Pillow"
    )


def _is_image(value: object) -> TypeGuard[Image]:
    return hasattr(value, "getbands") and hasattr(value, "tobytes")


def _of_image(image: Image) -> Picture:
    """Of a file that is opened and not read yet only the path is kept, so that many need no memory."""
    path = getattr(image, "filename", "")
    if path and getattr(image, "fp", None) is not None and Path(path).is_file():
        return Picture(path=str(path))
    return Picture(image=image)


def _of_text(text: str, access: PictureAccess) -> Picture:
    scheme = text[:16].partition(":")[0].lower() if ":" in text[:16] else ""
    if scheme == "data":
        header, comma, body = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise PictureError(f"{_short(text)} is no data URL with base64")
        return Picture(data=_unpacked(body))
    if scheme in ("http", "https"):
        if not access.remote:
            raise PictureError(f"{_short(text)} is remote, and fetched only with {access.remote_option}")
        content = (access.contents or {}).get(text)
        if isinstance(content, str):
            raise PictureError(content)
        return Picture(url=text) if content is None else Picture(data=content)
    if text.startswith(_BASE64) and len(text) > 64:
        return Picture(data=_unpacked(text))
    if not access.files:
        raise PictureError(f"{_short(text)} is a file's name, which is not read here: send the picture as a data URL")
    if scheme == "file":
        address = urllib.parse.urlsplit(text)
        if address.netloc not in ("", "localhost"):
            raise PictureError(f"{_short(text)} is on another machine ({address.netloc}): give a path of this one")
        path = urllib.parse.unquote(address.path)
    elif "://" in text[:16]:
        raise PictureError(f"{_short(text)} is of a kind that is not fetched: give http, https, a path or a data URL")
    else:
        path = text
    if "\0" in path or len(path) > 4096:
        raise PictureError(f"{_short(text)} is no path")
    try:
        paths = [Path(folder, Path(path).expanduser()) for folder in access.folders]
        if access.asked is not None:
            access.asked.extend(str(candidate.absolute()) for candidate in paths)
        existing = next((candidate for candidate in paths if candidate.is_file()), None)
    except (OSError, RuntimeError, ValueError) as error:
        raise PictureError(f"{_short(text)} is no path: {error}") from None
    if existing is None:
        where = (
            "" if Path(path).is_absolute() else f" in {' or '.join(str(Path(f).absolute()) for f in access.folders)}"
        )
        raise PictureError(f"there is no file {_short(path)}{where}")
    return Picture(path=str(existing.absolute()))


def _unpacked(body: str) -> bytes:
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{_short(body)} is no base64: {error}") from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
