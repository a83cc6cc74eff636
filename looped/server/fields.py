"""Field types of requests: JSON numbers read as JSON means them, and the free forms of `prompt`, `stop`, `content`.

Pydantic would take `false` for 0 and "12" for 12, or in strict mode refuse 8.0, which JSON calls an integer.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from looped.sampling_options import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_BIAS = 100
MAX_PROMPTS = 1024
MAX_STOPS = 1024
# Stop strings together: every new token is compared with the beginnings of all of them.
MAX_STOP_CHARS = 1 << 16
MAX_PARTS = 8192
INT64 = 1 << 63


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("must be a whole number")
    return value


def _number(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError("must be a number")
    return value


def _flag(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode (it holds half of a surrogate pair)") from None
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
Seed = Annotated[Whole, Field(ge=-INT64, le=INT64 - 1)]

Prompt = str | tuple[int, ...]


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, not empty")
    return _ids(value)


def _ids(value: list[Any]) -> tuple[int, ...]:
    # One look at the types: lists of millions come in, and the event loop waits.
    ids = value if set(map(type, value)) <= {int} else [_whole(item) for item in value]
    if ids and (None in ids or not 0 <= min(ids) <= max(ids) < INT64):
        raise ValueError("token ids must be whole numbers of at least 0")
    return tuple(ids)


def _any_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    return _ids(value)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or several, as a tuple of texts and id lists."""
    single = isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list))
    items = [value] if single else value
    if not isinstance(items, list) or not items:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, not empty")
    if len(items) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, got {len(items)}")
    prompts = tuple(_text(item) if isinstance(item, str) else _token_ids(item) for item in items)
    if not all(prompts):
        raise ValueError("must not be empty")
    return prompts


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError("must be a string or a list of strings")
    if len(items) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(items)}")
    stops = tuple(_text(item) for item in items)
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise ValueError(f"stop strings may have {MAX_STOP_CHARS} characters together")
    return stops


def _logit_bias(value: Any) -> dict[int, float] | None:
    """JSON writes token ids as strings."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} tokens, got {len(value)}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 19):
            raise ValueError(f"keys must be token ids, got {key[:40]!r}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not -MAX_BIAS <= number <= MAX_BIAS:
            raise ValueError(f"biases must be numbers between -{MAX_BIAS} and {MAX_BIAS}")
        bias[int(key)] = float(number)
    return bias


def _count_or_false(value: Any) -> Any:
    return None if value is False else _whole(value)


def _content(value: Any) -> str:
    """A message's text: a string, or a list of text parts, which become paragraphs of one text."""
    if value is None or isinstance(value, str):
        return "" if value is None else str(_text(value))
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} text parts, got {len(value)}")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"only text parts are supported, got a part of type {str(kind)[:40]!r}")
        texts.append(str(_text(part.get("text"))))
    return "\n".join(texts)


_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_LOGIT_BIAS,
        },
    ]
}
_STRING = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_MANY = {"minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT_SCHEMA = {
    "anyOf": [
        _STRING,
        {"type": "array", "items": _STRING, **_MANY},
        _IDS,
        {"type": "array", "items": _IDS, **_MANY},
    ]
}
_STOP_SCHEMA = {"anyOf": [{"type": "null"}, _STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOPS}]}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _PART}]}

Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_any_ids), WithJsonSchema(_IDS | {"minItems": 0})]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
LogitBias = Annotated[dict[int, float] | None, PlainValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)]
TopCount = Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
# Completions count what chats switch on and off; `false` asks for nothing.
Logprobs = Annotated[TopCount | None, BeforeValidator(_count_or_false)]
Content = Annotated[str, PlainValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
