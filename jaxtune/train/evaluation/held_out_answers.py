"""Exact match on held-out questions: which rows are asked, the score, and the answers that are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtune.conversations.pictures import PictureAccess
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.config import DataConfig, EvaluationConfig
from jaxtune.train.data.rendering.formats import Example, normalize, refuse_excluded
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.row_errors import Excluded, RowError, attempt
from jaxtune.train.evaluation.evaluate import exact_match, questions_of
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.phases import Sampled, phase, questions_at_a_time
from jaxtune.train.planning.planner import Planner

if TYPE_CHECKING:
    from rich.console import Console


BEFORE, AFTER = "before training", "after training"  # printed before the answers that the model gives then


def answered(data: DataConfig, limit: int, pictures: PictureOptions | None = None) -> tuple[list[Example], int]:
    """The first `limit` held-out rows (data.eval) that end with a non-empty answer, and the number of other rows read
    until then. ValueError if there is none, or a row is bad and data.on_bad_row is "error". pictures: how they are
    read; None: rows have none.
    """
    rows, left_out = [], 0
    sources = open_sources(data.eval, columns=data.columns)
    for row in read_rows(sources, data.format):
        access = None if pictures is None else pictures.access(row.file)
        example = RowError(row.error) if row.value is None else attempt(_asked, row.value, row.format, access)
        if isinstance(example, RowError) and not isinstance(example, Excluded) and data.on_bad_row == "error":
            raise ValueError(f"{printable(row.place)}: {printable(example)}")
        last = example.messages[-1] if isinstance(example, Example) and example.messages else {}
        if isinstance(example, Example) and last.get("role") == "assistant" and last["content"].strip():
            rows.append(example)
        else:
            left_out += 1
        if len(rows) == limit:
            break
    if not rows:
        raise ValueError(f"data.eval = {data.eval!r}: no row is a conversation that ends with an answer")
    return rows, left_out


def _asked(value: Mapping[str, Any], format: str, access: PictureAccess | None) -> Example:
    refuse_excluded(value)
    return normalize(value, format, access)


def sampled_by(
    planner: Planner | ForwardPlanner,
    tokenizer: Tokenizer,
    settings: EvaluationConfig,
    data: DataConfig,
    positions: int,
    pictures: PictureOptions | None,
) -> Sampled:
    """How held-out questions will be answered: how many at a time, and the tokens of the longest prompt and answer.
    Samples nothing; before training, so that rows that cannot be asked raise ValueError then. positions: the model's.
    """
    rows, _ = answered(data, settings.exact_match_rows, pictures)
    template = data.trained_template
    questions = questions_of(tokenizer, rows, settings.max_new_tokens, template, positions, data.today, pictures)
    longest = max(len(question.prompt) for question in questions)
    return questions_at_a_time(planner.cost, planner.device, planner.budget_bytes, longest, settings.max_new_tokens)


def answer(
    model: Decoder,
    tokenizer: Any,
    settings: EvaluationConfig,
    data: DataConfig,
    console: Console,
    sampled: Sampled,
    when: str = "",
    pictures: PictureOptions | None = None,
) -> dict[str, Any]:
    """Measures exact match, prints the score and some answers (`answers_to_show`), and returns {"exact_match": 0 to 1,
    "rows": their number, "samples": [{"question", "expected", "given"}]}.

      sampled: from `sampled_by`.
      when: printed before the score, such as "before training".

    ValueError if rows cannot be asked, or device memory ran out (OutOfDeviceMemory).
    """
    rows, left_out = answered(data, settings.exact_match_rows, pictures)
    with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.exact_match_rows=0"):
        score, answers = exact_match(
            model,
            tokenizer,
            rows,
            settings.max_new_tokens,
            data.trained_template,
            sampled.rows,
            data.today,
            pictures,
        )
    samples = [
        dict(zip(("question", "expected", "given"), shown_answer, strict=True))
        for shown_answer in answers_to_show(answers, settings.sample_rows)
    ]
    result = {"exact_match": score, "rows": len(rows), "samples": samples}
    _show_answers(result, console, when, left_out)
    return result


def answers_to_show(answers: Sequence[tuple[str, str, str]], count: int) -> list[tuple[str, str, str]]:
    """`count` of the answers (question, expected, given) in their order. Half of them, rounded down, are wrong ones if
    there are such, as a good model's mistakes show most.
    """
    wrong = [
        index for index, (_, expected, answer_text) in enumerate(answers) if answer_text.strip() != expected.strip()
    ]
    right = sorted({*range(len(answers))} - {*wrong})
    few_right = right[: max(count - len(wrong), (count + 1) // 2)]
    return [answers[index] for index in sorted([*few_right, *wrong[: count - len(few_right)]])]


def _show_answers(result: dict[str, Any], console: Console, when: str, left_out: int) -> None:
    begin, suffix = f"{when}: " if when else "", f" ({left_out:,} rows without an answer left out)" if left_out else ""
    console.print(
        f"{begin}exact match {100 * result['exact_match']:.1f} % of {result['rows']} held-out questions{suffix}"
    )
    for sample in result["samples"]:
        question, expected, answer_text = sample["question"], sample["expected"], sample["given"]
        mark = "right" if answer_text.strip() == expected.strip() else f"expected {expected!r}"
        console.print(fitted(f"  {question!r} -> {answer_text!r} ({mark})", console))
