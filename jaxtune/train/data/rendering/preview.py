"""Shows a packed row as coloured text: tokens that are trained on, tokens that are only read, and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtune.system.terminal import printable
from jaxtune.train.data.batches import Batch

if TYPE_CHECKING:
    from rich.text import Text

# The rich styles of trained tokens, of tokens that are only context, of lines between documents, and of padding.
TRAINED, READ, BOUNDARY, PADDING = "bold green", "default", "magenta", "dim"


# The brackets around trained tokens if the output has no colours.
MARKS = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


def preview(batch: Batch, tokenizer: Any, row: int = 0, marks: bool = False) -> Text:
    """One packed row, decoded, with trained tokens in green, lines between documents, numbers of tokens for pictures,
    and a legend.

    A token is trained if it is a target: the weight at the position before it counts.

      batch: `[rows, length]`, numpy or jax arrays.
      marks: also put trained tokens in brackets, for output without colours.
    """
    from rich.text import Text

    tokens, segments, weights = (np.asarray(field)[row] for field in (batch.tokens, batch.segment_ids, batch.weights))
    trained = np.concatenate([[False], weights[:-1] > 0]) & (segments > 0)
    real = segments > 0
    features = batch.pictures.get("picture_features")
    seen = np.zeros(len(tokens), bool) if features is None else np.asarray(features)[row] >= 0
    before, after = MARKS if marks else ("", "")
    text = Text()
    text.append(f"row {row}: {int(real.sum())} tokens, {int(trained.sum())} trained ", BOUNDARY)
    text.append(f"{before}trained{after}", TRAINED)
    text.append(" / ").append("only read", READ)
    # Consecutive tokens of one document and one kind are decoded in one call, because a character may span tokens.
    kinds = np.stack([segments, trained, seen])
    changes = np.flatnonzero((np.diff(kinds) != 0).any(0)) + 1
    document = 0
    for start, end in zip([0, *changes], [*changes, len(tokens)], strict=True):
        if segments[start] != document:
            document = segments[start]
            if document:
                text.append(f"\n--- document {document}: {int((segments == document).sum())} tokens ---\n", BOUNDARY)
        if document and seen[start]:
            text.append(f"[{end - start} tokens of a picture]", BOUNDARY)
        elif document:
            decoded = printable(tokenizer.decode(tokens[start:end].tolist()))
            text.append(f"{before}{decoded}{after}" if trained[start] else decoded, TRAINED if trained[start] else READ)
        else:
            text.append(f"\n--- {end - start} slots of padding ---", PADDING)
    return text
