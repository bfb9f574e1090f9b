"""Text as byte tokens, cut into sequences, in a shuffled order that depends on nothing but the seed and the position.

Batch t is a pure function of (seed, t): a run resumed at batch t sees what the uninterrupted run would have seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stepscope.errors import StepscopeError
from stepscope.reference.model import IGNORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BOS, EOS, PAD = 256, 257, 258
"""Ids of the special tokens; 0 to 255 are the bytes themselves."""
VOCAB_SIZE = 259

Batch = tuple[Tensor, Tensor]
"""input_ids and labels, both [B, S]."""


def pack(pieces: list[bytes], max_length: int) -> Tensor:
    """Frame each piece with BOS and EOS and pad it on the right, [pieces, max_length] in int16."""
    rows = [[BOS, *piece, EOS, *[PAD] * (max_length - 2 - len(piece))] for piece in pieces]
    return torch.tensor(rows, dtype=torch.int16)


def labels_of(input_ids: Tensor) -> Tensor:
    """The inputs as targets, with padding set to -100 so that it does not count in the loss."""
    return input_ids.masked_fill(input_ids == PAD, IGNORE_INDEX)


def cut(text: str, size: int, *, keep_rest: bool) -> Iterator[bytes]:
    """Cut a document's UTF-8 bytes into pieces of `size`; the shorter rest is kept, to be padded, or dropped."""
    document = text.encode("utf-8")
    for start in range(0, len(document), size):
        piece = document[start : start + size]
        if keep_rest or len(piece) == size:
            yield piece


class TokenBatches:
    """Endless shuffled batches of packed sequences.

    Each epoch has its own order, drawn from the seed and the epoch's number; sequences that do not fill a last batch
    are left out of that epoch, so that all batches weigh alike.

    Args:
        sequences: token ids, [N, S].
        batch_size: B, sequences in a batch.
        seed: of the order.

    Raises:
        StepscopeError: fewer sequences than one batch needs.
    """

    def __init__(self, sequences: Tensor, batch_size: int, seed: int) -> None:
        if len(sequences) < batch_size:
            raise StepscopeError(
                f"the data holds {len(sequences)} sequences; one batch needs {batch_size}",
                hint="give more data, or lower --batch-size or --max-length",
            )
        self.sequences = sequences
        self.batch_size = batch_size
        self.seed = seed

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.sequences) // self.batch_size

    def order(self, epoch: int) -> Tensor:
        """The sequences' indices in the order of this epoch, [N]."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(len(self.sequences), generator=generator)

    def stream(self, start: int = 0) -> Iterator[Batch]:
        """Yield batch `start`, `start` + 1, …, over as many epochs as are asked for."""
        epoch, first = divmod(start, len(self))
        while True:
            order = self.order(epoch)
            for index in range(first, len(self)):
                chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
                input_ids = self.sequences[chosen].long()
                yield input_ids, labels_of(input_ids)
            epoch, first = epoch + 1, 0


def load_batches(path: str | None, *, max_length: int, batch_size: int, seed: int) -> TokenBatches:
    """Read a file, or the text that ships with Python, into shuffled batches.

    Running text is cut into whole sequences and its rest is dropped. Documents (JSON lines, Parquet rows) stay apart:
    each is padded to the full length, a longer one gives several sequences.

    Args:
        path: a .txt, .jsonl or .parquet file; None for Python's own documentation.
        max_length: S, tokens in a sequence with BOS and EOS.
        batch_size: B.
        seed: of the order.

    Raises:
        StepscopeError: a file that is missing, empty, malformed, too short or of an unknown kind.
    """
    size = max_length - 2
    if path is None:
        documents, keep_rest = python_documentation(), False
    else:
        documents, keep_rest = read_documents(Path(path))
    pieces = [piece for text in documents for piece in cut(text, size, keep_rest=keep_rest)]
    if not pieces:
        have = sum(len(text.encode("utf-8")) for text in documents)
        raise StepscopeError(
            f"{path} holds {have} bytes of text; one sequence needs {size}",
            hint="give more data, or lower --max-length",
        )
    return TokenBatches(pack(pieces, max_length), batch_size, seed)


def python_documentation() -> list[str]:
    """The language reference that ``help()`` shows: about 0.5 MB of English that every full Python has on disk."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise StepscopeError(
            "this Python ships without its documentation text", hint="give a file with --data"
        ) from error
    return [topics[name] for name in sorted(topics)]


def read_documents(path: Path) -> tuple[list[str], bool]:
    """Read a data file: its documents, and whether each stands alone (JSON lines, Parquet) or is running text."""
    readers = {".txt": _read_text, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise StepscopeError(f"{path}: unknown kind of data {path.suffix!r}", hint=f"use {', '.join(readers)}")
    try:
        documents = [text for text in readers[path.suffix](path) if text]
    except FileNotFoundError as error:
        raise StepscopeError(f"{path}: no such file") from error
    except OSError as error:
        raise StepscopeError(f"{path} cannot be read: {error.strerror or error}") from error
    if not documents:
        raise StepscopeError(f"{path} holds no text")
    return documents, path.suffix != ".txt"


def _read_text(path: Path) -> Iterable[str]:
    try:
        return [path.read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise StepscopeError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _read_json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_read_text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise StepscopeError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise StepscopeError(f'{path}, line {number}: expected an object with a string, like {{"text": "…"}}')
        yield record["text"]


def _read_text_lines(path: Path) -> list[str]:
    (text,) = _read_text(path)
    return text.split("\n")


def _read_parquet(path: Path) -> Iterable[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise StepscopeError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from error
    if "text" not in table.column_names:
        raise StepscopeError(f"{path} has no column 'text'", hint=f"it has {', '.join(table.column_names) or 'none'}")
    column = table.column("text")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise StepscopeError(f"{path}: column 'text' holds {column.type}, not strings")
    return [text for text in column.to_pylist() if text is not None]
