"""The command `jaxtune chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from jaxtune.commands import common, sampling
from jaxtune.system import progress, timing
from jaxtune.system.terminal import console, fitted, say


# arguments: the words after `jaxtune chat`: a model folder, hub name or adapter folder, and options such as --system
# and --temperature. Questions are read from stdin, answers printed on stdout as they are generated, and notes on
# stderr. ValueError: the model has no tokenizer or no chat template. That of a single question, such as a conversation
# that is too long, is printed on stderr, and the conversation continues.
def run(arguments: Sequence[str]) -> None:
    """Talk to a model or an adapter in the terminal.

    /reset starts a new conversation, /adapter turns the adapter off and on, and /exit or the end of the input quits.
    Ctrl-C ends an answer, and at the prompt the conversation.
    """
    parser = common.parser("chat", run.__doc__)
    parser.add_argument("model", help="model folder, GGUF file, hub name or adapter folder")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--no-adapter", action="store_true", help="start with the adapter off")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="most tokens of an answer (default: 512)"
    )
    sampling.add_options(parser, temperature=0.7)
    common.add_timing(parser)
    options = parser.parse_args(arguments)
    common.begin_import()

    from jaxtune.models.ends import with_end_tokens
    from jaxtune.models.generation.chat import Conversation

    timing.imported()
    model, tokenizer = common.load(options)
    model = with_end_tokens(model, tokenizer)
    settings = {"max_new_tokens": options.max_new_tokens, **sampling.settings(options)}
    conversation = Conversation(model, tokenizer, options.system, options.template_arguments, **settings)
    if options.no_adapter:
        conversation.adapter = False
    prompt = "> " if sys.stdin.isatty() else ""
    switch = ", /adapter turns the adapter off and on" if conversation.has_adapter else ""
    usage = f"/reset starts a new conversation{switch}, /exit or end of input quits"
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
        if text == "/reset":
            conversation.reset()
        elif text == "/adapter" and conversation.has_adapter:
            conversation.adapter = not conversation.adapter
            say(f"the adapter is {'on' if conversation.adapter else 'off'}", file=sys.stderr)
        elif text.startswith("/"):
            say(f"{text}: unknown; there are /reset{', /adapter' if switch else ''}, /exit", file=sys.stderr)
        elif text:
            try:
                conversation.ask(text, functools.partial(say, end="", flush=True))
            except KeyboardInterrupt:  # ends the answer, not the conversation
                say(" ...", end="")
            except ValueError as error:  # mostly a conversation that is too long
                say(error, file=sys.stderr)
            say()
    if options.timing:
        progress.show_timing()
