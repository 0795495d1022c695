"""The chat template: Qwen3.5's marks for roles, pictures and tools, without thinking."""

from typing import Final

from tools.demo_model.conversations import TOOLS_HEAD, TOOLS_TAIL

_CONTENT: Final = """\
{%- macro written(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable -%}
    {%- for part in content -%}
      {%- if part.type in ['image', 'image_url', 'input_image'] or 'image' in part -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' or 'video' in part -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif 'text' in part -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
_SYSTEM: Final = """\
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if has_system -%}
    {{- written(messages[0].content) + '\\n\\n' -}}
  {%- endif -%}
  {{- TOOLS_HEAD -}}
  {%- for tool in tools -%}
    {{- '\\n' + (tool | tojson) -}}
  {%- endfor -%}
  {{- TOOLS_TAIL + '<|im_end|>\\n' -}}
{%- endif -%}
"""
_MESSAGES: Final = """\
{%- for message in messages -%}
  {%- if message.role == 'system' and loop.first and tools -%}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + written(message.content) -}}
    {{- '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + written(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {{- '<tool_call>\\n<function=' + function.name + '>\\n' -}}
      {%- if function.arguments is mapping -%}
        {%- for key, value in function.arguments | items -%}
          {{- '<parameter=' + key + '>\\n' -}}
          {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
        {%- endfor -%}
      {%- endif -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chat_template() -> str:
    """Return the Jinja source; it renders a chat as `tokenizer.encode_chat` encodes it."""
    heads = (
        f"{{%- set TOOLS_HEAD = {TOOLS_HEAD!r} -%}}\n{{%- set TOOLS_TAIL = {TOOLS_TAIL!r} -%}}\n"
    )
    return _CONTENT + heads + _SYSTEM + _MESSAGES
