import json
from pathlib import Path

import pytest

from megatron_tlt.config.load import build_config, dump_config, load_config
from megatron_tlt.config.root import SftConfig
from megatron_tlt.config.yaml_reader import parse_yaml
from megatron_tlt.errors import ConfigError

BASE = {"model": {"path": "m"}}


def problems(values: dict, *overrides: str) -> dict[str, str]:
    """Problems by path."""
    with pytest.raises(ConfigError) as caught:
        build_config(values, overrides)
    return {p.path: p.allowed for p in caught.value.problems}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_overrides_are_typed_as_in_yaml():
    config = build_config(
        BASE, ["optimizer.lr=1e-6", "actor.distributed_optimizer=on", "rollout.stop=[a, 'b c']", "eval.max_tokens=null"]
    )
    assert config.optimizer.lr == 1e-6
    assert config.actor.distributed_optimizer == "on"
    assert config.rollout.stop == ("a", "b c")
    assert config.eval.max_tokens is None


@pytest.mark.parametrize("override", ["data.train.answer_pattern=#### (.*)", "data.system_prompt=a #b"])
def test_a_comment_in_an_override_is_refused(override):
    (path, allowed) = problems(BASE, override).popitem()
    assert path == override.partition("=")[0]
    assert f"'{path}=\"..\"'" in allowed


@pytest.mark.parametrize(("text", "value"), [('"a #b"', "a #b"), ("'it''s #1'", "it's #1"), ("a#b", "a#b")])
def test_a_sharp_in_quotes_or_within_a_word_is_text(text, value):
    assert build_config(BASE, [f"data.system_prompt={text}"]).data.system_prompt == value


def test_a_mapping_of_an_override_merges_as_in_a_file(tmp_path):
    """Also into free dictionaries; lists, their elements, null and an empty map replace."""
    tasks = [{"name": "t", "params": {"a": 1}}]
    base = BASE | {
        "rollout": {"tp": 2, "stop": ["x", "y"]},
        "data": {"system_prompt": "s", "chat_template_kwargs": {"a": 1}, "train": {"tasks": tasks}},
    }
    over = {"rollout": {"stop": ["z"]}, "data": {"system_prompt": None, "chat_template_kwargs": {"b": 2}}}
    file = write(tmp_path, "over.yaml", json.dumps(over))
    words = [f"{name}={json.dumps(value)}" for name, value in over.items()]
    config = build_config(base, words)
    assert config == build_config(base, [str(file)])
    assert (config.rollout.tp, config.rollout.stop, config.data.system_prompt) == (2, ("z",), None)
    assert config.data.chat_template_kwargs == {"a": 1, "b": 2}
    (task,) = build_config(base, ["data.train.tasks.0={name: u, weight: 2}"]).data.train.tasks
    assert (task.name, task.weight, task.params) == ("u", 2.0, {})
    empty = write(tmp_path, "empty.yaml", "data: {chat_template_kwargs: {}}\n")
    for over in ("data.chat_template_kwargs={}", str(empty)):
        assert build_config(base, [over]).data.chat_template_kwargs == {}
    inherits = write(tmp_path, "inherits.yaml", "defaults: [over.yaml]\n")
    assert build_config(base, [str(inherits)]) == config, "a file without values of its own changes nothing"
    assert problems(base, "optimizer=null")["optimizer"] == "must be mapping"


def test_deterministic_forms_are_for_cpus_unless_they_are_asked_for():
    def forms(*overrides):
        train = build_config({"model": {"path": "m"}}, overrides).train
        return [train.is_deterministic(device) for device in ("cpu", "cuda")]

    assert forms() == [True, False]
    assert forms("train.deterministic=true") == [True, True]
    assert forms("train.deterministic=false") == [False, False]


def test_an_empty_stop_string_is_refused_before_a_run_starts():
    assert "non-empty" in problems(BASE, "rollout.stop=[a, '']")["rollout.stop.1"]


@pytest.mark.parametrize("index", ["tasks.1.weight", "tasks[1].weight"])
def test_overrides_reach_into_lists(index):
    values = BASE | {"data": {"train": {"tasks": [{"name": "a"}, {"name": "b"}]}}}
    config = build_config(values, [f"data.train.{index}=2.5"])
    assert [task.weight for task in config.data.train.tasks] == [1.0, 2.5]
    assert values["data"]["train"]["tasks"][1] == {"name": "b"}, "the caller's values must stay"


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("data.system_prompt", "None", "write null"),
        ("data.train.subset", "'null'", "write null"),
        ("drafter.responses_path", "none", "write null"),
        ("rewards.functions.0.pattern", "None", "write null"),
        ("observe.wandb_project", "'${oc.env:PROJ}'", "is not replaced"),
    ],
)
def test_a_text_that_stands_for_no_text_is_refused_where_a_field_may_be_null(field, text, says):
    values = BASE | {"rewards": {"functions": [{"name": "math"}]}}
    assert says in problems(values, f"{field}={text}")[field]
    assert build_config(values, [f"{field}=null"]) and build_config(values, ["data.system_prompt=None of ${it}"])


@pytest.mark.parametrize("is_file", [True, False])
def test_an_override_changes_one_of_the_places_of_an_alias(tmp_path, is_file):
    """The training tasks are not the held-out ones, also where a file or an override writes them once."""
    data = "{train: {tasks: &t [{name: a, params: {x: 1}}]}, eval: {tasks: *t}}"
    file = write(tmp_path, "a.yaml", f"model: {{path: m}}\ndata: {data if is_file else '{}'}\n")
    own = [] if is_file else [f"data={data}"]
    data = load_config(file, [*own, "data.train.tasks.0.params.x=9"]).data
    assert [source.tasks[0].params for _, source in data.sources] == [{"x": 9}, {"x": 1}]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.temprature=1", "rollout.temperature"),
        ("train.lr=1", "optimizer.lr"),
        ("rolout.tp=1", "rollout"),
        ("actor.tensor_model_parallel_size=2", "actor.tp"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "rollout.tp"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "actor.tp"),
        ("actor_rollout_ref.rollout.temperature=1", "rollout.temperature"),
        ("drafter.learning_rate=1", "drafter.lr"),
        ("data.train.taskz=[]", "data.train.tasks"),
        ("rewards.threshold=1", "rewards.functions.0.threshold"),
        ("train.threshold=1", "rewards.functions.0.threshold"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one_with_its_path(override, nearest):
    path = override.split("=")[0]
    found = problems(BASE, override)
    assert f"did you mean {nearest}?" in next(text for p, text in found.items() if path.startswith(p))


def test_settings_of_another_framework_are_named_one_by_one_with_their_units():
    found = problems(BASE, "trainer.total_epochs=2", "trainer.n_gpus_per_node=8", "trainer.unheard_of=x")
    assert found["trainer.total_epochs"].startswith("unknown key; did you mean train.num_steps? (here: steps,")
    assert "did you mean cluster.ranks_per_node?" in found["trainer.n_gpus_per_node"]
    assert found["trainer.unheard_of"] == "unknown key"
    found = problems(BASE, "actor_rollout_ref.actor.ppo_mini_batch_size=256")
    (allowed,) = found.values()
    assert allowed.endswith("algorithm.mini_batches? (there: prompts of a mini-batch; here: mini-batches of a step)")


def test_an_unknown_key_of_a_list_element_is_looked_for_in_that_element():
    tasks = {"data": {"train": {"tasks": [{"nmae": "chain_sum"}]}}}
    rewards = {"rewards": {"functions": [{"name": "python", "paht": "m:f"}]}}
    found = problems(BASE | tasks | rewards)
    assert found["data.train.tasks.0.nmae"] == "unknown key; did you mean data.train.tasks.0.name?"
    assert found["rewards.functions.0.paht"] == "unknown key; did you mean rewards.functions.0.path?"


def test_an_unknown_key_is_named_with_the_last_file_that_it_stands_in(tmp_path):
    base = write(tmp_path, "base.yaml", "model: {path: m}\noptimizer: {lrr: 1}\ntrain: {num_stepz: 1, sed: 1}\n")
    own = "defaults: [base.yaml]\ntrain: {sed: 2}\ntrain.seed: 3\nrewards: {functions: [{name: math, paht: p}]}\n"
    path, over = write(tmp_path, "own.yaml", own), write(tmp_path, "over.yaml", "train: {num_stepz: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [str(over), "rollout.tpp=2"])
    found = {p.path: p.allowed for p in caught.value.problems}
    assert found.pop("rollout.tpp") == "unknown key; did you mean rollout.tp?"
    assert found["optimizer.lrr"] == f"unknown key in {base}; did you mean optimizer.lr?"
    files = {name: allowed.removeprefix("unknown key in ").partition(";")[0] for name, allowed in found.items()}
    fields = ("train.sed", "train.seed", "rewards.functions.0.paht")
    assert files == {"optimizer.lrr": str(base), "train.num_stepz": str(over)} | dict.fromkeys(fields, str(path))


def test_all_problems_come_at_once():
    found = problems(
        {}, "actor.tp=0", "optimizer.lr=.nan", "train.num_stepz=1", "nonsense", "train.seed.x=1", "train.seed=1"
    )
    assert set(found) >= {"model", "actor.tp", "optimizer.lr", "train.num_stepz", "override"}
    assert found["model"] == "is required: mapping; `defaults: [configs/quickstart.yaml]` brings all settings"


def test_defaults_merge_maps_and_replace_lists(tmp_path):
    write(tmp_path, "models/a.yaml", "model: {path: a, max_context: 100}\nrollout: {stop: [x, y], tp: 2}\n")
    write(tmp_path, "b.yaml", "rollout: {temperature: 0.5}\ntrain: {num_steps: 3}\n")
    path = write(tmp_path, "run/c.yaml", "defaults: [../models/a.yaml, ../b.yaml]\nrollout: {stop: [z]}\n")
    config = load_config(path, ["train.num_steps=4"])
    assert (config.model.path, config.model.max_context) == (str(tmp_path / "models/a"), 100)
    assert (config.rollout.stop, config.rollout.tp, config.rollout.temperature) == (("z",), 2, 0.5)
    assert config.train.num_steps == 4


def test_a_file_may_be_inherited_twice_but_not_in_a_circle(tmp_path):
    write(tmp_path, "base.yaml", "model: {path: a}\n")
    write(tmp_path, "left.yaml", "defaults: [base.yaml]\n")
    write(tmp_path, "right.yaml", "defaults: [base.yaml]\n")
    both = write(tmp_path, "both.yaml", "defaults: [left.yaml, right.yaml]\n")
    assert load_config(both).model.path == str(tmp_path / "a")
    write(tmp_path, "x.yaml", "defaults: [y.yaml]\n")
    with pytest.raises(ConfigError, match=r"circle: y\.yaml -> x\.yaml -> y\.yaml"):
        load_config(write(tmp_path, "y.yaml", "defaults: [x.yaml]\n"))


def test_a_missing_file_is_named_with_the_file_that_refers_to_it(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*named in defaults of top\.yaml"):
        load_config(write(tmp_path, "top.yaml", "defaults: [nowhere.yaml]\n"))


@pytest.mark.parametrize(
    ("text", "place", "allowed"),
    [
        ("a: 1\nb: [1,\nc: }", "f.yaml:3 = 'c: }'", "expected the node content, but found '}'"),
        ("m: {}\nt: {n: 2}\nt: {n: 3}\n", "f.yaml:3 = 't: {n: 3}'", 'found duplicate key "t"'),
        ('t:\n  d: "x\n  n: 2\n', "f.yaml:2 = '  d: \"x'", "found unexpected end of stream"),
    ],
)
def test_broken_yaml_names_file_line_and_what_stands_there(text, place, allowed):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert str(caught.value) == f"{place}: not valid YAML: {allowed}"


def test_a_dump_reads_back_to_the_same_configuration():
    config = build_config(BASE, ["data.train.tasks=[{name: t, params: {a: [1, 2]}}]", "rollout.stop=[x]"])
    assert build_config(parse_yaml(dump_config(config), "dump")) == config


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{scores: {1: 2.0}, cap: 3}", "the key 1 of scores must be a text: write it in quotes"),
        ("{1: 2.0}", "the key 1 must be a text"),
        ("{caps: [1, .inf]}", "caps.1 = inf must be finite"),
        ("{day: 2024-07-26}", "day = 2024-07-26 (date) must be a text, in quotes, or another value that JSON has"),
    ],
)
@pytest.mark.parametrize("field", ["env.params", "data.chat_template_kwargs"])
def test_what_workers_and_config_json_would_get_otherwise_is_refused(field, value, why):
    with pytest.raises(ConfigError) as caught:
        build_config(BASE, [f"{field}={value}"])
    (problem,) = caught.value.problems
    assert problem.path == field and problem.allowed.startswith(why)


def test_sft_is_a_root_of_its_own():
    values = BASE | {"sft": {"train_path": "a", "out": "b"}}
    assert build_config(values, ["sft.num_steps=3"], SftConfig).sft.num_steps == 3
    with pytest.raises(ConfigError, match="rollout"):
        build_config(values, ["rollout.tp=1"], SftConfig)
