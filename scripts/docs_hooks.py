"""What mkdocs fills in while it builds the pages: tables and code that the project itself holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEYS = "<!-- every key -->"
TOY_FORMAT = "<!-- tests/models/toy_format.py -->"


def keys_table() -> str:
    """Every key of a recipe, as `--help` lists them, as a Markdown table."""
    from jaxtune.train.config.file import config_keys

    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in config_keys():
        cells = (f"`{key.name}`", key.type, f"`{key.default}`", key.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def toy_format() -> str:
    """The code of the format of weights that tests add, as a block."""
    code = (Path(__file__).resolve().parents[1] / "tests/models/toy_format.py").read_text(encoding="utf-8")
    return f"```python\n{code[code.index('import dataclasses') :]}```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with each page's text."""
    markdown = markdown.replace(KEYS, keys_table()) if KEYS in markdown else markdown
    return markdown.replace(TOY_FORMAT, toy_format()) if TOY_FORMAT in markdown else markdown


# ---- docs/compat.md, which is stored: `python scripts/docs_hooks.py` writes it again

BEGIN, END = "<!-- arguments: begin -->", "<!-- arguments: end -->"


def compat_tables() -> str:
    """What becomes of every argument of jaxtune.compat's callables, a table for each."""
    import dataclasses
    import inspect

    from jaxtune import compat
    from jaxtune.compat import tables
    from jaxtune.compat.transformers_names import plain_arguments
    from jaxtune.pallas.formats import FORMATS

    def parameters(function: Any) -> list[str]:
        return [
            name
            for name, found in inspect.signature(function).parameters.items()
            if found.kind not in (found.VAR_KEYWORD, found.VAR_POSITIONAL) and name != "self"
        ]

    def fields(kind: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(kind)]

    model = compat.FastLanguageModel
    sampling = (compat.GRPOConfig, compat.RLOOConfig, compat.DistillationConfig, compat.GKDConfig)
    load = parameters(model.from_pretrained)
    load += [each.flag for each in FORMATS.values() if each.flag is not None and each.flag not in load]
    merged = parameters(compat.CompatModel.save_pretrained_merged)
    callables = {
        "FastLanguageModel.from_pretrained": (load, tables.LOAD),
        "FastLanguageModel.get_peft_model": (parameters(model.get_peft_model), tables.PEFT),
        "AutoModelForCausalLM.from_pretrained, beside what FastLanguageModel.from_pretrained does not follow": (
            parameters(plain_arguments)[1:],  # all but `where`
            {name: fate for name, fate in tables.AUTO.items() if name in load or tables.LOAD.get(name) != fate},
        ),
        "BitsAndBytesConfig": (parameters(compat.BitsAndBytesConfig.__init__), tables.BITS_AND_BYTES),
        "get_peft_model, PeftModel.from_pretrained": (
            [name for name in parameters(compat.get_peft_model) if name not in tables.PEFT_MODEL],
            tables.PEFT_MODEL,
        ),
        "SFTConfig": (fields(compat.SFTConfig), tables.SFT),
        "SFTTrainer": (parameters(compat.SFTTrainer.__init__), tables.TRAINER),
        **{
            f"{config.__name__}, beside those of SFTConfig": (
                [name for name in fields(config) if name not in fields(compat.SFTConfig)],
                {name: fate for name, fate in config.table.items() if tables.SFT.get(name) is not fate},
            )
            for config in (compat.DPOConfig, compat.ORPOConfig, compat.KTOConfig, compat.RewardConfig, *sampling)
        },
        "DPOTrainer, ORPOTrainer and KTOTrainer, beside those of SFTTrainer": (["ref_model"], tables.REFERENCE_MODEL),
        "GRPOTrainer and RLOOTrainer, beside those of SFTTrainer": (
            ["reward_funcs", "reward_processing_classes", "tools", "rollout_func", "environment_factory"],
            {name: fate for name, fate in tables.REWARDED_TRAINER.items() if name not in tables.TRAINER},
        ),
        "DistillationTrainer and GKDTrainer, beside those of SFTTrainer": (
            ["teacher_model"],
            {name: fate for name, fate in tables.DISTILLATION_TRAINER.items() if name not in tables.TRAINER},
        ),
        "save_pretrained_merged": (merged, tables.SAVE),
        "save_pretrained_gguf, beside what save_pretrained_merged does not follow": (
            parameters(compat.CompatModel.save_pretrained_gguf),
            {name: fate for name, fate in tables.SAVE.items() if name in merged},
        ),
        "generate": (parameters(compat.CompatModel.generate), tables.GENERATE),
        "train_on_responses_only": (parameters(compat.train_on_responses_only), tables.RESPONSES),
        "get_chat_template": (parameters(compat.get_chat_template), tables.TEMPLATE),
    }
    return "\n".join(line for name, (followed, others) in callables.items() for line in _table(name, followed, others))


def _table(name: str, followed: list[str], others: dict[str, Any]) -> list[str]:
    """A heading, the followed arguments, and a row for each fate of others, of all arguments that share it."""
    lines = [f"## {name}", ""]
    if followed:
        lines += ["Followed: " + ", ".join(f"`{argument}`" for argument in followed) + ".", ""]
    shared: dict[tuple[str, str], list[str]] = {}
    for argument, fate in others.items():
        free = " or ".join(f"`{value!r}`" for value in fate.free)
        means = "nothing to do" if fate.idle else f"error{f', unless it is {free}' if free else ''}"
        if argument not in followed:
            shared.setdefault((means, fate.text if fate.idle else f"instead: {fate.text}"), []).append(f"`{argument}`")
    if shared:
        lines += ["| argument | what becomes of it | why, or what to use instead |", "|---|---|---|"]
        lines += [f"| {', '.join(arguments)} | {means} | {why} |" for (means, why), arguments in shared.items()]
        lines.append("")
    return lines


def with_tables(text: str) -> str:
    """The page with the tables between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{compat_tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page = Path(__file__).resolve().parents[1] / "docs/compat.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
