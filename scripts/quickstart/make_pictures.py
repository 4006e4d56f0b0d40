"""Writes the quickstart's rows with pictures, or what its base model learns from before.

    python scripts/quickstart/make_pictures.py [FOLDER]
    python scripts/quickstart/make_pictures.py --base FOLDER

FOLDER (by default the package's own, jaxtune/quickstart/pictures) receives train.jsonl and eval.jsonl. A held-out word
or number is in no training picture and in none that the base has seen. --base writes the base's statements, tokenizer
and config. The same code, with the same Pillow, always gives the same files.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

from make_tokenizer import build
from PIL import Image, ImageDraw, ImageFont
from transformers import PreTrainedTokenizerFast

type Row = dict[str, list[dict[str, object]]]
type Picture = tuple[str, Image.Image]  # what it shows, and the pixels

TRAIN_ROWS = {"number": 900, "word": 450, "drawing": 650}
EVAL_ROWS = {"number": 80, "word": 80, "drawing": 80}
STATEMENTS = {"word": 26_000, "drawing": 6_000, "series": 3_000}
HELD_OUT = 200  # of the statements
SEED = 1
FOLDER = Path(__file__).resolve().parents[2] / "jaxtune" / "quickstart" / "pictures"
PATCH, MERGE = 8, 2
CELL = PATCH * MERGE  # pixels of a side that become a token
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 50),
    "white": (245, 245, 245),
    "purple": (150, 60, 190),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Each with the words of what a picture shows that answer it.
QUESTIONS: dict[str, dict[str, slice]] = {
    "number": {"Which number is this?": slice(None), "Read the number.": slice(None)},
    "word": {"Read the word.": slice(None), "What is written here?": slice(None)},
    "drawing": {
        "What is drawn?": slice(None),
        "Which colour does it have?": slice(0, 1),
        "Which shape is this?": slice(None),
    },
}
START, IMAGE, STOP, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
MARKS = (START, IMAGE, STOP, VIDEO)
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>' }}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- elif message.role in ('system', 'user') %}{{ '<|' + message.role + '|>' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|end|>' }}
{%- else %}{{ raise_exception('roles are system, user and assistant, not ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def _written(alphabet: str, rng: random.Random, least: int = 3) -> Picture:
    """Up to 5 dark characters on a light ground, each within a pixel of the middle of a cell of its own."""
    text = "".join(rng.choices(alphabet, k=rng.randint(least, 5)))
    picture = Image.new("RGB", (CELL * len(text), CELL), (rng.randint(225, 255),) * 3)
    draw, font, ink = ImageDraw.Draw(picture), ImageFont.load_default(CELL - 2), (rng.randint(0, 50),) * 3
    for index, character in enumerate(text):
        left, top, right, bottom = draw.textbbox((0, 0), character, font=font)
        x, y = (round((CELL - low - high) / 2) + rng.randint(-1, 1) for low, high in ((left, right), (top, bottom)))
        draw.text((CELL * index + x, y), character, fill=ink, font=font)
    return text, picture


def number(rng: random.Random) -> Picture:
    return _written("0123456789", rng)


def word(rng: random.Random) -> Picture:
    return _written(LETTERS, rng)


def drawing(rng: random.Random) -> Picture:
    """A shape on a dark ground."""
    (name, colour), shape = rng.choice([*COLOURS.items()]), rng.choice(SHAPES)
    scale, side = 4, 2 * CELL  # drawn larger and made smaller, for smooth edges
    picture = Image.new("RGB", (side * scale, side * scale), tuple(rng.randint(0, 50) for _ in range(3)))
    ink = tuple(min(255, max(0, channel + rng.randint(-18, 18))) for channel in colour)
    draw, r = ImageDraw.Draw(picture), rng.uniform(8, 13) * scale
    x, y = (side * scale / 2 + rng.uniform(-3, 3) * scale for _ in range(2))
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        draw.ellipse(box, fill=ink)
    elif shape == "square":
        draw.rectangle(box, fill=ink)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink)
    elif shape == "ring":
        draw.ellipse(box, outline=ink, width=int(r / 2.5))
    else:
        draw.line((x - r, y, x + r, y), fill=ink, width=int(r / 1.8))
        draw.line((x, y - r, x, y + r), fill=ink, width=int(r / 1.8))
    return f"{name} {shape}", picture.resize((side, side), Image.Resampling.BOX)


DRAWS: dict[str, Callable[[random.Random], Picture]] = {"number": number, "word": word, "drawing": drawing}


def _part(picture: Image.Image) -> dict[str, str]:
    data = io.BytesIO()
    picture.quantize(16).save(data, "PNG", optimize=True)
    return {"type": "image", "image": "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()}


def _messages(content: object, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _row(texts: dict[str, slice], rng: random.Random, shown: str, picture: Image.Image) -> Row:
    text, words = rng.choice([*texts.items()])
    return _messages([_part(picture), {"type": "text", "text": text}], " ".join(shown.split()[words]))


def rows() -> dict[str, list[Row]]:
    """{"eval", "train"}, each shuffled over the kinds."""
    rng, held_out = random.Random(SEED), set()
    sets: dict[str, list[Row]] = {}
    for name, counts in (("eval", EVAL_ROWS), ("train", TRAIN_ROWS)):
        sets[name] = []
        for kind in itertools.chain.from_iterable(itertools.repeat(*pair) for pair in counts.items()):
            shown, picture = DRAWS[kind](rng)
            while name == "train" and shown in held_out:
                shown, picture = DRAWS[kind](rng)
            if name == "eval" and kind != "drawing":
                held_out.add(shown)
            sets[name].append(_row(QUESTIONS[kind], rng, shown, picture))
        rng.shuffle(sets[name])
    return sets


def statements() -> list[Row]:
    """Pictures of letters, words and drawings with what they show, and series of numbers without a picture: the base
    reads digits as text alone, and no question.
    """
    asked = {row["messages"][1]["content"] for row in rows()["eval"]}
    rng, made = random.Random(SEED + 1), []
    for kind in itertools.chain.from_iterable(itertools.repeat(*pair) for pair in STATEMENTS.items()):
        if kind == "series":
            first = rng.randrange(100_000)
            made.append(_messages(f"{first} {first + 1} ", f"{first + 2}"))
            continue
        shown, picture = drawing(rng) if kind == "drawing" else _written(LETTERS, rng, 1)
        while kind == "word" and shown in asked:
            shown, picture = _written(LETTERS, rng, 1)
        made.append(_messages([_part(picture)], shown))
    rng.shuffle(made)
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    texts = [text for kind in QUESTIONS.values() for text in kind] * 50
    texts += [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES] * 50
    return build(texts, MARKS, TEMPLATE)


def config(tokens: PreTrainedTokenizerFast) -> dict[str, object]:
    """Qwen3-VL's: three layers of text over a tower of two."""
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": len(tokens),
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
        "dtype": "float32",
    }
    tower = {
        "model_type": "qwen3_vl_vision",
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 256,
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.05,
    }
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    names |= {"vision_start_token_id": START, "vision_end_token_id": STOP}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": tower,
        **{key: tokens.convert_tokens_to_ids(token) for key, token in names.items()},
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "temporal_patch_size": 1,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": CELL * CELL, "longest_edge": 16 * CELL * CELL},
}


def _write(file: Path, made: list[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base", action="store_true")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.base:
        for name, made in rows().items():
            _write(folder / f"{name}.jsonl", made)
        return
    made = statements()
    _write(folder / "held_out.jsonl", made[:HELD_OUT])
    _write(folder / "statements.jsonl", made[HELD_OUT:])
    tokens = tokenizer()
    tokens.save_pretrained(folder / "tokenizer")
    for name, content in (("config", config(tokens)), ("preprocessor_config", PREPROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
