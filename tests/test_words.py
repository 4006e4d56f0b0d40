"""Words and phrases that a stranger stumbles over: none is used in the package, the docs and the README.

docs, docstrings, comments, messages and identifiers are searched alike; the parts of an identifier are words, too. What
is needed is said in standard terms (CONTRIBUTING.md). The one exception is names that files of runs contain (RECORDED).
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Patterns, in any case of letters; an underscore in a text counts as a space.
RETIRED = (
    r"\bcarr(?:y|ies|ied)\b",
    r"\bheld\b(?![- ]out)",
    r"\bmet\b",
    r"\bow(?:ed|es|ing)\b",
    r"\btold\b",
    r"\btheirs\b",
    r"\blies\b",
    r"\btogether\b",
    r"\bfates?\b",
    r"\bremember(?:ed|s)?\b",
    r"\bunfinished\b",
    r"\bbegun\b",
    r"\bcoming\b",
    r"\blet go\b",
    r"\bso many\b",
    r"\bso much\b",
    r"\bof before\b",
    r"\b(?:for |a )?want of\b",
    r"\bwhat leaves\b",
    r"\bwho builds\b",
    r"\bwithout more\b",
    r"\bnothing, but\b",
    r"\btells? of\b",
    r"\bsays? when\b",
    r"\bthat lie\b",
    r"\bas (?:it|they) (?:lie|stand)s?\b",
    r"\bway round\b",
    r"\bwhose (?:it|they|a moment)\b",
    r"\bwhat there is\b",
    r"\bafter the other\b",
    r"\bbut for\b",
    r"\bstands? in\b",
    r"\bat hand\b",
    r"\bpersons?\b",
    r"\bkin\b",
    r"\bin the place of\b",
    r"\bgo(?:es)? on\b",
    r"\bcomes? of\b",
)

# Names that files of runs contain, and that must therefore stay as they are, because they are read again: {the exact
# text in a file of the package, with its quotes: the file of a run in which it is recorded, and where}.
RECORDED = {
    '"remembered"': "a checkpoint's meta.json: a residual in the plan (numerics.residuals, config.memory.plan)",
    '"together"': "a checkpoint's meta.json and adapter_model.safetensors: a name that base_digest digests",
}


def texts() -> dict[str, str]:
    files = [path for folder in ("jaxtune", "docs") for path in (ROOT / folder).rglob("*")] + [ROOT / "README.md"]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(files)
        if path.suffix in (".py", ".md", ".yaml")
    }


def places(pattern: str, files: dict[str, str]) -> list[str]:
    """file:line of each occurrence outside of the names in RECORDED."""
    found, recorded = re.compile(pattern, re.IGNORECASE), re.compile("|".join(map(re.escape, RECORDED)))
    stripped = {name: recorded.sub('""', text).replace("_", " ") for name, text in files.items()}
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in stripped.items()
        for match in found.finditer(text)
    ]


def test_no_retired_word_is_used():
    files = texts()
    assert len(files) > 200 and len(RETIRED) > 30
    wrong = [f"{place} ({pattern})" for pattern in RETIRED for place in places(pattern, files)]
    assert not wrong, "say it in standard terms:\n" + "\n".join(wrong)


def test_each_recorded_name_is_still_needed():
    files = texts()
    for name in RECORDED:
        assert any(re.search(pattern, name) for pattern in RETIRED), f"{name} is not retired: take it from RECORDED"
        assert any(name in text for text in files.values()), f"{name} is used nowhere: take it from RECORDED"


def test_an_occurrence_is_found_with_its_line():
    files = {"a.py": "x = 1\n# What leaves takes with the gaps.\nlet_go(_TOLD=True)\n"}
    assert places(r"\bwhat leaves\b", files) == ["a.py:2: What leaves"]
    assert places(r"\blet go\b", files) == ["a.py:3: let go"] and not places(r"\blies\b", files)
    assert places(r"\btold\b", files) == ["a.py:3: TOLD"]


def test_only_the_exact_recorded_text_is_excepted():
    files = {"a.py": 'OUT = "remembered"\n# remembered\nx = "remembered "\ny = \'remembered\'\nz = "Remembered"\n'}
    found = places(r"\bremember(?:ed|s)?\b", files)
    assert found == ["a.py:2: remembered", "a.py:3: remembered", "a.py:4: remembered", "a.py:5: Remembered"]
