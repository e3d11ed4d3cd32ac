# SPDX-License-Identifier: Apache-2.0
"""Errors that users' mistakes raise."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch._dynamo.exc import ShortenTraceback


class BackendError(ShortenTraceback):
    """Base of the backend's errors: Dynamo passes on a ShortenTraceback, and wraps everything else
    in BackendCompilerFailed.

    From torch 2.15 on Dynamo adds to the arguments of one that passes that PyTorch wants a report.
    What is shown stays ours.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def remove_dynamo_frames(self) -> BackendError:
        """Return the error for Dynamo to raise, without the thirty frames of Dynamo and ours
        between the call of the compiled code and the place where it was raised."""
        return self.with_traceback(None)


class ConfigError(BackendError, ValueError):
    """An option, a recipe, a policy or an environment setting that can't be used as given."""


class NotTakenError(BackendError, RuntimeError):
    """``strict`` found a matmul that the policy wanted and that was not taken, or not seen."""


class StageError(BackendError, RuntimeError):
    """A stage of q2compile raised: a fault of q2compile or of torch, not of the user.

    stage       what raised: "capture and rewrite", "pass 'merge_seeds'", "compilation", ...
    graph       which graph it worked on
    reproducer  a file that builds the graph again and runs the stage; None if it could not be
                written
    """

    def __init__(self, message: str, stage: str, graph: str, reproducer: str | None) -> None:
        super().__init__(message)
        self.stage, self.graph, self.reproducer = stage, graph, reproducer


# The names that other libraries give to ours.
_SYNONYMS = {
    "fwd": "fprop",
    "forward": "fprop",
    "grad_input": "dgrad",
    "grad_weight": "wgrad",
    "bfloat16": "bf16",
    "input": "x",
    "weight": "w",
    "grad_output": "dy",
}
_ALIKE = 0.7  # of 1; what is less alike is another word
_MOST_LISTED = 40


def one_of(what: str, got: object, allowed: Collection[str], listed_by: str = "") -> str:
    """``got`` if it is one of ``allowed``; ``listed_by``: the call that prints them all.

    Raises ValueError saying what came, the right name that was probably meant, and what is allowed,
    if that is not too long.
    """
    if isinstance(got, str) and got in allowed:
        return got
    near = _meant(got[:200], allowed) if isinstance(got, str) else ""
    hint = f"; did you mean {near!r}?" if near else "."
    listed = f"Allowed: {', '.join(allowed)}."
    if len(allowed) > _MOST_LISTED:
        listed = f"{len(allowed)} are allowed; {listed_by} lists them."
    raise ConfigError(f"unknown {what} {shown(got)}{hint} {listed}")


def _meant(word: str, allowed: Collection[str]) -> str:
    """The allowed name that the user probably meant: ``word`` is another name for it, a
    misspelling, or a part of it. "" if no name is likely."""
    plain = {_plain(name): name for name in allowed}
    word = _plain(word)
    if _SYNONYMS.get(word) in allowed:
        return _SYNONYMS[word]
    near = difflib.get_close_matches(word, plain, n=1, cutoff=_ALIKE)
    near = near or sorted((n for n in plain if word in n.split("_")), key=len)
    return plain[near[0]] if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


def shown(got: object) -> str:
    """A short text of any value for a message, whatever its own repr does."""
    try:
        return _REPR.repr(got)
    except Exception:  # an int of 5000 digits, a class whose metaclass raises
        return f"<{type(got).__name__}>"


@contextmanager
def naming(where: str) -> Iterator[None]:
    """A context: a ConfigError raised inside it begins with ``where`` it was found."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
