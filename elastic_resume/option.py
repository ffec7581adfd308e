"""Declare one setting: its name, its variable, and how its value is parsed; a switch has its parser here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_resume import constants
from elastic_resume.errors import ConfigError

_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


@dataclass(frozen=True)
class Option:
    """One setting: its name, its variable, and perhaps its flag.

    Attributes:
        name: its name, and the flag after its dashes; with underscores, the field of `Settings` or of the
            parsed arguments, and the argument of `er.resume()`.
        metavar: the accepted forms; None for a switch.
        help: one line for ``--help``; empty if users are not to set it, or torchrun's flag sets it.
        parse: gets the source and the given value.
        default: text for ``parse`` if nothing is given; None: the value is then None.
        has_flag: whether ``run`` has a flag for it.
        details: more help, for ``--help-all``.
        default_help: the default in words, where ``default`` is None.
        help_group: the heading of its flag in the short help, if a mechanism declares it.
        is_for_workers: workers get it too, all of them rank 0's; its value is JSON. For a mechanism's option.
        show: returns the given text as lists of settings, events and reports show it: without secrets.
    """

    name: str
    metavar: str | None
    help: str
    parse: Callable[[str, Any], Any]
    default: Any = None
    has_flag: bool = False
    details: str = ""
    default_help: str = ""
    help_group: str = "recovery"
    is_for_workers: bool = False
    show: Callable[[str], str] = str

    @property
    def field(self) -> str:
        """The name of the setting's field or of the flag's destination."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return constants.ENV_PREFIX + self.field.upper()

    @property
    def default_text(self) -> str:
        """The default as users would write it, or in words."""
        return self.default_help if self.default is None else str(self.default)


def parse_switch(setting: str, value: object) -> bool:
    """Parse true, false, or another word for them."""
    text = str(value).strip().lower()
    if text not in _BOOLEANS:
        raise ConfigError(f"{setting} is {text[:100]!r}: write true or false.")
    return _BOOLEANS[text]
