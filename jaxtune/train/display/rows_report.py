"""A run's rows, steps and epochs in words with warnings, and the report of --check."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from jaxtune.conversations.dates import parsed_day
from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.rendering.preview import MARKS, preview
from jaxtune.train.display.model_report import trained_table


def data_summary(
    train: TokenDataset | None,
    held_out: TokenDataset | None,
    batches: BatchSource,
    total_steps: int,
    warmup_steps: int,
    context_length: int,
) -> str:
    """The rows, steps and epochs of a run in words, with warnings below.

    train: None if the rows are not all known before the run.
    context_length: the positions that the model was made for.
    """
    rows, *steps = batches.described(total_steps)
    lines = [rows]
    if held_out is not None:
        lines.append(f"evaluation rows: {held_out.report}")
    lines += steps
    warnings = [*([] if train is None else train.warnings()), *batches.warnings(), *held_out_warnings(train, held_out)]
    if batches.length > context_length:
        warnings.append(
            f"data.length = {batches.length:,} is more than the {context_length:,} positions that the model was made "
            f"for: rows hold several documents, none of which may be longer than {context_length:,} tokens"
        )
    if warmup_steps > total_steps:
        warnings.append(
            f"schedule.warmup_steps = {warmup_steps:,}, of {total_steps:,} steps in all: the learning rate only rises, "
            "and does not reach optim.learning_rate; lower it, or set schedule.warmup_ratio in its place"
        )
    return "\n".join(printable(line) for line in [*lines, *(f"warning: {line}" for line in warnings)])


def held_out_warnings(train: TokenDataset | None, held_out: TokenDataset | None) -> list[str]:
    """Warnings of `held_out` that `train` does not give too, and how many documents are in both.

    train: None: the rows are not all known before the run.
    """
    if held_out is None:
        return []
    # Rows that data.eval_rows takes out of the training file were counted with it but are not trained on.
    train_warnings, documents = [] if train is None else train.warnings(), held_out.documents
    warnings = [line for line in held_out.warnings() if line not in train_warnings]
    if train is None:
        return [f"evaluation rows: {line}" for line in warnings]
    if documents.tokens is not train.documents.tokens and (shared := documents.also_in(train.documents)):
        warnings.append(
            f"{shared:,} of {len(documents):,} documents are also trained on: their loss says nothing about others"
        )
    return [f"evaluation rows: {line}" for line in warnings]


def today_note(today: str | None) -> list[str]:
    """A line on the day that the chat template writes (data.today); [] for None."""
    if today is None:
        return []
    day = f"{parsed_day(today):%d %b %Y}"
    return [
        f"the chat template writes today's date: {day} in all rows (data.today); the saved template, chat and serve "
        "write the day of asking"
    ]


def columns_read(
    train: TokenDataset | None, held_out: TokenDataset | None, batches: BatchSource, prompts: object = None
) -> list[str]:
    """A line for each set of rows: which columns are read, and as what, and which are not. prompts: of evaluations."""
    sets = {"training rows": "" if train is None else train.summary.columns, **batches.columns()}
    is_apart = held_out is not None and (train is None or held_out.summary is not train.summary)
    sets["evaluation rows"] = held_out.summary.columns if held_out is not None and is_apart else ""
    sets["prompts of evaluations"] = getattr(prompts, "columns", "")
    return [f"columns of {name}: {words}" for name, words in sets.items() if words]


def check(model: Decoder, summary: str, batches: BatchSource, tokenizer: Any, console: Console) -> None:
    """Prints the report of --check: trainable tensors, the data (`summary`), and one packed row, or a prompt."""
    colours = console.color_system is not None
    mark_words = "green" if colours else f"between {MARKS[0]} and {MARKS[1]}"
    if batches.needs_model:
        title = "A prompt, to which the model samples answers during the run:"
        sample_text = Text(printable(tokenizer.decode(batches.first_prompt())))
    else:
        title = f"One packed row: what is trained is {mark_words}, the rest is only read."
        sample_text = preview(batches.batch_at(0), tokenizer, 0, marks=not colours)
    header: list[RenderableType] = [trained_table(model), Text(), Text(fitted(summary, console))]
    console.print(Group(*header, Text(f"\n{title}\n"), sample_text))
