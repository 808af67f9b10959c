"""Objects of classes that a configuration names as `package.module:Class`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any


def named_object(target: str, base: type, refuse: Callable[[str], Exception], *given: Any, **keywords: Any) -> Any:
    """A new object of the subclass of `base` that `target` names.

    `refuse(cause)`: the error to raise if there is no such class, it is abstract, or does not take the arguments.
    """
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise refuse(f"{module_name} cannot be imported: {error}") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise refuse(f"{class_name!r} of {module_name} is no subclass of {base.__name__}")
    if inspect.isabstract(found):
        raise refuse(f"it lacks {', '.join(sorted(getattr(found, '__abstractmethods__', ())))}")
    try:
        inspect.signature(found).bind(*given, **keywords)
    except TypeError as error:
        takes = ", ".join(
            one.name for one in inspect.signature(found).parameters.values() if one.kind is one.KEYWORD_ONLY
        )
        cause = f"it does not take the keywords {', '.join(sorted(keywords))}: {error}"
        raise refuse(f"{cause}. It takes {takes}" if takes else cause) from error
    return found(*given, **keywords)
