import json
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from diptych.text.chat_template import ChatTemplate
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_model

USER = [{"role": "user", "content": "Hi"}]


def test_the_models_template_writes_the_prompt(tmp_path: Path) -> None:
    template = ChatTemplate.from_directory(make_tiny_model(tmp_path))
    assert template.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert not template.render(USER, add_generation_prompt=False).endswith("assistant\n")


def test_a_jinja_file_comes_before_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config", "eos_token": "<e>", "bos_token": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "config"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file{{ eos_token }}")
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "<b>file<e>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "d"


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = ChatTemplate(CHAT_TEMPLATE).render([{"role": "user", "content": parts}])
    assert "user\na\nb<|im_end|>" in rendered


def test_what_templates_of_the_field_use_is_there() -> None:
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ 'none' if tools is none }}{{ flag }}"
    )
    messages = [{"role": "user", "content": "é<"}] * 2
    rendered = ChatTemplate(source).render(messages, flag="!")
    assert rendered == '{"role": "user", "content": "é<"}4none!'


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must not be empty"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"content is missing"),
        ([{"role": "user", "content": 3}], r"content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate(CHAT_TEMPLATE).render(messages)


def test_an_image_part_is_a_named_refusal() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(UnsupportedFeatureError, match="image_url"):
        ChatTemplate(CHAT_TEMPLATE).render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
        "{% for i in range(999999999) %}x{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_the_callers_mistake(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        ChatTemplate(source).render(USER)


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(CHAT_TEMPLATE).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    template = ChatTemplate.from_directory(tmp_path)
    assert not template.exists
    with pytest.raises(InvalidRequestError, match="no chat template"):
        template.render(USER)


@pytest.mark.parametrize("several", [[], [1, None], [{"name": "tool_use", "template": "t"}]])
def test_several_templates_without_a_default_are_none(tmp_path: Path, several: list[Any]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert not ChatTemplate.from_directory(tmp_path).exists


def test_a_template_that_does_not_parse_fails_at_load() -> None:
    with pytest.raises(ModelLoadError, match="does not parse"):
        ChatTemplate("{% for %}")
