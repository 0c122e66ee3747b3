"""Records of supervised fine-tuning and their way into optimizer steps."""

from itertools import islice

import pytest

from megatron_tlt.config.root import SftSection
from megatron_tlt.errors import DataError
from megatron_tlt.trainer.sft import read_records, steps_of
from tests.helpers.fake_decoder import CharTokenizer


class PlainTokenizer(CharTokenizer):
    has_chat_template = False

    def encode_chat(self, text):
        raise AssertionError("there is no template")


def read(path, tokenizer=None, max_context=10, **settings):
    sft = SftSection(train_path=str(path), out="", **{"chat_template": False, **settings})
    return read_records(sft, path, sft.train_split, tokenizer or CharTokenizer(), max_context)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_completion_and_the_end_are_learned(tmp_path):
    path = write(
        tmp_path / "r.jsonl", '{"prompt": "ab", "completion": "cd"}', "", '{"prompt": "a", "completion": ""}'
    )
    tokenizer = CharTokenizer()
    first, second = read(path)
    assert first.trajectory.token_ids.tolist() == [*tokenizer.encode("abcd"), 0]
    assert (first.trajectory.response_start, first.loss_mask.tolist()) == (2, [1.0, 1.0, 1.0])
    assert second.trajectory.token_ids.tolist() == [1, 0] and second.trajectory.prompt_id == 3  # the line


def test_a_chat_template_is_used_where_there_is_one(tmp_path):
    path = write(tmp_path / "r.jsonl", '{"prompt": "b", "completion": "c"}')
    (chat,) = read(path, max_context=20, chat_template=True)
    (plain,) = read(path, PlainTokenizer(), 20, chat_template=True)
    assert (chat.trajectory.response_start, plain.trajectory.response_start) == (5, 1)


def test_chat_messages_end_with_the_completion(tmp_path):
    chat = '{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    path = write(tmp_path / "r.jsonl", chat)
    (sequence,) = read(path, max_context=20, chat_template=True)
    tokenizer = CharTokenizer()
    assert sequence.trajectory.token_ids.tolist() == [*tokenizer.encode("A b B"), *tokenizer.encode("c"), 0]
    with pytest.raises(DataError, match=r"r\.jsonl:1: chat messages need sft\.chat_template"):
        read(path)
    unanswered = write(tmp_path / "u.jsonl", '{"messages": [{"role": "user", "content": "b"}]}')
    with pytest.raises(DataError, match=r"u\.jsonl:1: field 'messages' must end with a message of the assistant"):
        read(unanswered)


def test_a_split_of_a_data_set_with_columns_of_its_own_is_read(tmp_path):
    write(tmp_path / "train.jsonl", '{"q": "a", "r": "b"}')
    write(tmp_path / "test.jsonl", '{"q": "a", "r": "c"}')
    tokenizer = CharTokenizer()
    for split, text in (("train", "ab"), ("test", "ac")):
        (sequence,) = read(tmp_path, prompt_field="q", completion_field="r", train_split=split)
        assert sequence.trajectory.token_ids.tolist() == [*tokenizer.encode(text), 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "r.jsonl:2: not a JSON object"),
        ("[]", "r.jsonl:2: expected a JSON object"),
        ('{"prompt": "a"}', "r.jsonl:2: field 'completion' must be a string"),
        ('{"prompt": "abcdefgh", "completion": "ab"}', "r.jsonl:2: 11 tokens, model.max_context allows 10"),
    ],
)
def test_bad_records_are_named_by_line(tmp_path, line, message):
    path = write(tmp_path / "r.jsonl", '{"prompt": "a", "completion": "b"}', line)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in str(caught.value)


def test_an_epoch_holds_every_record_once_within_the_token_budget(tmp_path):
    lines = [f'{{"prompt": "{"a" * (1 + i % 5)}", "completion": "b"}}' for i in range(20)]
    sequences = read(write(tmp_path / "r.jsonl", *lines))
    taken, steps = [], steps_of(sequences, tokens_per_step=16, seed=3)
    for step in islice(steps, 12):
        assert 0 < sum(s.trajectory.length for s in step) <= 16
        taken += [s.trajectory.prompt_id for s in step]
    first = taken[:20]
    assert sorted(first) == list(range(1, 21))
    assert first != sorted(first) and first != taken[20:40]
    again = [s.trajectory.prompt_id for step in islice(steps_of(sequences, 16, seed=3), 12) for s in step]
    assert again == taken
