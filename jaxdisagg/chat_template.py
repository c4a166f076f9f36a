"""Chat templates of model folders, rendered as Hugging Face does, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One Jinja template that turns a conversation into a prompt.

    Raises ValueError if the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        helpers = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, globals=helpers)
        except jinja2.TemplateSyntaxError as error:
            message = f"invalid chat template, line {error.lineno}: {error.message}"
            raise ValueError(message) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> str:
        """Prompt of a conversation, up to and including the opening of the assistant's turn.

        Raises ValueError with the template's own words where it refuses the conversation.
        """
        variables = {
            **self._special,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **(options or {}),
            "messages": [dict(message) for message in messages],
        }
        try:
            return self._template.render(variables)
        except (
            *(jinja2.TemplateError, TypeError, ArithmeticError, LookupError),
            *(AttributeError, RecursionError),
        ) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error


def load_template(
    folder: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model folder, or None; `settings` is its tokenizer_config.json.

    Looked for in chat_template.jinja, chat_template.json, tokenizer_config.json, in this order.
    Raises ValueError naming the file where it is unusable.
    """
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    path = next((folder / n for n in names if (folder / n).is_file()), None)
    if path is None:
        return None
    try:
        if path.name == "chat_template.jinja":
            source = path.read_text(encoding="utf-8")
        elif path.name == "chat_template.json":
            source = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
        else:
            source = settings.get("chat_template")
        if isinstance(source, list):  # named templates, one of them "default"
            source = {part["name"]: part["template"] for part in source}.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError("chat_template is no text")
        return ChatTemplate(source, special_tokens)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


class _Generation(Extension):
    """The tag {% generation %}, which only marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
