"""The day that a chat template writes: that of asking, or a fixed one for all rows of a run."""

from __future__ import annotations

import datetime
import re

_CLOCK = "strftime_now"  # the only function by which a template of transformers reads the time
# Directives of strftime with their flags, wherever a template's text has them.
_DIRECTIVE = re.compile(r"%[-_0^#]?[aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ]")
_PERCENT = "\ue000"  # stands for %% while directives are replaced


def writes_date(template: str) -> bool:
    """Whether a template's Jinja text reads the time."""
    return _CLOCK in template


def today() -> str:
    """The current day, such as 2026-11-28, in this machine's time zone."""
    return datetime.date.today().isoformat()


def parsed_day(text: str) -> datetime.date:
    """The day of a text such as 2026-11-28; raises ValueError for another form."""
    return datetime.datetime.strptime(text, "%Y-%m-%d").date()


def dated(template: str, day: str | None) -> str:
    """The Jinja text of a template whose clock stands at the midnight before `day`, such as 2026-11-28.

    It is `template` itself if that reads no time, or for None: the clock of whoever renders it. Otherwise a macro of
    the clock's name stands before it, on a line of its own, so that its first line is read as before.
    """
    if day is None or not writes_date(template):
        return template
    midnight = datetime.datetime.combine(parsed_day(day), datetime.time())
    directives = sorted(set(_DIRECTIVE.findall(template)))
    values = [("%%", _PERCENT), *((one, midnight.strftime(one)) for one in directives), (_PERCENT, "%")]
    replaced = "".join(f" | replace({old!r}, {new!r})" for old, new in values)
    return f"{{%- macro {_CLOCK}(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro %}}\n{template}"
