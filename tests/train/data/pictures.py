"""What tests of rows with pictures share: drawn pictures, a tokenizer with their tokens, and rows in many forms."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.train.data.rendering.pictures import PictureOptions
from tests.train.data.conftest import make_tokenizer

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
# Reads contents in parts, as Qwen's templates do.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of Qwen's, with pictures of 4 to 64 features in place of 64 to 16,384.
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
}


def picture_tokenizer(template=TEMPLATE):
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *MARKS]})
    return tokenizer


def picture_options(tokenizer, **options) -> PictureOptions:
    config = {"image_token_id": tokenizer.convert_tokens_to_ids(MARKS[1])}
    return PictureOptions(PictureProcessor.of(config, SETTINGS, tokenizer.convert_tokens_to_ids), **options)


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
