# SPDX-License-Identifier: Apache-2.0
"""Replacing vLLM symbols, or overriding them in subclasses, group by group: resolve, check, install, confirm; and undo.

Nothing is set until every member of a group has resolved and passed its check; a failure midway takes back what
was set, newest first. The mark of a replacement is the object in the slot itself (`Replacement`), so that a second
installation finds it and changes nothing. Runs in every process, in the thread that calls `plugin.register`.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import wrapt
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_mmcache.base.errors import HookDisturbed, HookError, SymbolChanged, SymbolMissing, VersionUnsupported
from vllm_mmcache.hooking.hook import TESTED_VLLM, Hook
from vllm_mmcache.hooking.subclasses import mixin_for

_INHERITED = object()  # the slot's owner did not define the attribute itself


@dataclass(frozen=True)
class Outcome:
    """What became of one group in this process."""

    group: str
    state: Literal["on", "off"]
    reason: str = ""


class Replacement(wrapt.FunctionWrapper[Any, Any]):
    """What we put into a slot; recognised by its type and by the name of its hook."""

    def __init__(self, wrapped: Any, wrapper: Callable[..., Any], name: str) -> None:
        super().__init__(wrapped, wrapper)
        self._self_hook_name = name


@dataclass
class _Slot:
    """A function of vLLM that is replaced."""

    owner: Any
    attribute: str
    raw: Any  # what vars(owner) held, or _INHERITED
    replacement: Any
    hook: Hook

    def put(self) -> None:
        setattr(self.owner, self.attribute, self.replacement)

    def is_ours(self) -> bool:
        return vars(self.owner).get(self.attribute) is self.replacement

    def put_back(self) -> None:
        if self.raw is _INHERITED:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.raw)


@dataclass
class _Override:
    """A method of vLLM that a mixin overrides. Several components can, and come and go in any order."""

    owner: type
    attribute: str
    raw: Any  # vLLM's method
    hook: Hook

    def put(self) -> None:
        self._change([*_overridden(self.owner, self.attribute)[1], self.hook])

    def is_ours(self) -> bool:
        method, hooks = _overridden(self.owner, self.attribute)
        return vars(self.owner).get(self.attribute) is method and self.hook in hooks

    def put_back(self) -> None:
        self._change([hook for hook in _overridden(self.owner, self.attribute)[1] if hook is not self.hook])

    def _change(self, hooks: list[Hook]) -> None:
        if not hooks:
            delattr(self.owner, self.attribute)
            del _overrides[self.owner, self.attribute]
            return
        method: Any = None
        for hook in hooks:
            method = _override(self.owner, self.attribute, self.raw, hook, method)
        setattr(self.owner, self.attribute, method)
        _overrides[self.owner, self.attribute] = method, hooks


_installed: dict[str, list[_Slot | _Override]] = {}  # group -> slots, oldest first
_overrides: dict[
    tuple[type, str], tuple[Any, list[Hook]]
] = {}  # a mixin's method, and its hooks, the last called first


def version_supported(installed: str, spec: str) -> bool:
    """Whether `installed` lies in the range; a development, pre-release or unparsable version does not."""
    try:
        version = Version(installed)
    except InvalidVersion:
        return False
    if version.is_devrelease:
        return False
    return version in SpecifierSet(spec, prereleases=False)


def install(group: str, hooks: Iterable[Hook], vllm_version: str, *, allow_untested: bool = False) -> Outcome:
    """Install all hooks of one group, or none of them. A HookError of `hooks` itself is a reason why they don't fit.

    A second call adds those that the group lacks, as where another engine of this process needs more; where these don't
    fit, what it has stays as it is.
    """
    before = _installed.get(group, [])
    names = {slot.hook.name for slot in before}
    done: list[_Slot | _Override] = []
    try:
        lacking = [hook for hook in hooks if hook.name not in names]
        planned = [slot for hook in lacking for slot in _resolve(hook, vllm_version, allow_untested)]
        for slot in planned:
            slot.put()
            done.append(slot)
        _confirm(done)
    except HookError as error:
        _put_back(done)
        return Outcome(group, "off", str(error))
    except BaseException:
        _put_back(done)
        raise
    _installed[group] = before + done
    return Outcome(group, "on")


def undo(group: str) -> None:
    """Put the originals of a group back, newest first.

    Raises: HookDisturbed, with nothing changed, if a slot no longer holds our object.
    """
    slots = _installed.get(group, [])
    _confirm(slots)
    _put_back(slots)
    _installed.pop(group, None)


def undo_all() -> None:
    """Put back the originals of every group."""
    for group in reversed(list(_installed)):
        undo(group)


def check(hook: Hook, vllm_version: str, *, allow_untested: bool = False) -> None:
    """Resolve and check one hook without installing it. Raises: HookError that says why it does not fit."""
    _resolve(hook, vllm_version, allow_untested)


def incompatibility(hooks: Iterable[Hook], vllm_version: str, *, allow_untested: bool = False) -> str:
    """Why these can't all be installed here; empty if they can, or are. Installs nothing.

    A HookError of `hooks` itself is such a reason.
    """
    try:
        for hook in hooks:
            if not is_replaced(hook.target):
                check(hook, vllm_version, allow_untested=allow_untested)
    except HookError as error:
        return str(error)
    return ""


def is_replaced(target: str) -> bool:
    """Whether the slot of "module:Owner.attr" holds one of our replacements, or our mixin overrides it."""
    owner, attribute = resolve_owner(target)
    mixin = mixin_for(target)
    return attribute in vars(mixin) if mixin else isinstance(inspect.getattr_static(owner, attribute), Replacement)


def is_there(target: str) -> bool:
    """Whether "module:Owner.attr" exists in this vLLM."""
    try:
        resolve_owner(target)
    except SymbolMissing:
        return False
    return True


def reads_name(target: str, part: str) -> bool:
    """Whether the body of the function "module:Owner.attr" reads an attribute or a global with `part` in its name."""
    try:
        owner, attribute = resolve_owner(target)
    except SymbolMissing:
        return False
    return any(part in name for name in getattr(owner, attribute).__code__.co_names)


def resolve_owner(target: str) -> tuple[Any, str]:
    """Import the module of "module:Owner.attr" and find the owner. Raises: SymbolMissing."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SymbolMissing(f"{target}: module {module_name} can't be imported ({error})") from error
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not hasattr(owner, attribute):
        raise SymbolMissing(f"{target} is not in this vLLM; it was renamed or removed")
    return owner, attribute


def _resolve(hook: Hook, vllm_version: str, allow_untested: bool) -> list[_Slot | _Override]:
    if not allow_untested and not version_supported(vllm_version, TESTED_VLLM):
        raise VersionUnsupported(
            f"vLLM {vllm_version} is not in the tested range {TESTED_VLLM}; "
            "install a tested version, or set MMCACHE_ALLOW_UNTESTED_VLLM=1 to try"
        )
    for target in hook.reads:
        resolve_owner(target)
    wrapper = hook.wrapper
    slots: list[_Slot | _Override] = []
    original: Any = None
    for target in (hook.target, *hook.also):
        owner, attribute = resolve_owner(target)
        raw = inspect.getattr_static(owner, attribute)
        if isinstance(raw, Replacement):
            raise SymbolChanged(f"{target} already holds a replacement of mmcache ({raw._self_hook_name})")
        if original is None:
            original = raw
            _check_signature(hook, raw)
            if mixin := mixin_for(target):
                method, others = _overridden(mixin, attribute)
                if vars(mixin).get(attribute) is not method or hook.name in {other.name for other in others}:
                    raise SymbolChanged(f"{target} is overridden already")
                slots.append(_Override(mixin, attribute, raw, hook))
                continue
        elif raw is not original:
            raise SymbolChanged(
                f"{target} is not the object that {hook.target} is; another plugin may have replaced one"
            )
        replacement = Replacement(raw, wrapper, hook.name)
        slots.append(_Slot(owner, attribute, vars(owner).get(attribute, _INHERITED), replacement, hook))
    return slots


def _overridden(mixin: type, attribute: str) -> tuple[Any, list[Hook]]:
    """Our method of a mixin and the hooks that it runs; None and none where we have none."""
    return _overrides.get((mixin, attribute), (None, []))


def _override(mixin: type, attribute: str, raw: Any, hook: Hook, below: Any) -> Callable[..., Any]:
    """A method of a mixin: the hook's wrapper around that of another hook, `below`.

    Without one, around what comes after the mixin in the object's own order of classes.
    """

    @functools.wraps(raw)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = getattr(super(mixin, self), attribute) if below is None else below.__get__(self)
        return hook.wrapper(wrapped, self, args, kwargs)

    return method


def _check_signature(hook: Hook, raw: Any) -> None:
    function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if not callable(function):
        raise SymbolChanged(f"{hook.target} is a {type(function).__name__}, expected a function")
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise SymbolChanged(f"{hook.target} has no signature to check ({error})") from error
    missing = [name for name in hook.args_used if name not in names]
    if missing:
        raise SymbolChanged(f"{hook.target} has no argument {', '.join(missing)} any more; it has {', '.join(names)}")


def _confirm(slots: Iterable[_Slot | _Override]) -> None:
    for slot in slots:
        if not slot.is_ours():
            seen = vars(slot.owner).get(slot.attribute)
            owner = getattr(slot.owner, "__qualname__", getattr(slot.owner, "__name__", slot.owner))
            raise HookDisturbed(f"{owner}.{slot.attribute} now holds {seen!r}; take that away first")


def _put_back(slots: Sequence[_Slot | _Override]) -> None:
    for slot in reversed(slots):
        slot.put_back()
