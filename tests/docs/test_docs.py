"""The pages that people read are true: their code runs, their links lead somewhere, their tables are the code's."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter

import pytest
import yaml
from step_costs import costs_of

from jaxtune import cli
from jaxtune.models.files.model_folder import find_config
from jaxtune.models.registry import config_from_hf, text_parts
from jaxtune.train.config.file import config_keys, load_config, packaged_recipes, recipe_summary
from jaxtune.train.planning.choice import PlanError, choose
from jaxtune.train.planning.devices import budget, find_device
from jaxtune.train.planning.step_spec import StepSpec
from tests.docs import qwen35_plans
from tests.docs.conftest import run_command
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links, prose

DOCS = ROOT / "docs"
RUN = ("python", "sh", "console")
SHOWN = ("text", "json", "yaml", "mermaid")
ALL = [block for page in PAGES for block in blocks(page)]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Commands of other programs: shown, not run.
OTHERS = ("pip", "make", "docker", "git", "cd", "export", "vllm", "ollama")
# Blocks that cannot run here. Each one more must be added by hand: nothing hides among them.
NOT_RUN = {"a GPU": 1, "two GPUs": 2, "the network": 6}


@pytest.mark.full
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language in RUN for b in blocks(p))], ids=lambda p: p.stem)
def test_the_blocks_of_a_page_run(page, workplace):
    """In their order, Python's in one namespace; lines of `sh` and after the "$ " of `console` as commands."""
    namespace: dict = {"__name__": "__page__"}
    for block in blocks(page):
        if block.needs:
            continue
        if block.language == "python":
            exec(compile(block.code, str(block), "exec", dont_inherit=True), namespace)
        elif block.language in ("sh", "console"):
            for line in commands(block):
                if shlex.split(line)[0] not in OTHERS:
                    assert run_command(line) == 0, f"{block}: {line}"


def test_every_block_says_what_it_is_and_few_cannot_run():
    unknown = [str(block) for block in ALL if block.language not in (*RUN, *SHOWN)]
    assert not unknown, f"name the language: {', '.join(RUN + SHOWN)}"
    assert dict(Counter(block.needs for block in ALL if block.needs)) == NOT_RUN


def test_commands_name_what_there_is():
    """Also where they are not run: recipes, keys, make's targets, extras."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    keys = {key.name for key in config_keys()}
    for block in ALL:
        if block.language not in ("sh", "console"):
            continue
        for line in commands(block):
            words = shlex.split(line)
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.M), f"{block}: {line}"
            for extra in re.findall(r"(?:jaxtune|\.)\[([\w,-]+)\]", line):
                assert set(extra.split(",")) <= extras.keys(), f"{block}: {line}"
            if words[0] == "jaxtune":
                assert words[1] in cli.COMMANDS or words[1].startswith("-"), f"{block}: {line}"
            if "train" in words[:2] or words[:3] == ["python", "-m", "jaxtune.train"]:
                named = {word.split("=")[0] for word in words if re.match(r"[\w.]+=", word)}
                assert named <= keys, f"{block}: {named - keys}"


def test_yaml_blocks_are_recipes(workplace):
    """Completed with what a page about one thing leaves out."""
    blocks = [block for block in ALL if block.language == "yaml"]
    assert blocks
    for block in blocks:
        recipe = {"model": {"path": "base"}, "data": {}} | yaml.safe_load(block.code)
        recipe["data"] = {"train": "rows.jsonl"} | recipe["data"]
        (workplace / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        load_config(str(workplace / "recipe.yaml"), [])


ROOMS = sorted([*(ROOT / "jaxtune").rglob("README.md"), *(ROOT / "notes").rglob("*.md")])


@pytest.mark.parametrize("page", [*PAGES, *ROOMS], ids=lambda page: page.relative_to(ROOT).with_suffix("").as_posix())
def test_links_lead_somewhere(page):
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"
        if page.is_relative_to(DOCS):  # the built site has nothing else
            assert target.is_relative_to(DOCS), f"{page.name}: {link} leaves docs/"


def test_files_that_contributors_are_sent_to_exist():
    pages = [ROOT / "CONTRIBUTING.md", DOCS / "extending.md", *(page for page in ROOMS if page.name == "README.md")]
    folders = ("jaxtune", "tests", "benchmarks", "scripts", "examples")
    known = [f"/{path.relative_to(ROOT)}" for name in folders for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    for page in pages:
        for path in re.findall(r"`([\w./-]+\.(?:py|yaml)|[\w-]+(?:/[\w-]+)*/|[\w-]+(?:/[\w-]+)+)`", prose(page)):
            if re.search("NAME|OPERATION", path):
                continue
            there = [one for one in known if one.endswith("/" + path.rstrip("/"))]
            assert there, f"{page.relative_to(ROOT)}: {path}"
            room = f"/{page.parent.relative_to(ROOT)}/"
            if room.startswith("/jaxtune/") and room != "/jaxtune/pallas/":  # each operation has the same files
                inside = [one for one in there if one.startswith(room)]
                assert not inside or (page.parent / path).exists(), f"{page.relative_to(ROOT)}: {path} is in {inside}"


@pytest.mark.parametrize(
    "page", [page for page in ROOMS if page.name == "README.md"], ids=lambda page: page.parent.name
)
def test_a_readme_of_a_room_is_one_screen(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 45


def test_every_page_is_in_the_table_of_contents():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [path for section in site["nav"] for path in _paths(section)]
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES if DOCS in p.parents)


def _paths(section) -> list[str]:
    [value] = section.values()
    return [value] if isinstance(value, str) else [path for part in value for path in _paths(part)]


# ---- README.md


def test_the_readme_is_short_and_has_every_command():
    assert len(README.splitlines()) < 130
    for command in cli.COMMANDS:
        assert f"| `jaxtune {command} " in README or f"| `jaxtune {command}`" in README, command


def test_the_readmes_models_are_those_of_its_recipes():
    rows = re.findall(
        r"^\| ([\w./-]+)(?:, all parameters)? \| (\d+) GB \(([\w ]+)\)(?: \(1\))? \| `([\w.-]+)` \|$", README, re.M
    )
    recipes = packaged_recipes()
    assert {recipe for *_, recipe in rows} == {name for name in recipes if not name.startswith("quickstart")}
    for model, memory, _, recipe in rows:
        assert re.findall(r"(\d+) GB", recipe_summary(recipes[recipe])) == [memory], recipe  # what jaxtune info says
        config = load_config(recipe, [], rows_needed=False)
        assert config.model.path == model
        assert (config.adapter is None) == (f"| {model}, all parameters |" in README and recipe.startswith("full"))


def test_the_cards_that_the_readme_marks_are_those_on_record():
    """Of recipes as packaged: every phase, from training to the export, ended as it should on a card of that size."""
    marked = re.findall(r"(\d+) GB \([\w ]+\) \(1\) \| `([\w.-]+)` \|$", README, re.M)
    record = json.loads((ROOT / "benchmarks" / "results" / "cards.json").read_text(encoding="utf-8"))
    whole = [
        (str(life["card_gib"]), life["recipe"])
        for life in record["lives"].values()
        # A folder that is stored in four bits is not quantised while it is loaded.
        if life["overrides"] in ([], ["model.load_in=null"]) and "export" in life["phases"]
        if not any("problem" in phase for phase in life["phases"].values())
    ]
    assert sorted(marked) == sorted(whole) != []


def test_the_quickstarts_time_is_one_in_readme_and_info():
    (time,) = re.findall(r"jaxtune train quickstart +#.*two CPU cores: (in [\w ]+ s)$", README, re.M)
    assert f"on two CPU cores, {time}" in recipe_summary(packaged_recipes()["quickstart"])


@pytest.mark.full
def test_the_readmes_plan_is_what_the_command_prints(workplace, capsys):
    (line,) = re.findall(r"^ +(predicted peak .*)\.\.\.$", README, re.M)
    assert cli.main(["train", "qlora-8b", "--plan", "plan.device=RTX 4090"]) == 0
    assert line in capsys.readouterr().out


CARDS = ("RTX 3060", "RTX 4060 Ti 16GB", "RTX 4090", "RTX 5090", "A40", "A100")  # of 12, 16, 24, 32, 48 and 80 GB


# Not gemma-4-e4b and gemma-4-12b: by forecast they fit 12 GB, where a step mostly waits for the host; they are named
# for 16 GB, in which their steps were measured (steps.json).
@pytest.mark.full
@pytest.mark.parametrize(
    ("card", "recipe"), re.findall(r"GB \(([\w ]+)\) \| `((?:qwen3\.5|gemma-4-[23])[\w.-]+)` \|$", README, re.M)
)
def test_the_card_that_is_named_is_the_smallest(card, recipe):
    """Of those that have room for all weights; on smaller ones they stream."""
    config = load_config(recipe, [], rows_needed=False)
    parts = costs_of(config_from_hf(find_config(config.model.path)), config).without_last_resorts()

    def fits(card: str) -> bool:
        device = find_device(card)
        try:
            return bool(choose(parts, StepSpec.of(config), device, budget(config.memory, device)))
        except PlanError:
            return False

    smaller = CARDS[: CARDS.index(card)]
    assert fits(card) and not any(map(fits, smaller[-1:]))


@pytest.mark.full
@pytest.mark.parametrize("row", qwen35_plans.ROWS)
def test_the_plans_of_qwen35_are_what_the_planner_says(row):
    """Bytes and speed of each recorded plan, as they are forecast today; what is said to fit a card does."""
    recorded = json.loads(qwen35_plans.FILE.read_text(encoding="utf-8"))
    assert recorded.keys() == qwen35_plans.ROWS.keys()
    assert (DOCS / "qwen35.md").read_text(encoding="utf-8").count(qwen35_plans.table(recorded)) == 1
    for card, record in recorded[row].items():
        found, limit = qwen35_plans.forecast_of(row, card, record)
        assert (found.peak_bytes <= limit) == record["fits"], card
        for name, value in qwen35_plans.figures(found).items():
            assert value == pytest.approx(record[name], rel=2e-3), f"{card}: python -m tests.docs.qwen35_plans"


# ---- docs/: functions and tables of names


def test_the_examples_have_an_index_of_all_of_them():
    folder = ROOT / "examples"
    named = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\) \|", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(named) == sorted(path.name for path in folder.iterdir() if path.name != "README.md")


def test_the_page_names_every_family_whose_text_part_loads():
    names = {
        "gemma3": "Gemma 3",
        "gemma4": "Gemma 4",
        "gemma4_unified": "Gemma 4",
        "qwen3_5": "Qwen3.5",
        "qwen3_5_moe": "Qwen3.5",
        "qwen3_vl": "Qwen3-VL",
        "mistral3": "Mistral Small 3.1 and 3.2, and Ministral 3",
    }
    assert names.keys() == text_parts().keys()
    page = " ".join((DOCS / "notebooks.md").read_text(encoding="utf-8").split())
    assert "Gemma 3 and 4, Qwen3.5, Qwen3-VL, Mistral Small 3.1 and 3.2, and Ministral 3" in page


def test_functions_that_errors_tell_users_to_call_are_in_the_reference():
    """They are named as "use dequantize first (jaxtune.models.files.quant)"."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "jaxtune").rglob("*.py")]
    named = {found for text in sources for found in re.findall(r"use (\w+)(?: first)? \((jaxtune\.[\w.]+)\)", text)}
    reference = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md")).splitlines()
    assert named and {f"::: {module}.{name}" for name, module in named} <= set(reference)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    found = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert found, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]


def test_names_of_other_tools_lead_to_keys_that_exist():
    keys = {key.name for key in config_keys()}
    for heading in ("axolotl", "LLaMA-Factory", "torchtune"):
        rows = table("moving.md", heading)
        assert len(rows) >= 12
        for theirs, ours, *_ in rows:
            named = re.findall(r"`([\w.]+?)(?:[=:][^`]*)?`", ours)
            assert theirs and (named or ours), heading
            assert set(named) <= keys, f"{heading}: {set(named) - keys}"
