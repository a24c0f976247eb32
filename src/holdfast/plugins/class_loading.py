"""Admit a class that a config names: a dotted name enters, a class that can be called as it will be leaves.

Everything that can be wrong with it is raised here, before an object is made: one that fails at the first save has
lost the training up to there. Knows signatures; knows no manager.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import UnsafeContentError, UsageError
from holdfast.plugins.config_values import is_dotted_name, nearest, shown

__all__ = ["Call", "check_class", "named_class"]


class Call(NamedTuple):
    """How a method is called: with one positional argument of this name, or with keywords."""

    positional: str | None = None
    keywords: tuple[str, ...] = ()

    def spelled(self) -> str:
        """Return the arguments as a signature has them, after `self`."""
        names = [self.positional] if self.positional else []
        return "".join(f", {name}" for name in [*names, *(("*", *self.keywords) if self.keywords else ())])

    def described(self) -> str:
        return f"one {self.positional}" if self.positional else f"the keywords {' and '.join(self.keywords)}"


def named_class(name: str, *allowed: Sequence[str] | None) -> type:
    """Return the class "package.module.Class" if every list of packages allows it. A list of None allows any."""
    module, _, last = name.rpartition(".")
    if not module or not is_dotted_name(name):
        raise UsageError(f"manager_class={name!r} is no name of a class", advice="write it as package.module.Class")
    for packages in allowed:
        # Before the import, which runs the module's code.
        _check_allowed(name, packages)
    return _class_of(_imported(module, name), last)


def check_class(cls: type, calls: Mapping[str, Call], keywords: Sequence[str]) -> None:
    """Refuse a class whose methods cannot be called as `calls` describes, or that cannot be built from a config and the
    keywords."""
    for name, call in calls.items():
        _check_method(cls, name, call)
    if inspect.isabstract(cls):
        left = sorted(getattr(cls, "__abstractmethods__", ()))
        raise TypeError(f"{_spelled(cls)} is abstract; write its {', '.join(left)}")
    try:
        inspect.signature(cls).bind(None, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(
            f"{_spelled(cls)} cannot be built with a config and the keywords {', '.join(keywords)}: {error}; "
            "write def __init__(self, config, *, state, **arguments)"
        ) from None
    except ValueError:
        # Some classes of extension modules have no signature to look at.
        pass


# Which class


def _check_allowed(name: str, packages: Sequence[str] | None) -> None:
    if packages is None:
        return
    if isinstance(packages, str) or not all(map(is_dotted_name, packages)):
        raise UsageError(f"allowed_packages={packages!r:.100}", advice="give a list of packages such as ['mycompany']")
    if not any(name.startswith(f"{package}.") for package in packages):
        raise UnsafeContentError(
            f"manager_class={name!r} is not in allowed_packages=[{', '.join(packages)}]",
            advice="nothing was imported; add its package to the list if you trust it",
        )


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise ModuleNotFoundError(
                f"manager_class={name!r}: there is no module '{missing}'; install its package, or check the name and "
                "sys.path",
                name=missing,
            ) from None
        # The module is there and failed: its own error is the useful one.
        error.add_note(f"This came up while '{module}' was imported for manager_class={name!r}.")
        raise


def _class_of(module: Any, name: str) -> type:
    try:
        found = getattr(module, name)
    except AttributeError:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        # A package that loads its names when they are first used lists them.
        near = nearest(name, [*classes, *getattr(module, "__all__", ())])
        advice = f"did you mean '{near}'?" if near else "check the name"
        raise AttributeError(
            f"module '{module.__name__}' has no class '{name}'; {advice}", name=name, obj=module
        ) from None
    if not isinstance(found, type):
        raise TypeError(f"manager_class='{module.__name__}.{name}' is {shown(found)}, not a class")
    return found


# Whether it can be called


def _check_method(cls: type, name: str, call: Call) -> None:
    place, wanted = f"{_spelled(cls)}.{name}", f"write def {name}(self{call.spelled()})"
    try:
        found = inspect.getattr_static(cls, name)
    except AttributeError:
        raise TypeError(f"{_spelled(cls)} has no method '{name}'; {wanted}") from None
    method, bound = _as_called(cls, found)
    if not callable(method):
        raise TypeError(f"{place} is {shown(found)}, not a method; {wanted}")
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"{place} is async or a generator, and would do nothing when it is called; {wanted}")
    positional = (*bound, None) if call.positional else bound
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        raise TypeError(f"{place} cannot be called with {call.described()}: {error}; {wanted}") from None
    except ValueError:
        # Some functions of extension modules have no signature to look at.
        pass


def _as_called(cls: type, found: Any) -> tuple[Any, tuple[None, ...]]:
    """Return what is called for an attribute of a class, and the `self` that is passed first, as None, if one is."""
    if isinstance(found, staticmethod | classmethod):
        return found.__get__(None, cls), ()
    if isinstance(found, functools.partialmethod):
        return found.__get__(None, cls), (None,)
    return found, (None,) if hasattr(found, "__get__") else ()


def _spelled(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
