"""The command `jaxtune export`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.pallas.format_names import LOADED
from jaxtune.system.terminal import console, fitted, say
from jaxtune.train.signals import StopSignal


# arguments: the words after `jaxtune export`: a model or an adapter, the folder to write, and options such as --to. The
# folder must be new or empty; what is written is read back and compared, and after a signal nothing of it stays. Notes
# and the names of the files are printed on stdout. ValueError: an unknown format; a model without an adapter for one of
# the formats merged (the default), adapter and gguf-adapter; or a model that the format cannot represent.
# ArithmeticError: what was read back differs.
def run(arguments: Sequence[str]) -> None:
    """Write a model or an adapter in the format of another program: merged, as GGUF for llama.cpp, in four bits."""
    parser = common.parser("export", run.__doc__)
    parser.add_argument("model", help="PEFT adapter folder, which names its base model; or a model folder or hub name")
    parser.add_argument("output", help="folder to write")
    parser.add_argument(
        "--to",
        default="merged",
        help="merged (the default): the base with the adapter in it; gguf: one file for llama.cpp, and a "
        "Modelfile for Ollama; gguf-adapter: the adapter alone for llama.cpp; adapter: PEFT's files, checked; "
        "bnb-4bit: the layers in bitsandbytes' NF4; "
        f"{', '.join(name for name in LOADED if name != 'nf4')}: the layers in that format, for vLLM; w4a16: in int4, "
        "for vLLM; w4a8: the same codes with activations in int8; mxfp4: the layers in MXFP4, of gpt-oss as it is "
        "published; nvfp4-nvfp4 and mxfp4-mxfp4: the same with activations in that format",
    )
    parser.add_argument(
        "--outtype", help="for gguf: f32, f16, bf16, q8_0, q6_k, q4_k_m or q4_0 (default: the weights' dtype)"
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="for adapter: read what was written as PEFT (where torch and peft are installed), vLLM and llama.cpp do, "
        "compare it with the model here, and write what they answer beside it",
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="for --prove: training rows, by whose loss the order of experts is decided that a foreign adapter's file "
        "does not say",
    )
    common.add_numbers(parser)
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a safetensors shard (default: 5)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to this model repository afterwards")
    parser.add_argument("--private", action="store_true", help="create the repository of --push as private")
    options = parser.parse_args(arguments)
    if options.prove and options.to != "adapter":
        parser.error(f"--prove: goes with --to adapter, not {options.to}")
    if options.rows and not options.prove:
        parser.error("--rows: goes with --prove")
    from jaxtune.models.adapters.adapter_config import base_of
    from jaxtune.models.files import model_card
    from jaxtune.models.files.model_folder import is_gguf

    converts = options.to == "merged" and is_gguf(Path(options.model).expanduser())  # to safetensors
    if options.to in ("merged", "adapter", "gguf-adapter") and base_of(options.model) is None and not converts:
        raise ValueError(f"{options.model} is not an adapter folder: it has no adapter_config.json")

    common.begin(options.model)
    import jaxtune
    from jaxtune.export.api import require_format
    from jaxtune.export.modelfile import MODELFILE, create_command

    require_format(options.output, options.to, options.outtype)
    with StopSignal() as stop, stop.at_once(), _order_known(options):  # an incomplete folder is removed
        model, tokenizer = common.load(options, streamed=common.streamed_to_export)
        exported = jaxtune.export_model(
            model,
            options.output,
            options.to,
            tokenizer=tokenizer,
            outtype=options.outtype,
            max_shard_bytes=int(options.max_shard_gb * 1e9),
            facts=None if base_of(options.model) is None else model_card.of_folder(Path(options.model).expanduser()),
        )
    screen = console()
    for note in exported.notes:
        say(fitted(f"note: {note}", screen))
    kind = "merged model" if options.to == "merged" else options.to
    checked = [name for name in exported.files if name not in (model_card.NAME, model_card.RECORD)]
    say(fitted(f"{kind}: {options.output} (read back: {', '.join(checked)})", screen))
    if options.prove:
        del model
        _prove(exported.folder)
    if MODELFILE in exported.files:
        say(f"next: {create_command(options.output, exported.folder.name)}")
    if options.push:
        from jaxtune.export.hub import push

        say(f"pushed: {push(exported.folder, options.push, private=options.private)}")


@contextlib.contextmanager
def _order_known(options: argparse.Namespace) -> Iterator[None]:
    """With --rows, `options.model` is meanwhile a folder that says in which order its experts are."""
    from jaxtune.commands import expert_order

    folder = Path(options.model).expanduser()
    if not options.rows:
        yield
        return
    if not expert_order.is_open(folder):
        raise ValueError(f"--rows {options.rows}: the order of experts in {folder} is known: leave it out")
    losses = expert_order.losses(folder, options.rows)
    layout = expert_order.decided(losses, folder)
    words = ", ".join(f"{loss:.4f} as {name}" for name, loss in losses.items())
    say(fitted(f"the order of experts is {layout}: the loss on {options.rows} is {words}", console()))
    with expert_order.marked(folder, layout) as options.model:
        yield


def _prove(folder: Path) -> None:
    """Prints what other programs make of an adapter's folder, read back in float32."""
    import jaxtune
    from jaxtune.export import proof

    model, _ = jaxtune.from_pretrained(folder, dtype="float32", load_in="stored", streamed=common.streamed_to_export)
    for answer in proof.prove(model, folder):
        say(fitted(str(answer), console()))
    say(fitted(f"proof: {folder / proof.NAME}", console()))
