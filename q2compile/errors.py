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
        """Dynamo raises what this returns: the error without the thirty frames of Dynamo and ours
        that are between the call of the compiled code and the place where it was raised."""
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


def one_of(what: str, got: object, allowed: Collection[str]) -> str:
    """``got`` if it is one of ``allowed``.

    Raises ValueError saying what came, the nearest right name and what is allowed (up to 24 names).
    """
    if isinstance(got, str) and got in allowed:
        return got
    word = got[:200] if isinstance(got, str) else shown(got)
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    first = list(allowed)[:24]
    more = f" and {len(allowed) - len(first)} more" if len(allowed) > len(first) else ""
    raise ConfigError(f"unknown {what} {shown(got)}{hint} Allowed: {', '.join(first)}{more}.")


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
    """A ConfigError that is raised inside begins with ``where`` it was found."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
