"""The day that a chat template writes: the current one, or a fixed one for all rows of a run."""

from __future__ import annotations

import datetime
import re

_CLOCK = "strftime_now"  # the only function by which a template of transformers reads the time
# Directives of strftime with their flags, wherever a template's text has them.
_DIRECTIVE = re.compile(r"%[-_0^#]?[aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ]")
_PERCENT = "\ue000"  # stands for %% while directives are replaced


def writes_date(template: str) -> bool:
    return _CLOCK in template


def today() -> str:
    """The current day, such as 2026-11-28, in local time."""
    return datetime.date.today().isoformat()


def parsed_day(text: str) -> datetime.date:
    """The day of a text such as 2026-11-28; ValueError for other forms."""
    return datetime.datetime.strptime(text, "%Y-%m-%d").date()


def dated(template: str, day: str | None) -> str:
    """The template with its clock fixed at the midnight that begins `day` (such as 2026-11-28); unchanged if it reads
    no time or for None.

    A macro with the clock's name is put on a line before it.
    """
    if day is None or not writes_date(template):
        return template
    midnight = datetime.datetime.combine(parsed_day(day), datetime.time())
    directives = sorted(set(_DIRECTIVE.findall(template)))
    values = [
        ("%%", _PERCENT),
        *((directive, midnight.strftime(directive)) for directive in directives),
        (_PERCENT, "%"),
    ]
    replaced = "".join(f" | replace({old!r}, {new!r})" for old, new in values)
    return f"{{%- macro {_CLOCK}(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro %}}\n{template}"
