"""Chat templates: found, rendered as transformers renders them, and bounded when hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import MemorySource, byte_level_metadata

from pykestrel.errors import KestrelError, TemplateError, UsageError
from pykestrel.text import sandbox
from pykestrel.text.chat import ChatTemplate, flatten_content

HI = [{"role": "user", "content": "hi"}]


def render(template: str, messages: Any = HI, **kwargs: Any) -> str:
    return ChatTemplate({"default": template}, "T").render(messages, **kwargs)


# -- where the template is found --------------------------------------------------------------


def found(files: dict[str, Any], **kwargs: Any) -> str:
    return ChatTemplate.from_source(MemorySource(files)).render(HI, **kwargs)


def test_lookup_order() -> None:
    files: dict[str, Any] = {
        "chat_template.jinja": "jinja",
        "chat_template.json": {"chat_template": "json"},
        "tokenizer_config.json": {"chat_template": "config"},
    }
    assert found(files) == "jinja"
    del files["chat_template.jinja"]
    assert found(files) == "json"
    files["chat_template.json"] = {"chat_template": None}
    assert found(files) == "config"
    files["tokenizer_config.json"] = {"chat_template": ""}
    with pytest.raises(TemplateError, match=r"no chat template in chat_template.jinja, .*--raw"):
        found(files)


def test_named_templates() -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files: dict[str, Any] = {"tokenizer_config.json": {"chat_template": named}}
    assert found(files) == "d"
    assert found(files, tools=[{"type": "function"}]) == "t"
    files["tokenizer_config.json"] = {"chat_template": [{"name": "rag", "template": "r"}]}
    assert found(files) == "r"  # the only one
    two = [{"name": "rag", "template": "r"}, {"name": "x", "template": "x"}]
    files["tokenizer_config.json"] = {"chat_template": two}
    with pytest.raises(TemplateError, match=r"2 chat templates \(rag, x\) and none is called"):
        found(files)


def test_gguf_template_and_special_tokens() -> None:
    metadata = byte_level_metadata(bos_token_id=262)
    with pytest.raises(TemplateError, match=r"no chat template in its metadata"):
        ChatTemplate.from_source(MemorySource(metadata=metadata))
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "t"
    template = ChatTemplate.from_source(MemorySource(metadata=metadata))
    assert template.render(HI) == "<|endoftext|><|im_end|>"
    assert template.render(HI, tools=[{}]) == "t"


def test_special_tokens_of_a_directory() -> None:
    files = {
        "chat_template.jinja": "{{ bos_token }}|{{ eos_token }}|{{ additional_special_tokens }}",
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>"},
            "additional_special_tokens": ["<x>"],
        },
        "special_tokens_map.json": {"eos_token": "</s>"},
    }
    assert found(files) == "<s>|</s>|['<x>']"
    files["tokenizer_config.json"] = {"bos_token": 7}  # the tokenizer complains, not the template
    assert found(files) == "||"


def test_override(tmp_path: Path) -> None:
    source = MemorySource({"chat_template.jinja": "model's"})
    file = tmp_path / "t.jinja"
    file.write_text("from {{ messages[0].role }}", encoding="utf-8")
    for override in (file, str(file), "from {{ messages[0].role }}"):
        assert ChatTemplate.from_source(source, override).render(HI) == "from user"
    for override in (tmp_path / "none", "none.jinja", "x" * 5000, "a\0b"):
        with pytest.raises(UsageError, match="neither a file that is there nor Jinja text"):
            ChatTemplate.from_source(source, override)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(TemplateError, match="cannot be read"):
        ChatTemplate.from_source(source, file)


@pytest.mark.parametrize("stated", [7, [1], [{"name": 1, "template": "x"}], {"default": 3}, True])
def test_damaged_statements(stated: Any) -> None:
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        found({"tokenizer_config.json": {"chat_template": stated}})


# -- how it is rendered ------------------------------------------------------------------------


FOR = "{% for m in [1, 2, 3] %}"
COUNT = "{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # trim_blocks, lstrip_blocks
        (FOR + "{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        (FOR + "{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% generation %}said {{ 1 ~ 'x' }}{% endgeneration %}!", "said 1x!"),
        ("{{ messages[::-1][0].content[1:] }}{{ 'abc'[:-1] }}{{ [1, 2, 3][::2] }}", "iab[1, 3]"),
        ("{{ nothing }}{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
        ("{{ 'a' * 3 }}{{ 2 ** 10 }}", "aaa1024"),
        ("{{ 'x%sy%03d' % ('-', 5) }}{{ '%d'|format(3) }}", "x-y0053"),
        ("{{ [1, 2, 3]|slice(2)|list }}{{ [1]|batch(2, 0)|list }}", "[[1, 2], [3]][[1, 0]]"),
        ("{{ ['a', 'b']|join(', ') }}{{ 'aXa'|replace('a', 'bb') }}", "a, bbbXbb"),
        ("{{ 'a\nb'|indent(1) }}{{ 'aba'.replace('a', 'cc') }}", "a\n bccbcc"),
        ("{{ messages|map(attribute='role')|join('+') }}{{ ' a '|trim|upper }}", "userA"),
        ("{% set x %}q{% endset %}{{ x }}", "q"),
        ("{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f(1) }}", "[1]"),
        (COUNT + "{{ ns.n }}", "6"),
    ],
)
def test_renderings(template: str, expected: str) -> None:
    assert render(template) == expected


def test_tojson_is_transformers() -> None:
    value = {"b": "<é>&'\"", "a": [1, None]}
    assert render("{{ v|tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    expected = json.dumps(value, ensure_ascii=False, indent=2)
    assert render("{{ v|tojson(indent=2) }}", v=value) == expected


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_raise_exception_is_the_models_word() -> None:
    with pytest.raises(TemplateError, match=r"^the chat template refused the messages: no system$"):
        render("{{ raise_exception('no\nsystem') }}")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", r"\(T line 1\) does not compile"),
        ("\n\n{{ x.y.z }}", r"\(T line 3\) failed on these messages: 'x' is undefined"),
        ("{{ 'x'|nofilter }}", r"No filter named 'nofilter'"),
        ("{{ 1 / 0 }}", r"failed on these messages: division by zero"),
        ("{{ messages[5].role }}", r"list object has no element 5"),
        ("{% include 'other' %}", r"no loader"),
        ("{{ ''.__class__.__mro__ }}", r"unsafe"),
        ("{{ messages.append(1) }}", r"unsafe"),
        ("{{" * 2000, r"does not compile"),
        ("{{ " + "(" * 400 + "1" + ")" * 400 + " }}", r"nested too deeply"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, r"does not compile"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"recursion"),
        ("x" * (1 << 20) + "x", r"has 1048577 characters; at most 1048576"),
    ],
)
def test_failures_are_one_line(template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        render(template)
    assert "\n" not in str(caught.value)


# -- hostile templates -------------------------------------------------------------------------

BIG = "('x' * 10000000)"
MANY = f"([{BIG}] * 100000)"


def grow(start: str, step: str) -> str:
    """A loop that sets ns.s, from ``start``, to ``step`` again and again."""
    head = "{% set ns = namespace(s=" + start + ") %}{% for i in range(9999) %}"
    return head + "{% set ns.s = " + step + " %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ ([0] * 10**9)|length }}",
        "{{ 10 ** (10 ** 10) }}",
        grow("9", "ns.s * ns.s"),
        grow("'xx'", "ns.s ~ ns.s"),
        grow("'xx'", "ns.s + ns.s"),
        grow("[1]", "ns.s + ns.s"),
        grow("[]", f"ns.s + [{BIG}[1:]]"),
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%((a))1000000000d' % {'(a)': 1} }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x'.zfill(10**10) }}",
        "{{ 'x'.expandtabs(10**10) }}",
        "{{ 'x'|center(10**10) }}",
        "{{ 'x\ny'|indent(10**10) }}",
        "{{ {'a': 1}|tojson(indent=10**9) }}",
        "{{ (5).to_bytes(10**9, 'big') }}",
        "{{ lipsum(10**9) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ strftime_now('%1000000000d') }}",
        f"{{{{ {BIG}.replace('x', 'y' * 1000) }}}}",
        f"{{{{ {BIG}|replace('x', 'y' * 1000) }}}}",
        f"{{{{ {BIG}.join(['a'] * 100000) }}}}",
        f"{{{{ (['a'] * 100000)|join({BIG}) }}}}",
        f"{{{{ {MANY} }}}}",
        f"{{{{ {MANY}|tojson }}}}",
        f"{{{{ {MANY}|string }}}}",
        f"{{{{ {MANY}|upper }}}}",
        f"{{{{ {MANY}|map('upper')|join }}}}",
        f"{{{{ '%s' % ({MANY}, ) }}}}",
        f"{{{{ {MANY} ~ 'x' }}}}",
    ],
)
def test_hostile_templates_are_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(sandbox, "MAX_WORK", 1 << 26)
    with pytest.raises(TemplateError) as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_long_conversations_are_not_hostile() -> None:
    """4 MB in 2000 messages pass, with a loop in the template that looks at all of them twice."""
    template = (
        "{% for m in messages[::-1] %}{% if m.content.startswith('zz') %}?{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
    )
    text = "x" * 2000
    assert len(render(template, [{"role": "user", "content": text}] * 2000)) == 2000 * 2007


WORDS = """{{ }} {% %} {# #} if endif for endfor in messages loop.index ( ) [ ] . | ~ + * ** % - ' "
1 99999999 x role content tojson join range set macro endmacro call filter is not none break
generation endgeneration self true"""


@settings(max_examples=300)
@given(parts=st.lists(st.sampled_from([*WORDS.split(), "\n"]), max_size=25))
def test_any_template_renders_or_fails_in_one_line(parts: list[str]) -> None:
    message = ""
    try:
        assert isinstance(render(" ".join(parts)), str)
    except KestrelError as error:
        message = str(error)
    assert "\n" not in message


# -- messages ----------------------------------------------------------------------------------


def test_content_is_flattened() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten_content([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert flatten_content([{"role": "user", "content": None}])[0]["content"] == ""
    assert flatten_content([{"role": "user", "content": []}])[0]["content"] == ""
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    original = {"role": "assistant", "tool_calls": [call]}
    (flat,) = flatten_content([original])
    assert flat["content"] == ""
    assert flat["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert original == {"role": "assistant", "tool_calls": [call]}  # a copy was changed
    call["function"] = {"name": "f", "arguments": "not json"}
    (flat,) = flatten_content([original])
    assert flat["tool_calls"][0]["function"]["arguments"] == "not json"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (7, "messages must be a list"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\].role must be a text"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\].role must be a text"),
        ([{"role": "user"}], r"messages\[0\] \(role user\) has no content"),
        ([*HI, {"role": "user", "content": 5}], r"messages\[1\].content must be text, got int"),
        ([{"role": "user", "content": {"type": "text"}}], r"content must be text, got dict"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\] must be .*got 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"'image_url' part.*text only"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], r"'input_audio' part"),
        ([{"role": "user", "content": [{"type": "x"}]}], r"got 'x'"),
        ([{"role": "assistant", "content": "", "tool_calls": "f"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": 1}]}], "function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "arguments must be JSON text or an object",
        ),
        ([{"role": "assistant", "content": "", "reasoning_content": 1}], "reasoning_content"),
    ],
)
def test_wrong_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        flatten_content(messages)
    assert "\n" not in str(caught.value)


def test_roles() -> None:
    generic = "{% for m in messages %}{{ m.role }};{% endfor %}"
    assert render(generic, [{"role": "developer", "content": "x"}]) == "system;"
    knows = generic + "{# developer and narrator #}"
    assert render(knows, [{"role": "developer", "content": "x"}]) == "developer;"
    assert render(knows, [{"role": "narrator", "content": "x"}]) == "narrator;"
    with pytest.raises(UsageError, match=r"messages\[0\] has the role 'narrator'; wanted one of"):
        render(generic, [{"role": "narrator", "content": "x"}])


def test_tools_of_the_wrong_shape() -> None:
    for tools in ("f", {"type": "function"}, [1]):
        with pytest.raises(UsageError, match="tools"):
            render("x", tools=tools)
    assert not ChatTemplate({"default": "x"}, "T").supports_tools
    assert not ChatTemplate({"default": "x"}, "T").supports_thinking
