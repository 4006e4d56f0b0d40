"""How a model's pictures become tokens, positions and patches: transformers' image processor and what its processor
writes.

A picture of a grid of (height, width) patches is at its tokens what `tokens` writes in place of the one token that the
chat template does. Patches are in blocks of merge x merge, row by row; a block's patches become one feature, which
stands at one token.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np

from jaxtune.conversations.messages import Message, pictures_of
from jaxtune.conversations.pictures import Picture, PictureAccess, PictureError, Size
from jaxtune.conversations.tokenizing import Tokenizer, token_id

if TYPE_CHECKING:
    from PIL.Image import Image

FILES = ("preprocessor_config.json", "processor_config.json")  # of a model's folder; the second has it inside
type Grid = tuple[int, int]  # (height, width) of a picture in patches


class _ImageProcessor(Protocol):
    """transformers' PIL class of an image processor."""

    size: Mapping[str, int]

    def __call__(self, images: list[Image], **options: object) -> Mapping[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Sides:
    """Pixels of a patch's side, and patches of a block's."""

    patch: int
    merge: int


type Settings = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Kind:
    """An image processor of transformers, and how its models read pictures."""

    sides: Callable[[Settings, Settings], Sides]
    """Of the settings and config.json. Raises KeyError."""
    grid: Callable[[_ImageProcessor, Sides, int, int], Grid]
    """Of a picture's height and width in pixels. Raises ValueError."""
    patches: Callable[[_ImageProcessor, Sides, Image], np.ndarray]
    """float[patches, F], in blocks."""
    limited: Callable[[Settings, int], Settings]
    """The settings by which a picture has at most this many pixels. Raises ValueError."""
    read_by: str = ""
    """The class with `values`, where this one needs torch; else this one's PIL class."""
    values: Callable[[Settings], Settings] = dict
    """Settings of `read_by` that do the same."""
    axes: int = 1
    """Of positions: 3 are time, height and width."""
    around: tuple[str, ...] = ()
    """Keys of config.json with the tokens that the processor writes before and behind a picture."""
    row_ends: tuple[str, ...] = ()
    """Tokens behind each row of features but the last, and behind the last."""
    token: str = "image_token_id"
    """Key of config.json with the token at which features stand."""
    written: str = ""
    """Key of the token that the chat template writes once for a picture, if that is another."""
    spaces: tuple[str, str] = ("", "")
    """Texts that the processor writes before and behind a picture."""


@dataclasses.dataclass(frozen=True)
class PictureProcessor:
    """A model's. Values only, so that it can be sent to other processes and written into keys."""

    name: str
    """Of transformers' image processor, without Fast or Pil."""
    settings: str
    """JSON of its settings."""
    sides: Sides
    token: int
    """At which features stand."""
    written: int
    """That the chat template writes once for a picture."""
    around: tuple[int, ...] = ()
    """Tokens before and behind a picture."""
    row_ends: tuple[int, ...] = ()
    """Tokens behind each row of features but the last, and behind the last."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def reads_like(self, other: PictureProcessor) -> bool:
        """Whether both make the same patches and tokens of a picture whose size neither changes; how large one may be
        is not compared.
        """
        return self._deciding() == other._deciding()

    def _deciding(self) -> PictureProcessor:
        processor = _loaded(self.name, self.settings)
        values = {key: getattr(processor, key, None) for key in _DECIDING}
        if self.kind.limited is _fixed:  # not a limit, but each picture's
            values |= {side: processor.size[side] for side in ("height", "width")}
        return dataclasses.replace(self, settings=json.dumps(values))

    @property
    def axes(self) -> int:
        """Of positions; with 1 they are plain numbers."""
        return self.kind.axes

    @property
    def merge(self) -> int:
        """Patches of a block's side."""
        return self.sides.merge

    @property
    def block(self) -> int:
        """Patches that become one feature."""
        return self.merge**2

    @functools.cached_property
    def size(self) -> int:
        """Numbers of a patch."""
        from PIL import Image

        return self.patches(Image.new("RGB", (64, 64))).shape[1]

    def grid(self, image: Image | Size) -> Grid:
        """Raises PictureError for a picture that the processor refuses."""
        try:
            return self.kind.grid(_loaded(self.name, self.settings), self.sides, image.height, image.width)
        except ValueError as error:
            raise PictureError(f"a picture of {image.width} x {image.height} pixels: {error}") from None

    def features(self, grid: Grid) -> int:
        return grid[0] * grid[1] // self.block

    def tokens(self, grid: Grid) -> np.ndarray:
        """int32[n] in place of the template's token."""
        rows, columns = grid[0] // self.merge, grid[1] // self.merge
        row = [self.token] * columns
        features = (row + [*self.row_ends[:1]]) * (rows - 1) + row + [*self.row_ends[1:]]
        return np.array([*self.around[:1], *features, *self.around[1:]], np.int32)

    def patches(self, image: Image) -> np.ndarray:
        """float32[patches, F] of an image in RGB, normalised."""
        return np.asarray(self.kind.patches(_loaded(self.name, self.settings), self.sides, image), np.float32)

    def coordinates(self, grid: Grid) -> np.ndarray:
        """int32[patches, 2]: (row, column) of each patch."""
        rows, columns = np.indices(grid, np.int32)
        return np.stack([in_blocks(rows, self.merge), in_blocks(columns, self.merge)], 1)

    def positions(self, count: int, starts: Sequence[int], grids: Sequence[Grid]) -> np.ndarray:
        """int32[count] or [count, axes]: positions in a document from 0; a picture with several axes advances by the
        larger side of its features.

          count: tokens of the document, which may end before its pictures do.
          starts, grids: of its pictures, in order; a start is the index of its first token.
        """
        if self.axes == 1:
            return np.arange(count, dtype=np.int32)
        positions = np.arange(count, dtype=np.int32)[:, None].repeat(self.axes, 1)
        for start, grid in zip(starts, grids, strict=True):
            if start >= count:
                break
            height, width = grid[0] // self.merge, grid[1] // self.merge
            end, begin = min(start + height * width, count), positions[start, 0]
            inside = np.arange(end - start)
            for axis, offset in enumerate((0 * inside, inside // width, inside % width)):
                positions[start:end, axis] = begin + offset
            positions[end:] += max(height, width) - height * width
        return positions

    @classmethod
    def of_folder(cls, folder: Path, tokenizer: Tokenizer, max_pixels: int | None = None) -> PictureProcessor:
        """The processor of a model's folder, as `of_files`."""
        files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
        return cls.of_files((folder / "config.json").read_bytes(), files, tokenizer, max_pixels, str(folder))

    @classmethod
    def of_files(
        cls,
        config: str | bytes,
        files: Mapping[str, bytes],
        tokenizer: Tokenizer,
        max_pixels: int | None = None,
        where: str = "the model",
    ) -> PictureProcessor:
        """Raises ValueError, which names the file that is missing or the value that is wrong.

        config: of the whole model.
        files: {name: content} of its folder; those of FILES are read.
        max_pixels: of a picture that is read; None: as the files say.
        where: for messages.
        """
        settings = json.loads(files[FILES[0]]) if FILES[0] in files else None
        if settings is None and FILES[1] in files:
            settings = json.loads(files[FILES[1]]).get("image_processor")
        if settings is None:
            raise ValueError(
                f"{where}: there is no {FILES[0]}, and no image_processor in a {FILES[1]}: pictures cannot be read "
                "without the model's own settings; fetch the file from where the model is from"
            )
        return cls.of(json.loads(config), settings, functools.partial(token_id, tokenizer), max_pixels)

    @classmethod
    def of(
        cls,
        config: Settings,
        settings: Settings,
        token_id: Callable[[str], int | None],
        max_pixels: int | None = None,
    ) -> PictureProcessor:
        """As `of_files`, of what is in config.json and in the preprocessor's file."""
        written = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
        name = written.removesuffix("Fast").removesuffix("Pil")
        if (kind := KINDS.get(name)) is None:
            raise ValueError(f"image_processor_type = {written!r} is not supported; there are {', '.join(KINDS)}")
        values = {key: value for key, value in settings.items() if value is not None and key not in _NO_SETTINGS}
        values = values if max_pixels is None else kind.limited(values, max_pixels)
        try:
            values, sides = kind.values(values), kind.sides(settings, config)
        except KeyError as error:
            raise ValueError(f"{name}: neither the preprocessor's file nor config.json has {error}") from None
        ends = [(text, token_id(text)) for text in kind.row_ends]
        if missing := [text for text, index in ends if index is None]:
            raise ValueError(f"the tokenizer has no token {missing[0]}, which {name} writes")
        processor = cls(
            name,
            json.dumps(values, sort_keys=True),
            sides,
            _token(config, kind.token),
            _token(config, kind.written or kind.token),
            tuple(_token(config, key) for key in kind.around),
            tuple(index for _, index in ends if index is not None),
        )
        _loaded(processor.name, processor.settings)
        return processor


@dataclasses.dataclass(frozen=True)
class PictureReader:
    """How a model's pictures are read, and from where they may be."""

    processor: PictureProcessor
    access: PictureAccess


@dataclasses.dataclass(frozen=True)
class PlacedPicture:
    """A picture among tokens."""

    start: int
    """Index of its first token."""
    grid: Grid
    picture: Picture
    digest: bytes
    """16 bytes, of its file or pixels."""


def spaced(text: str, written: str, processor: PictureProcessor) -> tuple[str, Callable[[int], int]]:
    """(Rendered text with what the processor writes around pictures, function from indices of the text to those of the
    result). written: text of the token that the chat template writes for a picture.
    """
    before, behind = processor.kind.spaces
    if not before and not behind:
        return text, lambda index: index
    starts = np.array([match.start() for match in re.finditer(re.escape(written), text)], np.int64)

    def shifted(index: int) -> int:
        begun, ended = (int(np.count_nonzero(starts + size <= index)) for size in (1, len(written)))
        return index + begun * len(before) + ended * len(behind)

    return text.replace(written, f"{before}{written}{behind}"), shifted


def placed_pictures(
    messages: Sequence[Message], ids: np.ndarray, processor: PictureProcessor, is_cut: bool = False
) -> tuple[np.ndarray, np.ndarray, tuple[PlacedPicture, ...]]:
    """(Tokens int32[m], int64[m] index in `ids` that each comes from, -1 at pictures; pictures): what the processor
    writes in place of the chat template's token of each picture. Raises PictureError for a template or a text with
    another number of such tokens, and for pictures that cannot be read.

      ids: int[n], of the rendered messages.
      is_cut: whether the end of their text is missing.
    """
    pictures = [picture for message in messages for picture in pictures_of(message)]
    indices = np.arange(len(ids))
    if not pictures:
        return ids, indices, ()
    offsets = np.flatnonzero(ids == processor.written)
    pictures = pictures[: len(offsets)] if is_cut else pictures
    if len(offsets) != len(pictures):
        raise PictureError(
            f"the chat template writes {len(offsets)} tokens of pictures for {len(pictures)} pictures: it may be for "
            "text alone (set data.template to one with pictures), or the text itself has such a token"
        )
    pieces, sources, placed, count, low = [], [], [], 0, 0
    for number, (picture, offset) in enumerate(zip(pictures, offsets.tolist(), strict=True), start=1):
        try:
            fetched = picture.fetched()
            grid, digest = processor.grid(fetched.size()), fetched.digest()
            fetched.decoded()  # a broken one is found here
        except PictureError as error:
            raise PictureError(f"picture {number}: {error}") from None
        tokens = processor.tokens(grid)
        pieces += [ids[low:offset], tokens]
        sources += [indices[low:offset], np.full(len(tokens), -1)]
        placed.append(PlacedPicture(count + offset - low, grid, fetched, digest))
        count, low = count + offset - low + len(tokens), offset + 1
    tokens = np.concatenate([*pieces, ids[low:]]).astype(np.int32)
    return tokens, np.concatenate([*sources, indices[low:]]), tuple(placed)


@dataclasses.dataclass(frozen=True)
class DeferredPatches:
    """The patches of pictures, which are decoded when they are read by np.asarray, each time anew."""

    processor: PictureProcessor
    pictures: tuple[PlacedPicture, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, sum(height * width for height, width in (picture.grid for picture in self.pictures))

    @property
    def digest(self) -> bytes:
        return b"".join(picture.digest for picture in self.pictures)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """float32[1, patches, F]. Raises PictureError."""
        return np.concatenate([self.processor.patches(placed.picture.decoded()) for placed in self.pictures])[None]


class PictureArrays(TypedDict):
    """What a model gets of one prompt with pictures: positions, and models/vision/pictures.Pictures of one row."""

    positions: np.ndarray
    """int32[tokens, axes], or int32[tokens] with one axis"""
    patches: np.ndarray | DeferredPatches
    patch_segments: np.ndarray
    patch_grids: np.ndarray
    patch_coordinates: np.ndarray
    picture_features: np.ndarray


def picture_arrays(
    count: int, pictures: Sequence[PlacedPicture], processor: PictureProcessor | None
) -> PictureArrays | None:
    """Of a prompt of `count` tokens, in which equal pictures have one set of patches; None without any."""
    if processor is None or not pictures:
        return None
    entries = list({picture.digest: picture for picture in pictures}.values())
    sizes = [height * width for height, width in (entry.grid for entry in entries)]
    begins = {entry.digest: sum(sizes[:index]) for index, entry in enumerate(entries)}
    features = np.full((1, count), -1, np.int32)
    for picture in pictures:
        tokens = picture.start + np.flatnonzero(processor.tokens(picture.grid) == processor.token)
        features[0, tokens] = begins[picture.digest] // processor.block + np.arange(len(tokens))
    return {
        "positions": processor.positions(count, [each.start for each in pictures], [each.grid for each in pictures]),
        "patches": DeferredPatches(processor, tuple(entries)),
        "patch_segments": np.repeat(np.arange(1, len(entries) + 1, dtype=np.int32), sizes)[None],
        "patch_grids": np.repeat(np.array([entry.grid for entry in entries], np.int32), sizes, 0)[None],
        "patch_coordinates": np.concatenate([processor.coordinates(entry.grid) for entry in entries])[None],
        "picture_features": features,
    }


# Settings, beside the sides, that decide the numbers of a patch.
_DECIDING = (
    *("do_convert_rgb", "do_resize", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "temporal_patch_size"),
)
# Keys of the file that say which class reads it.
_NO_SETTINGS = frozenset(("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"))


def _token(config: Settings, key: str) -> int:
    value = config.get(key, config.get(key.replace("_id", "_index")))
    if not isinstance(value, int):
        raise ValueError(f"config.json: {key} = {value!r}: must be a token's id")
    return value


def _side(settings: object, key: str) -> int:
    """A whole number of the settings, or a square's height. Raises KeyError."""
    value = settings[key] if isinstance(settings, Mapping) else None
    value = value.get("height") if isinstance(value, Mapping) else value
    if not isinstance(value, int):
        raise KeyError(key)
    return value


@functools.lru_cache(8)
def _loaded(name: str, settings: str) -> _ImageProcessor:
    """transformers' PIL class with these settings, which needs no torch and is the same whatever is installed."""
    import transformers

    return getattr(transformers, KINDS[name].read_by or f"{name}Pil")(**json.loads(settings))


def in_blocks(raster: np.ndarray, merge: int) -> np.ndarray:
    """[h * w, ...]: the patches [h, w, ...] of a picture, blocks of merge x merge one after the other."""
    height, width, *numbers = raster.shape
    blocks = raster.reshape(height // merge, merge, width // merge, merge, *numbers)
    return blocks.swapaxes(1, 2).reshape(height * width, *numbers)


# --- families


def _functions(processor: _ImageProcessor) -> ModuleType:
    """The module of an image processor, with the functions by which it chooses a picture's size."""
    return importlib.import_module(type(processor).__module__)


def _qwen_grid(processor: _ImageProcessor, sides: Sides, height: int, width: int) -> Grid:
    factor, areas = sides.patch * sides.merge, processor.size
    size = _functions(processor).smart_resize(height, width, factor, areas["shortest_edge"], areas["longest_edge"])
    return size[0] // sides.patch, size[1] // sides.patch


def _qwen_limited(settings: Settings, pixels: int) -> Settings:
    """The edges of this processor are areas."""
    values = {key: value for key, value in settings.items() if key not in ("min_pixels", "max_pixels")}
    size = settings.get("size")
    smallest = settings.get("min_pixels", size.get("shortest_edge") if isinstance(size, Mapping) else None)
    smallest = smallest if isinstance(smallest, int) else pixels
    return {**values, "size": {"shortest_edge": min(smallest, pixels), "longest_edge": pixels}}


_GEMMA_TOKENS = (70, 140, 280, 560, 1120)  # that a picture may have


def _gemma4_grid(processor: _ImageProcessor, sides: Sides, height: int, width: int) -> Grid:
    most = _side(vars(processor), "max_soft_tokens") * sides.merge**2
    choose = _functions(processor).get_aspect_ratio_preserving_size
    size = choose(height, width, sides.patch, most, sides.merge)
    return size[0] // sides.patch, size[1] // sides.patch


def _gemma4_patches(processor: _ImageProcessor, sides: Sides, image: Image) -> np.ndarray:
    """They come row by row, padded."""
    height, width = _gemma4_grid(processor, sides, image.height, image.width)
    patches = processor([image])["pixel_values"][0][: height * width]
    return in_blocks(np.asarray(patches).reshape(height, width, -1), sides.merge)


def _gemma4_limited(settings: Settings, pixels: int) -> Settings:
    patch, merge = (_side(settings, key) for key in ("patch_size", "pooling_kernel_size"))
    numbers = [number for number in _GEMMA_TOKENS if number * (patch * merge) ** 2 <= pixels]
    if not numbers:
        raise ValueError(
            f"max_pixels = {pixels}: a picture of Gemma 4 has at least {_GEMMA_TOKENS[0] * (patch * merge) ** 2:,}"
        )
    return {**settings, "max_soft_tokens": min(numbers[-1], _side(settings, "max_soft_tokens"))}


def _unified_values(settings: Settings) -> Settings:
    patch, merge = (_side(settings, key) for key in ("patch_size", "pooling_kernel_size"))
    return {**settings, "patch_size": patch * merge, "pooling_kernel_size": 1}


def _pixtral_grid(processor: _ImageProcessor, sides: Sides, height: int, width: int) -> Grid:
    block, longest = sides.patch * sides.merge, processor.size["longest_edge"]
    choose = _functions(processor).get_resize_output_image_size
    size = choose(np.broadcast_to(np.uint8(0), (height, width, 3)), (longest, longest), (block, block), "channels_last")
    return size[0] // sides.patch, size[1] // sides.patch


def _pixtral_patches(processor: _ImageProcessor, sides: Sides, image: Image) -> np.ndarray:
    block = sides.patch * sides.merge
    return _squares(processor([image], patch_size={"height": block, "width": block})["pixel_values"][0], sides)


def _squares(pixels: np.ndarray, sides: Sides) -> np.ndarray:
    """Patches of (channel, row, column), as a convolution sees them, in blocks. pixels: [channels, height, width]."""
    pixels = np.asarray(pixels)
    channels, height, width = pixels.shape
    squares = pixels.reshape(channels, height // sides.patch, sides.patch, width // sides.patch, sides.patch)
    return in_blocks(squares.transpose(1, 3, 0, 2, 4), sides.merge).reshape(-1, channels * sides.patch**2)


def _pixtral_limited(settings: Settings, pixels: int) -> Settings:
    size = settings.get("size")
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    edge = math.isqrt(pixels)
    return {**settings, "size": {"longest_edge": min(edge, longest) if isinstance(longest, int) else edge}}


def _gemma3_sides(settings: Settings, config: Settings) -> Sides:
    patch, size = _side(config.get("vision_config"), "patch_size"), settings.get("size")
    features = _side(config, "mm_tokens_per_image")
    return Sides(patch, _side(size, "height") // patch // math.isqrt(features))


def _gemma3_values(settings: Settings) -> Settings:
    if settings.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan = true: crops of pictures are not supported; set it to false")
    return settings


def _fixed(settings: Settings, pixels: int) -> Settings:
    raise ValueError(f"max_pixels = {pixels}: every picture of this model has {settings.get('size')}; leave it out")


KINDS = {
    "Qwen2VLImageProcessor": Kind(
        sides=lambda settings, config: Sides(_side(settings, "patch_size"), _side(settings, "merge_size")),
        grid=_qwen_grid,
        patches=lambda processor, sides, image: processor([image])["pixel_values"],
        limited=_qwen_limited,
        axes=3,
    ),
    "Gemma3ImageProcessor": Kind(
        sides=_gemma3_sides,
        grid=lambda processor, sides, height, width: (
            processor.size["height"] // sides.patch,
            processor.size["width"] // sides.patch,
        ),
        patches=lambda processor, sides, image: _squares(processor([image])["pixel_values"][0], sides),
        limited=_fixed,
        values=_gemma3_values,
        around=("boi_token_id", "eoi_token_id"),
        written="boi_token_id",
        spaces=("\n\n", "\n\n"),
    ),
    "Gemma4ImageProcessor": Kind(
        sides=lambda settings, config: Sides(_side(settings, "patch_size"), _side(settings, "pooling_kernel_size")),
        grid=_gemma4_grid,
        patches=_gemma4_patches,
        limited=_gemma4_limited,
        around=("boi_token_id", "eoi_token_id"),
    ),
    "Gemma4UnifiedImageProcessor": Kind(  # a feature is one patch of 48 x 48, so blocks are patches
        sides=lambda settings, config: Sides(_side(settings, "patch_size") * _side(settings, "pooling_kernel_size"), 1),
        grid=_gemma4_grid,
        patches=_gemma4_patches,
        limited=_gemma4_limited,
        read_by="Gemma4ImageProcessorPil",
        values=_unified_values,
        around=("boi_token_id", "eoi_token_id"),
    ),
    "PixtralImageProcessor": Kind(
        sides=lambda settings, config: Sides(_side(settings, "patch_size"), _side(config, "spatial_merge_size")),
        grid=_pixtral_grid,
        patches=_pixtral_patches,
        limited=_pixtral_limited,
        row_ends=("[IMG_BREAK]", "[IMG_END]"),
    ),
}
