"""A packed row as a person sees it: what is trained on, what is only read, what is padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtune.system.terminal import printable
from jaxtune.train.data.batches import Batch

if TYPE_CHECKING:
    from rich.text import Text

TRAINED, READ, BOUNDARY, PADDING = "bold green", "default", "magenta", "dim"


# Around trained tokens, where there are no colours.
MARKS = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


def preview(batch: Batch, tokenizer: Any, row: int = 0, marks: bool = False) -> Text:
    """A `rich.text.Text` of one row: trained tokens green, others plain, documents and padding marked.

    A token is trained on when it is a target: its colour is the weight of the slot before it.

    Args:
        batch: packed rows, `[rows, length]`.
        tokenizer: the tokenizer of its tokens.
        row: the row to show.
        marks: trained tokens stand between brackets too, for where there are no colours.
    """
    from rich.text import Text

    tokens, segments, weights = (np.asarray(field)[row] for field in (batch.tokens, batch.segment_ids, batch.weights))
    trained = np.concatenate([[False], weights[:-1] > 0]) & (segments > 0)
    real = segments > 0
    before, after = MARKS if marks else ("", "")
    text = Text()
    text.append(f"row {row}: {int(real.sum())} tokens, {int(trained.sum())} trained ", BOUNDARY)
    text.append(f"{before}trained{after}", TRAINED)
    text.append(" / ").append("only read", READ)
    # Runs of tokens of one document and one kind are decoded together: a character may span tokens.
    changes = np.flatnonzero((np.diff(segments) != 0) | (np.diff(trained.astype(int)) != 0)) + 1
    document = 0
    for start, end in zip([0, *changes], [*changes, len(tokens)], strict=True):
        if segments[start] != document:
            document = segments[start]
            if document:
                text.append(f"\n--- document {document}: {int((segments == document).sum())} tokens ---\n", BOUNDARY)
        if document:
            shown = printable(tokenizer.decode(tokens[start:end].tolist()))
            text.append(f"{before}{shown}{after}" if trained[start] else shown, TRAINED if trained[start] else READ)
        else:
            text.append(f"\n--- {end - start} slots of padding ---", PADDING)
    return text
