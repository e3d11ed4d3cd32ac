# SPDX-License-Identifier: Apache-2.0
"""Documents out of files and folders, and the tokenizer that is trained on them."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ENCODE_CHARS = 1 << 16  # the tokenizer works on pieces of this many characters, in parallel
ENCODE_PIECES = 512  # at a time: 32 MB of text


def text_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files given and every file in the folders given, each folder in a fixed order.

    Without paths, the sources of the standard library of the Python that runs this.
    Raises ValueError for a path that is not there.
    """
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file())
        else:
            raise ValueError(f"--data {path}: no such file or folder")
    if not paths:
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        root = Path(sysconfig.get_paths()["stdlib"])
        for file in sorted(root.rglob("*.py")):
            if file.is_file() and not skipped & set(file.relative_to(root).parts):
                yield file


def read_text(file: Path) -> str | None:
    """The text of a file; None where it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def pieces(text: str) -> list[str]:
    return [text[i : i + ENCODE_CHARS] for i in range(0, len(text), ENCODE_CHARS)]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` entries; 256 of them are the bytes, the rest merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return tokenizer


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], end: int | None = None
) -> Iterator[np.ndarray]:
    """The tokens of the texts, uint16, in parts of any length; ``end`` is put after each text."""

    def marked() -> Iterator[tuple[str, bool]]:
        for text in texts:
            parts = pieces(text) or [""]
            yield from ((part, False) for part in parts[:-1])
            yield parts[-1], True

    source = marked()
    while batch := list(islice(source, ENCODE_PIECES)):
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch])
        for encoding, (_, last) in zip(encodings, batch, strict=True):
            yield np.array(encoding.ids, dtype=np.uint16)
            if last and end is not None:
                yield np.array([end], dtype=np.uint16)
