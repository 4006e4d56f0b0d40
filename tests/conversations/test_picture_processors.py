"""Pictures as tokens, positions and patches, beside transformers' own image processors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxtune.conversations.picture_processors import FILES, PictureProcessor, in_blocks
from jaxtune.conversations.pictures import PictureError
from tests.train.data.conftest import make_tokenizer

ENDS = {"[IMG_BREAK]": 12, "[IMG_END]": 13}
# {shape: (axes, tokens of pictures of 640 x 480, 1920 x 1080, 64 x 64 and 4000 x 300)}, from transformers' processors
SHAPES = {
    "qwen3.5-9b": (3, (300, 2040, 64, 1125)),
    "qwen3-vl-8b": (3, (300, 2040, 64, 1125)),
    "gemma-4-e4b-it": (1, (268, 266, 258, 246)),
    "gemma-3-4b-it": (1, (258, 258, 258, 258)),
    "gemma-4-12b-it": (1, (268, 266, 258, 246)),
    "mistral-small-3.1-24b": (1, (432, 1736, 12, 280)),
}


def contents(test_data, name):
    folder = test_data / "configs" / "vision"
    return [json.loads((folder / f"{prefix}{name}.json").read_text()) for prefix in ("", "preprocessor_config-")]


def processor_of(test_data, name, max_pixels=None):
    return PictureProcessor.of(*contents(test_data, name), ENDS.get, max_pixels)


def drawn(width, height):
    return Image.fromarray(np.random.RandomState(width).randint(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_of_a_picture(name, test_data):
    processor, (axes, counts) = processor_of(test_data, name), SHAPES[name]
    assert processor.axes == axes
    for size, count in zip(((640, 480), (1920, 1080), (64, 64), (4000, 300)), counts, strict=True):
        grid = processor.grid(Image.new("RGB", size))
        tokens = processor.tokens(grid)
        assert len(tokens) == count
        assert np.count_nonzero(tokens == processor.token) == processor.features(grid)


@pytest.mark.parametrize("name", SHAPES)
def test_patches_are_those_of_transformers_in_blocks(name, test_data):
    import transformers

    processor = processor_of(test_data, name)
    written = contents(test_data, name)[1]
    name_of_class = f"{processor.name.replace('Unified', '')}Pil"
    kind = getattr(transformers, name_of_class)(**{k: v for k, v in written.items() if v is not None})

    @settings(max_examples=6, deadline=None, database=None)
    @given(st.integers(1, 180), st.integers(1, 180))
    def check(width, height):
        image = drawn(width, height)
        if max(width, height) > 40 * min(width, height):
            return  # refused by some
        grid = processor.grid(image)
        patches, coordinates = processor.patches(image), processor.coordinates(grid)
        assert patches.shape == (grid[0] * grid[1], processor.size) and patches.dtype == np.float32
        block = processor.merge
        options = {"patch_size": {"height": 28, "width": 28}} if "mistral" in name else {}
        pixels = np.asarray(kind([image], **options)["pixel_values"])
        if "qwen" in name:
            assert np.array_equal(patches, pixels)
        elif "12b" in name:  # 3 x 3 patches of 16 x 16 as one of 48 x 48
            squares = pixels[0][: 9 * len(patches)].reshape(3 * grid[0], 3 * grid[1], 16, 16, 3)
            for (row, column), patch in zip(3 * coordinates, patches, strict=True):
                square = squares[row : row + 3, column : column + 3].transpose(0, 2, 1, 3, 4)
                assert np.array_equal(patch, square.reshape(-1))
        elif "gemma-4" in name:
            assert np.array_equal(patches, pixels[0][coordinates[:, 0] * grid[1] + coordinates[:, 1]])
        if name in ("mistral-small-3.1-24b", "gemma-3-4b-it"):
            for (row, column), patch in zip(14 * coordinates, patches, strict=True):
                assert np.array_equal(patch, pixels[0][:, row : row + 14, column : column + 14].reshape(-1))
        assert len(np.unique(coordinates, axis=0)) == len(patches)
        blocks = (coordinates // block).reshape(-1, block**2, 2)
        assert (blocks == blocks[:, :1]).all()  # a feature's patches are neighbours
        features = blocks[:, 0, 0] * (grid[1] // block) + blocks[:, 0, 1]
        assert np.array_equal(features, np.arange(len(features)))  # row by row

    check()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_blocks(rows, columns, merge):
    raster = np.arange(rows * columns * merge**2).reshape(rows * merge, columns * merge)
    blocks = in_blocks(raster, merge).reshape(rows, columns, merge, merge)
    for row in range(rows):
        for column in range(columns):
            square = raster[row * merge : (row + 1) * merge, column * merge : (column + 1) * merge]
            assert np.array_equal(blocks[row, column], square)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "gemma-3-4b-it"])
def test_fewer_pixels(name, test_data):
    limit = 400_000
    processor, whole = processor_of(test_data, name, limit), processor_of(test_data, name)
    image = Image.new("RGB", (1920, 1080))
    pixels = processor.grid(image)[0] * processor.grid(image)[1] * processor.sides.patch**2
    assert pixels <= limit < whole.grid(image)[0] * whole.grid(image)[1] * whole.sides.patch**2
    assert str(processor) != str(whole)


def test_pictures_of_one_size(test_data):
    with pytest.raises(ValueError, match="max_pixels = 9: every picture of this model has"):
        processor_of(test_data, "gemma-3-4b-it", 9)
    config, written = contents(test_data, "gemma-3-4b-it")
    with pytest.raises(ValueError, match="do_pan_and_scan = true"):
        PictureProcessor.of(config, {**written, "do_pan_and_scan": True}, ENDS.get)


def test_positions_of_text_and_pictures(test_data):
    """The example of transformers' documentation of these positions: a picture of 1 x 4 x 6 patches."""
    processor = processor_of(test_data, "qwen3.5-9b")
    positions = processor.positions(12, [3], [(4, 6)])
    assert positions[:, 0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8]
    assert positions[:, 1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8]
    assert positions[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    assert np.array_equal(processor.positions(5, [3], [(4, 6)]), positions[:5])
    plain = processor_of(test_data, "gemma-4-e4b-it").positions(7, [2], [(6, 6)])
    assert np.array_equal(plain, np.arange(7))


def test_what_a_folder_lacks_is_named(tmp_path, test_data):
    config, written = contents(test_data, "qwen3.5-9b")
    tokenizer = make_tokenizer()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="there is no preprocessor_config.json"):
        PictureProcessor.of_folder(tmp_path, tokenizer)
    (tmp_path / FILES[1]).write_text(json.dumps({"image_processor": written}))
    nested = PictureProcessor.of_folder(tmp_path, tokenizer)
    (tmp_path / FILES[0]).write_text(json.dumps(written))
    assert nested == PictureProcessor.of_folder(tmp_path, tokenizer) == processor_of(test_data, "qwen3.5-9b")
    config, written = (json.dumps(content).encode() for content in contents(test_data, "mistral-small-3.1-24b"))
    with pytest.raises(ValueError, match=r"has no token \[IMG_BREAK\]"):
        PictureProcessor.of_files(config, {FILES[0]: written}, tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ENDS)})
    mistral = PictureProcessor.of_files(config, {FILES[0]: written}, tokenizer)
    assert mistral.row_ends == tuple(tokenizer.convert_tokens_to_ids(list(ENDS)))
    config, written = contents(test_data, "qwen3.5-9b")
    with pytest.raises(ValueError, match="'ViTImageProcessor' is not supported"):
        PictureProcessor.of(config, {**written, "image_processor_type": "ViTImageProcessor"}, ENDS.get)
    with pytest.raises(ValueError, match="has 'merge_size'"):
        PictureProcessor.of(config, {k: v for k, v in written.items() if k != "merge_size"}, ENDS.get)
    with pytest.raises(ValueError, match="image_token_id = None"):
        PictureProcessor.of({}, written, ENDS.get)
    with pytest.raises(PictureError, match="3 x 1000 pixels: absolute aspect ratio"):
        nested.grid(Image.new("RGB", (3, 1000)))
    assert nested.grid(Image.new("RGB", (1, 1))) == (16, 16)
