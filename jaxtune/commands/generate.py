"""The command `jaxtune generate`."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.commands import common, pictures, sampling
from jaxtune.system import progress, timing
from jaxtune.system.terminal import say

if TYPE_CHECKING:
    from jaxtune.conversations.tokenizing import Tokenizer
    from jaxtune.models.decoder import Decoder

logger = logging.getLogger(__name__)


# arguments: the words after `jaxtune generate`: a model folder, hub name or adapter folder, the prompts, and options.
# Answers to --prompt are printed on stdout, and notes on stderr. ValueError: a prompt that cannot be asked, a model
# without a tokenizer, or an --output that answers other prompts; answers.py has the details.
def run(arguments: Sequence[str]) -> None:
    """Answer prompts with a model or an adapter.

    Prompts given by --prompt are answered on the terminal. For prompts in a JSONL file (--prompts), the answers are
    written to a second JSONL file (--output); if the command was stopped, the same command continues that file.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(options, parser)
    grammar = _grammar(options)
    common.begin(options.model)

    from jaxtune.commands import answers
    from jaxtune.models.ends import with_end_tokens
    from jaxtune.models.generation.pictures import why_no_pictures

    timing.imported()
    # What cannot be read is said before a model is loaded.
    shown = _first_with_pictures(options)
    if shown and (why := why_no_pictures(options.model)):
        raise ValueError(f"{shown} has pictures: {why}")
    beside = functools.partial(_begin, options) if len(options.prompt or ()) == 1 and not shown else None
    model, tokenizer = common.load(options, bool(shown), beside, common.streamed_to_answer)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer: copy its tokenizer files into the model's folder")
    folder = None if options.prompts is None else str(Path(options.prompts).parent)
    reader = pictures.reader(options, model, tokenizer, folder=folder) if shown else None
    model = with_end_tokens(model, tokenizer)
    if not options.raw and not tokenizer.chat_template:
        say(
            f"jaxtune: note: {options.model} has no chat template: the prompt is used as it is, as with --raw",
            file=sys.stderr,
        )
    settings = sampling.settings(options)
    if options.prompts is None:
        settings = {"max_new_tokens": options.max_new_tokens, **settings}
        variables = options.template_arguments
        answers.show(model, tokenizer, options.prompt, options.raw, settings, variables, options.image, reader)
    else:
        answers.answer_file(
            model,
            tokenizer,
            Path(options.prompts),
            Path(options.output),
            raw=options.raw,
            max_new_tokens=options.max_new_tokens,
            num_answers=options.num_answers,
            slots=options.slots,
            settings=settings,
            template_arguments=options.template_arguments,
            grammar=grammar,
            pictures=reader,
            cache=options.cache,
        )
    if options.timing:
        progress.show_timing()


def _first_with_pictures(options: argparse.Namespace) -> str:
    """What has the first picture, for messages; "" if nothing has any. ValueError for prompts that cannot be read."""
    from jaxtune.commands import answers

    rows = answers.read_rows(Path(options.prompts)) if options.prompts is not None else {}
    if options.image:
        return "--image"
    return next((f"{options.prompts}:{number}" for number, row in rows.items() if answers.has_pictures(row)), "")


def _parser() -> argparse.ArgumentParser:
    parser = common.parser("generate", run.__doc__)
    parser.add_argument("model", help="model folder, GGUF file, hub name or adapter folder")
    prompt_options = parser.add_mutually_exclusive_group(required=True)
    prompt_options.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="a picture that each --prompt is about; may be repeated, in the order of the prompt's tags <image> if any",
    )
    prompt_options.add_argument(
        "--prompts", metavar="FILE", help="JSONL: a line is an object with 'messages', or with 'prompt', and any others"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="JSONL: the lines of --prompts, each with its 'answer' and 'finish_reason'"
    )
    parser.add_argument(
        "--num-answers", type=int, default=1, metavar="N", help="lines of --output for each prompt (default: 1)"
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help="of --prompts, rows that decode at once (default: by memory, at most 64)"
    )
    sampling.add_cache(parser, "of --prompts, ")
    parser.add_argument(
        "--json-schema", metavar="FILE", help="a JSON schema that each answer to --prompts follows, after its thoughts"
    )
    parser.add_argument(
        "--regex", metavar="EXPRESSION", help="an expression in Rust's syntax that each answer matches whole"
    )
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, not as a user's chat message")
    pictures.add_options(parser)
    sampling.add_options(parser, temperature=0.0, max_new_tokens=64)
    common.add_timing(parser)
    return parser


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the command for options that contradict each other."""
    if (options.prompts is None) != (options.output is None):
        parser.error("--prompts and --output go with each other: one is given without the other")
    if options.prompts is None and (options.num_answers != 1 or options.slots is not None or options.cache is not None):
        parser.error("--num-answers, --slots and --cache are of --prompts and --output")
    for flag, value in (("--num-answers", options.num_answers), ("--max-new-tokens", options.max_new_tokens)):
        if value < 1:
            parser.error(f"{flag} {value}: must be a positive integer")
    if options.json_schema is not None and options.regex is not None:
        parser.error("--json-schema and --regex: give one of them")
    if options.prompts is None and (options.json_schema is not None or options.regex is not None):
        parser.error("--json-schema and --regex are of --prompts and --output")
    if options.image and (options.prompts is not None or options.raw):
        parser.error(f"--image and {'--raw' if options.raw else '--prompts'}: pictures are of a --prompt in a chat")


def _begin(
    options: argparse.Namespace, shapes: Decoder, room: float | None, tokenizer_of: Callable[[], Tokenizer | None]
) -> None:
    """Begins to load or compile the only prompt's programs while the weights load."""
    from jaxtune.commands.answers import prompt_of
    from jaxtune.models.ends import with_end_tokens
    from jaxtune.models.generation.generate import begin
    from jaxtune.models.generation.sampling import Sampling

    if (tokenizer := tokenizer_of()) is None:
        return
    try:
        prompt = prompt_of(
            {"prompt": options.prompt[0]}, tokenizer, options.raw, "--prompt", options.template_arguments
        )
        settings = sampling.settings(options)
        draws = Sampling(**{key: value for key, value in settings.items() if key not in ("seed", "stop_strings")})
        begin(with_end_tokens(shapes, tokenizer), prompt.ids, options.max_new_tokens, draws, room)
    except Exception as error:  # which the loaded model meets again
        logger.info("no program was begun while the weights loaded: %s: %s", type(error).__name__, error)


def _grammar(options: argparse.Namespace) -> str | None:
    """Of --json-schema or --regex; ValueError for one that is not followed."""
    expression, schema = options.regex, options.json_schema
    if expression is None and schema is None:
        return None
    from jaxtune.models.files.model_folder import read_json
    from jaxtune.models.generation import grammars

    try:
        return grammars.grammar_of(None if schema is None else read_json(Path(schema).expanduser()), expression)
    except ValueError as error:
        raise ValueError(f"{'--json-schema' if expression is None else '--regex'}: {error}") from None
