"""A template that a model brings, run where it can do no harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from diptych.errors import InvalidRequestError, ModelLoadError

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class SandboxedTemplate:
    """A template with what chat templates expect: `tojson`, `raise_exception`, `strftime_now`.

    Raises:
        ModelLoadError: it does not parse.
    """

    def __init__(self, source: str, strftime_now: Callable[[str], str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the chat template does not parse: {error}") from error

    def render(self, **variables: Any) -> str:
        """The text.

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        try:
            return self._template.render(**variables)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only keeps its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
