"""Built-in environments, tools, and users' environments of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.base import Environment, NoTextError, Step, as_step
from megatron_tlt.envs.build import (
    environment_fingerprint,
    environment_problems,
    environment_tools,
    environment_warning,
    has_opening,
    load_environment,
)
from megatron_tlt.envs.calculator import Calculator, evaluate
from megatron_tlt.envs.check import episode_problems
from megatron_tlt.envs.gymnasium import GymnasiumEnvironment
from megatron_tlt.envs.python import Python
from megatron_tlt.types import Prompt
from megatron_tlt.workers.scratch import sweep_scratch

USER = Path(__file__).parent / "user_envs.py"
PROMPT = Prompt(0, "d:0", (), "q", "7", seed=3)


def made(prompt: Prompt = PROMPT, **settings: object) -> Environment:
    environment = load_environment(EnvSection.model_validate(settings))()
    environment.reset(prompt, prompt.seed)
    return environment


def test_retry_gives_a_second_try_by_the_task_or_the_reference() -> None:
    wrong, right = "<answer>6</answer>", "<answer>1</answer> no, <answer>7</answer>"
    retry = made(kind="retry")
    assert [retry.step(wrong), retry.step(right)] == [Step("That is wrong. Try again."), Step(reward=1.0, done=True)]
    entry = {"answer": "7", "metadata": {}}
    task = Prompt(0, "d", (), "3 + 4", "7", metadata={"task_name": "chain_sum", "task_params": {}, "task_entry": entry})
    two = made(kind="retry", params={"pattern": "<(a|b)>(x)?"})
    assert two.step("<a>").observation == "That is wrong. Try again.", "group 1, however many there are"
    retry = made(task, kind="retry", params={"tries": 1})
    assert retry.step(wrong).done
    assert made(task, kind="retry").step(right) == Step(reward=1.0, done=True)
    with pytest.raises(ValueError, match="needs a reference answer"):
        made(Prompt(0, "d:0", (), "q"), kind="retry")


def test_a_game_is_a_function_of_its_seed() -> None:
    guess = made(kind="number_guess", params={"most": 4})
    answers = [guess.step(str(n)) for n in range(1, 5)]
    right = next(i for i, answer in enumerate(answers) if answer.done)
    assert [a.observation for a in answers[:right]] == ["The number is higher. Guess again."] * right
    assert all("lower" in a.observation for a in answers[right + 1 :])
    assert answers[right].reward == 1.0
    assert "no number" in guess.step("seven").observation


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3 + 4) - 7 / 2", 10.5), ("-7 // 2 % 4", 0), ("2 ** 9", None), ("__import__('os')", None), ("1e40", None)],
)
def test_the_calculator_evaluates_arithmetic_only(expression: str, value: float | None) -> None:
    if value is None:
        with pytest.raises(ValueError):
            evaluate(expression)
    else:
        assert evaluate(expression) == value


def test_a_class_of_tools_answers_its_calls_in_order_and_scores_the_last_turn() -> None:
    section = {"path": f"{USER}:Shop", "params": {"price": 2}, "tool_role": "user"}
    shop = made(**section)
    call = '<tool_call>{"name": "buy", "arguments": {"count": %s}}</tool_call>'
    text = "".join(call % count for count in ('"2"', "10", '"x"')) + call.replace("buy", "sell") % 1
    assert shop.step(text) == Step(
        '{"cost": 4}\nerror: ValueError: sold out\n'
        "error: buy: count: Input should be a valid integer, unable to parse string as an integer\n"
        "error: no tool 'sell'; there are: buy",
        role="user",
    )
    assert shop.step("done") == Step(reward=2.0, done=True)
    (tool,) = environment_tools(EnvSection.model_validate(section))
    assert tool["function"]["name"] == "buy"
    assert tool["function"]["parameters"]["properties"] == {"count": {"type": "integer", "description": "How many."}}


def test_tools_may_be_static_and_what_they_return_becomes_a_text() -> None:
    section = {"path": f"{USER}:Echo"}
    echo = made(**section)
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    assert echo.step(call % ("echo", '{"text": "a"}')).observation == "a"
    assert as_step(Step("a\ud800")).observation == "a?"
    with pytest.raises(NoTextError, match="tool loop returned Circular reference"):
        echo.step(call % ("loop", "{}"))
    tools = environment_tools(EnvSection.model_validate(section))
    assert [[*tool["function"]["parameters"]["properties"]] for tool in tools] == [["text"], []]


class Keywords:
    def reset(self, **options: object) -> tuple[str, dict[str, object]]:
        return str(options["seed"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        return "", 0.0, True, False, {}


class Swapped:
    def reset(self, seed: int, prompt: Prompt) -> str:
        return ""

    def step(self, text: str) -> Step:
        return Step()


class SwappedTools(Calculator):
    def reset(self, seed: int, prompt: Prompt) -> None:
        """Nothing."""


class OtherNames:
    def reset(self, row: Prompt, seed: int) -> str:
        return f"{row.text} {seed}"

    def step(self, text: str) -> Step:
        return Step()


def test_a_reset_that_needs_no_prompt_is_gymnasiums() -> None:
    for name, text in (("Keywords", "3"), ("OtherNames", "q 3")):
        assert load_environment(EnvSection(path=f"{__file__}:{name}"))().reset(PROMPT, 3) == text


def test_gymnasiums_methods_are_taken_as_they_are() -> None:
    gym = load_environment(EnvSection(path=f"{USER}:Gym"))()
    assert gym.reset(PROMPT, 3) == "q 3"
    assert [gym.step("a"), gym.step("right")] == [Step("did a", 0.5), Step("did right", 0.5, done=True)]
    assert gym.step("late") == Step("did late", 0.5, done=True, truncated=True)


def test_python_code_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "s")
    tool = Python(cpu_s=1, wall_s=300.0, output_kib=1)
    assert tool.python("print(1 + 1)\nprint({'a', 'b'})").startswith("2\n")
    assert tool.python("print(1)\n1 / 0") == "1\nerror: ZeroDivisionError: division by zero"
    assert tool.python("bytearray(3 << 30)") == "error: MemoryError"
    assert len(tool.python("print('x' * 9999)")) <= 1024
    assert "File too large" in tool.python("open('f', 'wb').write(b'x' * 9999)")
    assert tool.python("import os; print(os.environ.get('A_SECRET'))") == "None"
    assert tool.python("import os; print(os.environ['OPENBLAS_NUM_THREADS'])") == "1"
    assert tool.python("while True: pass") == "error: more than 1 s of CPU time"
    late = "error: no end within 0.5 s, which the calls of a turn share"
    assert Python(wall_s=0.5).python("import time; time.sleep(60)") == late


KILLED_IN_A_CALL = """
import os, signal
from megatron_tlt.envs.python import Python
Python(wall_s=300.0).python(f"import os, signal; os.kill({os.getpid()}, signal.SIGKILL)")
"""


def test_a_worker_killed_in_a_call_leaves_what_the_next_start_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subprocess.run([sys.executable, "-c", KILLED_IN_A_CALL], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir())
    sweep_scratch(tmp_path / "none", young_s=-1)
    assert not list(tmp_path.iterdir())


def test_python_calls_of_a_turn_share_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(args) or start(*args, **more))
    tools = made(kind="python", params={"wall_s": 0.3}, timeout_s=5)
    call = '<tool_call>{"name": "python", "arguments": {"code": "import time; time.sleep(60)"}}</tool_call>'
    late = "error: no end within 0.3 s, which the calls of a turn share"
    for turn in (1, 2):
        assert tools.step(3 * call).observation.splitlines() == [late] * 3
        assert len(started) == turn, "one process a turn: it took all the seconds"


def test_python_draws_the_same_numbers_in_a_replay_and_others_in_the_next_call() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"

    def draws(seed: int) -> list[str]:
        tool = Python(wall_s=300.0)
        tool.reset(PROMPT, seed)
        return [tool.python(code) for _ in range(2)]

    first, second = draws(3)
    assert draws(3) == [first, second]
    assert len({*first.split(), *second.split(), *draws(2**31 - 1)[0].split()}) == 6


@pytest.mark.parametrize(
    "code",
    [
        "from pandas import Series; print(Series(range(10**6)).sample(2).tolist())",
        pytest.param("import math, torch; print(torch.rand(2).tolist())", marks=pytest.mark.slow),
    ],
)
def test_python_seeds_the_generators_of_libraries(code: str) -> None:
    first, again = (Python(cpu_s=60, wall_s=300.0, memory_mib=4096).python(code) for _ in range(2))
    assert first == again
    assert first.startswith("[")


def test_python_prints_no_address() -> None:
    tool = Python(wall_s=300.0)
    assert tool.python("print(object(), 'the byte at 0x10')") == "<object object at 0x0> the byte at 0x10"


def test_python_without_a_network_of_its_own_is_named() -> None:
    mine = os.readlink("/proc/self/ns/net")
    reaches = Python(wall_s=300.0).python("import os; print(os.readlink('/proc/self/ns/net'))") == mine
    warning = environment_warning(EnvSection(kind="python"))
    assert ("reach the network" in warning) if reaches else warning is None  # type: ignore[operator]
    assert environment_warning(EnvSection(kind="calculator")) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "calculator"}, None),
        ({"path": f"{USER}:Act"}, None),
        ({"path": f"{USER}:Missing"}, "has no 'Missing'"),
        ({"path": f"{USER}:time"}, "is a module, not a class"),
        ({"path": f"{USER}:Untyped"}, "tool Untyped.buy"),
        *(
            (
                {"path": f"{__file__}:{name}"},
                f"{name}.reset: is called as reset(prompt, seed), but 'seed' is argument 1",
            )
            for name in ("Swapped", "SwappedTools")
        ),
        ({"kind": "number_guess", "params": {"words": 3}}, "do not fit the constructor"),
        ({"kind": "python", "timeout_s": 15}, "env.params.wall_s = 15.0: must be a number > 0 and < env.timeout_s"),
        ({"kind": "python", "params": {"wall_s": "9"}}, "env.params.wall_s = '9': must be a number > 0"),
        ({"kind": "python", "params": {"cpu_s": 2.5}}, "env.params.cpu_s = 2.5: must be an integer > 0"),
        ({"kind": "python", "params": {"output_kib": 0}}, "env.params.output_kib = 0: must be an integer > 0"),
        ({"kind": "retry", "params": {"tries": 6}}, "env.params.tries = 6: must be an integer from 1 to env.max_turns"),
        ({"kind": "python", "timeout_s": 15, "params": {"wall_s": 14}}, None),
    ],
)
def test_what_cannot_be_loaded_is_named(settings: dict[str, object], message: str | None) -> None:
    problems = environment_problems(EnvSection.model_validate(settings))
    assert not problems if message is None else message in str(problems[0])


def test_an_environment_that_answers_otherwise_is_refused_before_the_run() -> None:
    assert episode_problems(EnvSection(path=f"{USER}:Act"), PROMPT) == []
    (problem,) = episode_problems(EnvSection(path=f"{USER}:Dice"), PROMPT)
    assert "must be a function of prompt, seed and turns" in problem.allowed
    assert "step('1')" in problem.allowed
    (problem,) = episode_problems(EnvSection(kind="calculator"), Prompt(0, "env:0", (), ""))
    assert "must return a text from reset" in problem.allowed


def test_only_an_environment_with_a_reset_of_its_own_opens_prompts() -> None:
    assert has_opening(EnvSection(kind="number_guess"))
    assert not has_opening(EnvSection(kind="calculator"))
    assert not has_opening(EnvSection(path=f"{USER}:Dice"))


def test_the_fingerprint_sees_settings_and_source(tmp_path: Path) -> None:
    file = tmp_path / "e.py"
    prints = []
    cases = [("", 2, 1, ""), ("", 2, 3, ""), ("#", 2, 1, ""), ("", 3, 1, ""), ("", 2, 1, "#")]
    for text, turns, workers, helper in cases:
        file.write_text(USER.read_text() + text)
        (tmp_path / "helper.py").write_text(helper)
        section = EnvSection(path=f"{file}:Act", max_turns=turns, workers=workers)
        prints.append(str(environment_fingerprint(section)))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_a_step_that_cuts_a_trajectory_off_is_its_last() -> None:
    assert as_step(Step(truncated=True)) == Step(done=True, truncated=True)
    with pytest.raises(TypeError, match="step returned 0 values"):
        as_step(())


@pytest.mark.parametrize("flag", ["False", "".strip, object()])
def test_an_end_is_true_or_false(flag: object) -> None:
    class Never:
        def reset(self, *, seed: int) -> tuple[str, dict[str, object]]:
            return "", {}

        def step(self, action: str) -> tuple[str, float, object, bool, dict[str, object]]:
            return "", 0.0, flag, False, {}

    with pytest.raises(TypeError, match="for done: must be true or false"):
        as_step(("a", 0.0, flag))
    with pytest.raises(TypeError, match="for terminated: must be true or false"):
        GymnasiumEnvironment(Never()).step("a")
