"""Chat templates: where they are found, and what they may do."""

from __future__ import annotations

import pytest

from eejax.common.errors import ConfigError
from eejax.data import load_tokenizer, train_bpe
from eejax.serving import chat


def test_templates_of_a_folder_come_before_the_tokenizers(tmp_path):
    tokenizer = train_bpe(["hello"], 257)
    assert chat.find(tmp_path, tokenizer) is None
    tokenizer.chat = "{{ eos_token }}|{{ bos_token }}|{{ messages[0].content }}"
    tokenizer.save(tmp_path / "tokenizer")
    found = chat.find(tmp_path, load_tokenizer(tmp_path / "tokenizer"))
    text = chat.Template(*found).render([dict(role="user", content="hi")])
    assert text == "<|endoftext|>||hi"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    found = chat.find(tmp_path, tokenizer)
    assert chat.Template(*found).render([dict(role="user", content="hi")]) == "user"


def test_templates_run_in_a_sandbox():
    for source in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no') }}"):
        with pytest.raises(ConfigError, match="the model's chat template refuses them"):
            chat.Template(source).render([dict(role="user", content="hi")])
    with pytest.raises(ConfigError, match="is no template of Jinja"):
        chat.Template("{% if %}")
