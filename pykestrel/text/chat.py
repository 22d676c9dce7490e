"""Chat messages to the text a model was trained on: the model's own Jinja template.

`ChatTemplate` finds the template, checks the messages and renders them in a sandbox (`sandbox`).
The rendered text holds its special tokens already: encode it with ``add_special_tokens=False``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, TemplateError, UsageError

if TYPE_CHECKING:
    from .tokenizer import TextSource

MAX_TEMPLATE = 1 << 20  # characters; the longest in use have some 30,000
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
_MEDIA = ("image", "video", "audio", "file")

# What ends a turn: when one follows the last <think>, that <think> is somebody's words.
_TURN_ENDS = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</s>|\[/?INST\]|<end_of_turn>")


class ChatTemplate:
    """One model's chat template, compiled. Safe to share between threads."""

    def __init__(
        self,
        templates: Mapping[str, str],
        where: str,
        special_tokens: Mapping[str, Any] | None = None,
        *,
        given: bool = False,
    ) -> None:
        """templates: name -> Jinja text, with one called "default" or only one; where: what to
        call it in messages; special_tokens: bos_token and so on, as the template sees them; given:
        the user gave it in place of the model's own."""
        self.where = where
        self._special = dict(special_tokens or {})
        self._name = "default" if "default" in templates else next(iter(templates), "")
        if "default" not in templates and len(templates) != 1:
            raise TemplateError(
                f"{where} has {len(templates)} chat templates ({', '.join(templates)}) and none is "
                "called default; choose one with --chat-template FILE"
            )
        self.text = templates[self._name]
        self.tool_text = templates.get("tool_use", self.text)
        self._environment, self._default = _compile(self.text, where, given)
        self._tools = self._default
        if self.tool_text != self.text:
            _, self._tools = _compile(self.tool_text, f"{where}, tool_use", given)

    @classmethod
    def from_source(cls, source: TextSource, override: Path | str | None = None) -> ChatTemplate:
        """The template of a model, or ``override``: a path or the Jinja text itself.

        Looked for in chat_template.jinja, chat_template.json, tokenizer_config.json (a string, or
        a list of named ones: "tool_use" serves calls with tools), or a GGUF file's metadata.
        Raises TemplateError when there is none or it does not compile.
        """
        special = _special_tokens(source)
        if override is not None:
            text, where = _override(override)
            return cls({"default": text}, where, special, given=True)
        try:
            templates, where = find_templates(source)
        except TemplateError:
            raise
        except ModelError as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from None
        if not templates:
            looked = "its metadata (tokenizer.chat_template)"
            if source.kind == "dir":
                looked = "chat_template.jinja, chat_template.json and tokenizer_config.json"
            raise TemplateError(
                f"{source.path} has no chat template in {looked}; complete plain text instead "
                "(--raw), or give a template with --chat-template FILE"
            )
        return cls(templates, where, special)

    @property
    def supports_thinking(self) -> bool:
        """Whether the template lets thinking be switched (``enable_thinking``)."""
        return "enable_thinking" in self.text or "enable_thinking" in self.tool_text

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows tools to the model at all."""
        return re.search(r"\btools\b", self.tool_text) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation; ``add_generation_prompt`` ends it where the answer begins.

        ``kwargs`` reach the template as variables (``enable_thinking=False``). Raises UsageError
        for messages or tools of the wrong shape, TemplateError when the template fails on them.
        """
        from jinja2 import TemplateError as JinjaError

        from .sandbox import Refused

        checked = self._roles(flatten_content(messages))
        _check_tools(tools)
        variables = {
            **self._special,
            "documents": None,
            **kwargs,
            "messages": checked,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tools if tools else self._default
        self._environment.start()
        try:
            return str(template.render(variables))
        except Refused as error:
            raise TemplateError(
                f"the chat template refused the messages: {_line(error) or 'it gave no reason'}"
            ) from None
        except (JinjaError, Exception) as error:
            raise TemplateError(
                f"the chat template ({self.where}{_place(error)}) failed on these messages: "
                f"{_line(error) or type(error).__name__}"
            ) from None

    def _roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Roles that the template knows. Most templates drop a message of another role silently."""
        for n, message in enumerate(messages):
            role = message["role"]
            if role == "developer" and role not in self.text:
                message["role"] = "system"  # OpenAI's newer word for the same thing
            elif role not in ROLES and role not in self.text:
                raise UsageError(
                    f"messages[{n}] has the role {role[:40]!r}; wanted one of {', '.join(ROLES)}"
                )
        return messages


def find_templates(source: TextSource) -> tuple[dict[str, str], str]:
    """The templates of a model by name, and where they were found; ({}, "") without any."""
    if source.kind == "gguf":
        metadata = source.gguf().metadata
        where = f"{source.path.name}, tokenizer.chat_template"
        names = metadata.get("tokenizer.chat_templates")
        names = [n for n in names if isinstance(n, str)] if isinstance(names, (list, tuple)) else []
        found: dict[str, Any] = {n: metadata.get(f"tokenizer.chat_template.{n}") for n in names}
        found["default"] = metadata.get("tokenizer.chat_template")
        return _texts({n: t for n, t in found.items() if t is not None}, where), where
    text = source.read_text("chat_template.jinja")
    if text:
        return {"default": text}, f"{source.path}/chat_template.jinja"
    for name in ("chat_template.json", "tokenizer_config.json"):
        content = source.read_json(name)
        where = f"{source.path}/{name}"
        stated = content.get("chat_template") if isinstance(content, Mapping) else None
        templates = _texts(stated, where)
        if templates:
            return templates, where
    return {}, ""


def _texts(stated: Any, where: str) -> dict[str, str]:
    """A template, or several with names, as a dict; empty ones count as missing."""
    if stated is None or isinstance(stated, str):
        return {"default": stated} if stated else {}
    if isinstance(stated, (list, tuple)):
        if not all(isinstance(entry, Mapping) for entry in stated):
            raise TemplateError(f"{where} lists chat templates that are not objects with a name")
        stated = {entry.get("name"): entry.get("template") for entry in stated}
    if not isinstance(stated, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in stated.items()
    ):
        raise TemplateError(
            f"{where} has a chat template that is no text ({type(stated).__name__}); wanted Jinja "
            "text or a list of {name, template}; give another with --chat-template FILE"
        )
    return {name: text for name, text in stated.items() if text}


def _override(override: Path | str) -> tuple[str, str]:
    """The template that the user named: a file, or Jinja text itself."""
    try:
        is_file = Path(override).is_file()
    except (OSError, ValueError):  # a long text is no file name
        is_file = False
    if is_file:
        try:
            return Path(override).read_text(encoding="utf-8-sig"), str(override)
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(
                f"the chat template {override} cannot be read: {_line(error)}"
            ) from None
    if isinstance(override, str) and re.search(r"\{[{%#]", override):
        return override, "the given text"
    raise UsageError(
        f"the chat template {str(override)[:80]!r} is neither a file that is there nor Jinja text; "
        "give the path of a template file"
    )


def _special_tokens(source: TextSource) -> dict[str, Any]:
    """The variables bos_token, eos_token, ... of a template. A damaged list is the tokenizer's to
    complain about: here it counts as empty."""
    from .dir_tokenizer import named_tokens
    from .gguf_tokenizer import special_token_texts

    try:
        if source.kind == "gguf":
            return dict(special_token_texts(source.gguf().metadata))
        config = source.read_json("tokenizer_config.json") or {}
        token_map = source.read_json("special_tokens_map.json") or {}
        named: dict[str, Any] = dict(named_tokens(config, token_map))
    except (ModelError, AttributeError, TypeError):
        return {}
    more = config.get("additional_special_tokens")
    if isinstance(more, list) and more and all(isinstance(t, str) for t in more):
        named["additional_special_tokens"] = more
    return named


def _compile(text: str, where: str, given: bool) -> tuple[Any, Any]:
    """An environment and the compiled template; TemplateError with the line of a mistake."""
    from jinja2 import TemplateSyntaxError

    from .sandbox import ChatEnvironment

    if len(text) > MAX_TEMPLATE:
        raise TemplateError(
            f"the chat template ({where}) has {len(text)} characters; at most {MAX_TEMPLATE} are "
            "read: give another with --chat-template FILE"
        )
    environment = ChatEnvironment()
    try:
        return environment, environment.load(text)
    except TemplateSyntaxError as error:
        place, words = f" line {error.lineno}", _line(error.message or error)
    except RecursionError:
        place, words = "", "it is nested too deeply"
    except Exception as error:  # of Python's compiler: too many nested blocks, and the like
        place, words = "", _line(error) or type(error).__name__
    advice = "complete plain text instead (--raw), or give a template with --chat-template FILE"
    if given:
        advice = "correct it, or leave it out to use the model's own"
    raise TemplateError(
        f"the chat template ({where}{place}) does not compile: {words.rstrip('.')}; {advice}"
    )


def _line(error: object) -> str:
    """The words of an error on one line."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:297] + "..."


def _place(error: BaseException) -> str:
    """ " line 12": Jinja gives the frames of a template the template's own line numbers."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" line {line}" if line else ""


def flatten_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with ``content`` as plain text, checked.

    Text parts are joined by newlines (as vLLM and llama.cpp do), null and a missing content of an
    assistant become "", and the arguments of tool calls, a JSON text in the OpenAI form, become
    the object that templates expect. Raises UsageError that names the message otherwise.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(
            f"messages must be a list of {{role, content}}, got {type(messages).__name__}"
        )
    if not messages:
        raise UsageError("messages is empty: a chat needs at least one message")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(
            f"{where} must be an object with role and content, got {type(message).__name__}"
        )
    flat = {str(key): value for key, value in message.items()}
    role = flat.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where}.role must be a text like user or assistant, got {role!r:.60}")
    calls = flat.get("tool_calls")
    if "content" not in flat and not (role == "assistant" and calls):
        raise UsageError(f"{where} (role {role[:40]}) has no content")
    flat["content"] = _text(flat.get("content"), f"{where}.content")
    if flat.get("reasoning_content") is not None:
        _need_text(flat["reasoning_content"], f"{where}.reasoning_content")
    if calls is not None:
        if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
            raise UsageError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
        flat["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)
        ]
    return flat


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, (list, tuple)):
        return "\n".join(_part(part, f"{where}[{n}]") for n, part in enumerate(content))
    return _need_text(content, where)


def _need_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be text, got {type(value).__name__}")
    return value


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
        raise UsageError(
            f"{where} is an {kind[:40]!r} part, but this version reads text only: leave out "
            "images, audio and files"
        )
    if kind != "text":
        got = kind if kind is not None else type(part).__name__
        raise UsageError(f'{where} must be {{"type": "text", "text": ...}}, got {got!r:.60}')
    return _need_text(part.get("text"), f"{where}.text")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} must be an object with function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is not None and not isinstance(arguments, Mapping):
        raise UsageError(
            f"{where}.function.arguments must be JSON text or an object, got "
            f"{type(arguments).__name__}"
        )
    function = {**function, "arguments": arguments if arguments is not None else {}}
    return {**call, "function": function} if "function" in call else function


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise UsageError(f"tools must be a list of objects, got {type(tools).__name__}")
    for n, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UsageError(f"tools[{n}] must be an object, got {type(tool).__name__}")


def opens_thinking(rendered: str) -> bool:
    """Whether a rendered prompt ends inside an open ``<think>``, so that the answer begins there.

    A ``<think>`` that a turn's end follows was part of a message and opens nothing.
    """
    start = rendered.rfind("<think>")
    if start < 0:
        return False
    rest = rendered[start + len("<think>") :]
    return "</think>" not in rest and _TURN_ENDS.search(rest) is None
