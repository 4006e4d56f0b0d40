"""The alarm's text reaches warnx, which reads % as a format."""

import hypothesis
import hypothesis.strategies as st

from jaxtune.system.lock_alarm import LockAlarm


@hypothesis.given(st.text(alphabet="%a\u00e9", min_size=0, max_size=1200))
def test_signs_of_percent_come_in_pairs(text):
    alarm = LockAlarm()
    alarm.set(text, 3600.0)
    alarm.clear()
    value = alarm._text.value
    assert value.replace(b"%%", b"").count(b"%") == 0 and len(value) <= 1023
    assert value == text.encode().replace(b"%", b"%%")[: len(value)]
