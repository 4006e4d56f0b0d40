"""Chat templates that the package brings, for tokenizers of base models, which have none.

Each writes what the template of its family's chat models writes, with `{% generation %}` around what is trained: a
response and the token that ends its turn. Differences: no date is looked up (the one of Llama's first template with a
date stands), and phi-4 has no system message of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtune.train.data.formats import ALPACA_PREAMBLE
from jaxtune.train.data.markers import special_ids


@dataclasses.dataclass(frozen=True)
class Packaged:
    """text: Jinja. marks: special tokens that it writes and a tokenizer must have; the last one ends a turn. None: any
    tokenizer with an EOS will do, which ends a turn."""

    text: str
    marks: tuple[str, ...] | None


# A BOS is written where the family's own template writes one; in training no row has two (RowEncoder).
_CHATML = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_ALPACA = (
    """\
{%- if tools %}{{ raise_exception('the alpaca template has no place for tools') }}{% endif %}
{%- if messages[0].role != 'system' %}{{ '"""
    + ALPACA_PREAMBLE
    + """\n\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content + '\n\n' }}
{%- elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}
{%- elif message.role == 'assistant' and not message.tool_calls %}{{ '### Response:\n' }}
{%- generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '' if loop.last else '\n\n' }}
{%- else %}{{ raise_exception('the alpaca template has no place for tools') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"""
)


def _no_tools(name: str) -> str:
    return f"{{%- if tools %}}{{{{ raise_exception('the {name} template has no place for tools') }}}}{{% endif %}}\n"


# ---- Llama

_LLAMA_3 = (
    _no_tools("llama-3")
    + """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
)

_LLAMA_3_1 = """\
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools and (not turns or turns[0].role != 'user') %}
{{- raise_exception('tools are written into the first turn, which must be the user\\'s') }}{% endif %}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- for message in turns %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}
{{- 'Given the following functions, please respond with a JSON for a function call with its proper arguments ' }}
{{- 'that best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": ' }}
{{- 'dictionary of argument name and its value}.Do not use variables.\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls and message.tool_calls | length > 1 %}
{{- raise_exception('the llama-3.1 template has one tool call in a turn') }}{% endif %}
{%- generation %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endgeneration %}
{%- elif message.role == 'tool' %}{{ message.content | tojson + '<|eot_id|>' }}
{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# ---- Qwen

_QWEN_TOOLS = """\
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n' }}
{{- '</tool_call>' }}
"""

_QWEN_2_5_SYSTEM = (
    """\
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}
{%- else %}{{ 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}{% endif %}
{%- if tools %}{{ '\n\n' }}
"""
    + _QWEN_TOOLS
    + "{%- endif %}{{ '<|im_end|>\n' }}\n"
)

_QWEN_3_SYSTEM = (
    """\
{%- if tools or messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}{{ '\n\n' if messages[0].role == 'system' else '' }}
"""
    + _QWEN_TOOLS
    + "{%- endif %}{{ '<|im_end|>\n' }}{% endif %}\n"
)

_QWEN_THOUGHTS = """\
{%- if '</think>' in content and message.reasoning_content is not string %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- else %}{% set thought = message.reasoning_content or '' %}{% endif %}
{%- if loop.index0 > asked.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% set content = content.lstrip('\n') %}
{%- endif %}
"""

# Where the user asked last: thoughts of the answers before it are left out. Results of tools are no questions.
_QWEN_ASKED_LAST = """\
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not (message.content.startswith('<tool_response>')
    and message.content.endswith('</tool_response>')) %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if asked.last < 0 %}{% set asked.last = messages | length - 1 %}{% endif %}
"""


def _qwen_turns(thoughts: str = "") -> str:
    return (
        """\
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- generation %}
"""
        + thoughts
        + """\
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}{{ '\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    )


# ---- Gemma


def _gemma(system: str) -> str:
    return (
        _no_tools("gemma")
        + system
        + """\
{{- bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate: user, assistant, user, assistant, ...') }}{% endif %}
{%- if message.role == 'assistant' %}{{ '<start_of_turn>model\n' }}
{%- generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}
{%- else %}
{{- '<start_of_turn>user\n' + (before if loop.first else '') + message.content | trim + '<end_of_turn>' }}
{%- endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
    )


_GEMMA_1 = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('Gemma has no place for a system message') }}{% endif %}
{%- set turns, before = messages, '' %}
"""
_GEMMA_3 = """\
{%- set has_system = messages[0].role == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}
{%- set before = messages[0].content + '\n\n' if has_system else '' %}
"""

# ---- Phi

_PHI_3 = (
    _no_tools("phi-3")
    + """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\n' }}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif message.role == 'user' or message.content %}
{{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endif %}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"""
)

_PHI_4 = (
    _no_tools("phi-4")
    + """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '<|im_sep|>' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
)

# ---- Mistral, from its tokenizer of version 3 on: tools and system message stand before the last question

_MISTRAL = """\
{{- bos_token }}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n\n') %}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- set last = turns | selectattr('role', 'equalto', 'user') | list | length %}
{%- set asked = namespace(count=0) %}
{%- for message in turns %}
{%- if loop.first and message.role != 'user' or not loop.first and message.role == loop.previtem.role != 'tool' %}
{{- raise_exception('the first turn is the user\\'s, and user and assistant take turns') }}{% endif %}
{%- if message.role == 'user' %}
{%- set asked.count = asked.count + 1 %}
{%- if tools and asked.count == last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system + '\n\n' if system and asked.count == last else '') + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}
{%- if message.tool_calls and message.content %}
{{- raise_exception('a turn has text or tool calls, not both') }}{% endif %}
{{- '' if message.tool_calls else ' ' }}
{%- generation %}
{%- if message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | default('') | length != 9 %}
{{- raise_exception('a tool call needs an id of 9 letters or digits') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' }}
{%- else %}{{ message.content }}{% endif %}
{{- eos_token }}
{%- endgeneration %}
{%- else %}
{%- if message.tool_call_id | default('') | length != 9 %}
{{- raise_exception('a tool\\'s result needs the tool_call_id of its call, 9 letters or digits') }}{% endif %}
{%- set result = message.content | string %}
{%- if result | int | string == result %}{% set result = result | int %}
{%- elif result | float | string == result %}{% set result = result | float %}{% endif %}
{{- '[TOOL_RESULTS] ' + {'content': result, 'call_id': message.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

_LLAMA_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_GEMMA_MARKS = ("<start_of_turn>", "<end_of_turn>")
PACKAGED = {
    "chatml": Packaged(_CHATML, ("<|im_end|>",)),
    "alpaca": Packaged(_ALPACA, None),
    "llama-3": Packaged(_LLAMA_3, _LLAMA_MARKS),
    "llama-3.1": Packaged(_LLAMA_3_1, _LLAMA_MARKS),
    "qwen-2.5": Packaged(_QWEN_2_5_SYSTEM + _qwen_turns(), _CHATML_MARKS),
    "qwen-3": Packaged(_QWEN_3_SYSTEM + _QWEN_ASKED_LAST + _qwen_turns(_QWEN_THOUGHTS), _CHATML_MARKS),
    "qwen-3-instruct": Packaged(_QWEN_3_SYSTEM + _qwen_turns(), _CHATML_MARKS),
    "gemma": Packaged(_gemma(_GEMMA_1), _GEMMA_MARKS),
    "gemma-3": Packaged(_gemma(_GEMMA_3), _GEMMA_MARKS),
    "phi-3": Packaged(_PHI_3, ("<|user|>", "<|assistant|>", "<|end|>")),
    "phi-4": Packaged(_PHI_4, ("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    "mistral": Packaged(_MISTRAL, ("[INST]", "[/INST]", "</s>")),
}


def missing_marks(tokenizer: Any, name: str) -> list[str]:
    """Marks of a packaged template that are no special tokens of this tokenizer; its missing EOS as "EOS"."""
    special = set(tokenizer.convert_ids_to_tokens(list(special_ids(tokenizer))))
    marks = PACKAGED[name].marks
    if marks is None:
        return [] if tokenizer.eos_token in special else [tokenizer.eos_token or "EOS"]
    return [mark for mark in marks if mark not in special]


def packaged_that_fit(tokenizer: Any) -> list[str]:
    """The names of the packaged templates all of whose marks are special tokens of this tokenizer."""
    return [name for name in PACKAGED if not missing_marks(tokenizer, name)]
