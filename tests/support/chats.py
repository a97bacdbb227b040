"""Conversations drawn for chat templates, and what transformers makes of them.

python tests/support/chats.py    records tests/serving/recorded_chats.json, with transformers
"""

from __future__ import annotations

import json
import pathlib
import random

FILE = pathlib.Path(__file__).parents[1] / "serving" / "recorded_chats.json"
SPECIAL = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")

# What templates of models do, each in few words.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>'"
        " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% endif %}"
    ),
    "tools": (
        "{{ bos_token }}{% if tools is not none %}[TOOLS]{{ tools | tojson(indent=2) }}{% endif %}"
        "{% if documents %}[DOCS]{{ documents | length }}{% endif %}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.tool_calls is defined %}{% for c in m.tool_calls %}[CALL]"
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}="
        "{{ v | tojson }}{% endfor %}"
        "{% endfor %}\n"
        "    {%- elif m.role == 'tool' %}[RESULT {{ m.tool_call_id }}]{{ m.content | trim }}\n"
        "    {%- else %}<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>"
        "{{ m.content }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}{{ eos_token }}"
    ),
    "words": (
        "{%- for m in messages -%}{%- if 'content' in m -%}{{ m.content | length }}{%- else -%}-"
        "{%- endif -%}{%- if m.tool_calls -%}{{ m.tool_calls[0].function | tojson }}{%- endif -%}"
        "{%- endfor -%}{{ pad_token }}{{ sep_token }}{% if mask_token is defined %}mask{% endif %}"
    ),
    "alternate": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) "
        "%}{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}{{ m.content + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "thoughts": (
        "{%- set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% continue %}{% endif %}{% if loop.index > 5 %}{% break %}{% endif %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
        "{% set ns.last = m.role %}{% endfor %}{{ ns.last }}{% generation %}!{% endgeneration %}"
    ),
    "calls": (
        "{% for m in messages %}{{ m.role }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.name }}{{ c.function['arguments'] | tojson }}{% endfor %}{% endif %}"
        "{% endfor %}{{ {'<&>': 'é'} | tojson }}{% if add_generation_prompt %}:{% endif %}"
    ),
}
TOOL = dict(
    type="function",
    function=dict(name="get", parameters=dict(type="object", properties={"city": {}})),
)


def conversation(rng: random.Random) -> dict:
    """A request's messages, and what else goes to the template."""

    def word():
        return rng.choice(["hi", "", " a b ", "é🙂\n", "<b>", "</think>x", '"q"', "{{ x }}"])

    messages = []
    if rng.random() < 0.3:
        messages.append(dict(role="system", content=word()))
    for _ in range(rng.randint(1, 4)):
        user = dict(role="user", content=word())
        if rng.random() < 0.2:
            user["name"] = "ann"
        if rng.random() < 0.2:
            user["content"] = [dict(type="text", text=word()) for _ in range(2)]
        reply = dict(role="assistant", content=word())
        for key in ("refusal", "audio", "function_call", "tool_calls", "name"):
            if rng.random() < 0.3:
                reply[key] = None
        if rng.random() < 0.2:
            reply[rng.choice(["reasoning", "thinking", "reasoning_content"])] = word()
        messages += [user, reply]
        if rng.random() < 0.4:
            reply["content"] = rng.choice([None, word()])
            arguments = rng.choice(['{"city": "Paris"}', "{}", '{"n": [1, null], "é": "<"}'])
            function = dict(name="get", arguments=arguments)
            reply["tool_calls"] = [dict(id="c1", type="function", function=function)]
            messages.append(dict(role="tool", tool_call_id="c1", content=word()))
    return dict(
        messages=messages[: rng.randint(1, len(messages))],
        tools=rng.choice([None, [TOOL]]),
        documents=rng.choice([None, [dict(title="t", text=word())]]),
        reply=rng.random() < 0.7,
    )


def as_transformers_wants(messages: list[dict]) -> list[dict]:
    """Content as text, and arguments as objects, as its documentation says."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def by_transformers():
    """(template, conversation) -> its text, or None where transformers fails."""
    import transformers
    from tokenizers import Tokenizer, models

    inner = Tokenizer(models.WordLevel({n: i for i, n in enumerate(SPECIAL.values())}, "<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)

    def text(template: str, asked: dict) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                as_transformers_wants(asked["messages"]),
                tools=asked["tools"],
                documents=asked["documents"],
                chat_template=template,
                add_generation_prompt=asked["reply"],
                continue_final_message=asked.get("go_on", False),
                tokenize=False,
            )
        except Exception:
            return None

    return text


if __name__ == "__main__":
    text, rng, rows = by_transformers(), random.Random(0), []
    for name, template in TEMPLATES.items():
        for _ in range(10):
            asked = conversation(rng)
            rows.append(dict(template=name, asked=asked, text=text(template, asked)))
            if asked["messages"][-1]["role"] == "assistant":
                asked = asked | dict(reply=False, go_on=True)
                rows.append(dict(template=name, asked=asked, text=text(template, asked)))
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(len(rows), sum(row["text"] is None for row in rows))
