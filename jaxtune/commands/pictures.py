"""What commands that ask a model with pictures share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxtune.commands import common

if TYPE_CHECKING:
    from jaxtune.conversations.picture_processors import PictureReader
    from jaxtune.conversations.tokenizing import Tokenizer
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.hf import Beside, Pretrained


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --max-pixels and --remote-images."""
    parser.add_argument(
        "--max-pixels",
        type=_positive,
        metavar="N",
        help="make pictures of more pixels smaller, which saves tokens (default: as the model's files say)",
    )
    parser.add_argument(
        "--remote-images",
        action="store_true",
        help="fetch pictures' http and https addresses, whichever this machine can reach",
    )


def reader(
    options: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, files: bool = True, folder: str | None = None
) -> PictureReader:
    """How pictures are read for a model with its tower. Raises ValueError.

    files: whether they may be read. folder: of relative paths, before the working directory.
    """
    from jaxtune.conversations.picture_processors import PictureReader
    from jaxtune.conversations.pictures import PictureAccess
    from jaxtune.models.generation.pictures import processor_of

    folders = (".",) if folder is None else (folder, ".")
    access = PictureAccess(folders, files=files, remote=options.remote_images, remote_option="--remote-images")
    return PictureReader(processor_of(model.source, tokenizer, options.max_pixels), access)


def load(
    options: argparse.Namespace,
    files: bool = True,
    why: str = "",
    beside: Beside | None = None,
    streamed: Callable[[Pretrained], int] | None = None,
):
    """(Model, tokenizer or None, how it reads pictures or None, why it reads none or ""): with its tower if it has one
    that is supported, and a tokenizer.

    files: whether they may be read. why: pictures are not to be read. beside, streamed: as for from_pretrained.
    """
    from jaxtune.models.generation.pictures import why_no_pictures

    why = why or why_no_pictures(options.model)
    model, tokenizer = common.load(options, pictures=not why, beside=beside, streamed=streamed)
    if why or tokenizer is None:
        return model, tokenizer, None, why
    try:
        return model, tokenizer, reader(options, model, tokenizer, files), ""
    except ValueError as error:  # its files lack how pictures are read
        return model, tokenizer, None, str(error)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
