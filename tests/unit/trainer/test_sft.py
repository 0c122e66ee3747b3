"""Records of supervised fine-tuning and their way into optimizer steps."""

import json
import re
import shutil
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace
from unittest.mock import MagicMock

import datasets
import pytest
import torch

from megatron_tlt.config.data import PromptSourceConfig
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.root import SftConfig, SftSection
from megatron_tlt.data import completions
from megatron_tlt.data.completions import RecordTokens, read_completions, read_sequences
from megatron_tlt.data.sources import open_file
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import DataError, TrainingError
from megatron_tlt.models.hf.peft import ADAPTER_WEIGHTS
from megatron_tlt.observe.jsonl import StepFile
from megatron_tlt.resilience.nonfinite import NonFiniteGuard
from megatron_tlt.trainer import sft as sft_module
from megatron_tlt.trainer.input_warnings import input_warnings
from megatron_tlt.trainer.preflight import input_problems
from megatron_tlt.trainer.sft import LOSSES_FILE, SftTrainer, _fingerprint, steps_of
from megatron_tlt.types import TrainOutput
from tests.helpers.chat_models import DEMO_POLICY, chat_model
from tests.helpers.fake_decoder import CharTokenizer

NAN = float("nan")


def read(path, tokenizer=None, max_context=10, **settings):
    sft = SftSection(train_path=str(path), out="", **{"chat_template": False, **settings})
    return read_sequences(sft, path, sft.train_split, tokenizer or CharTokenizer(), max_context)[0]


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_completion_and_the_end_are_learned(tmp_path):
    path = write(tmp_path / "r.jsonl", '{"prompt": "ab", "completion": "cd"}', "", '{"prompt": "a", "completion": "b"}')
    tokenizer = CharTokenizer()
    first, second = read(path)
    assert first.trajectory.token_ids.tolist() == [*tokenizer.encode("abcd"), 0]
    assert (first.trajectory.response_start, first.loss_mask.tolist()) == (2, [1.0, 1.0, 1.0])
    assert second.trajectory.token_ids.tolist() == [*tokenizer.encode("ab"), 0] and second.trajectory.prompt_id == 2


def test_chat_messages_end_with_the_completion(tmp_path):
    chat = '{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    path = write(tmp_path / "r.jsonl", chat)
    (sequence,) = read(path, max_context=20, chat_template=True)
    tokenizer = CharTokenizer()
    assert sequence.trajectory.token_ids.tolist() == [*tokenizer.encode("A b B"), *tokenizer.encode("c"), 0]
    with pytest.raises(DataError, match=r"r\.jsonl:1: chat messages need sft\.chat_template"):
        read(path)


CALL, ANSWER = ({"role": "assistant", "content": text} for text in ("call 1 + 2", "<answer>3</answer>"))
ASKED, OBSERVED = {"role": "user", "content": "1 + 2"}, {"role": "tool", "content": "3"}
PAIR = {"prompt": "1 + 2", "completion": "3"}


def test_a_conversation_trains_on_the_turns_after_the_last_user_and_not_on_its_tools(tmp_path):
    tokenizer = HFTokenizer(DEMO_POLICY)
    earlier = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "wrong"}]
    messages = [*earlier, ASKED, CALL, OBSERVED, ANSWER]
    path = write(tmp_path / "r.jsonl", json.dumps({"messages": messages}))
    (sequence,) = read(path, tokenizer, 200, chat_template=True)
    tokens, start = sequence.trajectory.token_ids.tolist(), sequence.trajectory.response_start
    assert tokens[:start] == tokenizer.encode_chat(tuple(messages[:3]))
    open_turn = len(tokenizer.encode("<|assistant|>"))
    assert tokens == tokenizer.encode_chat(tuple(messages))[:-open_turn]
    trained = [token for token, mask in zip(tokens[start:], sequence.loss_mask, strict=True) if mask]
    end = [tokenizer.eos_token_ids[0]]
    assert trained == [*tokenizer.encode(CALL["content"]), *end, *tokenizer.encode(ANSWER["content"]), *end]


def test_tools_of_a_record_are_in_its_prompt_and_answers_in_a_row_are_one_turn(tmp_path):
    template = (DEMO_POLICY / "chat_template.jinja").read_text()
    tokenizer = HFTokenizer(chat_model(tmp_path / "m", "{{ tools | tojson if tools }}" + template))
    tools = [{"type": "function", "function": {"name": "calculate"}}]
    record = {"messages": [ASKED, CALL, OBSERVED, OBSERVED, ANSWER], "tools": tools}
    path = write(tmp_path / "r.jsonl", json.dumps(record))
    (sequence,) = read(path, tokenizer, 300, chat_template=True)
    assert "calculate" in tokenizer.decode(sequence.trajectory.token_ids[: sequence.trajectory.response_start])
    ((begin, end),) = sequence.trajectory.given
    assert "3\n3" in tokenizer.decode(sequence.trajectory.token_ids[sequence.trajectory.response_start :][begin:end])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [ASKED, CALL, CALL]}, "the assistant and tools must take turns, found assistant, assistant"),
        ({"messages": [ASKED, OBSERVED, CALL, OBSERVED]}, "must end with a message of the assistant"),
        ({"messages": [ASKED, {**CALL, "tool_calls": [{}]}, OBSERVED, ANSWER]}, "message 1 has tool_calls"),
        ({"messages": [ASKED, {**ANSWER, "reasoning_content": "1 + 2 is 3."}]}, "message 1 has reasoning_content"),
        ({"messages": [ASKED, CALL], "tools": [{"function": {"nam": "f"}}]}, "field 'tools' must be a list of"),
        ({"messages": [ASKED, {**CALL, "weight": 0}, OBSERVED, ANSWER]}, "message 1 has weight 0: all of"),
        ({"messages": [ASKED, {**ANSWER, "train": False}]}, "message 1 has train false"),
        ({"messages": [ASKED, {**ANSWER, "mask": 1}]}, "message 1 has mask 1"),
        ({"messages": [ASKED, {**CALL, "weight": 1}, ASKED, ANSWER]}, "message 1 has weight 1: it is context"),
        ({"messages": [ASKED, {**CALL, "train": True}, ASKED, ANSWER]}, "message 1 has train true: it is context"),
        ({"messages": [ASKED, ANSWER], "system": "S"}, "field 'system' does not reach the model"),
        ({**PAIR, "system_prompt": "S"}, "field 'system_prompt' does not reach the model"),
        ({**PAIR, "images": ["a.png"]}, "field 'images' is not empty: models read text only"),
        ({**PAIR, "prompt": [ASKED, CALL]}, "field 'prompt' must not end with a message of .*'completion'"),
        ({"prompt": "1 + 2", "messages": [ASKED, ANSWER]}, "'completion' must be .*; sft.prompt_field=messages takes"),
        ({**PAIR, "completion": [ANSWER]}, "field 'completion' must be a string, found list"),
        (
            {"prompt": [ASKED, CALL, OBSERVED], "completion": [ANSWER]},
            "field 'prompt' must have all messages up to the user's last one, and 'completion' those behind it",
        ),
    ],
)
def test_a_record_that_cannot_be_learned_is_refused(tmp_path, record, message):
    with pytest.raises(DataError, match=f"r.jsonl:1: .*{message}"):
        read(write(tmp_path / "r.jsonl", json.dumps(record)), chat_template=True)


def test_messages_in_prompt_and_completion_are_a_conversation(tmp_path):
    """TRL's form."""
    rows = {"messages": [ASKED, CALL, OBSERVED, ANSWER]}, {"prompt": [ASKED], "completion": [CALL, OBSERVED, ANSWER]}
    path = write(tmp_path / "r.jsonl", *map(json.dumps, rows))
    joined, parted = read(path, HFTokenizer(DEMO_POLICY), 200, chat_template=True)
    assert joined.trajectory.token_ids.tolist() == parted.trajectory.token_ids.tolist()
    assert joined.loss_mask.tolist() == parted.loss_mask.tolist()


def test_records_without_text_to_learn_are_left_out(tmp_path):
    blank: list[object] = [{**PAIR, "completion": " \n"}, {"prompt": [ASKED], "completion": []}]
    blank.append({"messages": [ASKED, {**CALL, "content": ""}, OBSERVED, ANSWER]})
    path = write(tmp_path / "r.jsonl", *map(json.dumps, [PAIR, *blank, {"messages": [ASKED, ANSWER]}]))
    found = read(path, HFTokenizer(DEMO_POLICY), 200, chat_template=True)
    assert [sequence.trajectory.prompt_id for sequence in found] == [1, 5]
    with pytest.raises(DataError, match=r"none of its 3 records has text to learn \(field 'completion', or the assist"):
        read(write(path, *map(json.dumps, blank)), chat_template=True)


@pytest.mark.parametrize("column", ["input", "context"])
def test_an_instruction_whose_input_is_a_column_of_its_own_is_refused(tmp_path, column):
    row, fields = {"instruction": "a", "output": "b"}, {"prompt_field": "instruction"}
    path = write(tmp_path / "r.jsonl", json.dumps(row), json.dumps({**row, column: "Guten Tag"}))
    said = f"r.jsonl:2: field '{column}' is not empty and not read: join it and 'instruction' in one column"
    with pytest.raises(DataError, match=said):
        read(path, completion_field="output", **fields)
    parquet = tmp_path / "r.parquet"
    datasets.Dataset.from_list([{**row, column: "", "n": 1}, {**row, column: "Guten Tag", "n": 1}]).to_parquet(parquet)
    source = PromptSourceConfig(kind="parquet", path=str(parquet), answer_field="output")
    with pytest.raises(DataError, match=said.replace("jsonl:2", "parquet:1")):
        open_file(source.model_copy(update=fields), parquet)
    assert open_file(source.model_copy(update={"prompt_field": "output"}), parquet).size == 2
    (sequence,) = read(write(path, json.dumps({**row, column: " "})), completion_field="output", **fields)
    assert sequence.trajectory.prompt_id == 1


def test_what_a_record_says_of_its_context_or_twice_is_no_error(tmp_path):
    system, earlier = {"role": "system", "content": "S"}, {**CALL, "weight": 0, "train": False, "mask": 1}
    messages = [system, ASKED, earlier, ASKED, {**ANSWER, "weight": 1, "train": True}]
    path = write(
        tmp_path / "r.jsonl", json.dumps({"messages": messages, "prompt": "1 + 2", "system": "S", "images": []})
    )
    tokenizer = HFTokenizer(DEMO_POLICY)
    (sequence,) = read(path, tokenizer, 200, chat_template=True, prompt_field="messages")
    start = sequence.trajectory.response_start
    assert sequence.trajectory.token_ids[:start].tolist() == tokenizer.encode_chat(tuple(messages[:4]))


@pytest.mark.parametrize(("name", "data"), [("csv", b"prompt,completion\na,b\n"), ("Parquet", b"PAR1")])
def test_a_table_in_place_of_json_lines_is_named_with_what_takes_it(tmp_path, name, data):
    (tmp_path / f"r.{name}").write_bytes(data)
    with pytest.raises(DataError, match=rf"r\.{name}:.* directory.*sft\.train_path|: is a {name} file: .*directory"):
        read(tmp_path / f"r.{name}")


def test_a_split_of_a_data_set_with_columns_of_its_own_is_read(tmp_path):
    write(tmp_path / "train.jsonl", '{"q": "a", "r": "b"}')
    write(tmp_path / "test.jsonl", '{"q": "a", "r": "c"}')
    tokenizer = CharTokenizer()
    for split, text in (("train", "ab"), ("test", "ac")):
        (sequence,) = read(tmp_path, prompt_field="q", completion_field="r", train_split=split)
        assert sequence.trajectory.token_ids.tolist() == [*tokenizer.encode(text), 0]


SHORT, LONG = '{"prompt": "a", "completion": "b"}', '{"prompt": "abcdefgh", "completion": "%s"}'


def test_records_beyond_the_context_are_left_out_and_counted(tmp_path):
    path = write(tmp_path / "r.jsonl", SHORT, LONG % "ab", LONG % "abc", SHORT)
    sft = SftSection(train_path=str(path), out="", chat_template=False)
    sequences, line = read_sequences(sft, path, "train", CharTokenizer(), 10)
    assert [sequence.trajectory.prompt_id for sequence in sequences] == [1, 4]
    limit = "more than model.max_context = 10 tokens"
    assert line == f"{path}: 2 of 4 records have {limit} and are left out (the longest has 12, the first is {path}:2)"
    _, line = read_sequences(sft, path, "train", CharTokenizer(), 10, most=2)
    assert line.startswith(f"{path}: 1 of the first 2 records have {limit}")
    with pytest.raises(DataError, match=rf"r\.jsonl: all 2 records have {limit} \(the shortest, .*:2, has 11\)"):
        read(write(path, LONG % "abc", LONG % "ab"))


@pytest.mark.parametrize("is_main", [True, False])
def test_a_start_says_once_which_records_are_left_out_and_keeps_no_text(is_main, tmp_path, caplog, monkeypatch):
    path = write(tmp_path / "r.jsonl", SHORT, LONG % "ab")
    tree = {"model": {"path": "m", "max_context": 10}, "sft": {"train_path": str(path), "out": "o"}}
    tree["sft"]["chat_template"] = False

    class Enough(Exception):
        pass

    monkeypatch.setattr(sft_module, "_fingerprint", MagicMock(side_effect=Enough))
    with pytest.raises(Enough):
        SftTrainer(SftConfig.model_validate(tree), SimpleNamespace(is_main=is_main), CharTokenizer())
    assert [text.partition(" have")[0] for text in caplog.messages] == [f"{path}: 1 of 2 records"] * is_main
    assert completions._read_completions.cache_info().currsize == 0


def test_checks_warnings_and_training_share_one_read_of_a_file(tmp_path, monkeypatch):
    path, read_json = write(tmp_path / "r.jsonl", SHORT), MagicMock(side_effect=completions.read_json)
    monkeypatch.setattr(completions, "read_json", read_json)
    tree = {"model": {"path": "m"}, "sft": {"train_path": str(path), "out": "o", "chat_template": False}}
    config = SftConfig.model_validate(tree)
    assert not input_problems(config)
    input_warnings(config, "cpu")
    assert len(read(path)) == 1 and read_json.call_count == 1
    assert len(read(write(path, SHORT, SHORT))) == 2, "a file that has changed is read again"


def test_records_with_tools_of_their_own_look_at_the_vocabulary_once(tmp_path, monkeypatch):
    template = (DEMO_POLICY / "chat_template.jinja").read_text()
    tokenizer = HFTokenizer(chat_model(tmp_path / "m", "{{ tools | tojson if tools }}" + template))
    tools = [[{"type": "function", "function": {"name": name}}] for name in "abc"]
    records = [{"messages": [ASKED, CALL, OBSERVED, ANSWER], "tools": own} for own in tools]
    looks = MagicMock(side_effect=tokenizer.vocabulary)
    monkeypatch.setattr(tokenizer, "vocabulary", looks)
    assert len(read(write(tmp_path / "r.jsonl", *map(json.dumps, records)), tokenizer, 300, chat_template=True)) == 3
    assert looks.call_count == 1


@pytest.mark.parametrize("chat", [True, False])
def test_a_text_that_ends_with_the_end_token_gets_no_second_one(chat, tmp_path):
    """As records of other programs have it, and responses that were drawn with special tokens in their text."""
    tokenizer = HFTokenizer(DEMO_POLICY)
    (end,) = tokenizer.eos_token_ids
    ended = {**PAIR, "completion": f"3{tokenizer.token(end)}"}
    path = write(tmp_path / "r.jsonl", json.dumps(PAIR), json.dumps(ended))
    bare, marked = (s.trajectory.token_ids.tolist() for s in read(path, tokenizer, 200, chat_template=chat))
    assert bare == marked and bare[-1] == end != bare[-2]
    encoder = RecordTokens(tokenizer, 200, chat=chat)
    assert encoder.drawn(ended["completion"], encoder.prompt("1"), ends=True)[-2:] == bare[-2:]


def test_a_record_in_shards_is_named_by_its_file_and_row(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}] * 3 + [{"prompt": "a", "completion": None}]
    for shard in range(2):
        path = tmp_path / f"train-0000{shard}-of-00002.parquet"
        datasets.Dataset.from_list([*rows[:1], *rows[2 * shard : 2 * shard + 2]]).to_parquet(path)
    with pytest.raises(DataError, match=r"train-00001-of-00002\.parquet:2: field 'completion' must be a string"):
        read(tmp_path)
    path.unlink()
    _, places = read_completions(SftSection(train_path=str(tmp_path), out=""), tmp_path, "train")
    assert places == tuple(f"{tmp_path}/train-00000-of-00002.parquet:{row}" for row in range(3))


def test_a_checkpoint_is_of_one_adapter(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ADAPTER_WEIGHTS).write_bytes(b"1")
    shutil.copytree(tmp_path / "a", tmp_path / "same")
    shutil.copytree(tmp_path / "a", tmp_path / "other")
    (tmp_path / "other" / ADAPTER_WEIGHTS).write_bytes(b"2")

    def fingerprint(folder):
        lora = {} if folder is None else {"lora": {"adapter_path": str(tmp_path / folder)}}
        tree = {"model": {"path": "m"}, "actor": lora, "sft": {"train_path": "r.jsonl", "out": "o"}}
        return _fingerprint(SftConfig.model_validate(tree), [])

    assert fingerprint("a") == fingerprint("same")
    assert len({fingerprint(folder) for folder in (None, "a", "other")}) == 3


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


@pytest.mark.parametrize(
    ("tokens", "dp", "passes", "says"),
    [
        (16, 6, 2500, "16 is about 5 records of 3 tokens, and there are 6 .* With 18 tokens each"),
        (16, 5, 2500, None),
        (1, 1, 500, None),  # a step has a record at least
    ],
)
def test_replicas_without_a_record_and_passes_are_named_at_a_start(tokens, dp, passes, says, tmp_path, caplog, capsys):
    sft = {"train_path": "r.jsonl", "out": str(tmp_path), "tokens_per_step": tokens}
    trainer = SftTrainer.__new__(SftTrainer)
    trainer.config = SftConfig.model_validate({"model": {"path": "m"}, "sft": sft})
    trainer.world, trainer.policy = SimpleNamespace(is_main=True, rank=0), SimpleNamespace(dims=SimpleNamespace(dp=dp))
    trainer._train = read(write(tmp_path / "r.jsonl", *['{"prompt": "a", "completion": "b"}'] * 2))
    assert trainer.begin()
    trainer._rows.close()
    assert capsys.readouterr().out == f"sft 2 records, 6 tokens: 1000 steps are {passes} passes\n"
    assert len(caplog.messages) == (says is not None)
    assert all(re.match(f"sft.tokens_per_step = {says}", text) for text in caplog.messages)


def test_a_training_is_shown_in_some_lines_and_each_step_has_a_row(tmp_path, capsys):
    """Also one that is shorter than the interval of evaluations."""
    sft = {"train_path": "r.jsonl", "out": str(tmp_path), "num_steps": 60, "eval_every": 50}
    trainer = SftTrainer.__new__(SftTrainer)
    trainer.config = SftConfig.model_validate({"model": {"path": "m"}, "sft": sft})
    trainer.world, trainer._eval, trainer.evaluate = SimpleNamespace(is_main=True), [None], lambda: 0.5
    trainer._rows = StepFile(tmp_path / LOSSES_FILE)
    for step in range(1, 61):
        trainer._report(step, {"loss": 1 / step, "lr": 1e-3, "grad_norm": 2.0}, 100.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sft step 3/60  loss 0.3333  lr 0.001  tokens/s 100" and len(lines) == 21
    assert lines[-1] == "sft step 60/60  loss 0.01667  held-out 0.5  lr 0.001  tokens/s 100"
    rows = [json.loads(line) for line in (tmp_path / LOSSES_FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert [row["step"] for row in rows if "held-out" in row] == [50, 60]


def test_the_last_step_is_saved_before_the_result_also_where_its_save_has_failed():
    """Without `checkpoint.every`, too: the last step's save is under way, in the directory that `finish` removes."""
    written: list = []
    trainer = object.__new__(SftTrainer)
    trainer.config = SimpleNamespace(checkpoint=SimpleNamespace(every=0))
    trainer.world = SimpleNamespace(is_main=False, enter=lambda *_: None)
    trainer.policy, trainer.done = SimpleNamespace(has_stepped=True), 4
    trainer.nonfinite = SimpleNamespace(unsaved=lambda: None)
    trainer.checkpoints = SimpleNamespace(save_now=lambda step, _: written.append(step))
    trainer._write = lambda: written.append("result")
    trainer.finish()
    assert written == [4, "result"]


@pytest.mark.parametrize("norms", [[1.0, NAN, NAN, NAN], [NAN, 1.0, NAN, NAN]])
def test_updates_that_are_not_finite_are_not_saved_and_end_the_training(norms, tmp_path, capsys):
    """Three in a row: before the result is written. Fewer, at the end: the result is that of the updates before."""
    out, written = tmp_path / "out", []
    sft = {"train_path": "r.jsonl", "out": str(out), "num_steps": 4, "eval_every": 4}
    trainer = SftTrainer.__new__(SftTrainer)
    trainer.config = SftConfig.model_validate({"model": {"path": "m"}, "sft": sft})
    trainer.num_steps, trainer._eval, trainer._fingerprint = 4, [], ""
    trainer._train = read(write(tmp_path / "r.jsonl", '{"prompt": "a", "completion": "b"}'))
    trainer.world, trainer.shutdown = MagicMock(is_main=True, rank=0, device=torch.device("cpu")), MagicMock()
    left = iter(norms)
    trainer.policy = MagicMock(dims=Dims(), has_stepped=True)
    trainer.policy.train_step = lambda _: TrainOutput(0, {"loss": 1.0, "lr": 1.0, "grad_norm": next(left)})
    trainer.checkpoints = MagicMock(load_latest=lambda: None, save_s=0.0)
    trainer.nonfinite = NonFiniteGuard(3, trainer.state_dir, trainer.world, Dims(), "sft.max_lost_steps")
    trainer._write = lambda: written.append(trainer.done)
    ends = norms[1:] == [NAN] * 3
    with pytest.raises(TrainingError, match=r"sft\.max_lost_steps = 3") if ends else nullcontext():
        trainer.run()
    assert [call.args[2] for call in trainer.checkpoints.maybe_save.call_args_list] == [norm == 1 for norm in norms]
    assert written == ([] if ends else [4]) and not trainer.checkpoints.save_now.called
    assert ("the result has the weights before them" in capsys.readouterr().out) == (not ends)
