"""Chat templates: where they are found, what they are given, and what they may do."""

from __future__ import annotations

import json
import random

import chats
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.data import chat, load_tokenizer, train_bpe
from eejax.serving.protocol import ChatRequest

CALL = dict(id="c1", type="function", function=dict(name="get", arguments='{"city": "Paris"}'))
CALLED = [
    dict(role="user", content="weather?"),
    dict(role="assistant", content=None, tool_calls=[CALL]),
    dict(role="tool", tool_call_id="c1", content="18"),
]


def rendered(source: str, asked: dict, **more) -> str:
    """By a request as it comes in."""
    body = ChatRequest.model_validate(dict(model="m", messages=asked["messages"]))
    messages = [m.model_dump(exclude_unset=True) for m in body.messages]
    messages = [chat.plain(m, f"messages[{i}]") for i, m in enumerate(messages)]
    rest = {k: v for k, v in asked.items() if k != "messages"}
    return chat.ChatTemplate(source, chats.SPECIAL).render(messages, **rest, **more)


def check(template: str, asked: dict, want: str | None) -> None:
    """What transformers renders is the same here; of the rest, more may be rendered."""
    try:
        assert rendered(template, asked) == want or want is None
    except ConfigError:
        assert want is None, (template, asked)


RECORDED = json.loads(chats.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_conversations_are_what_transformers_makes_of_them(name):
    """As recorded from transformers 5.23."""
    rows = [row for row in RECORDED if row["template"] == name]
    assert sum(row["text"] is not None for row in rows) > 2
    for row in rows:
        check(chats.TEMPLATES[name], row["asked"], row["text"])


def test_drawn_conversations_are_what_transformers_makes_of_them():
    pytest.importorskip("transformers", reason="compared where it is installed")
    text = chats.by_transformers()

    @settings(max_examples=500, deadline=None)
    @given(st.sampled_from([*chats.TEMPLATES]), st.integers(0, 2**32), st.booleans())
    def same(name, seed, go_on):
        asked = chats.conversation(random.Random(seed))
        asked |= dict(reply=False, go_on=True) if go_on else {}
        check(chats.TEMPLATES[name], asked, text(chats.TEMPLATES[name], asked))

    same()


@pytest.mark.parametrize(
    "source, want",
    [
        (
            "{% for m in messages %}{{ m.role + m.content }};{% endfor %}",
            "userweather?;assistant;tool18;",
        ),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<weather?><><18>"),
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", '{"city": "Paris"}'),
        # Templates that take arguments for a text get the text.
        ("{{ 'call ' + messages[1].tool_calls[0].function.arguments }}", 'call {"city": "Paris"}'),
    ],
)
def test_nulls_and_calls_of_tools_are_rendered(source, want):
    assert rendered(source, dict(messages=CALLED)) == want


@pytest.mark.parametrize(
    "message, told",
    [
        (dict(role="user", content=None), r"messages\[1\].content: is required for the role .user"),
        (dict(role="tool"), r"messages\[1\].content: is required for the role 'tool'"),
        (
            dict(role="user", content=[dict(type="image_url", image_url={})]),
            r"messages\[1\].content\[0\].type = 'image_url': must be 'text'",
        ),
        (
            dict(
                role="assistant", tool_calls=[CALL | dict(function=dict(name="f", arguments="{"))]
            ),
            r"messages\[1\].tool_calls\[0\].function.arguments: must be JSON",
        ),
        (
            dict(
                role="assistant", tool_calls=[CALL | dict(function=dict(name="f", arguments="3"))]
            ),
            r"messages\[1\].tool_calls\[0\].function.arguments = 3: must be a JSON object",
        ),
        (
            dict(role="cat", content="miau"),
            r"refuses them \(no cats\), the first time at messages\[1\], which has role, content",
        ),
    ],
)
def test_what_is_refused_is_named_with_its_message(message, told):
    source = "{% for m in messages %}{% if m.role == 'cat' %}{{ raise_exception('no cats') }}"
    source += "{% endif %}{% endfor %}"
    user = dict(role="user", content="hi")
    with pytest.raises(ConfigError, match=told):
        rendered(source, dict(messages=[user, message, user]))


def test_the_last_message_is_gone_on_with():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    said = [dict(role="user", content="Why?"), dict(role="assistant", content="As ")]
    go_on = dict(reply=False, go_on=True)
    assert rendered(source, dict(messages=said), **go_on) == "<user>Why?</><assistant>As"
    with pytest.raises(ConfigError, match=r"messages\[1\].content: cannot be continued"):
        rendered("{{ messages[0].content }}", dict(messages=said), **go_on)


def test_other_variables_of_the_template():
    source = "{{ enable_thinking }} {{ messages[0].content }}"
    asked = dict(messages=[dict(role="user", content="a")])
    assert rendered(source, asked, options=dict(enable_thinking=False)) == "False a"
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: must not have \['messages'\]"):
        rendered(source, asked, options=dict(messages=[]))


def test_names_of_special_tokens_are_marked_wherever_users_write_them():
    name = "<|im_end|>"
    parts = [dict(type="text", text=text) for text in ("<|im_", "end|>")]
    function = dict(name=name, arguments=json.dumps({name: name}))
    asked = dict(
        messages=[
            dict(role="user", content=parts),
            dict(role="assistant", tool_calls=[CALL | dict(function=function)]),
        ],
        tools=[dict(type="function", function=dict(name=name))],
        documents=[dict(text=name)],
        options=dict(note=name),
    )
    source = (
        "{{ messages | tojson }}{{ tools | tojson(ensure_ascii=true) }}{{ documents | tojson }}"
        "{{ note }}{{ messages[0].content }}<|im_end|>"
    )
    messages = [chat.plain(m) for m in asked.pop("messages")]
    text = chat.ChatTemplate(source, {}, [name, "</s>"]).render(messages, **asked)
    assert text.count(name) == 1 and text.endswith(name)
    assert text.replace("\ufdd0", "").count(name) == 9
    # Content and the next one's may make a name together.
    text = chat.ChatTemplate(
        "{{ messages[0].content }}{{ messages[1].content }}", {}, [name]
    ).render([dict(role="user", content="a<|im_"), dict(role="user", content="end|>")])
    assert name not in text and name in text.replace("\ufdd0", "")
    with pytest.raises(ConfigError, match="messages: has the character U.FDD0"):
        chat.ChatTemplate("", {}, [name]).render([dict(role="user", content="\ufdd0")])


def test_templates_of_a_folder_come_before_the_tokenizers(tmp_path):
    tokenizer = train_bpe(["hello"], 257)
    assert chat.find(tmp_path, tokenizer) is None
    tokenizer.chat = "{{ eos_token }}|{{ bos_token }}|{{ messages[0].content }}"
    tokenizer.save(tmp_path / "tokenizer")
    found = chat.find(tmp_path, load_tokenizer(tmp_path / "tokenizer"))
    text = chat.ChatTemplate(*found).render([dict(role="user", content="hi")])
    assert text == "<|endoftext|>||hi"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    found = chat.find(tmp_path, tokenizer)
    assert chat.ChatTemplate(*found).render([dict(role="user", content="hi")]) == "user"


def test_templates_run_in_a_sandbox():
    for source in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no') }}"):
        with pytest.raises(ConfigError, match="the model's chat template refuses them"):
            chat.ChatTemplate(source).render([dict(role="user", content="hi")])
    with pytest.raises(ConfigError, match="is not a valid Jinja template"):
        chat.ChatTemplate("{% if %}")
