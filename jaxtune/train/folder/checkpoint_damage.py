"""Names of a checkpoint's files, and the check of their sizes and checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxtune.system.files import fingerprints

# Files of a checkpoint; checkpoint.py describes them.
ARRAYS, META, MANIFEST = "arrays", "meta.json", "manifest.json"
FORMAT = 1


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words; None if every file of its manifest has its size and checksum.
    Reads every byte; unlisted files are ignored.
    """
    if not path.is_dir():
        return "there is no such checkpoint"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"{MANIFEST}: expected format {FORMAT}, found {manifest['format']}"
        sizes = {name: int(entry["bytes"]) for name, entry in expected.items()}
        checksums = {name: str(entry["crc32"]) for name, entry in expected.items()}
    except FileNotFoundError:
        return f"{MANIFEST}: the file is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return f"{MANIFEST}: unreadable ({type(error).__name__}: {error})"
    if META not in expected:
        return f"{MANIFEST}: does not list {META}"
    if strange := [name for name in expected if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name]:
        return f"{MANIFEST}: lists {strange[0]!r}, which is not a file of a checkpoint"
    for name, count in sizes.items():  # sizes are compared first, because that is cheap
        if not (path / name).is_file():
            return f"{name}: the file is missing, expected {count:,} bytes"
        if (actual := (path / name).stat().st_size) != count:
            return f"{name}: expected {count:,} bytes, found {actual:,}"
    try:
        found_files = fingerprints([path / name for name in expected])
    except OSError as error:
        return f"unreadable ({error})"
    for name, checksum in checksums.items():
        if (actual := found_files[path / name]["crc32"]) != checksum:
            return f"{name}: expected CRC-32 {checksum}, found {actual}"
    return None
