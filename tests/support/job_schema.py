"""Write the JSON schema of the file of ``--config``: ``python -m tests.support.job_schema``.

It follows from the table of settings and from torchrun's parser.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_resume import config, config_file, setting_values
from elastic_resume.agent import torchelastic
from elastic_resume.option import Option
from elastic_resume.rendezvous.rendezvous_config import CONF_KEYS
from tests.support.paths import ROOT

PATH = ROOT / "docs" / "reference" / "job-file.schema.json"
_TIME: list[dict[str, Any]] = [
    {"type": "number", "minimum": 0},
    {"type": "string", "pattern": r"^[0-9.]+(ms|s|m|h|d)?$"},
]
_NAME = {"type": ["string", "integer"]}
_SCALAR = {"type": ["string", "number", "boolean"]}
_VARIABLE = {"$ref": "#/$defs/variable"}
# The forms of values, by the word for them in `Option.metavar`.
_FORMS: dict[str, list[dict[str, Any]]] = {
    "TIME": _TIME,
    "SIZE": [
        {"type": "integer"},
        {"type": "string", "pattern": r"^[0-9.]+ ?([kKmMgGtT]([iI]?[bB]|[iI])?)?$"},
    ],
    "[ADDRESS:]PORT": [
        {"type": "integer", "minimum": 0, "maximum": 65535},
        {"type": "string", "pattern": r"\d$"},
    ],
    "DIR": [{"type": "string", "minLength": 1}],
    "file:PATH": [{"type": "string", "pattern": "^file:"}],
}


def build_schema(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the JSON schema of the file; ``parser`` is that of ``run``."""
    ours = {option.name: option for option in config.OPTIONS if option.help}
    keys: dict[str, Any] = {
        config_file.SCRIPT: {"description": "the training script", "type": "string", "minLength": 1},
        config_file.SCRIPT_ARGS: {"description": "its arguments", "type": "array", "items": _SCALAR},
        config_file.ENV: {
            "description": "variables for the workers",
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": _SCALAR,
        },
    }
    for action in dict.fromkeys(config.actions_by_flag(parser).values()):
        name = action.dest.replace("_", "-")
        if name not in ours and action.dest not in config.NO_KEYS:
            help_text = " ".join((action.help or "").split()).replace("%%", "%")
            keys[name] = {"description": help_text, "anyOf": [*_forms_of_action(name, action), _VARIABLE]}
    for name, option in ours.items():
        text = option.help + (f"; {option.details}" if option.details else "")
        text += f" (default {option.default_text})" if option.default_text else ""
        keys[name] = {"description": text, "anyOf": [*_forms_of_option(option), _VARIABLE]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "elastic-resume run --config",
        "type": "object",
        "additionalProperties": False,
        "properties": keys,
        "$defs": {"variable": {"type": "string", "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"}},
    }


def _forms_of_action(name: str, action: argparse.Action) -> list[dict[str, Any]]:
    if action.nargs == 0:
        return [{"type": "boolean"}]
    if action.choices is not None:
        return [{"enum": list(action.choices)}]
    kinds = {int: {"type": "integer"}, float: {"type": "number"}}
    forms: list[dict[str, Any]] = [kinds[action.type] if action.type in (int, float) else _NAME]
    if name in config.COMMA_KEYS:
        forms.append({"type": "array", "items": _NAME, "minItems": 1})
    if name == "rdzv-conf":
        conf = {key: {**_SCALAR, "description": text} for key, text in CONF_KEYS.items()}
        forms.append(
            {"type": "object", "properties": conf, "additionalProperties": False, "minProperties": 1}
        )
    return forms


def _forms_of_option(option: Option) -> list[dict[str, Any]]:
    keywords = getattr(option.parse, "keywords", {})
    if option.metavar is None:
        return [{"type": "boolean"}]
    if "choices" in keywords:
        return [{"enum": list(keywords["choices"])}]
    if option.metavar.endswith(",..."):
        return [_NAME, {"type": "array", "items": _NAME, "minItems": 1}]
    words = option.metavar.split("|")
    if getattr(option.parse, "func", option.parse) is setting_values.parse_interval:
        words += ["auto", *(["off"] if keywords.get("allow_off") else [])]
    return [form for word in dict.fromkeys(words) for form in _forms_of_word(word, option, keywords)]


def _forms_of_word(word: str, option: Option, keywords: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if word == "N":
        minimum = (
            setting_values.MIN_KEEP
            if option.parse is setting_values.parse_keep
            else keywords.get("minimum", 1)
        )
        yield {"type": "integer", "minimum": minimum}
    elif word.islower():
        yield {"const": word}
    else:
        yield from _FORMS.get(word, [_NAME])


def render() -> str:
    """Return the schema as the file has it."""
    return json.dumps(build_schema(torchelastic.build_parser()), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(render())
