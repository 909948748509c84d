"""Parts of your own, named in settings by their import path `package.module:name`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from clawstream.errors import SettingsError


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """The function or class at `path`. `what` names the setting in errors.

    Raises SettingsError when the path has another form, cannot be imported, or is nothing to call.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise SettingsError(f"{what} {path!r} is not an import path of the form package.module:name")
    try:
        found: object = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{what} {path!r}: {error}") from error
    if not callable(found):
        raise SettingsError(f"{what} {path!r}: not a function")
    return cast("Callable[..., Any]", found)
