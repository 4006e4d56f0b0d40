"""Words and phrases that a stranger stumbles over: how often each still stands may only fall.

docs, docstrings, comments, messages and identifiers are counted alike. Whoever takes one away lowers its number here;
whoever needs a new sentence says it in standard terms (CONTRIBUTING.md).
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# pattern, in any case of letters: how often it stands in the package, the docs and the README.
RETIRED = {
    r"\bcarr(?:y|ies|ied)\b": 0,
    r"\bheld\b(?!-out| out)": 0,
    r"\bmet\b": 0,
    r"\bow(?:ed|es|ing)\b": 0,
    r"\btold\b": 4,
    r"\btheirs\b": 4,
    r"\blies\b": 0,
    r"\btogether\b": 2,
    r"\bfates?\b": 0,
    r"\bremember(?:ed|s)?\b": 4,
    r"\bunfinished\b": 0,
    r"\bbegun\b": 0,
    r"\bcoming\b": 0,
    r"\blet_go\b|\blet go\b": 0,
    r"\bso many\b": 0,
    r"\bso much\b": 0,
    r"\bof before\b": 0,
    r"\b(?:for |a )?want of\b": 0,
    r"\bwhat leaves\b": 0,
    r"\bwho builds\b": 0,
    r"\bwithout more\b": 0,
    r"\bnothing, but\b": 0,
    r"\btells? of\b": 0,
    r"\bsays? when\b": 0,
    r"\bthat lie\b": 0,
    r"\bas (?:it|they) (?:lie|stand)s?\b": 0,
    r"\bway round\b": 0,
    r"\bwhose (?:it|they|a moment)\b": 0,
    r"\bwhat there is\b": 0,
    r"\bafter the other\b": 0,
    r"\bbut for\b": 0,
    r"\bstands? in\b": 2,
    r"\bat hand\b": 0,
    r"\bpersons?\b": 0,
    r"\bkin\b": 0,
    r"\bin the place of\b": 0,
    r"\bgo(?:es)? on\b": 1,
    r"\bcomes? of\b": 0,
}


def texts() -> dict[str, str]:
    files = [path for folder in ("jaxtune", "docs") for path in (ROOT / folder).rglob("*")] + [ROOT / "README.md"]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(files)
        if path.suffix in (".py", ".md", ".yaml")
    }


def places(pattern: str, files: dict[str, str]) -> list[str]:
    """file:line of each occurrence."""
    found = re.compile(pattern, re.IGNORECASE)
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in files.items()
        for match in found.finditer(text)
    ]


def test_retired_words_only_become_fewer():
    files = texts()
    assert len(files) > 200 and len(RETIRED) > 30
    wrong = []
    for pattern, allowed in RETIRED.items():
        found = places(pattern, files)
        if len(found) > allowed:
            wrong += [f"{pattern}: {len(found)} where {allowed} stood; say it in standard terms:", *found]
        elif len(found) < allowed:
            wrong.append(f"{pattern}: {len(found)} are left: write {len(found)} for {allowed} in {Path(__file__).name}")
    assert not wrong, "\n".join(wrong)


def test_an_occurrence_is_found_with_its_line():
    files = {"a.py": "x = 1\n# What leaves takes with the gaps.\nlet_go(told=True)\n"}
    assert places(r"\bwhat leaves\b", files) == ["a.py:2: What leaves"]
    assert places(r"\blet_go\b|\blet go\b", files) == ["a.py:3: let_go"] and not places(r"\blies\b", files)
