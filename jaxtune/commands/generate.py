"""`jaxtune generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxtune.commands import common, sampling
from jaxtune.system.terminal import say


def run(arguments: Sequence[str]) -> None:
    """Answer prompts with a model or an adapter."""
    parser = common.parser("generate", run.__doc__)
    parser.add_argument("model", help="model folder, hub name or adapter folder")
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, not as a user's chat message")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="most tokens of an answer (default: 64)"
    )
    sampling.add_options(parser, temperature=0.0)
    options = parser.parse_args(arguments)

    import jaxtune
    from jaxtune.train.end_tokens import with_end_tokens

    model, tokenizer = common.load(options)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer: copy its tokenizer files into the model's folder")
    model = with_end_tokens(model, tokenizer)
    templated = bool(tokenizer.chat_template)
    if not options.raw and not templated:
        say(
            f"jaxtune: note: {options.model} has no chat template: the prompt is used as it is, as with --raw",
            file=sys.stderr,
        )
    if options.raw or not templated:
        prompts = [tokenizer(prompt)["input_ids"] for prompt in options.prompt]
    else:
        chats = [[{"role": "user", "content": prompt}] for prompt in options.prompt]
        prompts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
            for chat in chats
        ]
    answers = jaxtune.generate(
        model, prompts, max_new_tokens=options.max_new_tokens, tokenizer=tokenizer, **sampling.settings(options)
    )
    for prompt, answer in zip(options.prompt, answers, strict=True):
        if len(options.prompt) > 1:
            say(f"--- {prompt}")
        say(tokenizer.decode(answer, skip_special_tokens=True))
