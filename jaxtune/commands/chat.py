"""The command `jaxtune chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtune.commands import common, pictures, sampling
from jaxtune.system import progress, timing
from jaxtune.system.terminal import console, fitted, say

if TYPE_CHECKING:
    from jaxtune.conversations.picture_processors import PictureReader
    from jaxtune.conversations.pictures import Picture
    from jaxtune.models.generation.chat import Conversation


# arguments: the words after `jaxtune chat`: a model folder, hub name or adapter folder, and options such as --system
# and --temperature. Questions are read from stdin, answers printed on stdout as they are generated, and notes on
# stderr. ValueError: the model has no tokenizer or no chat template. That of a single question, such as a conversation
# that is too long, is printed on stderr, and the conversation continues.
def run(arguments: Sequence[str]) -> None:
    """Talk to a model or an adapter in the terminal.

    /reset starts a new conversation, /image FILE attaches a picture to the next question, /adapter turns the adapter
    off and on, and /exit or the end of the input quits.
    Ctrl-C ends an answer, and at the prompt the conversation.
    """
    parser = common.parser("chat", run.__doc__)
    parser.add_argument("model", help="model folder, GGUF file, hub name or adapter folder")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--no-adapter", action="store_true", help="start with the adapter off")
    pictures.add_options(parser)
    sampling.add_options(parser, temperature=0.7, max_new_tokens=512)
    common.add_timing(parser)
    options = parser.parse_args(arguments)
    common.begin(options.model)

    from jaxtune.models.ends import with_end_tokens
    from jaxtune.models.generation.chat import Conversation

    timing.imported()
    model, tokenizer, reader, why_no_pictures = pictures.load(options, streamed=common.streamed_to_answer)
    model = with_end_tokens(model, tokenizer)
    settings = {"max_new_tokens": options.max_new_tokens, **sampling.settings(options)}
    processor = None if reader is None else reader.processor
    conversation = Conversation(model, tokenizer, options.system, options.template_arguments, processor, **settings)
    if options.no_adapter:
        conversation.adapter = False
    _talk(conversation, reader, why_no_pictures)
    if options.timing:
        progress.show_timing()


def _talk(conversation: Conversation, reader: PictureReader | None, why_no_pictures: str) -> None:
    """Reads questions and commands, and answers them, until /exit or the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    switch = ", /adapter turns the adapter off and on" if conversation.has_adapter else ""
    usage = "/reset starts a new conversation" + ", /image FILE attaches a picture" * (reader is not None)
    usage += f"{switch}, /exit or end of input quits"
    attached: list[Picture] = []
    say(fitted(usage, console(stderr=True)), file=sys.stderr)
    while True:
        try:
            with timing.phase("input"):
                text = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            say(end="\n" if prompt else "")  # the shell's prompt starts on a new line
            break
        if text == "/exit":
            break
        if text.startswith("/"):
            _obey(text, conversation, attached, reader, why_no_pictures)
        elif text:
            try:
                conversation.ask(text, functools.partial(say, end="", flush=True), attached)
                attached.clear()
            except KeyboardInterrupt:  # ends the answer, not the conversation
                say(" ...", end="")
            except ValueError as error:  # mostly a conversation that is too long
                say(error, file=sys.stderr)
            say()


def _obey(
    text: str, conversation: Conversation, attached: list[Picture], reader: PictureReader | None, why_no_pictures: str
) -> None:
    """Does what a line with / asks for; `attached` gets pictures of the next question."""
    if text == "/reset":
        conversation.reset()
        attached.clear()
    elif text.startswith("/image ") or text == "/image":
        try:
            if reader is None:
                raise ValueError(f"/image: {why_no_pictures}")
            picture, tokens = _attached(text.removeprefix("/image").strip(), reader)
            attached.append(picture)
            say(f"of the next question: a picture of {tokens:,} tokens", file=sys.stderr)
        except ValueError as error:
            say(error, file=sys.stderr)
    elif text == "/adapter" and conversation.has_adapter:
        conversation.adapter = not conversation.adapter
        say(f"the adapter is {'on' if conversation.adapter else 'off'}", file=sys.stderr)
    else:
        commands = ["/reset", *["/image"] * (reader is not None), *["/adapter"] * conversation.has_adapter, "/exit"]
        say(f"{text}: unknown; there are {', '.join(commands)}", file=sys.stderr)


def _attached(name: str, reader: PictureReader) -> tuple[Picture, int]:
    """(Picture with its content, tokens). Raises ValueError for one that cannot be read."""
    from jaxtune.conversations.pictures import Picture, read_picture

    picture = Picture(data=read_picture(name, reader.access).file_bytes())
    return picture, len(reader.processor.tokens(reader.processor.grid(picture.decoded())))
