"""Compares what axolotl and LLaMA-Factory make of rows with what `jaxtune train` makes of them by the converted recipe,
for example configs of their repositories: token ids, and which of them are trained on.

    PROGRAM_PYTHON scripts/convert_once.py render axolotl FOLDER TOKENIZERS         # in an environment with axolotl
    PROGRAM_PYTHON scripts/convert_once.py render llama_factory FOLDER TOKENIZERS   # with llamafactory
    .venv/bin/python scripts/convert_once.py compare FOLDER TOKENIZERS   # writes benchmarks/results/convert_once.json

FOLDER has each config as PROGRAM/PATH, with "__" for "/" in PATH; TOKENIZERS has the tokenizers, a folder each. Model
and rows of a config are replaced by these tokenizers and the rows below; all else is as the config has it.
"""

from __future__ import annotations

import csv
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path

import yaml

IGNORED = -100
WHY = {  # of configs whose rows differ
    "examples/llama-3/instruct-dpo-lora-8b.yml": "the program writes BOS twice: by the template and by the tokenizer",
    "examples/qwen3/reward-model.yaml": "the program writes a turn for an empty system message",
    "examples/mistral/config.yml": "the program tokenises an answer apart: SentencePiece begins it with a space",
    "examples/gpt-oss/gpt-oss-20b-sft-lora-singlegpu.yaml": "eot_tokens: the program trains from the answer's first "
    "own token, not from its channel",
    "examples/train_lora/llama3_lora_pretrain.yaml": "no BOS there with a tokenizer that lacks add_bos_token",
}
with open(Path(__file__).with_name("convert_configs.csv"), encoding="utf-8") as _file:
    CASES = list(csv.reader(_file))[1:]

TALKS = [
    [("user", "Hi there!"), ("assistant", "Hello. What can I do for you?")],
    [("system", "Answer in one word."), ("user", "Is 7 prime?"), ("assistant", "Yes.")],
    [
        ("user", "Name a colour"),
        ("assistant", "Blue"),
        ("user", "  another, please\n"),
        ("assistant", "Red —\nor green: 綠色"),
    ],
]
THINKING = {"role": "assistant", "content": "Four.", "thinking": "2 + 2 is 4."}


def _turns(talk, role="role", content="content", roles=None):
    return [{role: (roles or {}).get(who, who), content: said} for who, said in talk]


SHARE = {"user": "human", "assistant": "gpt"}
ALPACA = [
    {"instruction": "Add the numbers.", "input": "2, 3 and 4", "output": "9"},
    {"instruction": "Write a line of verse.", "input": "", "output": "The sea is calm to-night,\nthe tide is full."},
    {"instruction": "Translate to German", "input": "good\n\nday ", "output": " Guten Tag"},
]
ROWS = {
    "alpaca": ALPACA,
    "identity": [
        {"instruction": "hi", "input": "", "output": "Hello! I am Pebble, made by Brook."},
        {"instruction": "Who made you?", "input": "", "output": "Brook did."},
    ],
    "messages": [{"messages": _turns(talk)} for talk in TALKS],
    "sharegpt": [{"conversations": _turns(talk, "from", "value", SHARE)} for talk in TALKS],
    "thoughts": [
        {"messages": [{"role": "user", "content": "2 + 2?"}, THINKING]},
        {"messages": _turns(TALKS[0])},
    ],
    "asked": [
        {
            "conversation": _turns(talk[:-1]),
            "chosen": {"role": "assistant", "content": talk[-1][1]},
            "rejected": {"role": "assistant", "content": f"No idea {index}"},
        }
        for index, talk in enumerate(TALKS)
    ],
    "argilla": [
        {
            "chosen": _turns([talk[-2], talk[-1]]),
            "rejected": _turns([talk[-2], ("assistant", "No idea.")]),
        }
        for talk in TALKS
    ],
    "labelled": [
        {"prompt": talk[-2][1], "completion": talk[-1][1], "label": index != 1} for index, talk in enumerate(TALKS)
    ],
    "intel": [
        {"system": "Be brief." * index, "input": talk[-2][1], "chosen": talk[-1][1], "rejected": f"No {index}"}
        for index, talk in enumerate(TALKS)
    ],
    "ranked": [
        {
            "conversations": _turns(talk[:-1], "from", "value", SHARE),
            "chosen": {"from": "gpt", "value": talk[-1][1]},
            "rejected": {"from": "gpt", "value": f"No idea {index}"},
        }
        for index, talk in enumerate(TALKS)
    ],
    "tagged": [{"messages": _turns(talk), "label": index != 1} for index, talk in enumerate(TALKS)],
    "text": [{"text": "A line of text."}, {"text": " Two lines,\nthe second with ümlaut\n"}],
}
# The entries of dataset_info.json, as LLaMA-Factory's repository registers such rows.
REGISTERED = {
    "identity": {},
    "alpaca": {},
    "sharegpt": {"formatting": "sharegpt"},
    "text": {"columns": {"prompt": "text"}},
    "ranked": {
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "tagged": {
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    },
}


def config_of(case, folder: Path, tokenizers: Path, read=lambda path: yaml.safe_load(path.read_text())) -> dict:
    """The config of a case, with its model and rows replaced."""
    program, path, _, tokenizer, kinds = case
    values = read(folder / program / path.replace("/", "__"))
    rows = folder / "rows"
    rows.mkdir(exist_ok=True)
    for kind, lines in ROWS.items():
        (rows / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = str(model_folder(folder, tokenizers / tokenizer))
    if program == "axolotl":
        values["base_model"] = model
        values.pop("tokenizer_type", None)  # of the model that is replaced
        key = "pretraining_dataset" if "pretraining_dataset" in values else "datasets"
        for entry, kind in zip(values[key], kinds.split(), strict=True):
            entry |= {"path": str(rows / f"{kind}.jsonl"), "ds_type": "json", "split": "train"}
            entry.pop("name", None)
    else:
        values["model_name_or_path"] = model
        values["dataset"] = ",".join(kinds.split())
        values["dataset_dir"] = str(rows)
        info = {kind: {**entry, "file_name": f"{kind}.jsonl"} for kind, entry in REGISTERED.items()}
        (rows / "dataset_info.json").write_text(json.dumps(info))
    return values


def model_folder(folder: Path, tokenizer: Path) -> Path:
    """A folder with the tokenizer and a model's config.json, which axolotl reads with it."""
    model = folder / "models" / tokenizer.name
    model.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        if not (model / file.name).exists():
            (model / file.name).symlink_to(file.resolve())
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return model


# ---- what the programs render: lists of {"ids", "labels"}; pairs are two of them, the chosen one first


def axolotl(values: dict, out: Path) -> list[dict]:
    os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    from axolotl.loaders import load_tokenizer
    from axolotl.utils.config import validate_config
    from axolotl.utils.data import rl, sft
    from axolotl.utils.dict import DictDefault

    values.pop("plugins", None)  # kernels, which are not here, and change no rows
    cfg = validate_config(DictDefault(values | {"output_dir": str(out), "dataset_num_proc": 1, "val_set_size": 0}))
    cfg.tokenizer_config = cfg.tokenizer_config or cfg.base_model
    if not cfg.datasets and cfg.pretraining_dataset:
        cfg.datasets = cfg.pretraining_dataset
    tokenizer = load_tokenizer(cfg)
    if cfg.rl:
        return _of_pairs(cfg, tokenizer, rl._load_split(cfg, "train"))
    documents = []
    for entry in cfg.datasets:
        if cfg.pretraining_dataset:
            from datasets import load_dataset

            rows = load_dataset("json", data_files=entry.path, split="train")
            from axolotl.utils.data.wrappers import get_dataset_wrapper

            base = "pretrain"
            rows, _ = get_dataset_wrapper(DictDefault({**entry, "type": base}), tokenizer, cfg, base, rows)
        else:
            rows, _ = sft._load_and_process_single_dataset(entry, cfg, tokenizer, "train", cfg.seed or 42)
        for row in rows:
            if "chosen_ids" in row:
                documents += [{"ids": row["chosen_ids"]}, {"ids": row["rejected_ids"]}]
            else:
                documents.append({"ids": row["input_ids"], "labels": row.get("labels") or row["input_ids"]})
    return documents


def _of_pairs(cfg, tokenizer, rows) -> list[dict]:
    """The tokens that axolotl's trainers make of prompts and answers, by TRL's own functions."""
    documents = []
    if cfg.rl == "orpo":
        from axolotl.core.trainers.trl import AxolotlORPOTrainer as Trainer

        trainer = Trainer.__new__(Trainer)
        trainer.is_encoder_decoder, trainer.processing_class = False, tokenizer
        trainer.max_length = cfg.sequence_len
        for row in rows:
            made = trainer.tokenize_row(row)
            documents += [{"ids": made[f"{side}_input_ids"], "labels": made[f"{side}_labels"]} for side in _SIDES]
        return documents
    if cfg.rl == "kto":
        from axolotl.core.trainers.trl import AxolotlKTOTrainer as Trainer
    else:
        from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer as Trainer
    trainer = Trainer.__new__(Trainer)
    trainer._tokenizer = trainer.processing_class = tokenizer
    trainer._is_vlm = trainer.calculate_KL = False
    trainer.desirable_weight = trainer.undesirable_weight = 1.0
    arguments = types.SimpleNamespace(dataset_num_proc=1, max_length=None, truncation_mode="keep_start")
    arguments.loss_type, arguments.precompute_ref_log_probs = ["kto"], False
    arguments.per_device_train_batch_size = 2
    prepared = trainer._prepare_dataset(rows, tokenizer, arguments, "train")
    for row in prepared:
        prompt = row["prompt_ids"]
        for side in _SIDES if cfg.rl != "kto" else ("completion",):
            answer = row[f"{side}_ids"]
            documents.append({"ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
    return documents


_SIDES = ("chosen", "rejected")


def llama_factory(values: dict, out: Path) -> list[dict]:
    for name in ("torchaudio",):  # of sounds; imported whatever the rows are
        if importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    dropped = ("preprocessing_num_workers", "deepspeed", "attn", "val_size", "eval_strategy", "eval_steps")
    dropped += (
        "quantization_bit",
        "quantization_method",
        "overwrite_output_dir",
        "enable_liger_kernel",
        "bf16",
        "pissa_init",
        "pissa_convert",
    )
    dropped += ("pure_bf16", "dataloader_num_workers", "save_steps", "warmup_ratio")  # no rows; some need a GPU
    values = {key: value for key, value in values.items() if key not in dropped}
    values |= {"output_dir": str(out), "report_to": "none", "disable_shuffling": True, "use_cpu": True}
    model, data, training, finetuning, _ = get_train_args(values)
    loaded = load_tokenizer(model)
    template = get_template_and_fix_tokenizer(loaded["tokenizer"], data)
    stage = {"dpo": "rm"}.get(finetuning.stage, finetuning.stage)  # as its workflow has it
    if stage == "pt":  # texts before they are joined into blocks
        data.packing = False
    made = get_dataset(template, model, data, training, stage=stage, **loaded)
    documents = []
    for row in made["train_dataset"]:
        if "chosen_input_ids" in row:
            documents += [{"ids": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"]} for side in _SIDES]
        else:
            documents.append({"ids": row["input_ids"], "labels": row.get("labels") or row["input_ids"]})
    return documents


def render(program: str, folder: Path, tokenizers: Path) -> None:
    renderer = {"axolotl": axolotl, "llama_factory": llama_factory}[program]
    package = {"axolotl": "axolotl", "llama_factory": "llamafactory"}[program]
    only = os.environ.get("ONLY", "")
    path = folder / f"{program}.json"
    rendered = json.loads(path.read_text())["configs"] if only and path.exists() else {}
    for case in CASES:
        if case[0] != program or only not in case[1]:
            continue
        try:
            rendered[case[1]] = renderer(config_of(case, folder, tokenizers), folder / "out")
        except Exception as error:
            print(case[1], "FAILED", type(error).__name__, str(error)[:600])
            if only:
                raise
    path.write_text(json.dumps({"version": importlib.metadata.version(package), "configs": rendered}))
    print(len(rendered), "configs")


# ---- what jaxtune makes of them


def compare(folder: Path, tokenizers: Path) -> None:
    import contextlib
    import io

    from transformers import AutoTokenizer

    from jaxtune.convert import recipe_of
    from jaxtune.train.config.file import config_from_dict, read_values
    from jaxtune.train.data.rendering.templates import trained_tokenizer
    from jaxtune.train.objectives.named import objective_of

    programs = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("axolotl", "llama_factory")}
    results = []
    for case in CASES:
        program, path, commit, tokenizer_name, kinds = case
        theirs = programs[program]["configs"].get(path)
        if theirs is None:
            continue
        translation = recipe_of(config_of(case, folder, tokenizers, read_values), folder)
        config = config_from_dict(translation.values)
        tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer or config.model.path)
        tokenizer = trained_tokenizer(tokenizer, config.data.template, config.data.template_arguments)
        rows = [config.data.train] if isinstance(config.data.train, str) else list(config.data.train)
        ours = []
        for name in rows:
            with contextlib.redirect_stdout(io.StringIO()):
                prepared = objective_of(config.objective).prepare(
                    name, tokenizer, config.data, vocab_size=10**9, max_rows=None
                )
            ours += [prepared.documents[index] for index in range(len(prepared.documents))]
        name = config.objective.name
        if name == "kto":  # each answer has a mismatched one beside it
            ours = ours[::2]
        size = 2 if name in ("dpo", "orpo", "simpo", "reward") else 1
        mine = _units([_unit(one.tokens.tolist(), one.mask.tolist(), name) for one in ours], size)
        others = _units(
            [_unit(one["ids"], [x != IGNORED for x in one.get("labels") or one["ids"]], name) for one in theirs], size
        )
        masks = (mine & others).total()
        equal = (_ids(mine) & _ids(others)).total()
        if os.environ.get("SHOW") and masks < others.total():
            for who, units in (("ours  ", mine - others), ("theirs", others - mine)):
                for unit in units:
                    for ids, trained in unit:
                        print("  ", who, _shown(tokenizer, ids, trained))
        results.append(
            {
                "program": program,
                "version": programs[program]["version"],
                "config": path,
                "commit": commit,
                "tokenizer": tokenizer_name,
                "rows": kinds,
                "documents": others.total(),
                "of_jaxtune": mine.total(),
                "tokens_equal": equal,
                "masks_equal": masks,
                "named_on_stderr": [line.replace(str(folder), "FOLDER") for line in translation.lacking],
                "why": WHY.get(path, "") if masks < others.total() else "",
            }
        )
        print(path, others.total(), mine.total(), equal, masks, translation.lacking)
    target = Path(__file__).parent.parent / "benchmarks" / "results" / "convert_once.json"
    target.write_text(json.dumps({"benchmark": "convert", "configs": results}, indent=1, ensure_ascii=False) + "\n")


def _unit(ids, trained, objective: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(ids, whether each is a trained target), without what follows the last trained token, which changes no loss. A
    reward is read at the last token of all."""
    if objective == "reward":
        return tuple(ids), (True,) * len(ids)
    last = max((index for index, is_trained in enumerate(trained) if is_trained), default=-1) + 1
    return tuple(ids[:last]), (False, *(bool(one) for one in trained[1:last]))


def _units(documents, size: int) -> Counter:
    """Documents, or pairs of them, in no order: axolotl mixes rows before they are trained on."""
    return Counter(tuple(documents[at : at + size]) for at in range(0, len(documents), size))


def _ids(units: Counter) -> Counter:
    return Counter({tuple(ids for ids, _ in unit): count for unit, count in units.items()})


def _shown(tokenizer, ids, trained) -> str:
    pieces = []
    for token, is_trained in zip(ids, trained, strict=True):
        word = repr(tokenizer.convert_ids_to_tokens(token))[1:-1]
        pieces.append(f"[{word}]" if is_trained else word)
    return " ".join(pieces)


if __name__ == "__main__":
    if sys.argv[1] == "render":
        render(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
