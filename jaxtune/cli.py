"""The console command: thin functions over the Python API.

A mistake of the user, and a want of memory, is one clear line on stderr and exit code 2; JAXTUNE_TRACEBACK=1 shows
where it came from. Any other exception is a fault of ours or of a library and keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtune import terminal
from jaxtune.terminal import say

USER_ERROR = 2


def console(arguments: Sequence[str] | None = None) -> int:
    """`main` in a process of its own."""
    # transformers imports torch wherever it is installed: seconds of each start, for nothing that a command uses. It is
    # hidden until transformers has looked (model_folder.load_tokenizer).
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    return main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if logging.lastResort is not None:  # which shows what libraries and we warn of
        logging.lastResort.setFormatter(terminal.PrintableFormatter())
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_usage()
        return 0 if arguments else USER_ERROR
    name, *rest = arguments
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
        return _fail(f"unknown command {name!r}; {hint}")
    try:
        return _COMMANDS[name](rest) or 0
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        message = _out_of_memory(error) or (str(error) if _is_user_error(error) else None)
        if os.environ.get("JAXTUNE_TRACEBACK") == "1" or message is None:
            raise
        return _fail(message)


def _out_of_memory(error: Exception) -> str | None:
    """What to tell of an error that says that memory ran out, of the host or of the device; None of any other."""
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        what = f" ({first_line})" if first_line else ""
        return (
            f"out of host memory{what}: this machine has {pages * page / 1e9:.1f} GB. A smaller model, "
            "model.load_in=nf4, fewer data.num_workers or fewer other programs need less"
        )
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of device memory ({first_line}): a smaller or quantised model, or shorter inputs, need less"
    return None


def _is_user_error(error: Exception) -> bool:
    """Whether jaxtune itself raised it, with a message for the user, or the system refused a file."""
    if isinstance(error, RuntimeError):
        return False
    if isinstance(error, OSError):
        return error.filename is not None
    raised_in = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        raised_in = frame.f_code.co_filename
    return Path(raised_in).is_relative_to(Path(__file__).parent)


def _fail(message: str) -> int:
    for line in message.splitlines():
        say(f"jaxtune: error: {line}", file=sys.stderr)
    return USER_ERROR


def _print_usage() -> None:
    """Every command with the first paragraph of its docstring, which is one sentence or two."""
    summaries = {name: (command.__doc__ or "").split("\n\n")[0] for name, command in _COMMANDS.items()}
    say("usage: jaxtune COMMAND ...\n")
    _print_columns([(name, " ".join(summary.split())) for name, summary in summaries.items()])
    say("\n'jaxtune COMMAND --help' says more.")


def _wide_console() -> Any:
    """As wide as the terminal; in a pipe or a file, as wide as is good to read."""
    return terminal.console(width=None if sys.stdout.isatty() else 140)


def _print_columns(rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, the first as wide as it must be."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, meaning in rows:
        table.add_row(f"  {name}", meaning)
    _wide_console().print(table)


def _parser(command: str, description: str | None) -> argparse.ArgumentParser:
    description = " ".join((description or "").split())
    return argparse.ArgumentParser(prog=f"jaxtune {command}", description=description, allow_abbrev=False)


def train(arguments: Sequence[str]) -> int | None:
    """Fine-tune a model, or train one from scratch, as a recipe says."""
    parser = argparse.ArgumentParser(prog="python -m jaxtune.train", allow_abbrev=False, add_help=False)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        _print_train_help()
        return 0
    if options.recipe is None or "=" in options.recipe:
        from jaxtune.train.config_file import packaged_recipes

        raise ValueError(f"the first argument is a recipe: a YAML file or one of {', '.join(packaged_recipes())}")
    from jaxtune.train.config_file import load_config

    config = load_config(options.recipe, options.overrides, rows_needed=not options.plan)
    # JAX's own default is three quarters of the device; the planner counts on all that the context leaves.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    from jaxtune.train.planning.devices import allow_pinned_memory

    allow_pinned_memory()
    from jaxtune.train.app import run

    return run(config, check=options.check, plan=options.plan)


def _print_train_help() -> None:
    from rich.table import Table

    from jaxtune.train.config_file import config_keys, packaged_recipes, recipe_summary

    console = _wide_console()
    console.print(
        "usage: python -m jaxtune.train RECIPE [key.sub=value ...] [--check | --plan]\n\n"
        "RECIPE is a YAML file or the name of a packaged recipe. Overrides win over it; their values are YAML.\n\n"
        "  --check   read config, tokenizer and data, show what would be trained and one packed row, then stop\n"
        "  --plan    show the plan: memory and speed, here or on the device plan.device names, then stop\n"
        "  --help    show this\n"
    )
    recipes = Table(title="Packaged recipes", title_justify="left", box=None, show_header=False)
    for name, path in packaged_recipes().items():
        recipes.add_row(name, recipe_summary(path))
    console.print(recipes)
    keys = Table("key", "type", "default", "meaning", title="\nKeys", title_justify="left", box=None)
    for key in config_keys():
        keys.add_row(key.name, key.type, key.default, key.help)
    console.print(keys)


def generate(arguments: Sequence[str]) -> None:
    """Answer prompts with a model or an adapter."""
    parser = _parser("generate", generate.__doc__)
    parser.add_argument("model", help="model folder, hub name or adapter folder")
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, not as a user's chat message")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    _add_sampling(parser, temperature=0.0)
    options = parser.parse_args(arguments)

    import jaxtune

    model, tokenizer = _load(options.model, options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer: put its tokenizer files into the model's folder")
    templated = bool(tokenizer.chat_template)
    if not options.raw and not templated:
        say(
            f"jaxtune: note: {options.model} has no chat template: the prompt is given as it stands (--raw says so)",
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
        model, prompts, max_new_tokens=options.max_new_tokens, tokenizer=tokenizer, **_sampling(options)
    )
    for prompt, answer in zip(options.prompt, answers, strict=True):
        if len(options.prompt) > 1:
            say(f"--- {prompt}")
        say(tokenizer.decode(answer, skip_special_tokens=True))


def _add_sampling(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The options that are settings of jaxtune.generate, and the dtype."""
    parser.add_argument(
        "--temperature", type=float, default=temperature, help=f"0 takes the likeliest token (default: {temperature:g})"
    )
    parser.add_argument("--top-k", type=int, default=0, help="only so many likeliest tokens; 0 (the default): all")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest with this probability together")
    parser.add_argument("--min-p", type=float, default=0.0, help="only those with this part of the likeliest one's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: less of what was said")
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights (default: bfloat16)")


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {name: getattr(options, name) for name in names} | {"stop_strings": options.stop}


def chat(arguments: Sequence[str]) -> None:
    """Talk to a model or an adapter in the terminal."""
    parser = _parser("chat", chat.__doc__)
    parser.add_argument("model", help="model folder, hub name or adapter folder")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--no-adapter", action="store_true", help="begin with the adapter off")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    _add_sampling(parser, temperature=0.7)
    options = parser.parse_args(arguments)

    from jaxtune.models.chat import Conversation

    model, tokenizer = _load(options.model, options.dtype)
    settings = {"max_new_tokens": options.max_new_tokens, **_sampling(options)}
    conversation = Conversation(model, tokenizer, options.system, **settings)
    if options.no_adapter:
        conversation.adapter = False
    prompt = "> " if sys.stdin.isatty() else ""
    switch = ", /adapter turns the adapter off and on" if conversation.has_adapter else ""
    say(f"/reset begins anew{switch}, /exit or the end of the input leaves", file=sys.stderr)
    while True:
        try:
            text = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/exit":
            return
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
            except ValueError as error:  # too long, mostly
                say(error, file=sys.stderr)
            say()


def evaluate(arguments: Sequence[str]) -> None:
    """Loss (and exact match) of a run's result, or of a recipe's model, on the held-out rows."""
    parser = _parser("evaluate", evaluate.__doc__)
    parser.add_argument(
        "recipe", help="config.yaml in a run's folder: what the run led to; or a recipe: its model as it is"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model.path=FOLDER adapter=null")
    options = parser.parse_args(arguments)

    from jaxtune.train.config_file import load_config

    config = load_config(options.recipe, options.overrides)
    from jaxtune.train.app import evaluate as evaluate_config

    say(json.dumps(evaluate_config(config, options.recipe, options.overrides), indent=2))


def export(arguments: Sequence[str]) -> None:
    """Write a model or an adapter as other programs read it: merged, as GGUF for llama.cpp, in four bits."""
    parser = _parser("export", export.__doc__)
    parser.add_argument("model", help="PEFT adapter folder, which names its base model; or a model folder or hub name")
    parser.add_argument("output", help="folder to write")
    parser.add_argument(
        "--to",
        default="merged",
        help="merged (the default): the base with the adapter in it; gguf: one file for llama.cpp; gguf-adapter: the "
        "adapter alone for llama.cpp; adapter: PEFT's files, checked; bnb-4bit: bitsandbytes' NF4; fp8: "
        "compressed-tensors; mxfp4: gpt-oss as it is published",
    )
    parser.add_argument("--outtype", help="of gguf: f32, f16, bf16, q8_0 or q4_0 (default: that of --dtype)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights (default: bfloat16)")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="cut safetensors above this (default: 5)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="then upload the folder to this model repository")
    parser.add_argument("--private", action="store_true", help="a repository that --push makes is private")
    options = parser.parse_args(arguments)
    if options.to in ("merged", "adapter", "gguf-adapter") and _base_of(options.model) is None:
        raise ValueError(f"{options.model} is not an adapter folder: it has no adapter_config.json")

    import jaxtune

    model, tokenizer = _load(options.model, options.dtype)
    done = jaxtune.export_model(
        model,
        options.output,
        options.to,
        tokenizer=tokenizer,
        outtype=options.outtype,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
    )
    for note in done.notes:
        say(f"note: {note}")
    what = "merged model" if options.to == "merged" else options.to
    say(f"{what}: {options.output} (read back: {', '.join(done.files)})")
    if options.push:
        from jaxtune.export.hub import push

        say(f"pushed: {push(done.folder, options.push, private=options.private)}")


def profile(arguments: Sequence[str]) -> int | None:
    """Read a profile, compare two, or measure what this device can do."""
    parser = _parser("profile", profile.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|compare|ceilings")
    trace_help = "folder or file: jaxtune's or JAX's XPlane, or a Chrome trace of PyTorch's profiler"
    shown = commands.add_parser("show", help="where the time of a step goes", allow_abbrev=False)
    shown.add_argument("trace", help=trace_help)
    compared = commands.add_parser("compare", help="what got faster or slower from A to B", allow_abbrev=False)
    compared.add_argument("a", help=trace_help)
    compared.add_argument("b", help="likewise")
    compared.add_argument("--fail-if-slower", metavar="3%", help="exit with 1 if B's step is slower by more than this")
    for command in (shown, compared):
        command.add_argument("--json", metavar="FILE", help="also write the tables as JSON")
        command.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    measured = commands.add_parser("ceilings", help="GEMM, copy, host link and launch rates, measured once and cached")
    measured.add_argument("--remeasure", action="store_true", help="measure again")
    options = parser.parse_args(arguments)

    from jaxtune import profile as profiling

    if options.command == "ceilings":
        say(json.dumps(profiling.ceilings(remeasure=options.remeasure).to_dict(), indent=2))
        return None
    too_slow = False
    if options.command == "show":
        result = profiling.show(options.trace)
    else:
        limit = None if options.fail_if_slower is None else _fraction("--fail-if-slower", options.fail_if_slower)
        result = profiling.compare(options.a, options.b)
        too_slow = limit is not None and result.slower_by > limit
    if options.json:
        Path(options.json).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    if options.html:
        Path(options.html).write_text(result.to_html(), encoding="utf-8")
    say(result.to_text(width=shutil.get_terminal_size((140, 40)).columns), end="")
    return int(too_slow)


def _fraction(option: str, text: str) -> float:
    """0.03 of "3%"; a number without the sign is refused, since 3 could mean either."""
    try:
        if not text.endswith("%"):
            raise ValueError
        value = float(text[:-1]) / 100
    except ValueError:
        raise ValueError(f"{option} {text}: write a percentage such as 3%") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{option} {text}: write a percentage such as 3%")
    return value


def info(arguments: Sequence[str]) -> None:
    """Versions, devices and packaged recipes, or the kernels that would run here."""
    parser = _parser("info", info.__doc__)
    parser.add_argument(
        "--kernels", action="store_true", help="which implementation of each op is chosen here, and why"
    )
    options = parser.parse_args(arguments)
    if options.kernels:
        from jaxtune.pallas.report import kernel_choices

        say("\n\n".join(choice.to_text() for choice in kernel_choices()))
        return
    import platform
    from importlib import metadata

    import jax

    from jaxtune import __version__
    from jaxtune.train.config_file import packaged_recipes, recipe_summary

    versions = [("jaxtune", __version__), ("python", platform.python_version())]
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "jax-triton"):
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            versions.append((name, "not installed"))
    say("versions")
    _print_columns(versions)
    say("\ndevices")
    for device in jax.devices():
        memory_bytes = (device.memory_stats() or {}).get("bytes_limit")
        say(f"  {device.device_kind}" + (f", {memory_bytes / 1e9:.1f} GB" if memory_bytes else ""))
    say("\nrecipes")
    _print_columns([(name, recipe_summary(path)) for name, path in packaged_recipes().items()])


def report(arguments: Sequence[str]) -> None:
    """Write a run as one HTML page: curves, samples, settings; it needs no network."""
    parser = _parser("report", report.__doc__)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--output", help="the page to write (default: report.html in the run's folder)")
    options = parser.parse_args(arguments)
    from jaxtune.files import atomic_write
    from jaxtune.train.run_page import run_page

    page = Path(options.output or Path(options.run) / "report.html")
    atomic_write(page, run_page(Path(options.run)))
    say(f"wrote {page}")


def doctor(arguments: Sequence[str]) -> int:
    """Look at this machine: driver, GPU, memory, disk, speed, a kernel; and say what to do about what is wrong."""
    parser = _parser("doctor", doctor.__doc__)
    parser.add_argument("--quick", action="store_true", help="measure no speeds")
    options = parser.parse_args(arguments)
    from jaxtune.doctor import findings

    wrong = 0
    for finding in findings(measure=not options.quick):
        say(finding.to_text(), flush=True)
        wrong += finding.state == "wrong"
    return int(wrong > 0)


def tune(arguments: Sequence[str]) -> None:
    """Measure the blocks of the kernels on this GPU and keep the fastest.

    Attention's are measured for your shapes, those of grouped_matmul (experts) for gpt-oss-20b's and Qwen3-30B-A3B's.
    """
    parser = _parser("tune", tune.__doc__)
    parser.add_argument("op", nargs="?", choices=["attention", "grouped_matmul"], default="attention")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192, help="tokens a row")
    parser.add_argument(
        "--documents",
        choices=["packed", "whole"],
        default="packed",
        help="log-normal lengths of mean 512, or one a row",
    )
    parser.add_argument("--window", type=int, help="sliding window, tokens")
    parser.add_argument("--soft-cap", type=float)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--kernels", nargs="+", choices=["forward", "dquery", "dkey"], help="default: all")
    parser.add_argument("--output", type=Path, help="the JSON file to add to; default: your cache, which is used here")
    options = parser.parse_args(arguments)
    from jaxtune.pallas import dispatch
    from jaxtune.pallas.attention.shapes import Case
    from jaxtune.pallas.attention.tune import KERNELS
    from jaxtune.pallas.attention.tune import tune as measure

    if dispatch.compute_capability() != (9, 0):
        raise ValueError("tune: only kernels for Hopper GPUs have blocks to measure, and there is none")
    tell = functools.partial(say, end="", flush=True)

    def fastest(what, entry):
        blocks = ", ".join(f"{name} {value}" for name, value in entry["blocks"].items())
        say(f"{what}: fastest {blocks}: {entry['milliseconds']:.4f} ms")

    if options.op == "grouped_matmul":
        from jaxtune.pallas.grouped_matmul.tune import tune as measure_grouped

        for product, entry in measure_grouped(options.dtype, tell, options.output).items():
            fastest(f"grouped_matmul {product}", entry)
        return
    documents = "log-normal" if options.documents == "packed" else None
    for dim in options.head_dim:
        case = Case(
            "tune", options.rows, options.length, options.heads, options.kv_heads, dim, documents, options.window,
            options.soft_cap,
        )  # fmt: skip
        found = measure(case, options.kernels or KERNELS, options.dtype, tell, options.output)
        for kernel, entry in found.items():
            fastest(f"attention {kernel}, head dim {dim}", entry)


def _base_of(folder: str) -> str | None:
    """The base model that an adapter folder names; None if the folder holds no adapter."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return None
    from jaxtune.models.adapter_files import read_adapter_config

    base = read_adapter_config(Path(folder)).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} names no base model: set base_model_name_or_path in it")
    return base


def _load(name: str, dtype: str):
    """Model and tokenizer of a model folder, a hub name or an adapter folder."""
    import jaxtune

    base = _base_of(name)
    model, tokenizer = jaxtune.from_pretrained(base or name, dtype=dtype)
    if base is None:
        return model, tokenizer
    from jaxtune.models.model_folder import load_tokenizer

    return jaxtune.load_adapter(model, name), load_tokenizer(Path(name)) or tokenizer


_COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "train": train,
    "generate": generate,
    "chat": chat,
    "evaluate": evaluate,
    "export": export,
    "profile": profile,
    "info": info,
    "tune": tune,
    "report": report,
    "doctor": doctor,
}

if __name__ == "__main__":
    sys.exit(console())
