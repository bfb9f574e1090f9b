import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.reference.data import BOS, EOS, PAD, TokenBatches, cut, labels_of, load_batches, pack


def load(path, *, max_length=8, batch_size=1, seed=0):
    return load_batches(str(path), max_length=max_length, batch_size=batch_size, seed=seed)


def take(batches, count, start=0):
    return [batch for batch, _ in zip(batches.stream(start), range(count), strict=False)]


def test_sequences_are_framed_padded_and_masked():
    packed = pack([b"\1\2", b"\3\4\5\6"], 6)
    assert packed.tolist() == [[BOS, 1, 2, EOS, PAD, PAD], [BOS, 3, 4, 5, 6, EOS]]
    assert labels_of(packed).tolist() == [[BOS, 1, 2, EOS, -100, -100], [BOS, 3, 4, 5, 6, EOS]]


def test_rest_of_a_document_is_kept_or_dropped():
    assert list(cut("abcdé", 2, keep_rest=True)) == [b"ab", b"cd", "é".encode()]
    assert list(cut("abcde", 2, keep_rest=True)) == [b"ab", b"cd", b"e"]
    assert list(cut("abcde", 2, keep_rest=False)) == [b"ab", b"cd"]


def test_running_text_gives_whole_sequences(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnop")  # 16 bytes: two sequences of 6, a rest of 4
    sequences = load(path).sequences
    assert [bytes(row[1:-1].tolist()) for row in sequences] == [b"abcdef", b"ghijkl"]
    assert (sequences[:, 0] == BOS).all()
    assert (sequences[:, -1] == EOS).all()


def write_json_lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_parquet(path, *texts):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    return path


@pytest.mark.parametrize(("write", "name"), [(write_json_lines, "a.jsonl"), (write_parquet, "a.parquet")])
def test_documents_stay_apart_and_long_ones_give_several_sequences(tmp_path, write, name):
    sequences = load(write(tmp_path / name, "abc", "defghijk")).sequences
    assert sequences.tolist() == [
        [BOS, *b"abc", EOS, PAD, PAD, PAD],
        [BOS, *b"defghi", EOS],
        [BOS, *b"jk", EOS, PAD, PAD, PAD, PAD],
    ]


def test_text_that_ships_with_python_is_english_and_fills_every_sequence():
    batches = load_batches(None, max_length=128, batch_size=4, seed=0)
    assert len(batches) > 500
    assert PAD not in batches.sequences
    text = b"".join(bytes(row[1:-1].tolist()) for row in batches.sequences[:300]).decode(errors="replace")
    assert " the " in text


def test_an_epoch_visits_each_sequence_once_and_the_next_in_another_order(text_file):
    batches = load(text_file, max_length=16, batch_size=2, seed=3)
    assert len(batches) == 5
    ids = [input_ids for input_ids, _ in take(batches, 10)]
    first, second = torch.cat(ids[:5]), torch.cat(ids[5:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(batches.sequences.tolist())
    assert first.tolist() != second.tolist()


def test_stream_from_a_position_is_the_rest_of_the_whole_stream(text_file):
    whole = take(load(text_file, max_length=16, batch_size=3), 10)  # three batches in an epoch, one sequence left out
    for start in (0, 1, 2, 3, 7):
        rest = take(load(text_file, max_length=16, batch_size=3), 10 - start, start)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[start:], rest, strict=True))


def test_order_depends_on_the_seed_and_not_on_the_global_generator(text_file):
    torch.manual_seed(1)
    one = take(load(text_file, max_length=16, seed=5), 10)
    torch.manual_seed(2)
    same = take(load(text_file, max_length=16, seed=5), 10)
    other = take(load(text_file, max_length=16, seed=6), 10)
    assert torch.equal(torch.cat([b[0] for b in one]), torch.cat([b[0] for b in same]))
    assert not torch.equal(torch.cat([b[0] for b in one]), torch.cat([b[0] for b in other]))


BAD_FILES = {
    "short.txt": (b"abc", "holds 3 bytes of text; one sequence needs 6"),
    "empty.txt": (b"", "holds no text"),
    "empty.jsonl": (b"\n\n", "holds no text"),
    "latin.txt": (b"abc\xff", r"is not UTF-8 text \(byte 3\)"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text": \n', "line 3: not JSON"),
    "list.jsonl": (b'{"text": "a"}\n["text"]\n', "line 2: expected an object with a string"),
    "number.jsonl": (b'{"text": 5}\n', "line 1: expected an object with a string"),
    "bad.parquet": (b"PAR1 no", "is not a Parquet file"),
    "data.csv": (b"text\nabc\n", "unknown kind of data '.csv'"),
    "data": (b"abcdef", "unknown kind of data ''"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_line_that_names_it(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StepscopeError, match=message) as caught:
        load(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_are_errors(tmp_path):
    with pytest.raises(StepscopeError, match="no such file"):
        load(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(StepscopeError, match="cannot be read"):
        load(tmp_path / "folder.txt")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"words": ["abc"]}, "has no column 'text'.*it has words"),
        ({"text": [1, 2]}, "column 'text' holds int64, not strings"),
        ({"text": pa.array([None, None], pa.string())}, "holds no text"),
    ],
)
def test_parquet_without_text_is_an_error(tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(StepscopeError, match=message):
        load(tmp_path / "a.parquet")


def test_fewer_sequences_than_a_batch_is_an_error():
    with pytest.raises(StepscopeError, match="holds 3 sequences; one batch needs 4"):
        TokenBatches(torch.zeros(3, 8, dtype=torch.long), 4, 0)
