# SPDX-License-Identifier: Apache-2.0
"""A corpus: the tokens of many documents in two files that are read through a memory map.

    corpus/train.bin       uint16, whole documents one after another, each with its end token
    corpus/val.bin         the same of the documents held out
    corpus/tokenizer.json  byte-level BPE; the end token is the entry after its last
    corpus/corpus.json     what the corpus is made of: hash, sizes, sources

A document is a file. Documents of equal content count once. Their order is that of the hashes of
their contents, which is random and the same on every machine; the first of them are held out. No
more than one document and one part of the token file are in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretraining.text import encode, read_text, text_files, train_tokenizer

TOKENIZER_BYTES = 64 << 20  # of the training documents: what a tokenizer is trained on
LARGEST_VOCABULARY = 1 << 16  # of uint16
HASH_CHUNK = 1 << 24


@dataclass(frozen=True)
class Document:
    digest: str  # of the content
    size: int  # bytes
    file: Path

    def text(self) -> str:
        text = read_text(self.file)
        if text is None or digest_of(text) != self.digest:
            raise ValueError(
                f"{self.file} changed while the corpus was being built: build it again"
            )
        return text


@dataclass(frozen=True)
class Facts:
    """corpus.json. hash: SHA-256 of train.bin followed by val.bin."""

    hash: str
    name: str
    sources: list[dict[str, Any]]  # path as given, documents and bytes that it added
    vocab: int
    train_tokens: int
    val_tokens: int
    train_documents: int
    val_documents: int
    bytes: int
    duplicates: int  # files left out because another has the same content
    not_text: int  # files left out because they are not UTF-8

    def __str__(self) -> str:
        sources = ", ".join(f"{s['path']} ({s['bytes'] / 1e6:.1f} MB)" for s in self.sources)
        return (
            f"corpus {self.name!r} {self.hash[:12]}: {self.train_tokens:,} tokens of "
            f"{self.train_documents:,} documents to train on, {self.val_tokens:,} of "
            f"{self.val_documents:,} held out, vocabulary {self.vocab}; from {sources}; "
            f"{self.duplicates:,} duplicates and {self.not_text:,} files that are not text left out"
        )


@dataclass(frozen=True)
class Corpus:
    """A corpus that was built. train, val: uint16 [tokens], memory-mapped."""

    folder: Path
    facts: Facts
    train: np.ndarray
    val: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Raises ValueError where there is none, or its files are not those that were built."""
        try:
            facts = Facts(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(
                f"--corpus {folder}: no corpus there; `pretrain.py corpus --data TEXTS --out "
                f"{folder}` builds one"
            ) from None
        splits = {}
        for split, count in (("train", facts.train_tokens), ("val", facts.val_tokens)):
            file = folder / f"{split}.bin"
            size = file.stat().st_size if file.exists() else 0
            if size != 2 * count:
                raise ValueError(
                    f"--corpus {folder}: {split}.bin has {size:,} bytes, corpus.json says "
                    f"{2 * count:,}: build it again"
                )
            splits[split] = np.memmap(file, dtype=np.uint16, mode="r")
        return cls(folder, facts, splits["train"], splits["val"])

    def check(self) -> None:
        """Read everything once; raises ValueError where the hash is not the corpus's."""
        if hash_of(self.folder) != self.facts.hash:
            raise ValueError(f"--corpus {self.folder}: its hash is not that of corpus.json")


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of(folder: Path) -> str:
    total = hashlib.sha256()
    for split in ("train", "val"):
        with open(folder / f"{split}.bin", "rb") as file:
            while chunk := file.read(HASH_CHUNK):
                total.update(chunk)
    return total.hexdigest()


def collect(paths: Sequence[Path]) -> tuple[list[Document], dict[str, Any]]:
    """(the distinct documents in the order of their hashes, what was counted on the way)."""
    found: dict[str, Document] = {}
    counts: dict[str, Any] = {"sources": [], "duplicates": 0, "not_text": 0}
    for path in list[Path | None](paths) or [None]:
        before, size = len(found), 0
        for file in text_files([path] if path else []):
            text = read_text(file)
            if text is None:
                counts["not_text"] += 1
                continue
            digest = digest_of(text)
            if digest in found or not text.strip():
                counts["duplicates"] += 1
                continue
            found[digest] = Document(digest, len(text.encode()), file)
            size += found[digest].size
        source = {"path": str(path or "Python's standard library")}
        counts["sources"].append({**source, "documents": len(found) - before, "bytes": size})
    if not found:
        raise ValueError(f"--data {' '.join(map(str, paths))}: no UTF-8 text found there")
    return [found[digest] for digest in sorted(found)], counts


def split(documents: list[Document], val_bytes: int) -> tuple[list[Document], list[Document]]:
    """(documents to train on, documents held out: the first ones, of at least ``val_bytes``)."""
    held_out = 0
    for count, document in enumerate(documents, start=1):
        held_out += document.size
        if held_out >= val_bytes:
            return documents[count:], documents[:count]
    return [], documents


def build(
    paths: Sequence[Path],
    folder: Path,
    *,
    name: str,
    vocab: int,
    val_bytes: int,
    tokenizer_file: Path | None = None,
    say: Callable[[str], None] = print,
) -> Facts:
    """Build a corpus in ``folder``, which appears when it is complete.

    vocab: entries of the tokenizer that is trained, the end token among them.
    val_bytes: how much text is held out, at least.
    tokenizer_file: a tokenizer to use instead of training one.
    """
    documents, counts = collect(paths)
    train, val = split(documents, val_bytes)
    if not train:
        total = sum(document.size for document in documents)
        raise ValueError(f"{total:,} bytes of text, and --val-bytes {val_bytes:,}: give more text")
    say(f"{len(train):,} documents to train on, {len(val):,} held out")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if tokenizer_file is None:
        tokenizer = train_tokenizer((d.text() for d in sample(train)), vocab - 1)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.get_vocab_size()
    if end >= LARGEST_VOCABULARY:
        raise ValueError(f"a vocabulary of {end + 1:,}: a token is 16 bits, so at most 65,536")
    tokenizer.save(str(unfinished / "tokenizer.json"))
    facts = Facts(
        train_tokens=write(train, tokenizer, end, unfinished / "train.bin"),
        val_tokens=write(val, tokenizer, end, unfinished / "val.bin"),
        hash=hash_of(unfinished),
        name=name,
        vocab=end + 1,
        train_documents=len(train),
        val_documents=len(val),
        bytes=sum(document.size for document in documents),
        **counts,
    )
    (unfinished / "corpus.json").write_text(json.dumps(asdict(facts), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return facts


def sample(documents: list[Document]) -> Iterator[Document]:
    size = 0
    for document in documents:
        if size >= TOKENIZER_BYTES:
            return
        yield document
        size += document.size


def write(documents: list[Document], tokenizer: Tokenizer, end: int, file: Path) -> int:
    """Write the tokens of the documents; returns their number."""
    count = 0
    with open(file, "wb") as output:
        for tokens in encode(tokenizer, (document.text() for document in documents), end):
            output.write(tokens.tobytes())
            count += len(tokens)
    return count
