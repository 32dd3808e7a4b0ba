"""Chat templates in the manner of the families in use: written anew, with the constructions that decide what is trained.

`TEMPLATES` has each by its name; `MARKS` are the special tokens of all of them, which the tokenizers of `tokenizer_of` have.
"""

from functools import cache

from made_tokenizers import PLAIN, TAGGED, THINKING, byte_backend
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

_CALLS = (
    "{%- for c in m.tool_calls or [] %}{%- set f = c.function if c.function is defined else c %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{%- if f.arguments is string %}{{- f.arguments }}{%- else %}{{- f.arguments | tojson }}{%- endif %}"
    "{{- '}\\n</tool_call>' }}{%- endfor %}"
)
_TOOLS = "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"

# A default system message before all, and the role as it stands in the message.
CHATML = (
    "{%- for m in messages %}{%- if loop.first and m['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are HelperBot.<|im_end|>\\n' }}{%- endif %}"
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# As it is written by hand: no generation prompt at all.
CHATML_BARE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# BOS, a system block in any case, contents trimmed, one call a turn, arguments and results as JSON.
LLAMA3 = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set sys = messages[0].content | trim %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set sys = '' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting HelperBot: 2023\\n' + sys }}"
    "{%- if tools %}" + _TOOLS + "{%- endif %}{{- '<|eot_id|>' }}"
    "{%- for m in rest %}{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set f = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' + (f.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + "
    "(m.content | tojson) + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + "
    "'<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- "
    "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
# Roles alternate, the system message stands before the first user's words; contents may be lists of parts.
GEMMA = (
    "{{ bos_token }}{%- set ns = namespace(first='', rest=messages) %}{%- if messages[0].role == 'system' %}"
    "{%- set ns.first = (messages[0].content if messages[0].content is string else "
    "messages[0].content[0].text) + '\\n\\n' %}"
    "{%- set ns.rest = messages[1:] %}{%- endif %}{%- for m in ns.rest %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (ns.first if "
    "loop.first else '') }}"
    "{%- if m.content is string %}{{ m.content | trim }}{%- else %}{%- for part in m.content %}"
    "{%- if part.type == 'image' %}{{ '<image>' }}{%- else %}{{ part.text | trim }}{%- endif %}{%- "
    "endfor %}{%- endif %}"
    "{{ '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"
)
# No generation prompt; the system message and the tools stand before the last of the user's words; ids of nine characters.
MISTRAL = (
    "{%- set sys = messages[0].content if messages[0].role == 'system' else none %}"
    "{%- set rest = messages[1:] if sys is not none else messages %}{%- set ns = namespace(user=-1, n=0) %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}"
    "{%- if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}{{ bos_token }}{%- for m in rest %}{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.user %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + "
    "'[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if sys is not none and loop.index0 == ns.user %}{{ '[INST] ' + sys + '\\n\\n' + m.content + '[/INST]' }}"
    "{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{%- endif %}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{%- if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{%- endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) + '
    "', \"id\": \"' + c.id + '\"}' }}"
    "{{ '' if loop.last else ', ' }}{%- endfor %}{{ ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + (m.content | tojson) + '}[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)
# Thoughts stay only after the last question, the last turn gets an empty one; tool results are a user's.
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- "
    "messages[0].content + '\\n\\n' }}"
    "{%- endif %}{{- '# Tools' }}" + _TOOLS + "{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(asked=messages | length - 1, looking=true) %}{%- for m in messages[::-1] %}"
    "{%- if ns.looking and m.role == 'user' and m.content is string and not "
    "(m.content.startswith('<tool_response>') and "
    "m.content.endswith('</tool_response>')) %}{%- set ns.asked = messages | length - 1 - loop.index0 %}"
    "{%- set ns.looking = false %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- elif m.role == "
    "'assistant' %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{%- "
    "else %}{{- content }}{%- endif %}" + _CALLS + "{{- '<|im_end|>\\n' }}{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif "
    "%}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Refuses conversations without a question; the generation prompt opens a thought; arguments are taken apart.
QWEN35 = (
    "{%- macro text(c) %}{%- if c is string %}{{- c }}{%- else %}{%- for part in c or [] %}{%- if "
    "part.type == 'image' %}"
    "{{- '<|vision|>' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}" + _TOOLS + "{%- if messages[0].role == 'system' %}"
    "{{- '\\n\\n' + text(messages[0].content) | trim }}{%- endif %}{{- '<|im_end|>\\n' }}{%- elif "
    "messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + text(messages[0].content) | trim + '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(asked=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set "
    "ns.asked = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- if ns.asked < 0 %}{{- raise_exception('no question') }}{%- endif %}"
    "{%- for m in messages %}{%- set content = text(m.content) | trim %}{%- if m.role == 'user' %}"
    "{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- elif m.role == 'assistant' %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{%- set content = "
    "content.split('</think>')[-1] %}"
    "{%- endif %}{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.asked %}"
    "{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{%- endif %}{{- content | trim }}"
    "{%- for c in m.tool_calls or [] %}{%- set f = c.function if c.function is defined else c %}"
    "{{- '\\n\\n<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for key, value in (f.arguments or {}) | items %}"
    "{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + "
    "'\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif m.role == 'tool' %}"
    "{%- if loop.previtem is defined and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif not loop.first %}{{- raise_exception('system first') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
# The header of an answer closes the user's turn; arguments are joined as text; thoughts are cut off.
DEEPSEEK = (
    "{%- set ns = namespace(sys='', asked=false, tool=false) %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.sys = ns.sys + m.content %}{%- endif %}{%- endfor %}{{- bos_token + ns.sys }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.asked = true %}{%- set ns.tool = false %}{{- '<｜User｜>' + "
    "m.content + '<｜Assistant｜>' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{%- set ns.asked = false %}{{- m.content or '' }}"
    "{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + "
    "c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{- '<｜tool▁calls▁end｜>' + eos_token }}{%- elif m.role == 'assistant' %}{%- set ns.asked = false %}"
    "{%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}"
    "{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- set ns.tool = false %}{%- endif %}{{- content + eos_token }}"
    "{%- elif m.role == 'tool' %}{%- if not ns.tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif "
    "%}{%- set ns.tool = true %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}"
    "{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}"
    "{%- if add_generation_prompt and not ns.asked and not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}"
)
# The prompt opens a thought that earlier turns do not have.
DEEPSEEK_R1 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- elif m.role == 'user' %}"
    "{{- '<｜User｜>' + m.content }}{%- elif m.role == 'assistant' %}"
    "{{- '<｜Assistant｜>' + (m.content.split('</think>')[-1]) + eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)
# Channels; a turn of a thought and an answer has two headers; the last turn ends with another mark than earlier ones.
GPT_OSS = (
    "{{- '<|start|>system<|message|>You are HelperBot.<|end|>' }}{%- set ns = namespace(call=none) %}"
    "{%- set rest = messages[1:] if messages[0].role in ('developer', 'system') else messages %}"
    "{%- if messages[0].role in ('developer', 'system') or tools %}{{- '<|start|>developer<|message|>' }}"
    "{%- if messages[0].role in ('developer', 'system') %}{{- '# Instructions\\n\\n' + "
    "messages[0].content }}{%- endif %}"
    "{%- if tools %}" + _TOOLS + "{%- endif %}{{- '<|end|>' }}{%- endif %}{%- for m in rest %}{%- "
    "if m.role == 'assistant' %}"
    "{%- if m.tool_calls %}{%- if m.content or m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}{%- endif %}"
    "{%- set f = m.tool_calls[0].function %}{%- set ns.call = f.name %}"
    "{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' + "
    "(f.arguments | tojson) + '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}{%- if m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{%- else %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- set ns.call "
    "= none %}{%- endif %}"
    "{%- elif m.role == 'tool' %}{%- if ns.call is none %}{{- raise_exception('no call before') }}{%- endif %}"
    "{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' + "
    "(m.content | tojson) + '<|end|>' }}"
    "{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# No mark ends a turn: the next header does; arguments are taken apart, so that text is refused.
GLM = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n# Tools"
    + _TOOLS
    + "{%- endif %}{%- macro text(c) -%}{{ c if c is string else '' }}"
    "{%- endmacro -%}{%- set ns = namespace(asked=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.asked = loop.index0 -%}{%- endif %}{%- endfor %}{% for m in messages %}{%- if "
    "m.role == 'user' -%}<|user|>\n"
    "{{ text(m.content) }}{%- elif m.role == 'assistant' -%}<|assistant|>{%- set thought = '' %}{%- "
    "set content = text(m.content) %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{%- set content = "
    "content.split('</think>')[-1] %}"
    "{%- endif %}{%- if loop.index0 > ns.asked and thought -%}{{ '\\n<think>' + thought.strip() + "
    "'</think>' }}{%- else -%}"
    "{{ '\\n<think></think>' }}{%- endif -%}{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}"
    "{% for c in m.tool_calls or [] %}{%- set c = c.function or c %}{{ '\\n<tool_call>' + c.name }}"
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is "
    "string else v | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{%- elif m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + text(m.content) + '\\n</tool_response>' }}{%- elif m.role == "
    "'system' -%}<|system|>\n"
    "{{ text(m.content) }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
# Tags that enclose the header, too; a system message of its own in any case; a thought in each answer where thinking is off.
SMOLLM3 = (
    "{%- set ns = namespace(mode='/think', sys='') %}{%- if messages[0].role == 'system' %}"
    "{%- if '/no_think' in messages[0].content %}{%- set ns.mode = '/no_think' %}{%- endif %}"
    "{%- set ns.sys = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() %}{%- endif %}"
    "{{- '<|im_start|>system\\n## Metadata of HelperBot\\n' + ns.mode + '\\n\\n' + ns.sys }}"
    "{%- if tools %}" + _TOOLS + "{%- endif %}{{- '<|im_end|>\\n' }}{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}{%- if m.role == 'user' %}"
    "{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- elif m.role == 'assistant' %}{% generation %}"
    "{%- if ns.mode == '/think' %}{{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + "
    "'<|im_end|>\\n' }}{%- endif %}"
    "{% endgeneration %}{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n' + content + "
    "'<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' + ('' if ns.mode == '/think' else '<think>\\n\\n</think>\\n') }}{%- endif %}"
)

# The whole conversation ends with a mark of its own.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Headers that are words; no mark but the end of a turn.
VICUNA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% elif m.role == 'user' %}"
    "{{ 'USER: ' + m.content + ' ' }}{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# For models with pictures: takes nothing but lists of parts.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Turns of one role in a row become one.
MERGING = (
    "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}{{ '<|im_start|>' + m.role + '\n' }}{% endif %}"
    "{{ m.content }}{% if loop.last or loop.nextitem.role != m.role %}{{ '<|im_end|>\n' }}{% else %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "chatml-bare": CHATML_BARE,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "deepseek": DEEPSEEK,
    "deepseek-r1": DEEPSEEK_R1,
    "gpt-oss": GPT_OSS,
    "glm": GLM,
    "smollm3": SMOLLM3,
    "phi3": PHI3,
    "vicuna": VICUNA,
    "parts": PARTS,
    "merging": MERGING,
    "plain": PLAIN,
    "tagged": TAGGED,
    "thinking": THINKING,
}
MARKS = (
    "<|start|>",
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<|channel|>",
    "<|message|>",
    "<|return|>",
    "<|call|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)


@cache
def tokenizer_of(template: str, *, named: bool = True) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with BOS, EOS and all marks, and `template`. `named`: it lists the marks by a role."""
    backend = Backend.from_str(byte_backend())
    if not named:
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(MARKS) if named else [],
    )
    tokenizer.chat_template = template
    return tokenizer
