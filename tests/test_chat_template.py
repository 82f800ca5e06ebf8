"""Chat templates: the ids that transformers gives, one BOS, and one sentence for whatever goes wrong."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tokenizer_files import byte_level, llama2, sentencepiece, write_json

from minillm.chat_template import ChatTemplate
from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}
{% else %}
    {% set system = '' %}{% set turns = messages %}
{% endif %}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate:\\nuser, assistant, user') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {% else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""
CHATML = """{%- for message in messages %}
    {{- '<tool>' + message.role + '\\n' + message.content + '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<tool>assistant\\n' }}{% endif %}"""
TOUR = """{{ bos_token }}{% if tools is not none %}tools{% endif %}{% set ns = namespace(n=0) %}
{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{% set ns.n = ns.n + 1 %}
{{ m | tojson }} {{ {'a': [1, '<é>']} | tojson(indent=2) }} {{ m.content[:2] | upper }}
{% generation %}
  {{ m.role ~ ns.n }}
{% endgeneration %}
{% if ns.n == 2 %}{% break %}{% endif %}
{% endfor %}{{ pad_token }}{{ missing }}{{ unk_token }}{{ dict(a=1) | length }}"""

HELLO = [{"role": "user", "content": "Hello 한국어"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '<b>Hello</b> & "hi"'},
    {"role": "assistant", "content": "  again  "},
    {"role": "user", "content": "fox?\n"},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [LLAMA2, CHATML, TOUR], ids=["llama2", "chatml", "tour"])
@pytest.mark.parametrize("make", [byte_level, llama2])
def test_ids_equal_transformers(make: Any, template: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make(tmp_path, chat_template=template)
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for messages in (HELLO, TALK):
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False, tokenize=True
        )
        assert ours.apply_chat_template(messages, add_generation_prompt) == expected


@pytest.mark.parametrize("make", [byte_level, llama2, sentencepiece])
def test_one_bos_and_special_tokens_as_ids(make: Any, tmp_path: Path) -> None:
    """Fault: the template writes BOS and encoding adds another; "</s>" of the template is spelled out in letters."""
    tokenizer = Tokenizer.from_dir(make(tmp_path, chat_template=LLAMA2, add_bos_token=True))
    ids = tokenizer.apply_chat_template(TALK)
    assert ids[:2].count(1) == 1
    assert ids.count(1) == 2
    assert ids.count(2) == 1
    assert "</s>" not in tokenizer.decode(ids)


def test_the_jinja_file_comes_before_the_config(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, chat_template="config")
    (folder / "chat_template.jinja").write_text("{{ 'file' }}", encoding="utf-8")
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == "file"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ([{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "plain"}], "plain"),
        ([{"name": "tool_use", "template": "tool"}], None),
        ([], None),
        (None, None),
    ],
)
def test_named_templates(template: Any, expected: str | None, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, chat_template=template))
    assert tokenizer.has_chat_template == (expected is not None)
    if expected is not None:
        assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == expected
    else:
        with pytest.raises(TokenizerError, match="no chat template"):
            tokenizer.apply_chat_template(HELLO)


def test_names_of_a_sentencepiece_model_without_a_config(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}fox{{ eos_token }}", encoding="utf-8")
    ids = Tokenizer.from_dir(folder).apply_chat_template(HELLO)
    assert (ids[0], ids[-1]) == (1, 2)


def test_a_token_that_does_not_exist_prints_nothing(tmp_path: Path) -> None:
    """Fault: `{{ bos_token }}` of a model without one prints "None"."""
    folder = byte_level(tmp_path, bos_token=None, chat_template="{{ bos_token }}fox")
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == "fox"


def test_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(HELLO) == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must\nalternate') }}", "Roles must alternate"),
        ("a\n{% if %}", "line 2"),
        ("{% for m in messages %}", "broken"),
        ("{{ missing.name }}", "missing"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 1 + 'a' }}", "unsupported"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{{ missing() }}", "missing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ range(10000000) }}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'other' %}", "loader"),
    ],
)
def test_templates_that_fail(template: str, says: str) -> None:
    """One sentence for whatever the template does, and no way out of the sandbox."""
    with pytest.raises(TokenizerError, match=says) as caught:
        ChatTemplate(template, {}).render(HELLO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Hello", "list of messages"),
        ({"role": "user", "content": "a"}, "list of messages"),
        (5, "list of messages"),
        ([], "empty"),
        (["Hello"], "message 0"),
        ([*HELLO, {"role": "user"}], 'message 1 .*"content", and has nothing'),
        ([{"content": "a"}], '"role", and has nothing'),
        ([{"role": "user", "content": None}], "NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "list"),
        ([{"role": 1, "content": "a"}], "int"),
    ],
)
def test_messages_that_are_none(messages: Any, says: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, chat_template=CHATML))
    with pytest.raises(TokenizerError, match=says):
        tokenizer.apply_chat_template(messages)


def test_messages_may_be_any_mapping() -> None:
    messages = tuple(MappingProxyType(message) for message in HELLO)
    assert ChatTemplate("{{ messages | tojson }}", {}).render(messages) == json.dumps(HELLO, ensure_ascii=False)


def test_surrogate_in_a_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, chat_template=CHATML))
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "\ud83d"}])


def test_template_of_a_list_in_the_config_file_is_read_as_utf8(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    write_json(folder / "tokenizer_config.json", {"chat_template": "안녕 {{ messages[0].content }}"})
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == "안녕 Hello 한국어"
