"""How one of another tool's methods is called and what its options become here."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One of their methods: ours, our options that give their defaults, and what each of their options becomes.

    takes: {their option: a function from its value to our options}. needs: those that must be given. silent: options
    that do not change numbers. refused: {their option: why only a false value can be had}. acts: what their method
    works on: "deltas" (θ_t − θ0), "models" (θ_t themselves) or "factors" (A and B of adapters as leaves).
    """

    ours: str
    preset: Mapping[str, Any]
    takes: Mapping[str, Callable[[Any], Mapping[str, Any]]]
    needs: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    acts: str = "deltas"


def into(option: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], dict[str, Any]]:
    """A function that puts a value under our name for it."""
    return gives(option)(lambda value: {option: convert(value)})


def gives(options: str) -> Callable[[Callable], Callable]:
    """Notes on a function which of our options it makes, for the pages."""

    def note(function):
        function.ours = options
        return function

    return note


def exactly(names) -> str:
    """The pattern of a list of whole names."""
    return f"^({'|'.join(map(re.escape, names))})$"


def leaves_to(option: str) -> Callable[[Any], dict[str, Any]]:
    """A list of whole names as a pattern; nothing for an empty one."""
    return gives(option)(lambda names: {option: exactly(names)} if names else {})
