"""Typed access to the fields of a request body, and the error for an invalid field."""

from collections.abc import Mapping
from typing import Any, TypeVar

Default = TypeVar("Default", float, None)
CACHE_SALT = "cache_salt"
"""The field of vLLM that isolates requests: only those with the same value share cached prompts."""
CACHE_SALT_CHARS = 256


class FieldError(ValueError):
    """A field of the body is missing, of the wrong type, out of bounds or not supported."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message

    def spelled(self, names: Mapping[str, str]) -> "FieldError":
        """Return the error with the names of fields as the client spells them."""
        message = self.message
        for name, other in names.items():
            message = message.replace(f"'{name}'", f"'{other}'")
        return FieldError(names.get(self.param or "", self.param), message)


class Fields:
    """Typed access to the fields of a body; an explicit null counts as absent."""

    LARGEST = 2**31 - 1
    """The maximum of the engines' 32-bit counters; the default upper bound of an integer field."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def text(self, name: str) -> str:
        """Return a required, non-empty string."""
        value = self._body.get(name)
        if value is None:
            raise FieldError(name, f"Missing required field '{name}'.")
        if not isinstance(value, str) or not value:
            raise FieldError(name, f"'{name}' must be a non-empty string.")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; absent means false."""
        return self.choice(name) or False

    def choice(self, name: str) -> bool | None:
        """Return a boolean, or None if the field is absent."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise FieldError(name, f"'{name}' must be true or false.")
        return value

    def integer(
        self, name: str, default: int | None, *, low: int, high: int = LARGEST
    ) -> int | None:
        """Return an integer within bounds, or the default."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise FieldError(name, f"'{name}' must be an integer.")
        if not low <= value <= high:
            bounds = f"at least {low}" if high == self.LARGEST else f"between {low} and {high}"
            raise FieldError(name, f"'{name}' must be {bounds}.")
        return value

    def number(
        self, name: str, default: Default, *, low: float, high: float, positive: bool = False
    ) -> float | Default:
        """Return a finite number within bounds, or the default."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FieldError(name, f"'{name}' must be a number.")
        if not low <= value <= high:  # NaN is in no range
            raise FieldError(name, f"'{name}' must be between {low:g} and {high:g}.")
        if positive and not value:
            raise FieldError(name, f"'{name}' must be above 0.")
        return float(value)

    def object(self, name: str) -> Mapping[str, Any]:
        """Return an object; absent means an empty one."""
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise FieldError(name, f"'{name}' must be an object.")
        return value

    def get(self, name: str) -> Any:
        """Return a value of any type, or None if the field is absent."""
        return self._body.get(name)


def read_cache_salt(body: Mapping[str, Any]) -> str:
    """Return the `cache_salt` of a request; empty without one."""
    salt = body.get(CACHE_SALT)
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= CACHE_SALT_CHARS:
        raise FieldError(
            CACHE_SALT, f"'{CACHE_SALT}' must be a string of 1 to {CACHE_SALT_CHARS} characters."
        )
    return salt
