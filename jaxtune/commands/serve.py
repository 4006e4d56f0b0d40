"""The command `jaxtune serve`: its options, and the models that the server answers with."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.commands import common, pictures, sampling
from jaxtune.system import progress, timing
from jaxtune.system.extras import install
from jaxtune.system.files import read_plain
from jaxtune.system.loopback import HOST, is_loopback
from jaxtune.system.terminal import say

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.generation.adapters import Adapter
    from jaxtune.models.generation.sampler import Sampler
    from jaxtune.models.hf import Beside
    from jaxtune.serve.readers import Readers
    from jaxtune.serve.served import ServedModel

logger = logging.getLogger(__name__)

_KEY = "JAXTUNE_API_KEY"
_MOST_KEY_BYTES = 65_536
_ADAPTER_RANKS = 256


# arguments: the words after `jaxtune serve`: a model folder, hub name or adapter folder, and options. It returns after
# one signal. KeyboardInterrupt: a second one came, which makes the exit code 128 plus its number. ValueError: starlette
# or uvicorn is missing, the address is not available, a model has no tokenizer, two models (adapters included) have the
# same name, an --adapter is not NAME=FOLDER, or the slots do not fit in memory.
def run(arguments: Sequence[str]) -> None:
    """Answer programs that speak OpenAI's API, with a model and adapters over it.

    Many clients, of the model and of all adapters, share the slots of one batch. SIGTERM, SIGHUP or Ctrl-C ends the
    server: no new requests are taken, answers have --grace seconds to end, and the exit code is 0. A second one ends it
    at once.
    """
    from jaxtune.serve import signals

    with signals.ending_start():
        _run(arguments)


def _run(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    for flag, value, is_valid in (
        ("--timeout", options.timeout, options.timeout > 0),
        ("--grace", options.grace, 0 <= options.grace < float("inf")),
    ):
        if not is_valid:
            parser.error(f"{flag} {value:g}: must be {'positive' if flag == '--timeout' else '0 or more'}")
    key = _key_of(options, parser)
    _require_packages()
    from jaxtune.serve.readers import Readers

    with Readers() as readers:
        common.begin(options.model)
        _serve(options, key, readers)
    if options.timing:
        progress.show_timing()


def _parser() -> argparse.ArgumentParser:
    parser = common.parser("serve", run.__doc__)
    parser.add_argument("model", help="model folder, GGUF file, hub name or adapter folder")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="an adapter over the same base, which clients ask for as model NAME; may be repeated",
    )
    parser.add_argument(
        "--adapters-below",
        metavar="FOLDER",
        help="clients may load the adapters in it while the server runs (POST /v1/load_lora_adapter), and unload them",
    )
    parser.add_argument(
        "--adapter-ranks",
        type=int,
        metavar="R",
        help=f"most ranks of all adapters in sum, for which memory stays free (default: {_ADAPTER_RANKS} with "
        "--adapters-below, else those of --adapter)",
    )
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST}, this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="a file with the key that clients must bring; required with another --host",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the key itself, which other users of the machine can see in `ps` (default: ${_KEY})",
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help="rows that decode at once (default: by memory, at most 64)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="most tokens of a prompt and its answer (default: by memory)"
    )
    sampling.add_cache(parser)
    parser.add_argument(
        "--no-prefixes",
        action="store_true",
        help="do not store states of prompts' beginnings, in a tenth of the free memory; answers are the same",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds that an answer may take (default: 600)"
    )
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="S", help="seconds for answers after a signal (default: 10)"
    )
    pictures.add_options(parser)
    parser.add_argument(
        "--no-pictures", action="store_true", help="load no tower, which saves its memory; requests are text alone"
    )
    common.add_numbers(parser)
    common.add_timing(parser)
    return parser


def _key_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """The key that clients must bring, or None; ends the command if it is empty, or missing for other machines."""
    if options.api_key is not None and options.api_key_file is not None:
        parser.error("--api-key and --api-key-file: give one of them")
    key = options.api_key if options.api_key is not None else os.environ.get(_KEY)
    if options.api_key_file is not None:
        key = _key_in(Path(options.api_key_file).expanduser())
    key = None if key is None else key.strip()  # as clients' keys are, and files and variables end with a newline
    if key == "":
        parser.error(f"--api-key (or --api-key-file, or ${_KEY}) is empty: give a key, or none")
    if key is None and not is_loopback(options.host):
        parser.error(
            f"--host {options.host} can be reached from other machines: give --api-key-file FILE, or set {_KEY}"
        )
    return key


def _require_packages() -> None:
    try:
        import prometheus_client
        import starlette
        import uvicorn
    except ImportError as error:
        raise ValueError(
            f"serve needs starlette, uvicorn and prometheus-client ({error}): {install('serve')}"
        ) from None
    del prometheus_client, starlette, uvicorn


def _key_in(file: Path) -> str:
    """The one line of a file; ValueError for other contents."""
    try:
        lines = read_plain(file, _MOST_KEY_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"--api-key-file {file}: cannot be read: {error}") from None
    if len(lines) != 1:
        raise ValueError(f"--api-key-file {file}: has {len(lines)} lines; a key is one")
    return lines[0]


def _serve(options: argparse.Namespace, key: str | None, readers: Readers) -> None:
    """Opens the socket, loads the models, and serves them until a signal. key: that clients must send; None: no key."""
    from jaxtune.models.adapters.adapter_config import base_of
    from jaxtune.models.generation.adapters import read_adapter
    from jaxtune.models.generation.sampler import Sampler
    from jaxtune.models.generation.slot_plan import prefix_room, room_bytes
    from jaxtune.models.lora import without_adapter
    from jaxtune.models.programs.kept import Prepared
    from jaxtune.serve import server
    from jaxtune.serve.engine import Engine
    from jaxtune.serve.loading import AdapterFolder
    from jaxtune.system.heap import frozen_heap

    timing.imported()
    below, ranks = options.adapters_below, options.adapter_ranks
    folder = None if below is None else AdapterFolder(Path(below).expanduser())
    ranks = _ADAPTER_RANKS if ranks is None and folder is not None else ranks

    def sampler_of(model: Decoder, adapters: Mapping[str, Adapter], room: float | None, **memory) -> Sampler:
        settings = dict(slots=options.slots, length=options.length, adapter_ranks=ranks, cache=options.cache, **memory)
        settings["prefix_bytes"] = 0 if options.no_prefixes else prefix_room(room)
        return Sampler(model, first_at_once=True, compiles_beside=True, adapters=adapters, **settings)

    ahead = Prepared(0, 0)

    def prepare_ahead(shapes: Decoder, room: float | None, tokenizer: object) -> None:
        """The programs of the sampler to come, while its weights load; in vain if the memory then has another plan."""
        nonlocal ahead
        try:
            shapes = without_adapter(shapes) if base_of(options.model) is not None else shapes  # as the base below is
            adapters = {name: read_adapter(shapes, path) for name, path in _named_folders(options)[1:]}
            with sampler_of(shapes, adapters, room, free_bytes=room) as sampler:
                ahead = sampler.prepare()
        except Exception as error:  # which the sampler of the weights meets again
            logger.info("no program was prepared while the weights loaded: %s: %s", type(error).__name__, error)

    with server.listen(options.host, options.port) as listener:
        models = {served.name: served for served in _models(options, prepare_ahead)}
        readers.serve({name: served.readable for name, served in models.items()})
        base = next(iter(models.values()))

        def sampler(adapters: Mapping[str, Adapter]) -> Sampler:
            nonlocal ahead
            began = time.monotonic()
            sampler = sampler_of(base.model, adapters, room_bytes())
            programs, earlier, ahead = sampler.prepare(), ahead, Prepared(0, 0)
            sampler.rehearse()
            defaults = ", ".join(f"{key} {value:g}" for key, value in base.defaults.items())
            say(
                f"{', '.join((base.name, *adapters))}: {sampler.plan}; programs: {programs.loaded} loaded, "
                f"{programs.compiled} compiled in {time.monotonic() - began:.1f} s"
                + f", before that, while the weights loaded, {earlier.loaded} and {earlier.compiled}" * any(earlier)
                + f"; unless a request says otherwise: {defaults}" * bool(defaults)
            )
            return sampler

        with ThreadPoolExecutor(1) as beside:
            beside.submit(base.prepare_grammars)
            engine = Engine(sampler, models)
        with frozen_heap(), timing.phase("serve"):
            limits = options.timeout, options.grace
            server.Server(engine, listener, key, *limits, readers, folder).run_until_signal()


def _models(options: argparse.Namespace, beside: Beside) -> list[ServedModel]:
    """The base, then the adapters, over the same arrays. ValueError: two have one name, or there is no tokenizer."""
    from jaxtune.models.adapters.adapter_config import base_of
    from jaxtune.models.adapters.adapter_files import to_host
    from jaxtune.models.ends import with_end_tokens
    from jaxtune.models.lora import without_adapter
    from jaxtune.serve.loading import read_served
    from jaxtune.serve.served import ServedModel

    (name, _), *adapters = _named_folders(options)
    names = [name, *(adapter for adapter, _ in adapters)]
    for served in names:
        if names.count(served) > 1:
            raise ValueError(
                f"two models have the name {served!r}: give the adapter another one (--adapter NAME=FOLDER)"
            )
    why = "the server was started with --no-pictures" * options.no_pictures
    model, tokenizer, reader, why = pictures.load(options, files=False, why=why, beside=beside)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer: copy its tokenizer files into the model's folder")
    is_adapter = base_of(Path(options.model).expanduser()) is not None
    base = without_adapter(model) if is_adapter else model
    reads = {"pictures": reader, "why_no_pictures": why}
    models = [ServedModel(name, with_end_tokens(base, tokenizer), tokenizer, **reads)]
    if is_adapter:
        adapted, *adapters = adapters
        models.append(ServedModel(adapted[0], to_host(model), tokenizer, name, **reads))
    return models + [read_served(models[0], *adapter) for adapter in adapters]


def _named_folders(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """(name, folder) of the base, then of the argument `model` if it is an adapter, then of those of --adapter."""
    from jaxtune.models.adapters.adapter_config import base_of

    path = base_of(Path(options.model).expanduser())
    models = [options.model] if path is None else [path, options.model]
    return [(_name(each), Path(each).expanduser()) for each in models] + [_named(text) for text in options.adapter]


def _named(text: str) -> tuple[str, Path]:
    """(name, folder) of NAME=FOLDER."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ValueError(f"--adapter {text}: must be NAME=FOLDER")
    return name, Path(folder).expanduser()


def _name(model: str) -> str:
    """The name of a model for clients: a local folder's own name, else the hub name."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
