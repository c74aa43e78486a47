"""Chat templates: Jinja programs that come with a model. They are untrusted, and run sandboxed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MESSAGE = "{'role': 'user', 'content': 'Hi'}"


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt that a template makes of messages; ValueError for malformed ones, and for whatever it raises."""
    check_messages(messages)
    try:
        return _compile(template).render(messages=messages, **variables)
    except Exception as error:  # a template is somebody's program and may fail in any way
        raise ValueError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error


def variables(template: str) -> frozenset[str]:
    """Names that a template reads and does not set itself; empty where it cannot be parsed."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except jinja2.TemplateError:
        return frozenset()


def check_messages(messages: Any) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r} must be a list of one or more messages like {_MESSAGE}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}]={message!r} must be a mapping with a string 'role', like {_MESSAGE}")
        content = message.get("content")
        parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or parts):
            raise ValueError(f"messages[{i}] has content={content!r}; it must be a string, None, or a list of parts")


class _GenerationTag(Extension):
    """`{% generation %}`, which marks an assistant's words for training: here they are only words."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    """The rules and helpers that transformers gives a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
