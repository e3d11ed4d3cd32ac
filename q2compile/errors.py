"""What users' mistakes raise."""

from __future__ import annotations

from torch._dynamo.exc import ShortenTraceback


class BackendError(ShortenTraceback):
    """What the backend raises: Dynamo lets a ShortenTraceback through, and wraps everything else
    in BackendCompilerFailed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


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
