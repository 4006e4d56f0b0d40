"""An OpenAI-compatible server over the sampling engine: `jaxtune serve`.

A request's way: `app` (its limits, and who may ask) - `bodies` (its JSON, checked) - `engine` (rows in slots) - `texts`
(tokens as text) - `forms` (the answer's JSON).
"""
