"""The demo policy with another chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

DEMO_POLICY = Path(__file__).resolve().parents[2] / "assets/demo-policy"

# What each family's template does with messages and variables, in our own words.
QWEN2_5 = """{%- for m in messages %}{%- if m.role in ('user', 'system', 'assistant') and not m.tool_calls %}
{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- elif m.role == 'assistant' %}
{{- '<|assistant|>' }}{%- for call in m.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- '<|end|>' }}
{%- elif m.role == 'tool' %}{{- '<|user|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
QWEN3 = """{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if m.reasoning_content is string %}{%- set content = '<think>' + m.reasoning_content + '</think>' + content %}
{%- endif %}{%- if m.role in ('user', 'system', 'assistant', 'tool') %}{{- '<|' + m.role + '|>' + content }}{%- endif %}
{%- endfor %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"""
LLAMA3_2 = """{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}{{- 'Today: ' + date_string }}{%- for m in messages %}{{- '<|' + m.role + '|>' }}
{%- if m.role in ('tool', 'ipython') and m.content is iterable %}{{- m.content | tojson }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|end|>' }}{%- endfor %}{{- '<|assistant|>' }}"""
GPT_OSS = """{{- 'Reasoning: ' + (reasoning_effort | default('medium')) }}{%- for m in messages %}
{{- '<|' + m.role + '|>' }}{%- if m.thinking %}{{- m.thinking + '|' }}{%- endif %}{{- m.content + '<|end|>' }}
{%- endfor %}{{- '<|assistant|>' }}"""
PARTS_TOO = """{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}{{- part.text | trim }}{%- endfor %}{%- endif %}{%- endfor %}
{{- '<|assistant|>' }}"""
PARTS_ONLY = """{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- for part in m.content %}
{%- if part.type == 'text' %}{% generation %}{{- part.text }}{% endgeneration %}{%- endif %}{%- endfor %}
{%- endfor %}"""


def chat_model(directory: Path, template: str | None, **settings: Any) -> Path:
    """A copy of the demo policy with `template`, and `settings` in tokenizer_config.json."""
    weights = "model.safetensors"
    shutil.copytree(DEMO_POLICY, directory, ignore=shutil.ignore_patterns(weights, "*.jinja"))
    (directory / weights).symlink_to(DEMO_POLICY / weights)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    about = directory / "tokenizer_config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), **settings}))
    return directory
