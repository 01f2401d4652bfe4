"""Chat templates with the control flow of published ones, in few words: how each family writes turns and rewrites them.

The name says the family. `LEARNED` has what is learned of two turns, one list for each document.
"""

SPECIAL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_sep|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|observation|>",
    ),
    *(
        "<|endoftext|>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[CALLS]",
        "[RESULTS]",
        "<|header|>",
        "<|/header|>",
        "<|eot|>",
    ),
    *("<turn>", "</turn>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<U>", "<A>", "<EOS>"),
    *("<|role|>", "<|/role|>", "<|TURN|>", "<|/TURN|>", "<|CHATBOT|>", "<|USER|>", "<|middle|>", "]b]", "[e["),
)

# Empty reasoning is written before the last answer only, and reasoning only after the last question. Without thinking,
# the generation prompt has the empty reasoning. Arguments of calls that are texts are written as they are.
QWEN_3 = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | map('tojson') | join('\\n') + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.open and m.role == 'user' %}
        {%- set ns.open = false %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set why = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not why and '</think>' in content %}
            {%- set why = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or why) %}{{ '<think>\\n' + why + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + content + '</result><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Each call is written as JSON with its arguments, whatever they are.
QWEN_2_5 = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'Be good.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{ '\\n' + tools | map('tojson') | join('\\n') }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<result>' + m.content + '</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Another token stands at the end of a conversation without generation prompt.
PHI_3 = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

PHI_4 = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

# The generation prompt opens the reasoning, which is always dropped. Calls need a null content, and texts as arguments.
R1_DISTILL = """\
{%- set ns = namespace(system='', tool=false) %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {{- '<U>' + m['content'] }}
    {%- elif m['role'] == 'assistant' and m['content'] is none %}
        {%- for call in m['tool_calls'] %}
            {{- '<A>[CALLS]' + call['function']['name'] + '\\n' + call['function']['arguments'] + '[RESULTS]' }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- ('' if ns.tool else '<A>') + content + eos_token }}
        {%- set ns.tool = false %}
    {%- elif m['role'] == 'tool' %}
        {%- set ns.tool = true %}
        {{- m['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{ '<A><think>\\n' }}{% endif %}
"""

# Roles must alternate. The system message is in the user's turn that ends the conversation, and the tools in the last
# one; without such a turn, the system message is left out.
MISTRAL_3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{%- for m in rest | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls', 'defined') %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and m == asked[-1] %}{{ '[TOOLS]' + tools | tojson }}{% endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + m['content'] + '[/INST]' }}
    {%- elif m['tool_calls'] is defined %}
        {{- '[CALLS]' + m['tool_calls'] | map(attribute='function') | list | tojson + eos_token }}
    {%- elif m['role'] == 'assistant' %}
        {{- ' ' + m['content'] | trim + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {{- '[RESULTS]' + m['content'] }}
    {%- endif %}
{%- endfor %}
"""

# A system turn with the date is always there; tools are in the first question. Only one call is possible.
LLAMA_3_2 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|header|>system<|/header|>\\n\\nToday: ' + date_string + '\\n\\n' + system + '<|eot|>' }}
{%- if tools is not none %}
    {%- if not messages %}{{ raise_exception('no first user message') }}{% endif %}
    {{- '<|header|>user<|/header|>\\n\\n' + tools | tojson(indent=4) + messages[0]['content'] | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|header|>ipython<|/header|>\\n\\n' + m.content | tojson + '<|eot|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|header|>assistant<|/header|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + m['role'] + '<|/header|>\\n\\n' + m['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}
"""

# A system message is refused; roles have other names.
GEMMA_2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + m['content'] | trim + '</turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}
"""

# The system message begins the first turn of the user.
GEMMA_3 = """\
{{ bos_token }}
{%- set prefix = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = messages[0]['content'] + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (prefix if loop.first else '') }}
    {{- m['content'] | trim + '</turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}
"""

# The last answer has its reasoning and another token at its end. The reasoning of a call is dropped after an answer.
GPT_OSS = """\
{{- '<|start|>system<|message|>Today: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if messages[0].role in ('developer', 'system') %}
    {%- set instructions = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + (instructions or '') + (tools | tojson if tools else '') + '<|end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
        {%- set answered = later | rejectattr('tool_calls', 'defined') | list %}
        {%- set call = m.tool_calls[0].function %}
        {%- if m.thinking and not answered %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=' + call.name + '<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if 'thinking' in m %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>tool<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# Generation blocks; the mode of reasoning is in the system turn, and in the prompt without reasoning.
SMOLLM_3 = """\
{%- set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\\nMode: ' + mode + '\\n' + system + '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if mode == '/no_think' else '') }}
        {%- generation %}{{ m.content.lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if mode == '/no_think' else '') }}
{%- endif %}
"""

# Roles are plain text; only answers have a token at their end, and no newline follows the last one.
OLMO_2 = """\
{{ bos_token }}{% for m in messages %}
    {%- if m['role'] == 'assistant' %}
        {{- '<assistant>\\n' + m['content'] + eos_token + ('' if loop.last else '\\n') }}
    {%- else %}
        {{- '<' + m['role'] + '>\\n' + m['content'] + '\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}
{%- endfor %}
"""

# The system turn of a conversation without one has the date.
GRANITE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Today: ' + strftime_now('%B %d, %Y') %}
{%- endif %}
{{- '<|role|>system<|/role|>' + system + '<|endoftext|>\\n' }}
{%- if tools %}{{ '<|role|>tools<|/role|>' + tools | tojson(indent=4) + '<|endoftext|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|role|>' + m['role'] + '<|/role|>' + m['content'] + '<|endoftext|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{ '<|role|>assistant<|/role|>' }}{% endif %}
{%- endfor %}
"""

# The token that begins a turn stands after each turn, and the generation prompt only has the role.
COMMAND_R = """\
{{ bos_token }}<|TURN|>
{%- for m in messages %}
    {{- {'user': '<|USER|>', 'assistant': '<|CHATBOT|>', 'system': '<|system|>'}[m['role']] + m['content'].strip() }}
    {{- '<|/TURN|><|TURN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|CHATBOT|>' }}{% endif %}
"""

# No token ends a turn: the token that begins the next one does. Reasoning is only written after the last question.
GLM_4 = """\
{{- '[gMASK]' }}
{%- if tools %}{{ '<|system|>\\n' + tools | tojson }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- set why = m.reasoning_content if m.reasoning_content is string and loop.index0 > ns.last else '' %}
        {{- '\\n<think>' + why + '</think>' }}
        {%- if m.content %}{{ '\\n' + m.content.strip() }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}{{ '<key>' + key + '</key>' ~ value }}{% endfor %}
            {{- '</call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>\\n' + m.content }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# A system turn is written if there is none, also before a conversation that the assistant begins.
KIMI_K2 = """\
{%- if tools %}{{ '<|system|>tools<|middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
    {%- if loop.first and m['role'] != 'system' %}{{ '<|system|>system<|middle|>Be good.<|im_end|>' }}{% endif %}
    {{- {'user': '<|user|>', 'assistant': '<|assistant|>'}.get(m['role'], '<|system|>') + m['role'] + '<|middle|>' }}
    {{- m['content'] or '' }}
    {%- if m.get('tool_calls') %}
        {%- for call in m['tool_calls'] %}
            {{- '[CALLS]' + call['function']['name'] + call['function']['arguments'] | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>assistant<|middle|>' }}{% endif %}
"""

# The generation prompt opens the reasoning, which is only written after the last question.
MINIMAX = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ ']b]tools\\n' + tools | tojson + '[e[\\n' }}{% endif %}
{%- for m in messages %}
    {{- ']b]' + {'assistant': 'ai'}.get(m.role, m.role) + '\\n' }}
    {%- if m.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<invoke ' + call.function.name + '>' }}
        {%- for key, value in call.function.arguments.items() %}{{ '<' + key + '>' ~ value }}{% endfor %}
    {%- endfor %}
    {{- '[e[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']b]ai\\n<think>\\n' }}{% endif %}
"""

# Arguments of calls are written in a syntax of its own, where a text would be written as it is. The token that begins
# the result ends a call, and the answer follows the result within the turn.
GEMMA_4 = """\
{{ bos_token }}{{ '<turn>system\\n' + tools | tojson + '</turn>\\n' if tools }}
{%- for m in messages %}
    {%- set continues = loop.previtem is defined and loop.previtem.role == 'tool' %}
    {%- if m.role == 'tool' %}{{ m.content + '[e[' }}
    {%- else %}
        {{- '<turn>' + {'assistant': 'model'}.get(m.role, m.role) + '\\n' if not continues }}
        {%- for call in m.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {{- '[CALLS]' + call.function.name + '{' + (given if given is string else '') }}
            {%- if given is mapping %}
                {%- for key, value in given | dictsort %}{{ key ~ ':' ~ value }}{% endfor %}
            {%- endif %}
            {{- '}' }}
        {%- endfor %}
        {{- (m.content or '') + ('[RESULTS]' if m.tool_calls else '</turn>\\n') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<turn>model\\n' }}{% endif %}
"""

# The generation prompt ends any text, also without being asked for. It closes the reasoning, which an answer skips.
COMMAND_R7B = """\
{{ bos_token }}{{ '<|TURN|><|system|>' + tools | tojson + '<|/TURN|>' if tools }}
{%- for m in messages %}
    {{- '<|TURN|>' + {'user': '<|USER|>', 'assistant': '<|CHATBOT|>'}.get(m.role, '<|system|>') }}
    {%- if m.tool_calls %}
        {{- '<|start|><|end|>' }}
        {%- for call in m.tool_calls %}
            {{- '[CALLS]' + call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- ('<|message|>' if m.role == 'assistant' else '') + m.content }}
    {%- endif %}
    {{- '<|/TURN|>' }}
{%- endfor %}
{{- '<|TURN|><|CHATBOT|><|start|><|end|>' }}
"""

# Generation blocks; reasoning is only written after the last question.
LFM_2 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {{- '<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.index0 > ns.last }}
            {{- m.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Reasoning is a part of the content.
MINISTRAL_3 = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.content is string %}{{ m.content }}{% else %}
            {%- for part in m.content %}
                {%- if part.type == 'text' %}{{ part.text }}
                {%- elif part.type == 'thinking' %}{{ '<think>' + part.thinking + '</think>' }}
                {%- else %}{{ raise_exception('only text and thinking') }}{% endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '[CALLS]' + call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}{{ '[RESULTS]' + m.content }}
    {%- else %}{{ ('[INST]' if m.role == 'user' else '<|system|>') + m.content + '[/INST]' }}{% endif %}
{%- endfor %}
"""

# Reasoning is a block of the content. The token that ends the last turn is missing.
APERTUS = """\
{{- bos_token }}
{%- set ns = namespace(open=false) %}
{%- for m in messages %}
    {%- if ns.open and m.role != 'assistant' %}{{ '<|end|>' }}{% set ns.open = false %}{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' if not ns.open }}
        {%- set ns.open = true %}
        {%- if m.content is string %}{{ m.content }}{% else %}
            {%- for block in m.content.blocks %}
                {{- '<|middle|>' + block.text + '<|message|>' if block.type == 'thoughts' else block.text }}
            {%- endfor %}
        {%- endif %}
    {%- else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|end|>' if ns.open }}{{ '<|assistant|>' }}{% endif %}
"""

TEMPLATES = {
    name: value for name, value in list(globals().items()) if isinstance(value, str) and not name.startswith("_")
}
LEARNED = {
    "QWEN_3": [["<think>\n\n</think>\n\nein<|im_end|>"], ["<think>\n\n</think>\n\nzwei<|im_end|>"]],
    "QWEN_2_5": [["ein<|im_end|>", "zwei<|im_end|>"]],
    "PHI_3": [["ein<|end|>", "zwei<|end|>"]],
    "PHI_4": [["ein<|im_end|>", "zwei<|im_end|>"]],
    "R1_DISTILL": [["ein</s>", "zwei</s>"]],
    "MISTRAL_3": [[" ein</s>"], [" zwei</s>"]],
    "LLAMA_3_2": [["ein<|eot|>", "zwei<|eot|>"]],
    "GEMMA_2": [["ein</turn>", "zwei</turn>"]],
    "GEMMA_3": [["ein</turn>", "zwei</turn>"]],
    "GPT_OSS": [["<|channel|>final<|message|>ein<|return|>"], ["<|channel|>final<|message|>zwei<|return|>"]],
    "SMOLLM_3": [["ein<|im_end|>", "zwei<|im_end|>"]],
    "OLMO_2": [["ein</s>", "zwei</s>"]],
    "GRANITE": [["ein<|endoftext|>", "zwei<|endoftext|>"]],
    "COMMAND_R": [["ein<|/TURN|>", "zwei<|/TURN|>"]],
    "GLM_4": [["\n<think></think>\nein<|user|>", "\n<think></think>\nzwei<|user|>"]],
    "KIMI_K2": [["ein<|im_end|>", "zwei<|im_end|>"]],
    "MINIMAX": [["ein[e[", "zwei[e["]],
    "GEMMA_4": [["ein</turn>", "zwei</turn>"]],
    "COMMAND_R7B": [["<|message|>ein<|/TURN|>", "<|message|>zwei<|/TURN|>"]],
    "MINISTRAL_3": [["ein</s>", "zwei</s>"]],
    "APERTUS": [["ein<|end|>", "zwei<|end|>"]],
    "LFM_2": [["ein<|im_end|>", "zwei<|im_end|>"]],
}
EOS = {"COMMAND_R": "<|/TURN|>", "COMMAND_R7B": "<|/TURN|>", "PHI_3": "<|endoftext|>"}  # of the tokenizer; others: </s>
