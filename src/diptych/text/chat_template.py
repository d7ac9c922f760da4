"""Messages to one prompt text, by the chat template that the model brings.

Templates come from the model directory only, never from a request, and run in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.clock import Clock, SystemClock
from diptych.errors import InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from diptych.text.tokenizer import read_tokenizer_config

if TYPE_CHECKING:
    from diptych.text.sandboxed_template import SandboxedTemplate


class ChatTemplate:
    """One model's chat template; without one, every `render` is refused."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._clock = clock or SystemClock()
        self._template: SandboxedTemplate | None = None
        if source is not None:
            # only here: many an engine has no template, and jinja takes its time
            from diptych.text.sandboxed_template import SandboxedTemplate

            self._template = SandboxedTemplate(source, self._strftime_now)

    @classmethod
    def from_directory(cls, path: Path, clock: Clock | None = None) -> ChatTemplate:
        """The template in `chat_template.jinja`, else in `tokenizer_config.json`.

        Raises:
            ModelLoadError: a file cannot be read, or the template does not parse.
        """
        config = read_tokenizer_config(path)
        return cls(_source(path, config), _special_tokens(config), clock)

    @property
    def exists(self) -> bool:
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; special tokens are in it already.

        Raises:
            InvalidRequestError: no template, no messages, a malformed message, or the template
                refuses the conversation.
            UnsupportedFeatureError: a content part is not text.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use a plain prompt", param="messages"
            )
        return self._template.render(
            messages=_plain_messages(messages),
            add_generation_prompt=add_generation_prompt,
            **{"tools": None, "documents": None, **self._special_tokens, **variables},
        )

    def _strftime_now(self, form: str) -> str:
        return datetime.fromtimestamp(self._clock.unix()).strftime(form)


def _source(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ModelLoadError("chat_template in tokenizer_config.json is not a string")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list", param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with its content as one string, as templates expect."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a non-empty string", param="messages")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(f"{where}.content[{i}]", p) for i, p in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be a string or a list", param="messages")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"{where}.content is missing", param="messages")
    return {**message, "content": "" if content is None else content}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "refusal"):
        raise UnsupportedFeatureError(
            f"{where}: only text parts are supported in this version, not {kind!r}",
            param="messages",
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string", param="messages")
    return text
