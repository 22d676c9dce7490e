"""Token ids, chat renderings and decoded text equal those of transformers, every one."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

from pykestrel.loading import Source
from pykestrel.text.chat import ChatTemplate, opens_thinking
from pykestrel.text.detokenize import StreamDecoder
from pykestrel.text.tokenizer import Tokenizer, stop_set

DATA = Path(__file__).parent / "data"


def cases(model: str, kind: str) -> list[Any]:
    content = json.loads((DATA / "text" / f"chat-{model}.json").read_text(encoding="utf-8"))
    return [pytest.param(case, id=f"{n}") for n, case in enumerate(content[kind])]


@pytest.fixture(scope="module")
def qwen3_source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    packed = DATA / "tokenizers" / "qwen3"
    directory = tmp_path_factory.mktemp("qwen3")
    shutil.copy(packed / "tokenizer_config.json", directory)
    with lzma.open(packed / "tokenizer.json.xz") as file:
        (directory / "tokenizer.json").write_bytes(file.read())
    return Source("dir", directory, "qwen3")


@pytest.fixture(scope="module")
def qwen3(qwen3_source: Source) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.from_source(qwen3_source), ChatTemplate.from_source(qwen3_source)


@pytest.fixture(scope="module")
def smollm2_source(demo_model: Path) -> Source:
    return Source("gguf", demo_model, "smollm2")


@pytest.fixture(scope="module")
def smollm2(smollm2_source: Source) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.from_source(smollm2_source), ChatTemplate.from_source(smollm2_source)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = StreamDecoder(tokenizer)
    return "".join([*map(decoder.push, ids), decoder.flush()])


def check_chat(case: dict[str, Any], model: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = model
    text = template.render(case["messages"], **case["kwargs"])
    assert text == case["text"]
    assert tokenizer.encode(text, add_special_tokens=False) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]
    assert streamed(tokenizer, case["ids"]) == case["text"]
    assert not opens_thinking(text)


def check_encode(case: dict[str, Any], model: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = model
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert streamed(tokenizer, case["ids"]) == case["decoded"]


@pytest.mark.parametrize("case", cases("qwen3", "chat"))
def test_qwen3_chat(case: dict[str, Any], qwen3: tuple[Tokenizer, ChatTemplate]) -> None:
    check_chat(case, qwen3)


@pytest.mark.parametrize("case", cases("qwen3", "encode"))
def test_qwen3_encode(case: dict[str, Any], qwen3: tuple[Tokenizer, ChatTemplate]) -> None:
    check_encode(case, qwen3)


@pytest.mark.model
@pytest.mark.parametrize("case", cases("smollm2", "chat"))
def test_smollm2_chat(case: dict[str, Any], smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    check_chat(case, smollm2)


@pytest.mark.model
@pytest.mark.parametrize("case", cases("smollm2", "encode"))
def test_smollm2_encode(case: dict[str, Any], smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    check_encode(case, smollm2)


def test_qwen3_tokens(qwen3: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = qwen3
    assert len(tokenizer) == 151669
    assert tokenizer.decode([151669, 151935, 10**9, -1]) == ""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 151645)
    assert template.supports_thinking
    assert template.supports_tools
    # <think> and <tool_call> are added but not special: they stay in sight
    for text in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        (id,) = tokenizer.encode(text)
        assert id not in tokenizer.special_ids
        assert tokenizer.decode([id], skip_special_tokens=True) == text
    (end,) = tokenizer.encode("<|im_end|>")
    assert tokenizer.decode([9707, end], skip_special_tokens=True) == "Hello"
    assert stop_set({"eos_token_id": [151643]}, (7,), tokenizer) == {7, 151643, 151645}


def test_qwen3_tool_calls_and_parts(qwen3: tuple[Tokenizer, ChatTemplate]) -> None:
    """The OpenAI forms that the template itself would turn into wrong text."""
    _, template = qwen3
    text = template.render(
        [
            {"role": "user", "content": [{"type": "text", "text": "weather in Oslo?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": "w", "arguments": '{"city": "Ås"}'}}
                ],
            },
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
        ]
    )
    assert "<|im_start|>user\nweather in Oslo?<|im_end|>" in text
    assert '<tool_call>\n{"name": "w", "arguments": {"city": "Ås"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text


@pytest.mark.model
def test_smollm2_from_gguf(smollm2: tuple[Tokenizer, ChatTemplate], tmp_path: Path) -> None:
    tokenizer, template = smollm2
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|> ends a text too, whatever the one eos id
    assert len(tokenizer.special_ids) == 17
    assert not template.supports_thinking
    # A directory written from it is the same tokenizer and the same template.
    tokenizer.save(tmp_path, chat_template=template.text)
    source = Source("dir", tmp_path, "copy")
    copy = Tokenizer.from_source(source)
    text = "Tabs\tand 12 numbers,\n\n\u00e9\u0301 <|im_start|>user \U0001f916 def f():\n    pass\n"
    assert copy.encode(text) == tokenizer.encode(text)
    assert copy.special_ids == tokenizer.special_ids
    assert (len(copy), copy.bos_token_id, copy.eos_token_id) == (49152, 1, 2)
    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate.from_source(source).render(messages) == template.render(messages)
