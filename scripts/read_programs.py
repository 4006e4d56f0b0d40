"""Writes jaxtune/convert/schemas/PROGRAM.json: every key of another program's config with its default, read from the
syntax trees of its wheel, of which nothing is imported or run.

    python scripts/read_programs.py FOLDER   # with axolotl-*.whl, llamafactory-*, trl-*, transformers-*, unsloth-*
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

# For each program the classes of its config by module, nearest base first; and classes of nested mappings by key.
AXOLOTL = "axolotl/utils/schemas/"
TRAINING = ("transformers", "transformers/training_args.py", "TrainingArguments")
BASE = [("trl", "trl/trainer/base_config.py", "_BaseConfig"), TRAINING]
PROGRAMS: dict[str, dict[str, list[tuple[str, str, str]]]] = {
    "axolotl": {
        "": [
            ("axolotl", AXOLOTL + module, name)
            for module, names in {
                "config.py": "AxolotlInputConfig",
                "model.py": "ModelInputConfig ModelOutputConfig",
                "peft.py": "LoraConfig MixLoraConfig ReLoRAConfig",
                "training.py": "JaggedLRConfig HyperparametersConfig",
                "integrations.py": "WandbConfig MLFlowConfig CometConfig TrackioConfig OpenTelemetryConfig LISAConfig "
                "GradioConfig RayConfig",
                "multimodal.py": "MultiModalConfig",
                "deprecated.py": "RemappedParameters DeprecatedParameters",
            }.items()
            for name in names.split()
        ],
        "trl": [("axolotl", AXOLOTL + "trl.py", "TRLConfig")],
        "datasets": [
            ("axolotl", AXOLOTL + "datasets.py", name)
            for name in ("SFTDataset", "DPODataset", "KTODataset", "PretrainingDataset")
        ],
    },
    "llama_factory": {
        "": [
            ("llamafactory", f"llamafactory/hparams/{module}", name)
            for module, names in {
                "data_args.py": "DataArguments",
                "model_args.py": "ModelArguments SGLangArguments VllmArguments KTransformersArguments ExportArguments "
                "ProcessorArguments QuantizationArguments BaseModelArguments",
                "finetuning_args.py": "FinetuningArguments SwanLabArguments BAdamArgument ApolloArguments "
                "GaloreArguments RLHFArguments LoraArguments OFTArguments FreezeArguments",
                "generating_args.py": "GeneratingArguments",
                "training_args.py": "TrainingArguments ProfilerArguments Fp8Arguments RayArguments",
            }.items()
            for name in names.split()
        ]
        + [TRAINING],
    },
    "trl": {
        "": [
            ("trl", "trl/scripts/utils.py", "ScriptArguments"),
            ("trl", "trl/scripts/utils.py", "DatasetMixtureConfig"),
            ("trl", "trl/trainer/model_config.py", "ModelConfig"),
        ],
        **{
            trainer: [
                ("trl", f"trl/trainer/{trainer}_config.py", name),
                *BASE,
            ]
            for trainer, name in {
                "sft": "SFTConfig",
                "dpo": "DPOConfig",
                "kto": "KTOConfig",
                "reward": "RewardConfig",
                "grpo": "GRPOConfig",
                "rloo": "RLOOConfig",
            }.items()
        },
        "datasets": [("trl", "trl/scripts/utils.py", "DatasetConfig")],
    },
    # Configs of scripts alone.
    "trl_scripts": {
        "training_arguments": [TRAINING],
        "distillation": [("trl", "trl/trainer/distillation_config.py", "DistillationConfig"), *BASE],
        "cpo": [("trl", "trl/experimental/cpo/cpo_config.py", "CPOConfig"), *BASE],
        "orpo": [("trl", "trl/experimental/orpo/orpo_config.py", "ORPOConfig"), *BASE],
        "gkd": [
            ("trl", "trl/experimental/gkd/gkd_config.py", "GKDConfig"),
            ("trl", "trl/trainer/sft_config.py", "SFTConfig"),
            *BASE,
        ],
    },
}
UNSLOTH = "unsloth/models/rl.py"  # the function that rewrites TRL's configs


def fields(source: str, name: str) -> dict[str, object]:
    """{field: its default} of a dataclass or pydantic model; null where there is none or it is computed."""
    return {field: _default(statement.value)[1] for field, statement in _statements(source, name)}


def types(source: str, name: str) -> dict[str, str]:
    """{field: the kinds of values that it may have}, joined by |, in the words of jaxtune/convert/kinds.py."""
    return {field: "|".join(dict.fromkeys(_kinds(one.annotation))) for field, one in _statements(source, name)}


def _statements(source: str, name: str) -> list[tuple[str, ast.AnnAssign]]:
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    body = next(node for node in classes if node.name == name).body
    found = []
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field = _default(statement.value)[0] or statement.target.id
            if not field.isupper() and "MIXLORA" not in field:
                found.append((field, statement))
    return found


_KINDS = {"str": "text", "int": "int", "float": "float", "bool": "bool", "dict": "mapping", "Any": "any"}
_KINDS |= {"list": "list[any]", "tuple": "list[any]", "PositiveInt": "int", "torch.dtype": "text"}
# Enums, whose values are texts; other classes are mappings.
_TEXTS = (
    *("RLType", "RingAttnFunc", "ChatTemplate", "CustomSupportedOptimizers", "Resampling", "QuantizationMethod"),
    *("RopeScaling", "AttentionFunction", "EngineName", "IntervalStrategy", "SchedulerType", "OptimizerNames"),
    *("SaveStrategy", "HubStrategy", "DebugOption"),
)


def _kinds(annotation: ast.expr) -> list[str]:
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _kinds(left) + _kinds(right)
        case ast.Constant(value=None):
            return ["null"]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return [*_kinds(inner), "null"]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _kinds(inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [json.dumps(ast.literal_eval(value)) for value in values]
        case ast.Subscript(value=ast.Name(id="list" | "tuple"), slice=inner):
            first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return [f"list[{'|'.join(dict.fromkeys(_kinds(first)))}]"]
        case ast.Subscript(value=ast.Name(id="dict")):
            return ["mapping"]
    name = ast.unparse(annotation)
    return [_KINDS.get(name) or ("text" if name in _TEXTS else "mapping")]


def _default(value: ast.expr | None) -> tuple[str | None, object]:
    alias = None
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("Field", "field"):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if isinstance(named := keywords.get("alias"), ast.Constant):
            alias = str(named.value)
        value = keywords.get("default", value.args[0] if value.args else None)
    return alias, _constant(value)


def _constant(value: ast.expr | None) -> object:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return _constant(value.left) * _constant(value.right)  # type: ignore[operator]
    if isinstance(value, ast.Attribute):  # of an enum, whose values are their names in small letters
        return value.attr.lower()
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def replaced(source: str) -> dict[str, dict[str, object]]:
    """{section, "" for all: {argument: the default that Unsloth gives it in TRL's configs}}; None where Unsloth only
    marks that the script says nothing. Of branches by version that for the newest counts."""
    found: dict[str, dict[str, object]] = {}

    def of(statements: list[ast.stmt], section: str) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id="replacements")], value=ast.Dict(keys=keys, values=values)):
                    names = [ast.literal_eval(key) for key in keys if key is not None]
                    found.setdefault(section, {}).update(zip(names, map(_constant, values), strict=True))
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id="replacements"), slice=ast.Constant(value=str(name)))],
                    value=value,
                ):
                    found.setdefault(section, {})[name] = _constant(value)
                case ast.If(
                    test=ast.Compare(left=ast.Name(id="trainer_file"), comparators=[ast.Constant(value=str(file))])
                ):
                    of(statement.body, file.removesuffix("_trainer"))
                case ast.If():
                    of(statement.body, section)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "replacements" in ast.unparse(node):
            of(node.body, "")
    return found


def read(wheels: Iterable[Path]) -> dict[str, dict[str, object]]:
    """{program: {"versions": {wheel: version}, "keys": {section: {key: default}}, "types": {section: {key: ...}}}}."""
    paths = {path.name.split("-")[0]: path for path in wheels}
    programs: dict[str, dict[str, object]] = {}
    for program, sections in PROGRAMS.items():
        keys: dict[str, dict[str, object]] = {}
        kinds: dict[str, dict[str, str]] = {}
        used: dict[str, str] = {}
        for section, classes in sections.items():
            keys[section], kinds[section] = {}, {}
            for wheel, module, name in classes:
                used[wheel] = paths[wheel].name.split("-")[1]
                with zipfile.ZipFile(paths[wheel]) as archive:
                    source = archive.read(module).decode()
                keys[section] = {**fields(source, name), **keys[section]}
                kinds[section] = {**types(source, name), **kinds[section]}
        programs[program] = {"versions": used, "keys": keys}
        if program != "trl_scripts":  # of which convert reads nothing
            programs[program]["types"] = kinds
    wheel = paths["unsloth"]
    with zipfile.ZipFile(wheel) as archive:
        keys = replaced(archive.read(UNSLOTH).decode())
    programs["unsloth"] = {"versions": {"unsloth": wheel.name.split("-")[1]}, "keys": keys}
    return programs


def templates(wheels: Iterable[Path]) -> dict[str, dict[str, object]]:
    """{name: what LLaMA-Factory's template of that name writes}: of each part its pieces, a text with {{content}}, or
    the name of a special token as {"special": name}, or another token as {"token": text}; and its other options."""
    path = next(path for path in wheels if path.name.startswith("llamafactory-"))
    with zipfile.ZipFile(path) as archive:
        tree = ast.parse(archive.read("llamafactory/data/template.py").decode())
    known: dict[str, dict[str, object]] = {}
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_template":
            options = {keyword.arg: _option(keyword.value) for keyword in call.keywords if keyword.arg in _OPTIONS}
            known[str(options.pop("name"))] = options
    return known


_OPTIONS = (
    *("name", "format_user", "format_assistant", "format_system", "format_prefix", "default_system"),
    *("thought_words", "efficient_eos", "stop_words", "replace_eos", "template_class"),
)


def _option(value: ast.expr) -> object:
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call):
        slots = next(keyword.value for keyword in value.keywords if keyword.arg == "slots")
        return [_piece(ast.literal_eval(slot)) for slot in slots.elts]  # type: ignore[attr-defined]
    return ast.literal_eval(value)


def _piece(slot: str | set[str] | dict[str, str]) -> object:
    return {"special": next(iter(slot))} if isinstance(slot, set) else slot


def _write(name: str, values: object) -> None:
    path = Path(__file__).parent.parent / "jaxtune" / "convert" / "schemas" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def main(folder: str) -> None:
    wheels = sorted(Path(folder).glob("*.whl"))
    for program, schema in read(wheels).items():
        _write(program, schema)
        print(program, schema["versions"])
    _write("llama_factory_templates", templates(wheels))


if __name__ == "__main__":
    main(sys.argv[1])
