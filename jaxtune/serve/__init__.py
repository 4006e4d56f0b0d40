"""An OpenAI-compatible server over the sampling engine: `jaxtune serve`.

A request's way: `connections` and `app` (limits, and who may ask) - `readers`, processes in which `bodies` checks its
JSON and makes tokens - `engine` (rows in slots) - `texts` (tokens as text) - `forms` (the answer's JSON).
"""
