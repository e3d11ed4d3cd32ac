# SPDX-License-Identifier: Apache-2.0
"""The data of examples/pretraining: token files, batches, and their transfer to the device."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from pretraining import corpus as corpora  # noqa: E402
from pretraining.batches import Backwards, First, Windows, prefetched  # noqa: E402
from pretraining.corpus import Corpus, build  # noqa: E402


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def poem(part: int) -> str:
    return "\n".join(f"the square of {i} is {i * i}." for i in range(20 * part, 20 * part + 20))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Twelve documents, a copy of one under another name, an empty file and a file of noise."""
    folder = write(tmp_path / "texts", {f"{part}.txt": poem(part) for part in range(12)})
    write(folder, {"copies/again.txt": poem(3), "empty.txt": ""})
    (folder / "noise.bin").write_bytes(bytes(range(128, 256)))
    return folder


def make(paths: list[Path], folder: Path, **given: object) -> Corpus:
    settings = {"name": "squares", "vocab": 300, "val_bytes": 800, "say": lambda line: None}
    build(paths, folder, **{**settings, **given})
    return Corpus.open(folder)


def documents(corpus: Corpus, tokens: np.ndarray) -> list[str]:
    """The texts between the end tokens."""
    tokenizer = Tokenizer.from_file(str(corpus.folder / "tokenizer.json"))
    ends = np.flatnonzero(tokens == corpus.facts.vocab - 1)
    assert ends[-1] == len(tokens) - 1
    parts = np.split(tokens, ends + 1)[:-1]
    return [decoded(tokenizer, part[:-1].tolist()) for part in parts]


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.id_to_token(i) for i in ids).replace("Ġ", " ").replace("Ċ", "\n")


def test_every_document_is_there_once_and_whole(texts: Path, tmp_path: Path) -> None:
    corpus = make([texts], tmp_path / "corpus")
    train, val = documents(corpus, corpus.train), documents(corpus, corpus.val)
    assert sorted(train + val) == sorted(poem(part) for part in range(12))
    # A document has about 450 bytes, so two are held out to reach the minimum of 800.
    assert len(val) == corpus.facts.val_documents == 2
    assert (corpus.facts.duplicates, corpus.facts.not_text) == (2, 1)  # the copy, the empty file
    assert corpus.facts.vocab == corpus.train.max() + 1 == 300


def test_a_corpus_is_a_function_of_the_contents(texts: Path, tmp_path: Path) -> None:
    """Names, folders and the order of the file system have no part in it."""
    renamed = write(
        tmp_path / "renamed", {f"{11 - part}/{part}.md": poem(part) for part in range(12)}
    )
    first, second = make([texts], tmp_path / "a"), make([renamed], tmp_path / "b")
    assert first.facts.hash == second.facts.hash
    in_order = sorted(
        documents(first, first.train), key=lambda d: hashlib.sha256(d.encode()).digest()
    )
    assert documents(first, first.train) == in_order
    other = make([texts], tmp_path / "c", tokenizer_file=tmp_path / "a" / "tokenizer.json")
    assert other.facts.hash == first.facts.hash
    write(renamed, {"one_more.txt": "a poem of its own"})
    assert make([renamed], tmp_path / "d").facts.hash != first.facts.hash


def test_the_tokenizer_never_sees_what_is_held_out(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = corpora.train_tokenizer

    def spy(texts: object, vocab: int) -> Tokenizer:
        seen.extend(texts)  # type: ignore[call-overload]
        return real(seen, vocab)

    monkeypatch.setattr(corpora, "train_tokenizer", spy)
    corpus = make([texts], tmp_path / "corpus")
    assert sorted(seen) == sorted(documents(corpus, corpus.train))


def test_building_streams(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of two pieces, at most three documents have been read for the parts written so
    far."""
    monkeypatch.setattr("pretraining.text.ENCODE_PIECES", 2)
    read, written, ahead = itertools.count(1), [0], []
    real = corpora.Document.text

    def text(document: corpora.Document) -> str:
        ahead.append(next(read) - written[0])
        return real(document)

    monkeypatch.setattr(corpora.Document, "text", text)
    found, _ = corpora.collect([texts])
    tokenizer = corpora.train_tokenizer([poem(0)], 260)
    ends = 0
    for part in corpora.encode(tokenizer, (document.text() for document in found), end=260):
        ends += int((part == 260).sum())
        written[0] = ends
    assert ends == 12 and max(ahead) <= 3


def test_what_was_not_built_whole_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no corpus there; `pretrain.py corpus"):
        Corpus.open(tmp_path / "absent")
    corpus = make([texts], tmp_path / "corpus")
    corpus.check()
    raw = bytearray((corpus.folder / "val.bin").read_bytes())
    raw[0] ^= 1
    (corpus.folder / "val.bin").write_bytes(raw)
    with pytest.raises(ValueError, match="its hash is not that of corpus.json"):
        Corpus.open(corpus.folder).check()
    (corpus.folder / "val.bin").write_bytes(raw[:-2])
    with pytest.raises(ValueError, match=r"val.bin has \d+ bytes, corpus.json says \d+"):
        Corpus.open(corpus.folder)


def test_too_little_text_and_too_large_vocabularies_are_refused(
    texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="and --val-bytes 100,000: give more text"):
        make([texts], tmp_path / "corpus", val_bytes=100_000)
    large = {"version": "1.0", "model": {"type": "WordLevel", "unk_token": "0"}}
    large["model"]["vocab"] = {str(i): i for i in range(1 << 16)}  # type: ignore[index]
    (tmp_path / "large.json").write_text(json.dumps(large))
    with pytest.raises(ValueError, match="a vocabulary of 65,537: a token is 16 bits"):
        make([texts], tmp_path / "corpus", tokenizer_file=tmp_path / "large.json")
    assert not (tmp_path / "corpus").exists()  # nothing half built is left under its name


def test_a_document_that_changes_meanwhile_is_noticed(texts: Path) -> None:
    found, _ = corpora.collect([texts])
    found[0].file.write_text("something else")
    with pytest.raises(ValueError, match="changed while the corpus was being built"):
        found[0].text()


TOKENS = np.arange(1000, dtype=np.uint16)


def test_an_epoch_has_every_token_once() -> None:
    """10 windows of 100 less one for where the epoch begins: 9, three to a batch."""
    windows = Windows(TOKENS, count=9, batch=3, seq=100, seed=5)
    assert len(windows) == 9 and windows.epochs == 3.0
    places = []
    for epoch in range(3):
        rows = torch.cat([windows[3 * epoch + i] for i in range(3)])
        assert torch.equal(rows - rows[:, :1], torch.arange(100).expand(9, 100))
        starts = rows[:, 0].tolist()
        begin = min(starts)
        assert 0 <= begin < 100
        assert sorted(starts) == list(range(begin, begin + 900, 100))
        assert starts != sorted(starts)
        places.append(starts)
    assert places[0] != places[1] != places[2]


def test_batches_are_a_function_of_seed_and_step() -> None:
    """The position in the data depends only on the number of the step: batches read backwards are
    the same."""
    windows, again = (Windows(TOKENS, 9, 3, 100, seed=5) for _ in range(2))
    backwards = [again[i] for i in reversed(range(9))]
    assert all(torch.equal(windows[i], backwards[8 - i]) for i in range(9))
    assert not torch.equal(windows[0], Windows(TOKENS, 9, 3, 100, seed=6)[0])


def test_validation_reads_from_the_start() -> None:
    windows = Windows(TOKENS, count=3, batch=3, seq=100, seed=None)
    assert torch.equal(torch.cat(list(windows)).flatten(), torch.arange(900))


def test_too_few_tokens_for_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="1,000 tokens, less than a batch of 10 x 100"):
        Windows(TOKENS, count=1, batch=10, seq=100, seed=0)


def test_backwards_has_the_same_sequences() -> None:
    windows = Windows(TOKENS, 9, 3, 100, seed=5)
    assert torch.equal(Backwards(windows)[4], windows[4].flip(0)) and len(Backwards(windows)) == 9


def test_the_first_batches_are_those_and_no_more() -> None:
    windows = Windows(TOKENS, 9, 3, 100, seed=5)
    found = list(First(windows, 2))
    assert len(found) == 2 and torch.equal(torch.stack(found), torch.stack(list(windows)[:2]))
    assert len(First(windows, 20)) == 9


def test_prefetched_batches_come_in_order_from_where_it_was_left() -> None:
    batches = torch.arange(40).reshape(20, 1, 2)
    with prefetched(batches, 7, "cpu") as source:
        assert torch.equal(torch.stack(list(source)), batches[7:])
    with prefetched(batches, 0, "cpu") as source:
        assert torch.equal(next(source), batches[0])  # and the rest is not waited for


def test_an_error_of_the_reader_is_raised_where_the_batch_is_asked_for() -> None:
    class Torn:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 1:
                raise OSError("the disk is gone")
            return torch.zeros(1, 1)

    with prefetched(Torn(), 0, "cpu") as source:
        next(source)
        with pytest.raises(OSError, match="the disk is gone"):
            next(source)
